//! What a preflight found, for people and as JSON.
//!
//! Invariant: every warning and every failure has a remedy.

use std::fmt::Write as _;

use devices::pci::address::Bdf;
use devices::remedy::Remedy;
use serde::Serialize;

use crate::error::{Error, chain};

/// How a fact stands to a boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Status {
    /// As it should be.
    #[serde(rename = "OK")]
    Ok,
    /// A guest starts; something is slower, or missing.
    #[serde(rename = "WARN")]
    Warn,
    /// A boot stops here, with this text.
    #[serde(rename = "FAIL")]
    Fail,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it stands.
    pub status: Status,
    /// What it is about, in one word.
    pub topic: &'static str,
    /// The device that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The fact; of a failure the message of the boot, without the remedy.
    pub text: String,
    /// A command that mends it, as root.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// What mends it where no command does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    /// For people: a line, below it what mends it.
    fn lines(&self) -> String {
        let mut text = String::new();
        let (status, topic) = (self.status.name(), self.topic);
        // Writing to a String does not fail.
        let _ = writeln!(text, "{status:<4}  {topic:<9} {}", self.text);
        let fix = self.fix.as_ref().map(|command| ("fix", command));
        let advice = self.advice.as_ref().map(|advice| ("do", advice));
        for (word, remedy) in fix.into_iter().chain(advice) {
            let _ = writeln!(text, "{:16}{word}: {remedy}", "");
        }
        text
    }
}

/// All facts, in the order in which they were found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// See the type.
    pub findings: Vec<Finding>,
}

impl Report {
    fn add(
        &mut self,
        status: Status,
        topic: &'static str,
        device: Option<Bdf>,
        text: String,
        remedy: Option<Remedy>,
    ) {
        let (fix, advice) = match remedy {
            Some(Remedy::Run(command)) => (Some(command), None),
            Some(Remedy::Do(advice)) => (None, Some(advice)),
            None => (None, None),
        };
        self.findings.push(Finding {
            status,
            topic,
            device: device.map(|bdf| bdf.to_string()),
            text,
            fix,
            advice,
        });
    }

    /// Something of the host is as it should be.
    pub fn ok(&mut self, topic: &'static str, text: impl Into<String>) {
        self.add(Status::Ok, topic, None, text.into(), None);
    }

    /// Something of a device is as it should be.
    pub fn device_ok(&mut self, topic: &'static str, bdf: Bdf, text: &str) {
        self.add(Status::Ok, topic, Some(bdf), format!("{bdf}: {text}"), None);
    }

    /// Something of the host could be better.
    pub fn warn(&mut self, topic: &'static str, text: impl Into<String>, remedy: Remedy) {
        self.add(Status::Warn, topic, None, text.into(), Some(remedy));
    }

    /// Something of a device could be better.
    pub fn device_warn(&mut self, topic: &'static str, bdf: Bdf, text: &str, remedy: Remedy) {
        let text = format!("{bdf}: {text}");
        self.add(Status::Warn, topic, Some(bdf), text, Some(remedy));
    }

    /// A boot stops with this error.
    pub fn fail(&mut self, topic: &'static str, device: Option<Bdf>, error: &Error) {
        let (message, remedy) = (chain(error), error.remedy());
        let text = remedy.cut_from(&message).to_owned();
        self.add(Status::Fail, topic, device, text, Some(remedy));
    }

    /// Whether a boot would stop.
    pub fn fails(&self) -> bool {
        self.count(Status::Fail) != 0
    }

    fn count(&self, status: Status) -> usize {
        let of_it = |finding: &&Finding| finding.status == status;
        self.findings.iter().filter(of_it).count()
    }

    /// For people: all facts, and the verdict.
    pub fn text(&self) -> String {
        let facts: String = self.findings.iter().map(Finding::lines).collect();
        format!("{facts}{}\n", self.verdict())
    }

    /// For people: what could be better.
    pub fn warnings(&self) -> String {
        let warnings = self.findings.iter();
        let warnings = warnings.filter(|finding| finding.status == Status::Warn);
        warnings.map(Finding::lines).collect()
    }

    fn verdict(&self) -> String {
        let warnings = match self.count(Status::Warn) {
            0 => String::new(),
            1 => ", with 1 warning".to_owned(),
            count => format!(", with {count} warnings"),
        };
        match self.count(Status::Fail) {
            0 => format!("A guest can be started{warnings}."),
            1 => format!("A guest cannot be started: 1 failure{warnings}."),
            count => format!("A guest cannot be started: {count} failures{warnings}."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::assign::preflight::PreflightError;
    use devices::host::uses::HostUses;

    #[test]
    fn a_failure_is_the_boots_message_and_its_remedy_apart() {
        let bdf: Bdf = "41:00.0".parse().unwrap();
        let error = Error::from(PreflightError::HostDriver {
            bdf,
            driver: "nouveau".to_owned(),
            uses: HostUses::default(),
        });
        let mut report = Report::default();
        report.device_ok("group", bdf, "IOMMU group 3");
        report.fail("driver", Some(bdf), &error);
        assert!(report.fails());
        let finding = &report.findings[1];
        let fix = finding.fix.as_ref().unwrap();
        assert_eq!(
            chain(&error),
            format!("{}: run `{fix}` as root", finding.text)
        );
        let text = report.text();
        assert!(
            text.contains("OK    group     0000:41:00.0: IOMMU group 3\n"),
            "{text}"
        );
        assert!(
            text.contains("\n                fix: [ -e /sys/bus"),
            "{text}"
        );
        assert!(text.ends_with("cannot be started: 1 failure.\n"), "{text}");
    }
}
