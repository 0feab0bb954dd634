//! Devices that interrupt, with their real drivers.

use crate::e2e::{Config, Outcome, Test, Verdict, demo};

const AHCI: &str = r#"
echo "IMAGE $(head -c 1048576 $LAB_DISK_d1 | sha256sum)"
guest 'probe wait /dev/sda; echo DISK $(head -c 1048576 /dev/sda | sha256sum); grep ahci /proc/interrupts' \
    --vfio $LAB_BDF_ahci"#;

const NVME: &str = r#"
echo "IMAGE $(head -c 1048576 $LAB_DISK_d0 | sha256sum)"
GUEST_CPUS=2 guest 'probe wait /dev/nvme0n1; echo DISK $(head -c 1048576 /dev/nvme0n1 | sha256sum); grep nvme /proc/interrupts' \
    --vfio $LAB_BDF_nvme"#;

/// Network cards with each kind of interrupt, and a USB controller with a keyboard.
fn cards() -> Config {
    Config::default()
        .qemu("-netdev user,id=n0")
        .qemu("-netdev user,id=n1")
        .qemu("-netdev user,id=n2")
        .device("e1000e,id=e1000e,netdev=n0")
        .device("rtl8139,id=rtl,netdev=n1")
        .device("virtio-net-pci,id=virtio,netdev=n2,iommu_platform=on,disable-legacy=on")
        .device("qemu-xhci,id=usb")
        .host_device("usb-kbd,id=keyboard,bus=usb.0")
}

/// The only card of the guest reaches the emulated network's gateway, packet by packet.
fn ping(device: &str) -> String {
    format!(
        "guest 'N=$(ls /sys/class/net | grep -v lo | head -n 1); ip link set $N up; \
             ip addr add 10.0.2.15/24 dev $N; for i in $(seq 50); do \
             ping -c 1 -W 1 10.0.2.2 >/dev/null && break; done; \
             echo PINGED $(ping -c 20 -i 0.1 -s 1400 10.0.2.2 | grep -c from); \
             cat /proc/interrupts; dmesg | grep -c nobod[y].cared | sed s/^/UNHANDLED./' \
             --vfio $LAB_BDF_{device}"
    )
}

/// Every packet came back, and the card interrupted.
fn pinged(outcome: &Outcome, kind: &str, driver: &str) -> Verdict {
    outcome.expect_clean()?;
    outcome.expect_number("PINGED", 20..=20)?;
    outcome.expect("UNHANDLED.0")?;
    match outcome.interrupts(kind, driver) {
        0 => Err(format!("no {kind} interrupt of {driver} was counted")),
        _ => Ok(()),
    }
}

/// Enumerated by the controller's driver: its name was read from it.
const KEYBOARD: &str = r#"
guest 'for i in $(seq 100); do grep -q Keyboard /sys/bus/usb/devices/*/product && break; sleep 0.1; done;
    echo PRODUCT $(cat /sys/bus/usb/devices/*/product); cat /proc/interrupts' --vfio $LAB_BDF_usb"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "interrupts::msix_e1000e_pings",
            cards(),
            ping("e1000e"),
            |outcome| pinged(outcome, "MSIX", "e"),
        ),
        Test::new(
            "interrupts::intx_rtl8139_pings",
            cards(),
            ping("rtl"),
            |outcome| pinged(outcome, "IO-APIC", "e"),
        ),
        Test::new(
            "interrupts::msix_virtio_net_behind_the_iommu_pings",
            cards(),
            ping("virtio"),
            |outcome| pinged(outcome, "MSIX", "virtio"),
        ),
        Test::new(
            "interrupts::a_usb_keyboard_is_found",
            cards(),
            KEYBOARD,
            |outcome| {
                outcome.expect_clean()?;
                outcome.expect("QEMU USB Keyboard")?;
                match outcome.interrupts("MSI", "xhci") {
                    0 => Err("no interrupt of xhci was counted".to_owned()),
                    _ => Ok(()),
                }
            },
        ),
        Test::new(
            "interrupts::msi_ahci_reads_a_disk",
            demo::config(),
            AHCI,
            |outcome| reads_by(outcome, "MSI", "ahci"),
        ),
        Test::new(
            "interrupts::msix_nvme_on_two_cpus",
            demo::config(),
            NVME,
            |outcome| reads_by(outcome, "MSIX", "nvme"),
        ),
    ]
}

/// The guest read what the image holds, and was interrupted.
fn reads_by(outcome: &Outcome, kind: &str, driver: &str) -> Verdict {
    outcome.expect_clean()?;
    outcome.same_checksum("IMAGE", "DISK")?;
    match outcome.interrupts(kind, driver) {
        0 => Err(format!("no {kind} interrupt of {driver} was counted")),
        _ => Ok(()),
    }
}
