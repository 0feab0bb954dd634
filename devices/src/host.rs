//! What the host's sysfs says of PCI devices. Everything is read below a root directory, so that
//! tests run on made trees.
//!
//! Here is what assignment itself asks; [`function`], [`iommu`], [`names`] and [`uses`] hold what a
//! preflight asks besides. Nothing here opens a PCI device: that would reset it.

pub mod function;
pub mod iommu;
pub mod names;
#[cfg(any(test, feature = "fake"))]
pub mod tree;
pub mod uses;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::pci::address::Bdf;

/// A reader of /sys.
#[derive(Clone, Debug)]
pub struct Sysfs {
    root: PathBuf,
}

impl Default for Sysfs {
    fn default() -> Self {
        Self::below(Path::new("/"))
    }
}

/// A PCI function of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostDevice {
    /// Its address.
    pub bdf: Bdf,
    /// Name of the bound driver.
    pub driver: Option<String>,
    /// Its IOMMU group; `None` where no IOMMU translates for it.
    pub group: Option<u32>,
}

impl HostDevice {
    /// Whether VFIO has it, by vfio-pci or one of its variants (mlx5_vfio_pci,
    /// nvgrace-gpu-vfio-pci, …).
    pub fn has_vfio(&self) -> bool {
        let driver = self.driver.as_deref().unwrap_or_default();
        driver.replace('_', "-").ends_with("vfio-pci")
    }
}

impl Sysfs {
    /// A reader of the tree below `root`.
    pub fn below(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    fn device_path(&self, bdf: Bdf) -> PathBuf {
        self.root.join(format!("sys/bus/pci/devices/{bdf}"))
    }

    /// The function at `bdf`; `None` when the host has none there.
    pub fn device(&self, bdf: Bdf) -> Option<HostDevice> {
        let path = self.device_path(bdf);
        path.exists().then(|| HostDevice {
            bdf,
            driver: link_name(&path.join("driver")),
            group: link_name(&path.join("iommu_group")).and_then(|name| name.parse().ok()),
        })
    }

    /// What a VFIO driver calls the function, as in vfio0; `None` when it is bound to none, or
    /// the kernel is older than 6.1.
    pub fn vfio_name(&self, bdf: Bdf) -> Option<String> {
        let entries = fs::read_dir(self.device_path(bdf).join("vfio-dev")).ok()?;
        let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.find(|name| name.starts_with("vfio"))
    }

    /// A path below the root, as in dev/iommu.
    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// The PCI functions of an IOMMU group, ascending.
    pub fn group_members(&self, group: u32) -> io::Result<Vec<Bdf>> {
        let path = format!("sys/kernel/iommu_groups/{group}/devices");
        let mut members = Vec::new();
        for entry in fs::read_dir(self.root.join(path))? {
            let name = entry?.file_name();
            // Other buses may share a group; they hold no BDF.
            members.extend(name.to_str().and_then(|name| name.parse::<Bdf>().ok()));
        }
        members.sort_unstable();
        Ok(members)
    }

    /// Host-physical address of a BAR (first column of its line in `resource`); `None` when it has
    /// none.
    pub fn bar_address(&self, bdf: Bdf, bar: u8) -> Option<u64> {
        let resource = fs::read_to_string(self.device_path(bdf).join("resource")).ok()?;
        let line = resource.lines().nth(bar.into())?;
        let first = line.split_ascii_whitespace().next()?;
        let address = u64::from_str_radix(first.strip_prefix("0x")?, 16).ok()?;
        (address != 0).then_some(address)
    }

    /// The NUMA node that a device is attached to; `None` where the host has but one, or does not
    /// say.
    pub fn numa_node(&self, bdf: Bdf) -> Option<u32> {
        let node = fs::read_to_string(self.device_path(bdf).join("numa_node")).ok()?;
        // -1 for none.
        node.trim().parse().ok()
    }

    /// The host's NUMA nodes, ascending; none where it does not say.
    pub fn nodes(&self) -> Vec<u32> {
        let entries = fs::read_dir(self.path("sys/devices/system/node"));
        let names = entries.into_iter().flatten().flatten();
        let mut nodes: Vec<u32> = names
            .filter_map(|entry| {
                entry
                    .file_name()
                    .to_str()?
                    .strip_prefix("node")?
                    .parse()
                    .ok()
            })
            .collect();
        nodes.sort_unstable();
        nodes
    }

    /// Whether the host has any IOMMU group at all.
    pub fn has_iommu(&self) -> bool {
        let groups = fs::read_dir(self.root.join("sys/kernel/iommu_groups"));
        groups.is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Number of the user that this process runs as.
    pub fn own_user() -> u32 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata("/proc/self").map_or(0, |metadata| metadata.uid())
    }

    /// Whether the host kernel is older than `version`; no, where it does not say.
    pub fn is_older_than(&self, version: (u32, u32)) -> bool {
        self.kernel_version().is_some_and(|found| found < version)
    }

    /// Major and minor number of the host kernel.
    pub fn kernel_version(&self) -> Option<(u32, u32)> {
        let release = fs::read_to_string(self.path("proc/sys/kernel/osrelease")).ok()?;
        // 7.3.4-amd64
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// Whether `bdf` is a PCI bridge (class 0604): it may stay with its host driver.
    pub fn is_bridge(&self, bdf: Bdf) -> bool {
        let class = fs::read_to_string(self.device_path(bdf).join("class"));
        class.is_ok_and(|class| class.trim_start_matches("0x").starts_with("0604"))
    }
}

/// Last component of what a symbolic link points to.
fn link_name(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_has_a_version() {
        let root = tempfile::tempdir().unwrap();
        let version = |release: &str| {
            let file = "proc/sys/kernel/osrelease";
            tree::rewrite(root.path(), file, release).unwrap();
            Sysfs::below(root.path()).kernel_version()
        };
        assert_eq!(version("7.3.4+deb13-amd64"), Some((7, 3)));
        assert_eq!(version("6.1.0-37-amd64"), Some((6, 1)));
        assert_eq!(version("linux"), None);
    }

    #[test]
    fn a_device_is_at_its_node_or_at_none() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        let bdf: Bdf = "41:00.0".parse().unwrap();
        let dir = root.path().join(format!("sys/bus/pci/devices/{bdf}"));
        fs::create_dir_all(&dir).unwrap();
        assert_eq!(sysfs.numa_node(bdf), None);
        for (text, node) in [("1\n", Some(1)), ("-1\n", None)] {
            fs::write(dir.join("numa_node"), text).unwrap();
            assert_eq!(sysfs.numa_node(bdf), node);
        }
    }

    #[test]
    fn a_bar_has_the_address_of_its_line_and_an_absent_one_none() {
        let root = tempfile::tempdir().unwrap();
        let bdf: Bdf = "41:00.0".parse().unwrap();
        let dir = root.path().join(format!("sys/bus/pci/devices/{bdf}"));
        fs::create_dir_all(&dir).unwrap();
        let text = "0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200\n\
                    0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        fs::write(dir.join("resource"), text).unwrap();
        let sysfs = Sysfs::below(root.path());
        assert_eq!(sysfs.bar_address(bdf, 0), Some(0xd000_0000));
        assert_eq!(sysfs.bar_address(bdf, 1), None);
        assert_eq!(sysfs.bar_address(bdf, 7), None);
    }
}
