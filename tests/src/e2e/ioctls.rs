//! Ioctls as the host's kernel sees them: as many as mini-vmm says, and what the IOMMU is told by them.

use std::collections::BTreeMap;

use crate::e2e::{Outcome, Test, Verdict, demo};
use crate::outside::{Calls, IoctlCounts};

/// Classes of calls in mini-vmm's profile, and the ioctls that each is, on either interface to the IOMMU.
const CLASSES: [(&str, &[&str]); 5] = [
    (
        "map DMA",
        &[
            "VFIO_IOMMU_MAP_DMA",
            "IOMMU_IOAS_MAP",
            "IOMMU_IOAS_MAP_FILE",
        ],
    ),
    ("unmap DMA", &UNMAP_DMA),
    ("memslot", &["KVM_SET_USER_MEMORY_REGION"]),
    ("set interrupts", &["VFIO_DEVICE_SET_IRQS"]),
    ("KVM_SET_GSI_ROUTING", &["KVM_SET_GSI_ROUTING"]),
];
const UNMAP_DMA: [&str; 2] = ["VFIO_IOMMU_UNMAP_DMA", "IOMMU_IOAS_UNMAP"];

const GIB: u64 = 1 << 30;
/// What kernels before 6.15 map to find out what an IOMMU can do, and a bit.
const TRIALS: u64 = 64 << 10;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "ioctls::mini_vmm_and_the_host_count_the_same",
            demo::config(),
            "set -- $LAB_BDFS
             counted same guest 'probe gpus; probe wait /dev/nvme0n1; head -c 1048576 /dev/nvme0n1 | sha256sum' \\
                 --vfio $1 --vfio $2 --vfio $LAB_BDF_nvme --boot-profile json,at=exit 2>$TMPDIR/messages
             sed 's/^{/PROFILE {/' $TMPDIR/messages",
            |outcome| {
                outcome.expect_clean()?;
                let counts = outcome.counted("same")?;
                let profile = profile(outcome)?;
                for class in ["map DMA", "memslot", "set interrupts", "KVM_SET_GSI_ROUTING"] {
                    if !profile.contains_key(class) {
                        return Err(format!("the profile has no `{class}`"));
                    }
                }
                same(&profile, &counts)
            },
        )
        .within(300),
        Test::new(
            "ioctls::ram_and_bars_of_peers_are_mapped_to_the_last_byte_and_stay",
            demo::config(),
            "set -- $LAB_BDFS
             GUEST_MEMORY=1G counted peers guest 'probe gpus' --vfio $1 --vfio $2",
            |outcome| {
                outcome.expect_clean()?;
                let counts = outcome.counted("peers")?;
                // BAR 2, and BAR 0 of a page.
                let all = GIB + 2 * (16 * GIB + 4096);
                let mapped = counts.iommu_map;
                if !(all..=all + TRIALS).contains(&mapped.bytes) {
                    return Err(format!("not {all} bytes were mapped: {mapped:?}"));
                }
                if mapped.bytes_1g < 32 * GIB {
                    return Err(format!("BARs do not allow entries of 1 GiB: {mapped:?}"));
                }
                match sum(&counts, &UNMAP_DMA) {
                    Calls { calls: 0, .. } => Ok(()),
                    calls => Err(format!("there were calls to unmap: {calls:?}")),
                }
            },
        )
        .within(300),
    ]
}

/// What mini-vmm counted, by class.
fn profile(outcome: &Outcome) -> Result<BTreeMap<String, Calls>, String> {
    let text = outcome.value("PROFILE")?;
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| format!("the profile is no JSON: {error}"))?;
    let rows = value["calls"]
        .as_array()
        .ok_or("the profile has no calls")?;
    let mut classes: BTreeMap<String, Calls> = BTreeMap::new();
    for row in rows {
        let class = row["class"].as_str().ok_or("a call has no class")?;
        let number = |key: &str| row[key].as_u64().ok_or(format!("{class} has no {key}"));
        let sum = classes.entry(class.to_owned()).or_default();
        sum.calls += number("count")?;
        sum.ns += number("total_ns")?;
        sum.max_ns = sum.max_ns.max(number("longest_ns")?);
    }
    Ok(classes)
}

/// What the host counted of these ioctls together.
fn sum(counts: &IoctlCounts, ioctls: &[&str]) -> Calls {
    let mut sum = Calls::default();
    for calls in ioctls.iter().filter_map(|ioctl| counts.before.get(*ioctl)) {
        sum.calls += calls.calls;
        sum.ns += calls.ns;
        sum.max_ns = sum.max_ns.max(calls.max_ns);
    }
    sum
}

/// Both views have the same number of calls; the times are only shown, the host's being a bit shorter.
fn same(inside: &BTreeMap<String, Calls>, outside: &IoctlCounts) -> Verdict {
    for (class, ioctls) in CLASSES {
        let inside = inside.get(class).copied().unwrap_or_default();
        let outside = sum(outside, ioctls);
        println!(
            "    {class}: {} calls in {:.3} ms, {} in {:.3} ms for the host",
            inside.calls,
            inside.ns as f64 / 1e6,
            outside.calls,
            outside.ns as f64 / 1e6
        );
        if inside.calls != outside.calls {
            return Err(format!(
                "mini-vmm counts {} times {class}, the host {} times {}",
                inside.calls,
                outside.calls,
                ioctls.join(" or ")
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_summed_over_devices_and_compared() {
        let outcome = Outcome {
            output: "PROFILE {\"calls\":[\
                 {\"class\":\"map DMA\",\"subject\":\"RAM\",\"count\":1,\"total_ns\":5,\"longest_ns\":5},\
                 {\"class\":\"map DMA\",\"subject\":\"x\",\"count\":2,\"total_ns\":4,\"longest_ns\":3}]}\n"
                .to_owned(),
            ..Outcome::default()
        };
        let inside = profile(&outcome).unwrap();
        let sum = Calls {
            calls: 3,
            ns: 9,
            max_ns: 5,
        };
        assert_eq!(inside["map DMA"], sum);
        let mut outside = IoctlCounts::default();
        outside.before.insert("VFIO_IOMMU_MAP_DMA".to_owned(), sum);
        assert_eq!(same(&inside, &outside), Ok(()));
        for unmap in UNMAP_DMA {
            outside.before.insert(unmap.to_owned(), sum);
            assert!(same(&inside, &outside).unwrap_err().contains(unmap));
        }
    }
}
