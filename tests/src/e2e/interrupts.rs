//! Devices that interrupt, with their real drivers.

use crate::e2e::{Test, demo};

const AHCI: &str = r#"
echo "IMAGE $(head -c 1048576 $LAB_DISK_d1 | sha256sum)"
guest 'probe wait /dev/sda; echo DISK $(head -c 1048576 /dev/sda | sha256sum); grep ahci /proc/interrupts' \
    --vfio $LAB_BDF_ahci"#;

const NVME: &str = r#"
echo "IMAGE $(head -c 1048576 $LAB_DISK_d0 | sha256sum)"
GUEST_CPUS=2 guest 'probe wait /dev/nvme0n1; echo DISK $(head -c 1048576 /dev/nvme0n1 | sha256sum); grep nvme /proc/interrupts' \
    --vfio $LAB_BDF_nvme"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
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
fn reads_by(outcome: &crate::e2e::Outcome, kind: &str, driver: &str) -> crate::e2e::Verdict {
    outcome.expect_clean()?;
    outcome.same_checksum("IMAGE", "DISK")?;
    match outcome.interrupts(kind, driver) {
        0 => Err(format!("no {kind} interrupt of {driver} was counted")),
        _ => Ok(()),
    }
}
