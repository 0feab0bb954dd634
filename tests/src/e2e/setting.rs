//! On what the tests are run: a kernel of the lab's host, and an interface to the IOMMU.

use clap::ValueEnum;

use crate::cli::Interface;
use crate::e2e::{Tally, Test};
use crate::error::Error;
use crate::setup::{self, IOMMUFD_KERNEL};

/// What `cargo lab test` was told, for the tests that do not say themselves.
pub struct Setting {
    host_kernel: String,
    iommu: Option<Interface>,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            host_kernel: setup::DEFAULT_KERNEL.to_owned(),
            iommu: None,
        }
    }
}

impl Setting {
    /// The lab's host runs `host_kernel`, and mini-vmm uses `iommu` or what it likes.
    pub fn new(host_kernel: &str, iommu: Option<Interface>) -> Result<Self, Error> {
        if iommu == Some(Interface::Iommufd) && host_kernel != IOMMUFD_KERNEL {
            return Err(Error::Usage(format!(
                "kernel {host_kernel} has no iommufd; --host-kernel {IOMMUFD_KERNEL} has"
            )));
        }
        Ok(Self {
            host_kernel: host_kernel.to_owned(),
            iommu,
        })
    }

    /// The tests as they are to be run; those that cannot are counted, with the reason printed.
    pub fn apply(&self, mut tests: Vec<Test>, tally: &mut Tally) -> Vec<Test> {
        tests.retain_mut(|test| {
            test.config.by_default_on(&self.host_kernel);
            match test.not_on {
                Some((kernel, why)) if kernel == test.config.host_kernel() => {
                    println!("test {} ... skipped on kernel {kernel}: {why}", test.name);
                    tally.skipped += 1;
                    false
                }
                _ => true,
            }
        });
        tests
    }

    /// For the scripts: shell assignments.
    pub fn variables(&self) -> String {
        match self.iommu.and_then(|iommu| iommu.to_possible_value()) {
            Some(value) => format!("export LAB_VMM_OPTIONS='--iommu {}'\n", value.get_name()),
            None => "export LAB_VMM_OPTIONS=\n".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::e2e::Config;

    #[test]
    fn a_test_runs_on_its_own_kernel_and_otherwise_on_the_one_asked_for() {
        let test = |name, config| Test::new(name, config, "true", |_| Ok(()));
        let tests = vec![
            test("a::free", Config::default()),
            test("a::fixed", Config::default().on("6.12")),
            test("a::lacking", Config::default()).not_on("6.1", "it has no such thing"),
        ];
        let mut tally = Tally::default();
        let setting = Setting::new("6.1", Some(Interface::Type1)).unwrap();
        let tests = setting.apply(tests, &mut tally);
        let on: Vec<_> = tests.iter().map(|test| test.config.host_kernel()).collect();
        assert_eq!(on, ["6.1", "6.12"]);
        assert_eq!(tally.skipped, 1);
        assert!(setting.variables().contains("'--iommu type1'"));
    }

    #[test]
    fn iommufd_needs_its_kernel() {
        let iommufd = Some(Interface::Iommufd);
        assert!(Setting::new("7.3", iommufd).is_err());
        assert!(Setting::new(IOMMUFD_KERNEL, iommufd).is_ok());
    }
}
