//! Disks, SR-IOV and a device that does nothing but interrupt; what interrupts and configuration cost.

use crate::e2e::cards::{counted, pinged, works};
use crate::e2e::{Config, Outcome, Test, Verdict, config_space, demo};

const AHCI: &str = r#"
echo "IMAGE $(head -c 1048576 $LAB_DISK_d1 | sha256sum)"
guest 'probe wait /dev/sda; echo DISK $(head -c 1048576 /dev/sda | sha256sum); grep ahci /proc/interrupts' \
    --vfio $LAB_BDF_ahci"#;

/// Reads a MiB that the image holds, writes another, and reads that back; the host looks at it in the image.
const NVME: &str = r#"
nvme() {
    echo "IMAGE $(head -c 1048576 $LAB_DISK_d0 | sha256sum)"
    GUEST_CPUS=2 guest 'D=/dev/nvme0n1; probe wait $D; echo DISK $(head -c 1048576 $D | sha256sum);
        head -c 1048576 /dev/urandom >x; dd if=x of=$D bs=1M seek=8 conv=fsync; echo 3 >/proc/sys/vm/drop_caches;
        echo WROTE $(sha256sum <x); echo AGAIN $(dd if=$D bs=1M skip=8 count=1 | sha256sum); interrupts; probe mark 0x42' \
        --vfio $LAB_BDF_nvme --boot-profile table,at=42
    echo "IN_IMAGE $(dd if=$LAB_DISK_d0 bs=1M skip=8 count=1 | sha256sum)"
}
once nvme nvme"#;

/// A network card with SR-IOV in the one layout in which the emulator gets the BARs of virtual functions right: nothing above
/// 4 GiB. One card is assigned itself, a virtual function of the other.
pub(super) fn sr_iov() -> Config {
    Config::default()
        .qemu("-global q35-pcihost.pci-hole64-size=0")
        .qemu("-netdev user,id=n0,net=10.0.2.0/24")
        .qemu("-netdev user,id=n1,net=10.0.3.0/24")
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10")
        .qemu("-device pcie-root-port,id=rp2,chassis=2,addr=11")
        .memory("2G")
        .device("igb,id=whole,netdev=n0,bus=rp1")
        .host_device("igb,id=shared,netdev=n1,bus=rp2")
}

const IGB: &str = r#"
igb() {
    guest 'network igb 2; interrupts; packed lspci -D -vv -xxxx' --vfio $LAB_BDF_whole
}
lspci_of $LAB_BDF_whole
unpacked igb"#;

const VIRTUAL_FUNCTION: &str = r#"
P=/sys/bus/pci/devices/$LAB_BDF_shared
echo 0 >$P/sriov_drivers_autoprobe
echo 1 >$P/sriov_numvfs
ip link set $(ls $P/net) up
V=$(basename $(readlink $P/virtfn0))
echo vfio-pci >/sys/bus/pci/devices/$V/driver_override
echo $V >/sys/bus/pci/drivers_probe
virtual() {
    guest 'network igbvf 3; interrupts; packed lspci -D -vv -xxxx' --vfio $V
}
lspci_of $V
unpacked virtual
echo 0 >$P/sriov_numvfs"#;

/// How many interrupts `edu` raises.
const RAISED: u64 = 100_000;

/// `edu` raises an interrupt only when the one before was counted by a program in the guest, through the guest's own VFIO.
/// The host's kernel counts them as well, as they reach it and as KVM takes them for the guest.
const HUNDRED_THOUSAND: &str = r#"
T=/sys/kernel/tracing/instances/interrupts; mkdir -p $T
echo COUNTS $([ -e $T/events/irq/irq_handler_entry/hist ]; echo $?)
echo hist:keys=name >$T/events/irq/irq_handler_entry/trigger
echo hist:keys=apicid,vec >$T/events/kvm/kvm_apic_accept_irq/trigger
echo hist:keys=vector,reinjected >$T/events/kvm/kvm_inj_virq/trigger
GUEST_KERNEL=$LAB_VMLINUX_iommufd GUEST_INITRD=$LAB_INITRD_iommufd GUEST_CPUS=2 guest '
    echo 1 >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode; E=0000:00:01.0; D=/sys/bus/pci/devices/$E;
    echo vfio-pci >$D/driver_override; echo $E >/sys/bus/pci/drivers_probe; probe edu $E interrupts 100000; interrupts' \
    --vfio $LAB_BDF_edu
tr -s ' ' <$T/events/irq/irq_handler_entry/hist | sed -n 's/^{ name: vfio-msi.* } hitcount: /HANDLED /p'
tr -s ' ' <$T/events/kvm/kvm_apic_accept_irq/hist | sed -n 's/^{ apicid: .* } hitcount: /ACCEPTED /p'
tr -s ' ' <$T/events/kvm/kvm_inj_virq/hist | sed -n 's/^{.* reinjected: 1 } hitcount: /REINJECTED /p'
rmdir $T"#;

/// Every interrupt reaches the host, KVM and the guest.
///
/// The guest may see more of them: the lab's emulated CPU now and then tells KVM that it has not delivered an interrupt which
/// it has, and KVM injects it again. A host whose kernel cannot count (CONFIG_HIST_TRIGGERS) cannot tell those apart.
fn none_lost(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    outcome.expect_number("RAISED", RAISED..=RAISED)?;
    if outcome.number("COUNTS")? != 0 {
        return outcome.expect_number("ARRIVED", RAISED..=u64::MAX);
    }
    outcome.expect_number("HANDLED", RAISED..=RAISED)?;
    let raised = RAISED.to_string();
    if !outcome.values("ACCEPTED").any(|count| count == raised) {
        return Err("KVM accepted no vector as often as the device raised it".to_owned());
    }
    let again: u64 = outcome
        .values("REINJECTED")
        .filter_map(|count| count.parse::<u64>().ok())
        .sum();
    outcome.expect_number("ARRIVED", RAISED..=RAISED + again)?;
    match outcome.interrupts("PCI-MSI", "vfio-msi") {
        counted if (RAISED..=RAISED + again).contains(&counted) => Ok(()),
        other => Err(format!("the guest's kernel counted {other} interrupts")),
    }
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let mut tests = disks();
    tests.extend([
        Test::new("interrupts::msix_igb_pings", sr_iov(), IGB, |outcome| {
            pinged(outcome, "igb", "PCI-MSIX", "0000:00:01.0")?;
            config_space::check(outcome)
        }),
        Test::new(
            "interrupts::msix_virtual_function_of_igb_pings",
            sr_iov(),
            VIRTUAL_FUNCTION,
            |outcome| {
                pinged(outcome, "igbvf", "PCI-MSIX", "0000:00:01.0")?;
                config_space::check(outcome)
            },
        ),
        Test::new(
            "interrupts::none_of_100000_is_lost",
            Config::default().device("edu,id=edu"),
            HUNDRED_THOUSAND,
            none_lost,
        )
        .with_guest_kernel("iommufd")
        .within(400),
    ]);
    tests
}

fn disks() -> Vec<Test> {
    vec![
        Test::new(
            "interrupts::msi_ahci_reads_a_disk",
            demo::config(),
            AHCI,
            |outcome| {
                outcome.expect_clean()?;
                outcome.same_checksum("IMAGE", "DISK")?;
                counted(outcome, "MSI", "ahci")
            },
        ),
        Test::new(
            "interrupts::msix_nvme_reads_and_writes_a_disk",
            demo::config(),
            NVME,
            |outcome| {
                works(outcome)?;
                outcome.same_checksum("IMAGE", "DISK")?;
                outcome.same_checksum("WROTE", "AGAIN")?;
                outcome.same_checksum("WROTE", "IN_IMAGE")?;
                counted(outcome, "PCI-MSIX", "nvme")
            },
        ),
        Test::new(
            "interrupts::a_vector_costs_one_routing_update_and_arms_itself_only",
            demo::config(),
            NVME,
            few_calls,
        ),
        Test::new(
            "interrupts::configuration_accesses_of_a_boot_cost_few_system_calls",
            demo::config(),
            NVME,
            few_system_calls,
        ),
    ]
}

/// The driver unmasks its first vector, gives MSI-X up, and unmasks three: of its two queues, and the first again.
fn few_calls(outcome: &Outcome) -> Verdict {
    const UNMASKED: u64 = 4;
    outcome.expect_clean()?;
    let updates = outcome.calls("KVM_SET_GSI_ROUTING");
    if updates == 0 || updates > UNMASKED {
        return Err(format!("{updates} routing updates for {UNMASKED} vectors"));
    }
    // Error and request events; INTx armed (two calls) and given up as MSI-X is enabled, twice; MSI-X enabled, disabled and
    // enabled.
    const OTHERS: u64 = 2 + 2 * (2 + 1) + 3;
    let armed = outcome.calls("set interrupts");
    if armed > UNMASKED + OTHERS {
        return Err(format!(
            "{armed} calls armed {UNMASKED} vectors, and {OTHERS} the rest"
        ));
    }
    Ok(())
}

/// At most one in twenty.
fn few_system_calls(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    let accesses = outcome.calls("guest config read") + outcome.calls("guest config write");
    let calls =
        outcome.calls("config read for the guest") + outcome.calls("config write for the guest");
    if accesses == 0 || calls * 20 > accesses {
        return Err(format!("{accesses} accesses cost {calls} system calls"));
    }
    Ok(())
}
