//! The network that the host has over the interfaces of a PCI function.

use std::fs;
use std::path::{Path, PathBuf};

use super::{HostUse, list, names};
use crate::host::{Sysfs, link_name};

/// IFF_UP (include/uapi/linux/if.h).
const IFF_UP: u32 = 1;

/// A network interface.
struct Interface {
    path: PathBuf,
    /// What it is used for, if for anything.
    used: Option<HostUse>,
}

/// The host's network interfaces.
pub(super) struct Network {
    interfaces: Vec<Interface>,
}

impl Network {
    pub(super) fn read(sysfs: &Sysfs) -> Self {
        let class = sysfs.path("sys/class/net");
        let interfaces = names(&class).into_iter().filter_map(|name| {
            let path = fs::canonicalize(class.join(&name)).ok()?;
            let used = used(sysfs, &path, name);
            Some(Interface { path, used })
        });
        Self {
            interfaces: interfaces.collect(),
        }
    }

    /// What the interfaces of the device whose directory is `device` are used for.
    pub(super) fn uses(&self, device: &Path) -> Vec<HostUse> {
        let interfaces = self.interfaces.iter();
        let own = interfaces.filter(|interface| interface.path.starts_with(device));
        own.filter_map(|interface| interface.used.clone()).collect()
    }
}

fn used(sysfs: &Sysfs, path: &Path, name: String) -> Option<HostUse> {
    if has_default_route(sysfs, &name) {
        return Some(HostUse::DefaultRoute(name));
    }
    let text = fs::read_to_string(path.join("flags")).ok()?;
    let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()?;
    (flags & IFF_UP != 0).then_some(HostUse::Network(name))
}

/// Whether the default route of IPv4 goes over the interface, or over one on top of it (a
/// bridge, a bond).
fn has_default_route(sysfs: &Sysfs, name: &str) -> bool {
    let master = link_name(&sysfs.path("sys/class/net").join(name).join("master"));
    let text = list(&sysfs.path("proc/net/route"));
    text.lines().skip(1).any(|line| {
        let mut fields = line.split_whitespace();
        let (interface, destination) = (fields.next(), fields.next());
        let ours = interface == Some(name) || interface == master.as_deref();
        interface.is_some() && ours && destination == Some("00000000")
    })
}
