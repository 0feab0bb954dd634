//! What the host itself uses a PCI function for: swap, mounted file systems, devices on top of its
//! disks (dm, md), network interfaces that are up. Whoever takes its driver takes these away.
//!
//! Nothing is walked: each block device and each network interface that the kernel lists is traced
//! to the function that it lies on (sysfs: `slaves` of a stacked device, controllers of an NVMe
//! subsystem), and no directory is looked at twice.

use std::fmt;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{Sysfs, link_name};
use crate::pci::address::Bdf;

/// IFF_UP (include/uapi/linux/if.h).
const IFF_UP: u32 = 1;

/// One way in which the host uses a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostUse {
    /// Swap, on this device node.
    Swap(String),
    /// A file system: device node and where it is mounted.
    Mount(String, String),
    /// A device node, and the name of a device on top of it.
    Held(String, String),
    /// A network interface that is up.
    Network(String),
    /// A network interface that the default route goes over.
    DefaultRoute(String),
}

impl fmt::Display for HostUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swap(node) => write!(f, "{node} is swap"),
            Self::Mount(node, at) => write!(f, "{node} is mounted at {at}"),
            Self::Held(node, holder) => write!(f, "{node} is part of {holder}"),
            Self::Network(name) => write!(f, "{name} is up"),
            Self::DefaultRoute(name) => write!(f, "the default route goes over {name}"),
        }
    }
}

impl HostUse {
    /// What ends it.
    fn end(&self) -> String {
        match self {
            Self::Swap(node) => format!("`swapoff {node}`"),
            Self::Mount(_, at) => format!("`umount {at}`"),
            Self::Held(node, holder) => format!("take {node} out of {holder}"),
            Self::Network(name) => format!("`ip link set {name} down`"),
            Self::DefaultRoute(name) => {
                format!("give the default route to another card than {name}'s")
            }
        }
    }
}

/// All of them; as it stands in a message behind the driver's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostUses(pub Vec<HostUse>);

impl HostUses {
    /// What is to be done first; `None` where the host does not use the function.
    pub fn advice(&self) -> Option<String> {
        if self.0.is_empty() {
            return None;
        }
        if self
            .0
            .iter()
            .any(|one| matches!(one, HostUse::Mount(_, at) if at == "/"))
        {
            return Some("leave it to the host, which runs from it".to_owned());
        }
        let ends: Vec<String> = self.0.iter().map(HostUse::end).collect();
        let ends = ends.join(", ");
        Some(format!(
            "end that first ({ends}); `mini-vmm check` then has the command that gives it to vfio-pci"
        ))
    }
}

impl fmt::Display for HostUses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uses: Vec<String> = self.0.iter().map(HostUse::to_string).collect();
        match uses.is_empty() {
            true => Ok(()),
            false => write!(f, ", and the host uses it ({})", uses.join(", ")),
        }
    }
}

/// A block device: a disk, a partition, or one on top of others.
struct Block {
    name: String,
    /// Major and minor number.
    number: String,
    path: PathBuf,
}

impl Block {
    fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Whether it lies on the device whose directory is `device`, itself or through others.
    fn lies_on(&self, device: &Path) -> bool {
        let mut seen: Vec<PathBuf> = Vec::new();
        let mut ahead = vec![self.path.clone()];
        while let Some(path) = ahead.pop() {
            if path.starts_with(device) {
                return true;
            }
            if !seen.contains(&path) {
                ahead.extend(below(&path));
                seen.push(path);
            }
        }
        false
    }

    /// What lies on it directly.
    fn holders(&self) -> Vec<String> {
        names(&self.path.join("holders"))
    }
}

/// What a stacked block device, or the one that it is a partition of, is made of. A namespace of an
/// NVMe subsystem lies beside the links to its controllers.
fn below(path: &Path) -> Vec<PathBuf> {
    let parent = path.parent().unwrap_or(path);
    let slaves = [path, parent].map(|of| of.join("slaves"));
    let mut found: Vec<PathBuf> = slaves.iter().flat_map(|of| resolved(of, "")).collect();
    let subsystem = path.ancestors().find(|of| {
        let name = of.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("nvme-subsys") && name != "nvme-subsystem")
    });
    found.extend(subsystem.into_iter().flat_map(|of| resolved(of, "nvme")));
    found
}

/// Where the links in `directory` lead whose names begin with `prefix`.
fn resolved(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let names = names(directory).into_iter();
    let links = names
        .filter(|name| name.starts_with(prefix))
        .map(|name| directory.join(name))
        .filter(|path| path.is_symlink());
    links
        .filter_map(|link| fs::canonicalize(link).ok())
        .collect()
}

/// The names in a directory, in order.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}

impl Sysfs {
    /// What the host uses the function for.
    pub fn uses(&self, bdf: Bdf) -> HostUses {
        let Ok(device) = fs::canonicalize(self.device_path(bdf)) else {
            return HostUses::default();
        };
        let mut uses = self.storage(&device);
        uses.extend(self.network(&device));
        HostUses(uses)
    }

    /// Whether the firmware's messages, and with them the host's console, are on this function.
    pub fn is_boot_display(&self, bdf: Bdf) -> bool {
        let text = fs::read_to_string(self.device_path(bdf).join("boot_vga"));
        text.is_ok_and(|text| text.trim() == "1")
    }

    fn storage(&self, device: &Path) -> Vec<HostUse> {
        let class = self.path("sys/class/block");
        let blocks = names(&class).into_iter().filter_map(|name| {
            let path = fs::canonicalize(class.join(&name)).ok()?;
            let number = fs::read_to_string(path.join("dev")).ok()?.trim().to_owned();
            Some(Block { name, number, path })
        });
        let blocks: Vec<Block> = blocks.filter(|block| block.lies_on(device)).collect();
        if blocks.is_empty() {
            return Vec::new();
        }
        let (swaps, mounts) = (self.swaps(), self.mounts());
        let mut uses = Vec::new();
        for block in &blocks {
            if swaps.contains(&block.number) {
                uses.push(HostUse::Swap(block.node()));
            }
            // The first is the file system's own, the rest show parts of it elsewhere.
            let mount = mounts.iter().find(|(number, _)| *number == block.number);
            uses.extend(mount.map(|(_, at)| HostUse::Mount(block.node(), at.clone())));
        }
        if uses.is_empty() {
            let held = blocks.iter().flat_map(|block| {
                let holders = block.holders().into_iter();
                holders.map(|holder| HostUse::Held(block.node(), holder))
            });
            uses.extend(held);
        }
        uses
    }

    /// Numbers of the block devices that are swap.
    fn swaps(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("proc/swaps")).unwrap_or_default();
        let nodes = text
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        nodes.filter_map(|node| self.block_number(node)).collect()
    }

    /// Numbers of the block devices that are mounted, and where (proc(5), mountinfo).
    fn mounts(&self) -> Vec<(String, String)> {
        let text = fs::read_to_string(self.path("proc/self/mountinfo")).unwrap_or_default();
        let mut mounts = Vec::new();
        for line in text.lines() {
            let Some((mount, source)) = line.split_once(" - ") else {
                continue;
            };
            let mut fields = mount.split(' ').skip(2);
            let (Some(number), Some(at)) = (fields.next(), fields.nth(1)) else {
                continue;
            };
            let at: String = at.chars().filter(|c| !c.is_control()).collect();
            // btrfs has a number of its own; what it is mounted from tells the device.
            let source = source
                .split(' ')
                .nth(1)
                .and_then(|node| self.block_number(node));
            mounts.extend(source.map(|number| (number, at.clone())));
            mounts.push((number.to_owned(), at));
        }
        mounts
    }

    /// Major and minor number of a device node.
    fn block_number(&self, node: &str) -> Option<String> {
        let name = node.strip_prefix("/dev/")?;
        if let Ok(text) = fs::read_to_string(self.path("sys/class/block").join(name).join("dev")) {
            return Some(text.trim().to_owned());
        }
        // A name of another kind, as those in /dev/mapper.
        let metadata = fs::metadata(self.path("dev").join(name)).ok()?;
        let number = metadata.rdev();
        let (major, minor) = (libc::major(number), libc::minor(number));
        metadata
            .file_type()
            .is_block_device()
            .then(|| format!("{major}:{minor}"))
    }

    fn network(&self, device: &Path) -> Vec<HostUse> {
        let class = self.path("sys/class/net");
        let interfaces = names(&class).into_iter().filter(|name| {
            fs::canonicalize(class.join(name)).is_ok_and(|path| path.starts_with(device))
        });
        let used = interfaces.filter_map(|name| {
            if self.has_default_route(&name) {
                return Some(HostUse::DefaultRoute(name));
            }
            let text = fs::read_to_string(class.join(&name).join("flags")).ok()?;
            let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()?;
            (flags & IFF_UP != 0).then_some(HostUse::Network(name))
        });
        used.collect()
    }

    /// Whether the default route of IPv4 goes over the interface, or over one on top of it (a
    /// bridge, a bond).
    fn has_default_route(&self, name: &str) -> bool {
        let master = link_name(&self.path("sys/class/net").join(name).join("master"));
        let text = fs::read_to_string(self.path("proc/net/route")).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            let mut fields = line.split_whitespace();
            let (interface, destination) = (fields.next(), fields.next());
            let ours = interface == Some(name) || interface == master.as_deref();
            interface.is_some() && ours && destination == Some("00000000")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree;

    const DISK: &str = "/sys/devices/pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n1";

    /// An NVMe disk with a partition below dm-0, an NVMe subsystem, and a network card.
    fn host(more: &str) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        let text = format!(
            "/sys/bus/pci/devices/0000:00:03.0 -> ../../../devices/pci0000:00/0000:00:03.0
/sys/bus/pci/devices/0000:00:04.0 -> ../../../devices/pci0000:00/0000:00:04.0
/sys/bus/pci/devices/0000:00:05.0 -> ../../../devices/pci0000:00/0000:00:05.0
/sys/class/block/nvme0n1 -> ../../devices/pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n1
/sys/class/block/nvme0n1p2 -> ../../devices/pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n1/nvme0n1p2
/sys/class/block/dm-0 -> ../../devices/virtual/block/dm-0
/sys/class/block/nvme1n1 -> ../../devices/virtual/nvme-subsystem/nvme-subsys1/nvme1n1
/sys/class/net/eth0 -> ../../devices/pci0000:00/0000:00:04.0/virtio1/net/eth0
@{DISK}
dev: 259:0
nvme0n1p2/dev: 259:2
nvme0n1p2/holders/dm-0 -> ../../../../../../../virtual/block/dm-0
@/sys/devices/virtual/block/dm-0
dev: 254:0
slaves/nvme0n1p2 -> ../../../../pci0000:00/0000:00:03.0/nvme/nvme0/nvme0n1/nvme0n1p2
@/sys/devices/virtual/nvme-subsystem/nvme-subsys1
nvme1n1/dev: 259:9
nvme1 -> ../../../pci0000:00/0000:00:05.0/nvme/nvme1
@/sys/devices/pci0000:00
0000:00:05.0/nvme/nvme1/
0000:00:04.0/virtio1/net/eth0/flags: 0x1002
@/proc
{more}"
        );
        let sysfs = tree::expand(&text, root.path()).unwrap();
        (root, sysfs)
    }

    fn told(more: &str, bdf: &str) -> Vec<String> {
        let (_root, sysfs) = host(more);
        let uses = sysfs.uses(bdf.parse().unwrap()).0;
        uses.iter().map(HostUse::to_string).collect()
    }

    #[test]
    fn swap_and_file_systems_are_traced_to_the_disk() {
        let swap =
            "swaps: Filename Type Size Used Priority\nswaps: /dev/nvme0n1 partition 9 0 -2\n";
        assert_eq!(told(swap, "00:03.0"), ["/dev/nvme0n1 is swap"]);
        assert_eq!(told(swap, "00:05.0"), [""; 0]);
        let mount = "self/mountinfo: 29 1 254:0 / /srv rw - ext4 /dev/mapper/x rw\n";
        assert_eq!(told(mount, "00:03.0"), ["/dev/dm-0 is mounted at /srv"]);
        let btrfs = "self/mountinfo: 29 1 0:26 / /srv rw - btrfs /dev/nvme0n1p2 rw\n";
        assert_eq!(
            told(btrfs, "00:03.0"),
            ["/dev/nvme0n1p2 is mounted at /srv"]
        );
        let subsystem = "self/mountinfo: 29 1 259:9 / /srv rw - ext4 /dev/nvme1n1 rw\n";
        assert_eq!(
            told(subsystem, "00:05.0"),
            ["/dev/nvme1n1 is mounted at /srv"]
        );
    }

    #[test]
    fn a_disk_below_another_device_is_in_use_though_nothing_is_mounted() {
        assert_eq!(
            told("uptime: 1\n", "00:03.0"),
            ["/dev/nvme0n1p2 is part of dm-0"]
        );
    }

    #[test]
    fn an_interface_is_in_use_while_it_is_up_or_has_the_default_route() {
        assert_eq!(told("uptime: 1\n", "00:04.0"), [""; 0]);
        let route = "net/route: Iface Destination Gateway\nnet/route: eth0 00000000 0202000A\n";
        assert_eq!(told(route, "00:04.0"), ["the default route goes over eth0"]);
        let (root, sysfs) = host("uptime: 1\n");
        tree::rewrite(root.path(), "/sys/class/net/eth0/flags", "0x1003\n").unwrap();
        let uses = sysfs.uses("00:04.0".parse().unwrap());
        assert_eq!(uses.to_string(), ", and the host uses it (eth0 is up)");
        assert!(uses.advice().unwrap().contains("`ip link set eth0 down`"));
    }

    #[test]
    fn the_disk_that_the_host_runs_from_stays_with_it() {
        let (_root, sysfs) = host("self/mountinfo: 29 1 259:2 / / rw - ext4 /dev/root rw\n");
        let advice = sysfs.uses("00:03.0".parse().unwrap()).advice();
        assert!(advice.unwrap().starts_with("leave it to the host"));
    }
}
