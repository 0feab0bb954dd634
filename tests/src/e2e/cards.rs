//! Cards of every kind of interrupt and their real drivers, all in one guest. Case 8: cards with MSI only and with INTx only.

use crate::e2e::{Config, Outcome, Test, Verdict, config_space};

/// A card of every kind: network with MSI-X and INTx, a USB controller with a keyboard, sound with MSI, a serial port with
/// INTx, and a disk controller with as many vectors as there can be. A service of the emulated network sends back what it
/// gets.
fn cards() -> Config {
    Config::default()
        .qemu("-netdev user,id=n0,net=10.0.2.0/24,guestfwd=tcp:10.0.2.100:7-cmd:cat")
        .qemu("-netdev user,id=n1,net=10.0.3.0/24")
        .qemu("-netdev user,id=n2,net=10.0.4.0/24")
        .qemu("-audiodev none,id=audio")
        .qemu("-chardev null,id=line")
        .disk("d0", 1)
        .device("e1000e,id=e1000e,netdev=n0")
        .device("rtl8139,id=rtl,netdev=n1")
        .device("virtio-net-pci,id=virtio,netdev=n2,iommu_platform=on,disable-legacy=on")
        .device("qemu-xhci,id=usb")
        .device("intel-hda,id=hda")
        .device("pci-serial,id=serial,chardev=line")
        .device("nvme,id=nvme,serial=lab,drive=d0,msix_qsize=2048")
        .host_device("usb-kbd,id=keyboard,bus=usb.0")
        .host_device("hda-output,id=codec,bus=hda.0,audiodev=audio")
}

/// All cards in one guest. The sound driver wants the codec's driver there before it looks for the codec.
const CARDS: &str = r#"
cards() {
    GUEST_CPUS=2 guest 'network e1000e 2; network 8139cp 3; network virtio_net 4; head -c 1048576 /dev/urandom >x;
        echo SENT $(sha256sum <x); echo ECHOED $(timeout 60 nc 10.0.2.100 7 <x | sha256sum);
        grep -h . /sys/bus/usb/devices/*/product; S=/sys/bus/pci/drivers/snd_hda_intel; B=$(cd $S; echo 0*);
        echo $B >$S/unbind; probe modprobe snd-hda-codec-generic snd-pcm-oss; echo $B >$S/bind;
        probe wait /dev/dsp; head -c 16000 /dev/zero >/dev/dsp && echo PLAYED; exec 5>/dev/ttyS1; echo hello >&5; sleep 0.2;
        interrupts; packed lspci -D -vv -xxxx' $(each --vfio $LAB_BDFS)
}
"#;

/// Every packet came back, and the card interrupted.
pub fn pinged(outcome: &Outcome, driver: &str, kind: &str, name: &str) -> Verdict {
    works(outcome)?;
    outcome.expect_number(&format!("PINGED {driver}"), 10..=10)?;
    counted(outcome, kind, name)
}

/// All went well, and no interrupt came that no driver wanted.
pub fn works(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    outcome.expect_number("UNHANDLED", 0..=0)
}

/// The guest counted at least one interrupt in a line of /proc/interrupts with both texts.
pub fn counted(outcome: &Outcome, kind: &str, name: &str) -> Verdict {
    match outcome.interrupts(kind, name) {
        0 => Err(format!("no {kind} interrupt of {name} was counted")),
        _ => Ok(()),
    }
}

fn card(name: &'static str, check: fn(&Outcome) -> Verdict) -> Test {
    Test::new(name, cards(), format!("{CARDS}once cards cards"), check).within(300)
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "cards::configuration_space_differs_only_as_documented",
            cards(),
            format!("{CARDS}lspci_of $LAB_BDFS; unpacked once cards cards"),
            config_space::check,
        )
        .within(300),
        card(
            "cards::msix_e1000e_pings_and_sends_a_mib_both_ways",
            |outcome| {
                pinged(outcome, "e1000e", "PCI-MSIX", "0000:00:01.0")?;
                outcome.same_checksum("SENT", "ECHOED").map(drop)
            },
        ),
        card("cards::intx_rtl8139_pings", |outcome| {
            pinged(outcome, "8139cp", "IO-APIC", &outcome.value("NIC 8139cp")?)
        }),
        card("cards::msix_virtio_net_behind_the_iommu_pings", |outcome| {
            pinged(outcome, "virtio_net", "PCI-MSIX", "virtio0-input")
        }),
        card("cards::msix_a_usb_keyboard_is_found", |outcome| {
            works(outcome)?;
            outcome.expect("QEMU USB Keyboard")?;
            counted(outcome, "PCI-MSIX", "xhci")
        }),
        card("cards::msi_a_sound_card_plays", |outcome| {
            works(outcome)?;
            outcome.expect("PLAYED")?;
            counted(outcome, "PCI-MSI-", "snd_hda_intel")
        }),
        card("cards::intx_a_serial_port_sends", |outcome| {
            works(outcome)?;
            counted(outcome, "IO-APIC", "ttyS1")
        }),
    ]
}
