//! What the host itself uses a PCI function for: swap, mounted file systems, devices on top of its
//! disks (dm, md), disks that something else holds, network interfaces that are up, virtual
//! functions, the boot display. Whoever takes its driver takes these away.
//!
//! Nothing is walked: each block device and each network interface that the kernel lists is traced
//! to the function that it lies on, and [`Usage`] reads the lists once for all functions.

mod network;
mod storage;

use std::cell::OnceCell;
use std::fmt;
use std::fs;
use std::path::Path;

use self::network::Network;
use self::storage::Storage;
use super::{Sysfs, link_name};
use crate::pci::address::Bdf;
use crate::remedy::quoted;

/// One way in which the host uses a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostUse {
    /// Swap, on this device node.
    Swap(String),
    /// A file system: device node and where it is mounted.
    Mount(String, String),
    /// A device node, and the name of a device on top of it.
    Held(String, String),
    /// A device node that something has opened exclusively which no list names: ZFS, another member
    /// of a file system on several disks, a mount of another namespace.
    Exclusive(String),
    /// A network interface that is up.
    Network(String),
    /// A network interface that the default route of IPv4 or IPv6 goes over, itself or by one on top.
    DefaultRoute(String),
    /// This many virtual functions, which go with the driver of this one.
    VirtualFunctions(Bdf, usize),
    /// The host's console since its firmware ran.
    BootDisplay,
}

impl fmt::Display for HostUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Swap(node) => write!(f, "{node} is swap"),
            Self::Mount(node, at) => {
                let shown = at.replace(char::is_control, "?");
                write!(f, "{node} is mounted at {shown}")
            }
            Self::Held(node, holder) => write!(f, "{node} is part of {holder}"),
            Self::Exclusive(node) => write!(f, "something holds {node} exclusively"),
            Self::Network(name) => write!(f, "{name} is up"),
            Self::DefaultRoute(name) => write!(f, "the default route goes over {name}"),
            Self::VirtualFunctions(_, 1) => f.write_str("1 virtual function goes with its driver"),
            Self::VirtualFunctions(_, count) => {
                write!(f, "{count} virtual functions go with its driver")
            }
            Self::BootDisplay => f.write_str("it is the display that the host was booted on"),
        }
    }
}

impl HostUse {
    /// What ends it.
    fn end(&self) -> String {
        match self {
            Self::Swap(node) => format!("`swapoff {}`", quoted(node)),
            // A path that cannot be typed is left out.
            Self::Mount(node, at) if at.contains(|c: char| c.is_control() || c == '\u{fffd}') => {
                format!("`umount {}`", quoted(node))
            }
            Self::Mount(_, at) => format!("`umount {}`", quoted(at)),
            Self::Held(node, holder) => format!("take {node} out of {holder}"),
            Self::Exclusive(node) => format!(
                "end what holds {node}, such as ZFS, or a file system on several disks that it is a member of"
            ),
            Self::Network(name) => format!("`ip link set {} down`", quoted(name)),
            Self::DefaultRoute(name) => {
                format!("give the default route to another card than {name}'s")
            }
            Self::VirtualFunctions(bdf, _) => format!(
                "assign a virtual function instead, or end what uses them and run `echo 0 > /sys/bus/pci/devices/{bdf}/sriov_numvfs`"
            ),
            Self::BootDisplay => {
                "end what draws on it (display server) and have another way to the host".to_owned()
            }
        }
    }
}

/// All of them; as it stands in a message behind the driver's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostUses(pub Vec<HostUse>);

impl HostUses {
    /// What is to be done before `command` gives the function to vfio-pci; `None` where the host
    /// does not use it.
    pub fn advice(&self, command: &str) -> Option<String> {
        if self.0.is_empty() {
            return None;
        }
        let is_root = |one: &HostUse| matches!(one, HostUse::Mount(_, at) if at == "/");
        if self.0.iter().any(is_root) {
            return Some("leave it to the host, which runs from it".to_owned());
        }
        let ends: Vec<String> = self.0.iter().map(HostUse::end).collect();
        let ends = ends.join(", ");
        // That the host was booted on it stays true: no later check would have the command.
        let lasts = self.0.iter().all(|one| *one == HostUse::BootDisplay);
        Some(match lasts {
            true => format!("{ends}, then run `{command}` as root"),
            false => format!(
                "end that first ({ends}); `mini-vmm check` then has the command that gives it to vfio-pci"
            ),
        })
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

/// What the host uses its functions for; its lists are read once, when they are first asked for.
pub struct Usage<'a> {
    sysfs: &'a Sysfs,
    storage: OnceCell<Storage>,
    network: OnceCell<Network>,
}

impl<'a> Usage<'a> {
    /// Of the host that `sysfs` reads.
    pub fn new(sysfs: &'a Sysfs) -> Self {
        Self {
            sysfs,
            storage: OnceCell::new(),
            network: OnceCell::new(),
        }
    }

    /// The reader of that host.
    pub fn sysfs(&self) -> &'a Sysfs {
        self.sysfs
    }

    /// What the host uses the function for, and its virtual functions.
    pub fn of(&self, bdf: Bdf) -> HostUses {
        let mut uses = self.of_alone(bdf);
        let virtual_functions = self.sysfs.virtual_functions_of(bdf);
        if !virtual_functions.is_empty() {
            uses.push(HostUse::VirtualFunctions(bdf, virtual_functions.len()));
        }
        uses.extend(virtual_functions.iter().flat_map(|vf| self.of_alone(*vf)));
        HostUses(uses)
    }

    fn of_alone(&self, bdf: Bdf) -> Vec<HostUse> {
        let Ok(device) = fs::canonicalize(self.sysfs.device_path(bdf)) else {
            return Vec::new();
        };
        let storage = self.storage.get_or_init(|| Storage::read(self.sysfs));
        let network = self.network.get_or_init(|| Network::read(self.sysfs));
        let mut uses = storage.uses(&device);
        uses.extend(network.uses(&device));
        if self.sysfs.is_boot_display(bdf) {
            uses.push(HostUse::BootDisplay);
        }
        uses
    }
}

impl Sysfs {
    /// Whether the firmware's messages, and with them the host's console, are on this function,
    /// and vfio-pci has not taken it yet.
    fn is_boot_display(&self, bdf: Bdf) -> bool {
        let text = fs::read_to_string(self.device_path(bdf).join("boot_vga"));
        let taken = self.device(bdf).is_some_and(|device| device.has_vfio());
        !taken && text.is_ok_and(|text| text.trim() == "1")
    }

    /// The virtual functions of a physical one.
    fn virtual_functions_of(&self, bdf: Bdf) -> Vec<Bdf> {
        let path = self.device_path(bdf);
        let links = names(&path).into_iter();
        let links = links.filter(|name| name.starts_with("virtfn"));
        let named = links.filter_map(|link| link_name(&path.join(link)));
        named.filter_map(|name| name.parse().ok()).collect()
    }
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

/// What a list of the kernel says; names in it need not be text.
fn list(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests;
