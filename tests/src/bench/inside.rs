//! The inside view: what mini-vmm's own profile says, to check the view from outside against.

use serde::{Deserialize, Serialize};

/// Times since the program was started, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inside {
    /// The first guest instruction.
    pub first_instruction_ns: u64,
    /// The guest's mark 0x41.
    pub init_ns: u64,
    /// The guest's mark 0x42.
    pub in_use_ns: u64,
    /// In calls that map and unmap BARs in the IOMMU, until the program ended.
    pub bar_iommu_ns: u64,
}

#[derive(Deserialize)]
struct Profile {
    /// CLOCK_MONOTONIC where `at_ns` is 0.
    started_ns: u64,
    events: Vec<Event>,
    calls: Vec<Call>,
}

#[derive(Deserialize)]
struct Event {
    name: String,
    at_ns: u64,
}

#[derive(Deserialize)]
struct Call {
    class: String,
    subject: String,
    total_ns: u64,
}

impl Inside {
    /// Finds the profile among the program's messages, which came to be at `exec` of CLOCK_MONOTONIC; the error says what it
    /// lacks.
    pub fn parse(messages: &str, exec: u64) -> Result<Self, String> {
        let line = messages.lines().find(|line| line.starts_with('{'));
        let line = line.ok_or("mini-vmm printed no profile")?;
        let profile: Profile = serde_json::from_str(line)
            .map_err(|error| format!("mini-vmm's profile is not understood: {error}"))?;
        let at = |name: &str| {
            let event = profile.events.iter().find(|event| event.name == name);
            let event = event.ok_or_else(|| format!("mini-vmm's profile has no `{name}`"))?;
            Ok::<_, String>((profile.started_ns + event.at_ns).saturating_sub(exec))
        };
        let is_bar = |call: &&Call| {
            ["map DMA", "unmap DMA"].contains(&call.class.as_str()) && call.subject.contains("BAR")
        };
        Ok(Self {
            first_instruction_ns: at("first guest instruction")?,
            init_ns: at("guest: user space")?,
            in_use_ns: at("guest: devices in use")?,
            bar_iommu_ns: profile
                .calls
                .iter()
                .filter(is_bar)
                .map(|c| c.total_ns)
                .sum(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_the_moment_that_was_seen_from_outside() {
        let event = |name: &str, at: u64| {
            format!(r#"{{"name":"{name}","subject":"machine","at_ns":{at}}}"#)
        };
        let call = |class: &str, subject: &str| {
            format!(r#"{{"class":"{class}","subject":"{subject}","count":1,"total_ns":5}}"#)
        };
        let events = [
            event("first guest instruction", 100),
            event("guest: user space", 200),
            event("guest: devices in use", 300),
        ];
        let calls = [
            call("map DMA", "0000:00:03.0 BAR 2"),
            call("map DMA", "RAM"),
            call("unmap DMA", "0000:00:03.0 BAR 2"),
            call("memslot", "0000:00:03.0 BAR 2"),
        ];
        let text = format!(
            "a warning\n{{\"version\":1,\"started_ns\":1000,\"events\":[{}],\"calls\":[{}]}}\n",
            events.join(","),
            calls.join(",")
        );
        assert_eq!(
            Inside::parse(&text, 1010),
            Ok(Inside {
                first_instruction_ns: 90,
                init_ns: 190,
                in_use_ns: 290,
                bar_iommu_ns: 10,
            })
        );
        assert!(Inside::parse("a warning\n", 0).is_err());
        assert!(Inside::parse(&text.replace("user space", "x"), 0).is_err());
    }
}
