//! What the host's sysfs says of PCI devices. Everything is read below a root directory, so that
//! tests run on made trees.

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

    /// Whether the host has any IOMMU group at all.
    pub fn has_iommu(&self) -> bool {
        let groups = fs::read_dir(self.root.join("sys/kernel/iommu_groups"));
        groups.is_ok_and(|mut entries| entries.next().is_some())
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
