//! The programs that the lab runs, installed when they are missing.

use std::path::Path;
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::paths::Cache;
use crate::setup::apt::{Apt, Installed};
use crate::setup::sources::Mirror;

/// The emulator.
pub const QEMU: &str = "qemu-system-x86_64";
/// Older ones break nested SVM: L2 page-faults.
const QEMU_VERSION: u32 = 10;
const QEMU_PACKAGE: &str = "qemu-system-x86";

/// A file that shows that a package is there.
struct Tool {
    package: &'static str,
    file: &'static str,
}

const TOOLS: [Tool; 7] = [
    Tool {
        package: "busybox-static",
        file: BUSYBOX,
    },
    Tool {
        package: "kmod",
        file: "/usr/sbin/depmod",
    },
    Tool {
        package: "xz-utils",
        file: "/usr/bin/xz",
    },
    Tool {
        package: "zstd",
        file: "/usr/bin/zstd",
    },
    Tool {
        package: "pciutils",
        file: "/usr/bin/lspci",
    },
    Tool {
        package: "util-linux",
        file: "/usr/bin/setpriv",
    },
    // The firmware of emulated network cards, without which QEMU does not start them.
    Tool {
        package: "ipxe-qemu",
        file: "/usr/lib/ipxe/qemu/efi-e1000e.rom",
    },
];

/// The statically linked busybox.
pub const BUSYBOX: &str = "/usr/bin/busybox";

/// What it takes to build a kernel.
const COMPILER: [Tool; 7] = [
    Tool {
        package: "gcc",
        file: "/usr/bin/gcc",
    },
    Tool {
        package: "make",
        file: "/usr/bin/make",
    },
    Tool {
        package: "flex",
        file: "/usr/bin/flex",
    },
    Tool {
        package: "bison",
        file: "/usr/bin/bison",
    },
    Tool {
        package: "bc",
        file: "/usr/bin/bc",
    },
    Tool {
        package: "libelf-dev",
        file: "/usr/include/libelf.h",
    },
    Tool {
        package: "libssl-dev",
        file: "/usr/include/openssl/opensslv.h",
    },
];

/// Installs what is missing.
pub fn ensure(cache: &Cache) -> Result<(), Error> {
    let mut missing = missing(&TOOLS);
    let old_qemu = || qemu_version().is_none_or(|version| version < QEMU_VERSION);
    if old_qemu() {
        missing.push(QEMU_PACKAGE);
    }
    provide(cache, &missing)?;
    if !missing.is_empty() && old_qemu() {
        return Err(Error::Packages {
            packages: QEMU_PACKAGE.to_owned(),
            reason: format!("the version installed is older than {QEMU_VERSION}"),
        });
    }
    Ok(())
}

/// Installs what building a kernel takes.
pub fn ensure_compiler(cache: &Cache) -> Result<(), Error> {
    provide(cache, &missing(&COMPILER))
}

fn missing(tools: &[Tool]) -> Vec<&'static str> {
    let absent = tools.iter().filter(|tool| !present(tool));
    absent.map(|tool| tool.package).collect()
}

fn provide(cache: &Cache, missing: &[&str]) -> Result<(), Error> {
    if missing.is_empty() {
        return Ok(());
    }
    let packages = missing.join(" ");
    let refuse = |reason: String| Error::Packages {
        packages: packages.clone(),
        reason,
    };
    if !rustix::process::geteuid().is_root() {
        return Err(refuse("installing them takes root".to_owned()));
    }
    let mirror = Mirror::of_this_machine().map_err(|error| refuse(error.to_string()))?;
    eprintln!("lab: installing {packages}");
    install(cache, &mirror, missing).map_err(|error| refuse(crate::error::chain(&error)))
}

fn install(cache: &Cache, mirror: &Mirror, packages: &[&str]) -> Result<(), Error> {
    let codename = mirror.codename.as_str();
    let (updates, security) = (
        format!("{codename}-updates"),
        format!("{codename}-security"),
    );
    let backports = format!("{codename}-backports");
    let mut suites = vec![codename, &updates, &security];
    // Debian 13 has QEMU 10 in its main suite.
    let qemu_suite = (codename == "bookworm").then_some(backports.as_str());
    suites.extend(qemu_suite);
    let apt = Apt::prepare(
        &cache.path("apt/tools"),
        mirror,
        &suites,
        Installed::Machine,
    )?;
    let (qemu, others): (Vec<&str>, Vec<&str>) = packages
        .iter()
        .partition(|package| **package == QEMU_PACKAGE);
    for (packages, suite) in [(others, None), (qemu, qemu_suite)] {
        if !packages.is_empty() {
            apt.install(&packages, suite)?;
        }
    }
    Ok(())
}

fn present(tool: &Tool) -> bool {
    if tool.package == "busybox-static" {
        // The package busybox has its program at the same place, but dynamically linked: of no use in an initramfs.
        return command::output(Command::new("dpkg-query").args([
            "--show",
            "--showformat=${db:Status-Status}",
            tool.package,
        ]))
        .is_ok_and(|status| status == "installed");
    }
    Path::new(tool.file).exists()
}

/// The major version of the QEMU on the path.
fn qemu_version() -> Option<u32> {
    parse_version(&command::output(Command::new(QEMU).arg("--version")).ok()?)
}

fn parse_version(text: &str) -> Option<u32> {
    let (_, version) = text.split_once("version ")?;
    version.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_tells_its_version() {
        assert_eq!(
            parse_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2)"),
            Some(10)
        );
        assert_eq!(parse_version("QEMU emulator version 7.2.18"), Some(7));
        assert_eq!(parse_version("nonsense"), None);
    }
}
