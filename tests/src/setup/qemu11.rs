//! QEMU 11 in a directory tree of its own, with all that it is linked with: the first that maps BARs through dma-buf on
//! iommufd. Debian has it in trixie-backports only, and its libraries do not go with those of an older release, so it is
//! run by chroot.

use std::fs;
use std::path::{Path, PathBuf};

use crate::command;
use crate::error::Error;
use crate::paths::Cache;
use crate::setup::apt::{Apt, Installed};
use crate::setup::sources::Mirror;

const SUITE: &str = "trixie-backports";
/// base-files has the symbolic links that lead to the loader.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "base-files", "libc-bin"];
/// The program, by its path in the tree.
pub const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";

/// The tree's root, made if it is not there yet.
pub fn ensure(cache: &Cache) -> Result<PathBuf, Error> {
    let target = cache.path("qemu11");
    if target.join(PROGRAM.trim_start_matches('/')).exists() {
        return Ok(target);
    }
    eprintln!("lab: fetching QEMU 11");
    let mirror = Mirror::of_this_machine()?;
    let apt = Apt::prepare(
        &cache.path("apt/qemu11"),
        &mirror,
        &["trixie", SUITE],
        Installed::Nothing,
    )?;
    // In the cache itself, so that the finished tree can be renamed into place.
    let parent = cache.path("");
    let work = tempfile::Builder::new()
        .prefix(".unpacking-")
        .tempdir_in(&parent)
        .map_err(Error::file("create a directory in", &parent))?;
    let tree = work.path().join("tree");
    apt.unpack_with_dependencies(&PACKAGES, SUITE, &tree)?;
    link_libraries(&tree)?;
    if target.exists() {
        fs::remove_dir_all(&target).map_err(Error::file("remove", &target))?;
    }
    fs::rename(&tree, &target).map_err(Error::file("rename into place", &target))?;
    Ok(target)
}

/// Makes the loader's list of libraries, as an installed system has it.
fn link_libraries(tree: &Path) -> Result<(), Error> {
    command::run(std::process::Command::new("ldconfig").arg("-r").arg(tree))
}
