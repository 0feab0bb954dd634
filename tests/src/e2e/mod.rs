//! End-to-end tests: each runs mini-vmm in the lab.
//!
//! A test is a value: the machine it needs, a script that runs there as root, and a function that checks what it printed.
//! Tests that need equal machines share one boot. To add one, write it into the file of its subject and name it in that
//! file's `tests()`.

mod bars;
mod boot;
mod check;
mod config;
pub mod demo;
mod errors;
mod gpus;
mod interrupts;
mod ioctls;
mod memory;
mod outcome;
mod ram;
mod runner;

use std::time::Duration;

pub use config::Config;
pub use outcome::Outcome;
pub use runner::{Tally, run, single};

/// What a check returns: nothing, or what is wrong in one sentence.
pub type Verdict = Result<(), String>;

/// One test.
pub struct Test {
    /// `subject::what_is_expected`.
    pub name: &'static str,
    /// The machine it runs in.
    pub config: Config,
    /// What L1's bash runs, with the functions of resources/lab/e2e.sh at hand.
    pub script: String,
    /// How long that may take.
    pub limit: Duration,
    /// Judges what came out.
    pub check: fn(&Outcome) -> Verdict,
}

impl Test {
    /// A test with the usual limit, enough for a few boots of the guest on a busy machine.
    fn new(
        name: &'static str,
        config: Config,
        script: impl Into<String>,
        check: fn(&Outcome) -> Verdict,
    ) -> Self {
        Self {
            name,
            config,
            script: script.into(),
            limit: Duration::from_secs(180),
            check,
        }
    }

    /// The same with another limit.
    fn within(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }
}

/// Every test.
pub fn all() -> Vec<Test> {
    [
        boot::tests(),
        bars::tests(),
        demo::tests(),
        gpus::tests(),
        interrupts::tests(),
        ioctls::tests(),
        memory::tests(),
        ram::tests(),
        errors::tests(),
        check::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_fit_into_markers() {
        let mut names: Vec<_> = all().iter().map(|test| test.name).collect();
        for name in &names {
            assert!(
                name.contains("::") && !name.contains([' ', '/', '\'']),
                "{name}"
            );
        }
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn scripts_are_shell() {
        for test in all() {
            let check = crate::command::run(std::process::Command::new("bash").args([
                "-n",
                "-c",
                &test.script,
            ]));
            assert!(check.is_ok(), "{}: {check:?}", test.name);
        }
    }
}
