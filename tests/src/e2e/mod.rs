//! End-to-end tests: each runs mini-vmm in the lab.
//!
//! A test is a value: the machine it needs, a script that runs there as root, and a function that checks what it printed.
//! Tests that need equal machines share one boot. To add one, write it into the file of its subject and name it in that
//! file's `tests()`.

mod bars;
mod boot;
mod cards;
mod check;
mod config;
mod config_space;
pub mod demo;
mod errors;
mod gpus;
mod interrupts;
mod ioctls;
mod iommufd;
mod kills;
mod lspci;
mod memory;
mod outcome;
mod ram;
mod resets;
mod runner;
mod setting;

use std::time::Duration;

pub use config::Config;
pub use outcome::Outcome;
pub use runner::{Job, Tally, run, single};
pub use setting::Setting;

/// What a check returns: nothing, or what is wrong in one sentence.
pub type Verdict = Result<(), String>;

/// One test.
#[derive(Clone)]
pub struct Test {
    /// `subject::what_is_expected`.
    pub name: &'static str,
    /// The machine it runs in.
    pub config: Config,
    /// What L1's bash runs, with the functions of resources/lab/e2e.sh at hand.
    pub script: String,
    /// How long that may take.
    pub limit: Duration,
    /// A kernel that its guest needs besides the default one.
    pub guest_kernel: Option<&'static str>,
    /// A kernel of the lab's host that it cannot run on, and why.
    pub not_on: Option<(&'static str, &'static str)>,
    /// Judges what came out.
    pub check: fn(&Outcome) -> Verdict,
    /// The host's IOMMU refuses DMA meanwhile; otherwise that is a failure.
    pub iommu_faults: bool,
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
            guest_kernel: None,
            not_on: None,
            check,
            iommu_faults: false,
        }
    }

    /// The same with another kernel set up for its guest.
    fn with_guest_kernel(mut self, name: &'static str) -> Self {
        self.guest_kernel = Some(name);
        self
    }

    /// The same, skipped on that kernel of the lab's host for a reason that lies in the kernel.
    fn not_on(mut self, kernel: &'static str, why: &'static str) -> Self {
        self.not_on = Some((kernel, why));
        self
    }

    /// The same, which the host's IOMMU refuses DMA in.
    fn with_iommu_faults(mut self) -> Self {
        self.iommu_faults = true;
        self
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
        cards::tests(),
        interrupts::tests(),
        ioctls::tests(),
        iommufd::tests(),
        kills::tests(),
        memory::tests(),
        ram::tests(),
        resets::tests(),
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
