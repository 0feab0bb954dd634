//! Kernels of Debian, unpacked into the cache, and one built from Debian's source.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::paths::Cache;
use crate::setup::IOMMUFD_KERNEL;
use crate::setup::apt::{Apt, Installed};
use crate::setup::iommufd_kernel;
use crate::setup::sources::Mirror;
use crate::setup::vmlinux;

/// A kernel that can be asked for by name.
pub struct Kernel {
    /// What `--host-kernel` takes.
    pub name: &'static str,
    /// How the names of its packages begin, as a regular expression.
    packages: &'static str,
    /// Where the packages are looked for.
    suites: &'static [&'static str],
    /// The packages are of source code, to be built with this configuration.
    built: Option<&'static str>,
}

/// Every kernel that the lab knows; the first is the default.
///
/// The newest package of each is taken: mirrors drop old ones.
pub const KERNELS: [Kernel; 4] = [
    Kernel {
        name: "7.3",
        packages: r"linux-image-7\.3\.",
        suites: &["trixie-backports"],
        built: None,
    },
    Kernel {
        name: "6.12",
        packages: r"linux-image-6\.12\.",
        suites: &["trixie", "trixie-security"],
        built: None,
    },
    Kernel {
        name: "6.1",
        packages: r"linux-image-6\.1\.0-",
        suites: &["bookworm", "bookworm-security"],
        built: None,
    },
    Kernel {
        name: IOMMUFD_KERNEL,
        packages: r"linux-source-[0-9.]+$",
        suites: &["trixie-backports"],
        built: Some(iommufd_kernel::CONFIG),
    },
];

/// A kernel in the cache.
pub struct Unpacked {
    /// The name in the table.
    pub name: &'static str,
    /// The boot image.
    pub image: PathBuf,
    /// The ELF kernel in it.
    pub elf: PathBuf,
    /// What `uname -r` says.
    pub release: String,
    /// The directory `lib/modules/<release>`, with the index files of depmod.
    pub modules: PathBuf,
}

/// The kernel of that name.
pub fn find(name: &str) -> Result<&'static Kernel, Error> {
    KERNELS
        .iter()
        .find(|kernel| kernel.name == name)
        .ok_or_else(|| Error::UnknownKernel {
            name: name.to_owned(),
            known: KERNELS.map(|kernel| kernel.name).join(", "),
        })
}

impl Kernel {
    /// The kernel in the cache, if it was set up.
    pub fn unpacked(&self, cache: &Cache) -> Option<Unpacked> {
        let root = cache.path("kernels").join(self.name);
        let release = fs::read_to_string(root.join("release")).ok()?;
        let elf = root.join("vmlinux");
        if !elf.exists() {
            // Left by an older lab.
            return None;
        }
        let config = fs::read_to_string(root.join(iommufd_kernel::CONFIG_COPY)).ok();
        if self.built.is_some() && config.as_deref() != self.built {
            return None;
        }
        Some(Unpacked {
            name: self.name,
            image: root.join("vmlinuz"),
            elf,
            modules: root.join("lib/modules").join(&release),
            release,
        })
    }
}

/// Fetches the kernels that are not in the cache yet.
pub fn ensure(cache: &Cache, kernels: &[&'static Kernel]) -> Result<(), Error> {
    let missing: Vec<_> = kernels
        .iter()
        .filter(|kernel| kernel.unpacked(cache).is_none())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mirror = Mirror::of_this_machine()?;
    for kernel in missing {
        eprintln!("lab: reading the package lists for kernel {}", kernel.name);
        let root = cache.path("apt").join(kernel.name);
        let apt = Apt::prepare(&root, &mirror, kernel.suites, Installed::Nothing)?;
        fetch(cache, &apt, kernel)?;
    }
    Ok(())
}

/// Makes the tree of a kernel in the cache.
fn fetch(cache: &Cache, apt: &Apt, kernel: &Kernel) -> Result<(), Error> {
    let names = apt.search(&format!("^{}", kernel.packages))?;
    let none = || Error::NoKernel {
        pattern: kernel.packages.to_owned(),
        suites: apt.suites.clone(),
    };
    let kernels = cache.path("kernels");
    fs::create_dir_all(&kernels).map_err(Error::file("create", &kernels))?;
    // In the cache itself, so that the finished tree can be renamed into place.
    let work = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(&kernels)
        .map_err(Error::file("create a directory in", &kernels))?;
    let tree = work.path().join("tree");
    if kernel.built.is_some() {
        let source = newest_source(&names).ok_or_else(none)?;
        iommufd_kernel::build(cache, apt, source, &tree)?;
    } else {
        let image = newest(&names).ok_or_else(none)?;
        unpack(apt, kernel, image, work.path(), &tree)?;
    }
    let target = kernels.join(kernel.name);
    if target.exists() {
        fs::remove_dir_all(&target).map_err(Error::file("remove", &target))?;
    }
    fs::rename(&tree, &target).map_err(Error::file("rename into place", &target))
}

/// Makes `tree` out of the package `image` and those that it needs.
fn unpack(apt: &Apt, kernel: &Kernel, image: &str, work: &Path, tree: &Path) -> Result<(), Error> {
    let release = release(image).unwrap_or_default().to_owned();
    eprintln!("lab: fetching kernel {} ({release})", kernel.name);
    // Since 7.x the image and the modules are packages of their own.
    let mut packages = vec![image.to_owned()];
    packages.extend(
        apt.dependencies(image)?
            .into_iter()
            .filter(|name| name.starts_with("linux-") && name.contains(&release)),
    );
    let unpacked = work.join("root");
    apt.unpack(&packages, &work.join("packages"), &unpacked)?;
    arrange(&unpacked, tree, &release, kernel.name)
}

/// Makes the tree of one kernel out of its unpacked packages: `vmlinuz`, `vmlinux`, `lib/modules/RELEASE`, and `release`, which is
/// written last.
fn arrange(unpacked: &Path, tree: &Path, release: &str, kernel: &str) -> Result<(), Error> {
    let first = |candidates: [String; 2]| {
        candidates
            .iter()
            .map(|candidate| unpacked.join(candidate))
            .find(|path| path.exists())
            .ok_or_else(|| Error::KernelLacks {
                kernel: kernel.to_owned(),
                what: candidates.join(" or "),
            })
    };
    let image = first([
        format!("boot/vmlinuz-{release}"),
        format!("usr/lib/modules/{release}/vmlinuz"),
    ])?;
    let modules = first([
        format!("lib/modules/{release}"),
        format!("usr/lib/modules/{release}"),
    ])?;
    let parent = tree.join("lib/modules");
    fs::create_dir_all(&parent).map_err(Error::file("create", &parent))?;
    let target = tree.join("vmlinuz");
    fs::rename(&image, &target).map_err(Error::file("rename into place", &target))?;
    vmlinux::extract(&target, &tree.join("vmlinux"))?;
    let target = parent.join(release);
    fs::rename(&modules, &target).map_err(Error::file("rename into place", &target))?;
    command::run(Command::new("depmod").arg("-b").arg(tree).arg(release))?;
    let stamp = tree.join("release");
    fs::write(&stamp, release).map_err(Error::file("write", &stamp))
}

/// `linux-image-6.1.0-50-amd64-unsigned` → `6.1.0-50-amd64`; nothing for cloud, real-time and debug packages.
fn release(package: &str) -> Option<&str> {
    let release = package.strip_prefix("linux-image-")?;
    let release = release.strip_suffix("-unsigned").unwrap_or(release);
    let version = release.strip_suffix("-amd64")?;
    let plain = !version.ends_with("-cloud") && !version.ends_with("-rt");
    plain.then_some(release)
}

/// The package of the highest version; of two of the same version the signed one.
fn newest(packages: &[String]) -> Option<&str> {
    packages
        .iter()
        .filter_map(|package| {
            let numbers: Vec<u32> = release(package)?
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            Some((numbers, !package.ends_with("-unsigned"), package.as_str()))
        })
        .max()
        .map(|(_, _, package)| package)
}

/// The package of the source code of the highest version: `linux-source-7.3`.
fn newest_source(packages: &[String]) -> Option<&str> {
    let version = |package: &str| -> Option<Vec<u32>> {
        let version = package.strip_prefix("linux-source-")?;
        version.split('.').map(|word| word.parse().ok()).collect()
    };
    packages
        .iter()
        .filter_map(|package| Some((version(package)?, package.as_str())))
        .max()
        .map(|(_, package)| package)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_ordinary_kernel_is_taken() {
        let names = |names: &[&str]| names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            newest(&names(&[
                "linux-image-6.1.0-9-amd64",
                "linux-image-6.1.0-57-amd64-unsigned",
                "linux-image-6.1.0-57-cloud-amd64",
                "linux-image-6.1.0-58-amd64-dbg",
            ])),
            Some("linux-image-6.1.0-57-amd64-unsigned")
        );
        assert_eq!(
            newest(&names(&[
                "linux-image-6.12.107+deb13-amd64",
                "linux-image-6.12.117+deb12-rt-amd64",
                "linux-image-6.12.117+deb13-amd64-unsigned",
                "linux-image-6.12.117+deb13-amd64",
            ])),
            Some("linux-image-6.12.117+deb13-amd64")
        );
        assert_eq!(newest(&names(&["linux-image-amd64-dbg"])), None);
        let sources = names(&["linux-source-6.9", "linux-source-6.12", "linux-source"]);
        assert_eq!(newest_source(&sources), Some("linux-source-6.12"));
    }

    #[test]
    fn an_unknown_kernel_is_answered_with_the_known_ones() {
        let error = find("5.4").err().unwrap().to_string();
        assert!(error.contains("7.3") && error.contains("5.4"), "{error}");
    }
}
