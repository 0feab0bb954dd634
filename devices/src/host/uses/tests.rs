//! Uses of a host's functions, on made trees.

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
    let uses = Usage::new(&sysfs).of(bdf.parse().unwrap()).0;
    uses.iter().map(HostUse::to_string).collect()
}

#[test]
fn swap_and_file_systems_are_traced_to_the_disk() {
    let swap = "swaps: Filename Type Size Used Priority\nswaps: /dev/dm-0 partition 9 0 -2\n";
    assert_eq!(told(swap, "00:03.0"), ["/dev/dm-0 is swap"]);
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
    let uses = Usage::new(&sysfs).of("00:04.0".parse().unwrap());
    assert_eq!(uses.to_string(), ", and the host uses it (eth0 is up)");
    assert!(
        uses.advice("bind")
            .unwrap()
            .contains("`ip link set eth0 down`")
    );
}

#[test]
fn the_disk_that_the_host_runs_from_stays_with_it() {
    let (_root, sysfs) = host("self/mountinfo: 29 1 259:2 / / rw - ext4 /dev/root rw\n");
    let advice = Usage::new(&sysfs)
        .of("00:03.0".parse().unwrap())
        .advice("bind");
    assert!(advice.unwrap().starts_with("leave it to the host"));
}

#[test]
fn the_command_that_ends_a_use_is_one_that_a_shell_takes() {
    for (at, shown, command) in [
        (r"/my\040disk", "/my disk", "`umount '/my disk'`"),
        (r"/it's\134", r"/it's\", r"`umount '/it'\''s\'`"),
        (r"/a\012b", "/a?b", "`umount /dev/nvme0n1p2`"),
    ] {
        let line = format!("self/mountinfo: 29 1 259:2 / {at} rw - ext4 /dev/root rw\n");
        let (_root, sysfs) = host(&line);
        let uses = Usage::new(&sysfs).of("00:03.0".parse().unwrap());
        assert_eq!(
            uses.0[0].to_string(),
            format!("/dev/nvme0n1p2 is mounted at {shown}")
        );
        let advice = uses.advice("bind").unwrap();
        assert!(advice.contains(&format!("({command})")), "{advice}");
    }
    assert_eq!(
        HostUse::Network("a;b".to_owned()).end(),
        "`ip link set 'a;b' down`"
    );
}
