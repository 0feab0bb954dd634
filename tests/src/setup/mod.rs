//! `cargo lab setup`: brings everything that the lab needs into place, once.

mod apt;
mod images;
mod initramfs;
mod iommufd_kernel;
mod kernels;
mod modules;
mod qemu11;
mod sources;
pub mod tools;
mod vmlinux;

use std::path::PathBuf;

use kernels::KERNELS;
pub use qemu11::PROGRAM as QEMU11_PROGRAM;

use crate::error::Error;
use crate::paths::Cache;

/// The kernel of host and guest where none is named.
pub const DEFAULT_KERNEL: &str = "7.3";
/// The kernel of the lab's host that has iommufd.
pub const IOMMUFD_KERNEL: &str = "iommufd";

/// A kernel with its images, ready to boot.
#[derive(Clone, Debug)]
pub struct Bootable {
    /// The name in the table of kernels.
    pub name: &'static str,
    /// What `uname -r` says.
    pub release: String,
    /// The boot image.
    pub image: PathBuf,
    /// The ELF kernel in it.
    pub elf: PathBuf,
    /// The initramfs of the lab's host.
    pub host_initrd: PathBuf,
    /// The initramfs of the lab's default guest.
    pub guest_initrd: PathBuf,
}

/// Sets up QEMU 11; returns the root of a directory tree, to be changed into before it is run.
pub fn qemu11() -> Result<PathBuf, Error> {
    let cache = Cache::open()?;
    let _lock = cache.lock()?;
    qemu11::ensure(&cache)
}

/// Sets up the named kernels, and returns every kernel that is set up, in the order of the table.
pub fn ensure(names: &[&str]) -> Result<Vec<Bootable>, Error> {
    let wanted = names
        .iter()
        .map(|name| kernels::find(name))
        .collect::<Result<Vec<_>, _>>()?;
    let cache = Cache::open()?;
    let _lock = cache.lock()?;
    tools::ensure(&cache)?;
    kernels::ensure(&cache, &wanted)?;
    let probe = images::build_probe()?;
    let mut bootable = Vec::new();
    for kernel in KERNELS.iter().filter_map(|kernel| kernel.unpacked(&cache)) {
        let images = images::ensure(&cache, &kernel, &probe)?;
        bootable.push(Bootable {
            name: kernel.name,
            release: kernel.release,
            image: kernel.image,
            elf: kernel.elf,
            host_initrd: images.host,
            guest_initrd: images.guest,
        });
    }
    Ok(bootable)
}
