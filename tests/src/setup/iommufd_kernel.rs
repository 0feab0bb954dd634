//! The kernel with IOMMUFD, which Debian's do not have: built once from the distribution's source package.
//!
//! The source tree is kept in the cache until the kernel is done, so that an interrupted build goes on where it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::paths::Cache;
use crate::setup::apt::Apt;
use crate::setup::tools;

/// What the kernel is built of, on top of `make allnoconfig`.
pub const CONFIG: &str = include_str!("../../../resources/lab/iommufd.config");
/// Where the kernel's tree keeps a copy of [`CONFIG`]: another configuration is another kernel.
pub const CONFIG_COPY: &str = "config";

/// Tells this kernel from the distribution's by `uname -r`.
const SUFFIX: &str = "LOCALVERSION=-iommufd";
/// Index files of modules that the images are built from; there are no modules.
const EMPTY_INDEXES: [&str; 2] = ["modules.dep", "modules.alias"];

/// Builds the kernel of the source `package` and makes its `tree` as `kernels::Unpacked` describes it.
pub fn build(cache: &Cache, apt: &Apt, package: &str, tree: &Path) -> Result<(), Error> {
    tools::ensure_compiler(cache)?;
    let work = cache.path("iommufd-build");
    let source = source(apt, package, &work)?;
    configure(&source, &work)?;
    eprintln!("lab: building kernel iommufd from {package}: 10 minutes or more, once");
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    command::run(make(&source).arg(format!("-j{jobs}")).arg("bzImage"))?;
    let release = command::output(make(&source).arg("kernelrelease"))?;
    arrange(&source, tree, release.trim())?;
    fs::remove_dir_all(&work).map_err(Error::file("remove", &work))
}

/// `make` that lets everything else go first, with the variables of this kernel.
fn make(source: &Path) -> Command {
    let mut command = Command::new("nice");
    command
        .args(["make", "--silent", "-C"])
        .arg(source)
        .args([SUFFIX, "KBUILD_BUILD_TIMESTAMP="]);
    command
}

/// The unpacked source tree.
fn source(apt: &Apt, package: &str, work: &Path) -> Result<PathBuf, Error> {
    let source = work.join(package);
    let complete = work.join("unpacked");
    if complete.exists() && source.is_dir() {
        return Ok(source);
    }
    if work.exists() {
        fs::remove_dir_all(work).map_err(Error::file("remove", work))?;
    }
    eprintln!("lab: fetching {package}");
    let root = work.join("package");
    apt.unpack(&[package.to_owned()], &work.join("packages"), &root)?;
    let archive = root.join(format!("usr/src/{package}.tar.xz"));
    command::run(
        Command::new("tar")
            .arg("-xf")
            .arg(&archive)
            .arg("-C")
            .arg(work),
    )?;
    for used in [work.join("packages"), root] {
        fs::remove_dir_all(&used).map_err(Error::file("remove", &used))?;
    }
    fs::write(&complete, "").map_err(Error::file("write", &complete))?;
    Ok(source)
}

/// Writes `.config`, and checks that everything asked for is in it: what lacks a dependency is dropped without a word.
fn configure(source: &Path, work: &Path) -> Result<(), Error> {
    let fragment = work.join("fragment");
    fs::write(&fragment, CONFIG).map_err(Error::file("write", &fragment))?;
    let wanted = format!("KCONFIG_ALLCONFIG={}", fragment.display());
    command::run(make(source).args([&wanted, "allnoconfig"]))?;
    let path = source.join(".config");
    let got = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    match missing(CONFIG, &got) {
        None => Ok(()),
        Some(line) => Err(Error::KernelLacks {
            kernel: "iommufd".to_owned(),
            what: format!("{line} (resources/lab/iommufd.config asks for it)"),
        }),
    }
}

/// The first option of `wanted` that `got` does not have.
fn missing<'a>(wanted: &'a str, got: &str) -> Option<&'a str> {
    let wanted = wanted.lines().filter(|line| line.ends_with("=y"));
    let mut lacking = wanted.filter(|line| !got.lines().any(|have| have == *line));
    lacking.next()
}

/// `vmlinuz`, `vmlinux`, `lib/modules/RELEASE` with index files that tell what is built in, the configuration, and last
/// `release`.
fn arrange(source: &Path, tree: &Path, release: &str) -> Result<(), Error> {
    let modules = tree.join("lib/modules").join(release);
    fs::create_dir_all(&modules).map_err(Error::file("create", &modules))?;
    let copy = |from: &str, to: PathBuf| {
        let from = source.join(from);
        fs::copy(&from, &to).map_err(Error::file("copy", &from))
    };
    copy("arch/x86/boot/bzImage", tree.join("vmlinuz"))?;
    copy("modules.builtin", modules.join("modules.builtin"))?;
    for name in EMPTY_INDEXES {
        let path = modules.join(name);
        fs::write(&path, "").map_err(Error::file("write", &path))?;
    }
    command::run(
        Command::new("strip")
            .arg("-o")
            .arg(tree.join("vmlinux"))
            .arg(source.join("vmlinux")),
    )?;
    let path = tree.join(CONFIG_COPY);
    fs::write(&path, CONFIG).map_err(Error::file("write", &path))?;
    let path = tree.join("release");
    fs::write(&path, release).map_err(Error::file("write", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_was_dropped_is_named() {
        let wanted = "# comment\nCONFIG_A=y\nCONFIG_B=n\nCONFIG_C=y\n";
        let got = "CONFIG_A=y\n# CONFIG_C is not set\n";
        assert_eq!(missing(wanted, got), Some("CONFIG_C=y"));
        assert_eq!(missing(wanted, "CONFIG_C=y\nCONFIG_A=y\n"), None);
    }
}
