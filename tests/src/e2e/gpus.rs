//! Many GPUs with huge BARs.

use crate::e2e::outcome::hex;
use crate::e2e::{Config, Outcome, Test, Verdict};

const GIB: u64 = 1 << 30;

/// What the kernel says of a BAR without an address. The brackets keep the pattern from finding itself in the command line,
/// which the kernel prints as well.
const UNASSIGNED: &str = "can.t.[a]ssign|[f]ailed.to.[a]ssign|no.[s]pace.for";

fn script(option: &str) -> String {
    format!(
        "GUEST_KERNEL=$LAB_KERNEL guest 'probe gpus; echo UNASSIGNED $(dmesg | grep -ciE \"{UNASSIGNED}\")' $(each --vfio $LAB_BDFS | sed 's/[.]0 /.0{option} /g')"
    )
    .replace('"', "'\\''")
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "gpus::eight_of_64_gib",
            Config::default().gpus(8, "64G"),
            script(""),
            |outcome| all_placed(outcome, 8, 64 * GIB),
        )
        .within(300),
        Test::new(
            "gpus::eight_of_256_gib",
            Config::default().gpus(8, "256G"),
            // Without peer-to-peer mappings: at exit the kernel takes 45 ms to unmap each of these 2048 GiB.
            script(",p2p=off"),
            |outcome| all_placed(outcome, 8, 256 * GIB),
        )
        .within(180),
        Test::new(
            "gpus::iommu_of_39_bits_refuses_what_does_not_fit",
            narrow("512G"),
            "vmm --kernel $LAB_KERNEL --vfio $LAB_BDFS",
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect("BAR")?;
                outcome.expect_any(&["512 GiB", "512G", "0x8000000000"])?;
                outcome.expect_any(&["39", "0x7fffffffff", "512 GiB"])
            },
        ),
        Test::new(
            "gpus::iommu_of_39_bits_takes_what_fits",
            narrow("16G"),
            "guest 'probe gpus' --vfio $LAB_BDFS",
            |outcome| {
                all_placed(outcome, 1, 16 * GIB)?;
                match outcome
                    .probe("touched")
                    .iter()
                    .map(|bar| hex(bar, "address"))
                    .max()
                {
                    Some(Ok(address)) if address + 16 * GIB <= 1 << 39 => Ok(()),
                    other => Err(format!("BAR2 is at {other:x?}, not below 2^39")),
                }
            },
        ),
    ]
}

/// A machine whose IOMMU cannot reach beyond 512 GiB. It has one GPU: the emulated firmware puts big BARs of different sizes
/// where the host's CPUs cannot reach them.
pub(super) fn narrow(bar: &str) -> Config {
    Config::default().gpus(1, bar).iommu_bits(39).memory("2G")
}

/// Every BAR2 has that size, lies where no other does, and was touched at both ends.
fn all_placed(outcome: &Outcome, count: usize, size: u64) -> Verdict {
    outcome.expect_clean()?;
    let touched = outcome.probe("touched");
    let mut addresses = Vec::new();
    for bar in touched.iter().filter(|bar| bar.get("bar") == Some(&"2")) {
        if hex(bar, "size")? != size {
            return Err(format!("a BAR2 has another size than {size:#x}: {bar:?}"));
        }
        addresses.push(hex(bar, "address")?);
    }
    addresses.sort_unstable();
    if addresses.len() != count {
        return Err(format!("{} BARs of {count} were touched", addresses.len()));
    }
    let apart = addresses
        .windows(2)
        .all(|pair| matches!(pair, [a, b] if b - a >= size));
    if !apart {
        return Err(format!("BARs overlap: {addresses:x?}"));
    }
    if outcome.has("UNASSIGNED") {
        outcome.expect_number("UNASSIGNED", 0..=0)?;
    }
    outcome.expect("MARK 0x42")
}
