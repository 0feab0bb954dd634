//! The network that the host has over the interfaces of a PCI function.

use std::fs;
use std::path::{Path, PathBuf};

use super::{HostUse, list, names};
use crate::host::Sysfs;

/// IFF_UP (include/uapi/linux/if.h).
const IFF_UP: u32 = 1;
/// RTF_UP (include/uapi/linux/route.h).
const RTF_UP: u32 = 1;

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
        let mut routed = ipv4_defaults(&list(&sysfs.path("proc/net/route")));
        routed.extend(ipv6_defaults(&list(&sysfs.path("proc/net/ipv6_route"))));
        let interfaces = names(&class).into_iter().filter_map(|name| {
            let path = fs::canonicalize(class.join(&name)).ok()?;
            let used = used(&class, &routed, name);
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

/// `routed` are the interfaces of the default routes.
fn used(class: &Path, routed: &[String], name: String) -> Option<HostUse> {
    if with_uppers(class, &name)
        .iter()
        .any(|one| routed.contains(one))
    {
        return Some(HostUse::DefaultRoute(name));
    }
    let flags = hex(&fs::read_to_string(class.join(&name).join("flags")).ok()?)?;
    (flags & IFF_UP != 0).then_some(HostUse::Network(name))
}

/// An interface and those on top of it (bond, bridge, VLAN), themselves or through others
/// (Documentation/ABI/testing/sysfs-class-net, upper).
fn with_uppers(class: &Path, name: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut ahead = vec![name.to_owned()];
    while let Some(name) = ahead.pop() {
        if !found.contains(&name) {
            let links = names(&class.join(&name)).into_iter();
            ahead.extend(links.filter_map(|link| Some(link.strip_prefix("upper_")?.to_owned())));
            found.push(name);
        }
    }
    found
}

/// The interfaces of IPv4's default routes (proc(5), /proc/net/route).
fn ipv4_defaults(routes: &str) -> Vec<String> {
    let mut interfaces = Vec::new();
    for line in routes.lines().skip(1) {
        let mut fields = line.split_whitespace();
        if let (Some(interface), Some("00000000")) = (fields.next(), fields.next()) {
            interfaces.push(interface.to_owned());
        }
    }
    interfaces
}

/// The interfaces of IPv6's default routes (net/ipv6/route.c, rt6_fill_node and ipv6_route_seq_show:
/// destination, bits of its prefix, … , flags, interface). The kernel's own route to nowhere is over `lo`.
fn ipv6_defaults(routes: &str) -> Vec<String> {
    let mut interfaces = Vec::new();
    for line in routes.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [destination, "00", .., flags, interface] = fields.as_slice() else {
            continue;
        };
        let is_up = hex(flags).is_some_and(|flags| flags & RTF_UP != 0);
        if is_up && destination.bytes().all(|digit| digit == b'0') && *interface != "lo" {
            interfaces.push((*interface).to_owned());
        }
    }
    interfaces
}

fn hex(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree;

    const V4: &str = "/proc/net/route: Iface Destination Gateway Flags\n/proc/net/route: vmbr0 00000000 01 0003\n";

    fn told(more: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let text = format!(
            "/sys/class/net/eno1 -> ../../devices/pci/a/net/eno1
@/sys/devices/pci/a/net/eno1
flags: 0x1003
upper_bond0 -> ../../../../virtual/net/bond0
@/sys/class/net
bond0/upper_vmbr0 -> ../vmbr0
vmbr0/upper_bond0 -> ../bond0
{more}"
        );
        let sysfs = tree::expand(&text, root.path()).unwrap();
        let device = fs::canonicalize(sysfs.path("sys/devices/pci/a")).unwrap();
        let uses = Network::read(&sysfs).uses(&device);
        uses.iter().map(HostUse::to_string).collect()
    }

    /// A line of /proc/net/ipv6_route.
    fn v6(destination: &str, prefix: &str, flags: &str, interface: &str) -> String {
        let zero = "0".repeat(32);
        let (next, numbers) = ("fd000000000000000000000000000001", "00000400 3 0");
        format!(
            "/proc/net/ipv6_route: {destination} {prefix} {zero} 00 {next} {numbers} {flags} {interface}\n"
        )
    }

    #[test]
    fn a_card_below_a_bond_below_a_bridge_has_their_default_route() {
        assert_eq!(told(V4), ["the default route goes over eno1"]);
    }

    #[test]
    fn a_default_route_of_ipv6_alone_counts_and_no_other_route_does() {
        let zero = "0".repeat(32);
        for interface in ["eno1", "vmbr0"] {
            let route = v6(&zero, "00", "00000003", interface);
            assert_eq!(told(&route), ["the default route goes over eno1"]);
        }
        for route in [
            v6(&zero, "00", "00200200", "eno1"),
            v6(&zero, "00", "00000003", "lo"),
            v6(&zero, "60", "00000003", "eno1"),
            v6("fd000000000000000000000000000000", "00", "00000003", "eno1"),
            "/proc/net/ipv6_route: 00\n".to_owned(),
        ] {
            assert_eq!(told(&route), ["eno1 is up"], "{route}");
        }
    }
}
