//! What sysfs says that the IOMMU cannot map, before a device is attached
//! (Documentation/ABI/testing/sysfs-kernel-iommu_groups).
//!
//! It does not tell how far an IOMMU reaches: the kernel's own word, once devices are attached,
//! counts more.

use std::fs;

use crate::host::Sysfs;
use crate::range::Range;

/// The reserved regions of `groups`, in any order; they may overlap.
pub fn regions(sysfs: &Sysfs, groups: impl IntoIterator<Item = u32>) -> Vec<Range> {
    let mut regions = Vec::new();
    for group in groups {
        let path = format!("sys/kernel/iommu_groups/{group}/reserved_regions");
        // What is not told is found out when the devices are attached.
        let text = fs::read_to_string(sysfs.path(&path)).unwrap_or_default();
        regions.extend(text.lines().filter_map(region));
    }
    regions
}

/// `0x00000000fee00000 0x00000000feefffff msi`, both ends included.
fn region(line: &str) -> Option<Range> {
    let mut words = line.split_ascii_whitespace();
    let mut address = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (first, last) = (address()?, address()?);
    // The kernel lets users map these (drivers/iommu/iommufd/io_pagetable.c,
    // iopt_table_enforce_dev_resv_regions).
    let mappable = words.next()? == "direct-relaxable";
    (!mappable && first <= last).then(|| Range::from_bounds(first, last.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_of_all_groups_are_taken_but_those_that_may_be_mapped() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        for (group, text) in [
            (
                3,
                "0x00000000000a0000 0x00000000000bffff direct-relaxable\n\
                 0x00000000fee00000 0x00000000feefffff msi\n",
            ),
            (
                7,
                "0x000000fd00000000 0x000000ffffffffff reserved\nnonsense\n0x2 0x1 msi\n",
            ),
        ] {
            let path = root.path().join(format!("sys/kernel/iommu_groups/{group}"));
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join("reserved_regions"), text).unwrap();
        }
        let expected = [
            Range::from_bounds(0xfee0_0000, 0xfef0_0000),
            Range::from_bounds(0xfd_0000_0000, 0x100_0000_0000),
        ];
        assert_eq!(regions(&sysfs, [3, 7, 8]), expected);
    }
}
