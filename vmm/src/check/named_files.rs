//! Facts about the files that the options name: kernel, initrd, boot profiles.

use arch::boot::{BootSource, KernelImage};

use super::report::Report;
use crate::config::Config;
use crate::error::Error;
use crate::profile;

/// Looks at all of them; at the kernel if one was named.
pub fn all(report: &mut Report, config: &Config, has_kernel: bool) {
    profiles(report, config);
    if has_kernel {
        match KernelImage::open(&config.kernel) {
            Ok(_) => report.ok(
                "image",
                format!("{} can be booted", config.kernel.display()),
            ),
            Err(error) => report.fail("image", None, &Error::from(error)),
        }
    }
    if let Some(path) = &config.initrd {
        match BootSource::open_initrd(path) {
            Ok(_) => report.ok("initrd", format!("{} can be read", path.display())),
            Err(error) => report.fail("initrd", None, &Error::from(error)),
        }
    }
}

/// A boot creates them before all else.
fn profiles(report: &mut Report, config: &Config) {
    for wanted in &config.boot_profile {
        let Some(path) = wanted.form.file() else {
            continue;
        };
        match profile::can_create(path) {
            Ok(()) => report.ok("profile", format!("{} can be written", path.display())),
            Err(error) => report.fail("profile", None, &error.into()),
        }
    }
}
