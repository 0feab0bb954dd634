//! What sysfs tells of the IOMMU above a device: the addresses that it can map
//! (Documentation/ABI/testing/sysfs-kernel-iommu_groups) and whether it isolates interrupts. The
//! kernel's own word, once devices are attached, counts more. And what keeps the kernel from using it.

use std::fs;

use super::Sysfs;
use crate::pci::address::Bdf;
use crate::pci::ext_caps;
use crate::pci::image;
use crate::pci::spec::{CONFIG_SIZE, ExtCapId};
use crate::range::Range;

/// The capability register of an Intel IOMMU (VT-d specification, 11.4.2).
#[derive(Clone, Copy, Debug)]
struct IntelCap(u64);

impl IntelCap {
    /// Bits of the addresses that second-stage tables translate: what the hardware can (MGAW) and
    /// what its deepest table can (SAGAW).
    fn address_bits(self) -> u32 {
        let hardware = (self.0 >> 16 & 0x3f) as u32 + 1;
        let supported = self.0 >> 8 & 0x1f;
        let deepest = [(3, 57), (2, 48), (1, 39)];
        let table = deepest.iter().find(|(bit, _)| supported >> bit & 1 != 0);
        table.map_or(hardware, |(_, bits)| hardware.min(*bits))
    }
}

/// The access control services capability (PCIe 6.0, 7.7.11): its control register, and the bit by
/// which requests to peers are sent up.
mod acs {
    pub const CONTROL: u16 = 6;
    pub const REQUEST_REDIRECT: u16 = 1 << 2;
}

/// A way in which firmware or kernel keep addresses from being mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservedRegion {
    /// Its IO-virtual addresses.
    pub range: Range,
    /// `direct`, `direct-relaxable`, `reserved` or `msi`.
    pub kind: String,
}

impl ReservedRegion {
    /// Whether the kernel lets users map it all the same (vfio_iommu_resv_exclude in
    /// drivers/vfio/vfio_iommu_type1.c, iopt_table_enforce_dev_resv_regions in
    /// drivers/iommu/iommufd/io_pagetable.c).
    pub fn is_mappable(&self) -> bool {
        self.kind == "direct-relaxable"
    }
}

/// `vendor_id` of /proc/cpuinfo: who makes no other IOMMUs than Intel's.
const INTEL: [&str; 1] = ["GenuineIntel"];
/// The same of AMD's.
const AMD: [&str; 2] = ["AuthenticAMD", "HygonGenuine"];

/// What turns Intel's IOMMUs off.
pub const INTEL_OFF: &str = "intel_iommu=off";

impl Sysfs {
    /// The kernel's parameter that turns the host's IOMMU off: of several `intel_iommu=` the last
    /// counts (drivers/iommu/intel/iommu.c), `off` of the others is final. That of the other
    /// vendor's IOMMU does nothing.
    pub fn iommu_disabled_by(&self) -> Option<&'static str> {
        let cmdline = fs::read_to_string(self.path("proc/cmdline")).unwrap_or_default();
        let settings: Vec<(&str, &str)> = cmdline
            .split_whitespace()
            .filter_map(|word| word.split_once('='))
            .flat_map(|(name, values)| values.split(',').map(move |value| (name, value)))
            .collect();
        if settings.contains(&("iommu", "off")) {
            return Some("iommu=off");
        }
        if settings.contains(&("amd_iommu", "off")) && !self.lacks_iommu("IVRS", &INTEL) {
            return Some("amd_iommu=off");
        }
        let mut switches = settings.iter().rev();
        let last =
            switches.find(|(name, value)| *name == "intel_iommu" && ["on", "off"].contains(value));
        let is_off = last? == &("intel_iommu", "off") && !self.lacks_iommu("DMAR", &AMD);
        is_off.then_some(INTEL_OFF)
    }

    /// Whether the processor is of `others`, who do not make the IOMMUs that firmware describes in
    /// `table`, and firmware has no such table (a virtual machine may).
    fn lacks_iommu(&self, table: &str, others: &[&str]) -> bool {
        let tables = self.path("sys/firmware/acpi/tables");
        let cpuinfo = fs::read_to_string(self.path("proc/cpuinfo")).unwrap_or_default();
        let vendor = cpuinfo.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == "vendor_id").then(|| value.trim())
        });
        vendor.is_some_and(|vendor| others.contains(&vendor)) && !tables.join(table).exists()
    }

    /// Address bits of the IOMMU above `bdf`; `None` where sysfs does not tell (AMD's).
    pub fn iommu_bits(&self, bdf: Bdf) -> Option<u32> {
        let cap = self.device_path(bdf).join("iommu/intel-iommu/cap");
        let text = fs::read_to_string(cap).ok()?;
        let cap = u64::from_str_radix(text.trim(), 16).ok()?;
        Some(IntelCap(cap).address_bits())
    }

    /// Regions that the group's devices may not use.
    pub fn reserved_regions(&self, group: u32) -> Vec<ReservedRegion> {
        let path = format!("sys/kernel/iommu_groups/{group}/reserved_regions");
        let text = fs::read_to_string(self.path(&path)).unwrap_or_default();
        text.lines().filter_map(parse_region).collect()
    }

    /// What devices of `groups` cannot be given mappings at, in any order; ranges may overlap. How
    /// far an IOMMU reaches is not told here.
    pub fn unmappable(&self, groups: impl IntoIterator<Item = u32>) -> Vec<Range> {
        let regions = groups
            .into_iter()
            .flat_map(|group| self.reserved_regions(group));
        let unmappable = regions.filter(|region| !region.is_mappable());
        unmappable.map(|region| region.range).collect()
    }

    /// The end of the IO-virtual addresses that the IOMMUs above all of `devices` translate; `None`
    /// where sysfs does not tell.
    pub fn iommu_reach(&self, devices: impl IntoIterator<Item = Bdf>) -> Option<u64> {
        let bits = devices.into_iter().map(|bdf| self.iommu_bits(bdf));
        let bits: Option<Vec<u32>> = bits.collect();
        Some(1u64 << bits?.into_iter().min()?.min(63))
    }

    /// The IO-virtual addresses that all of `devices`, each with its group, can use, as far as
    /// sysfs knows: up to the end of the address space where it does not tell how far an IOMMU
    /// reaches.
    pub fn usable_iova(&self, devices: &[(Bdf, u32)]) -> Vec<Range> {
        let reach = self.iommu_reach(devices.iter().map(|(bdf, _)| *bdf));
        let mut usable = vec![Range::from_bounds(0, reach.unwrap_or(u64::MAX))];
        for hole in self.unmappable(devices.iter().map(|(_, group)| *group)) {
            usable = usable.iter().flat_map(|r| without(r, &hole)).collect();
        }
        usable
    }

    /// Whether the host remaps interrupts: the kernel then calls its interrupt controllers "IR-…".
    pub fn remaps_interrupts(&self) -> bool {
        let text = fs::read_to_string(self.path("proc/interrupts")).unwrap_or_default();
        text.contains(" IR-")
    }

    /// Whether type1 was told to do without isolated interrupts.
    pub fn allows_unsafe_interrupts(&self) -> bool {
        let path = "sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
        fs::read_to_string(self.path(path)).is_ok_and(|text| text.trim() == "Y")
    }

    /// Whether the bridge `bdf` sends requests from one of the devices below it to another up to
    /// the root complex, instead of passing them on itself. `None` where it has no say in that, or
    /// extended configuration space may not be read.
    pub fn redirects_peers(&self, bdf: Bdf) -> Option<bool> {
        let config = self.config_bytes(bdf, CONFIG_SIZE);
        if config.len() < CONFIG_SIZE {
            return None;
        }
        let at = ext_caps::find(&config, ExtCapId::ACS)?;
        let control = image::read_u16(&config, at + acs::CONTROL);
        Some(control & acs::REQUEST_REDIRECT != 0)
    }
}

/// `0x00000000fee00000 0x00000000feefffff msi`, both ends included.
fn parse_region(line: &str) -> Option<ReservedRegion> {
    let mut words = line.split_ascii_whitespace();
    let mut address = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (first, last) = (address()?, address()?);
    (first <= last).then_some(())?;
    Some(ReservedRegion {
        range: Range::from_bounds(first, last.saturating_add(1)),
        kind: words.next()?.to_owned(),
    })
}

/// What is left of `range`.
fn without(range: &Range, hole: &Range) -> impl Iterator<Item = Range> {
    let below = Range::from_bounds(range.start(), hole.start().min(range.end()));
    let above = Range::from_bounds(hole.end().max(range.start()), range.end());
    [below, above].into_iter().filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree;

    #[test]
    fn an_intel_iommu_reaches_as_far_as_its_tables_and_its_hardware() {
        // As QEMU emulates them: 39 bits, and 48.
        assert_eq!(IntelCap(0x00d2_008c_2226_0206).address_bits(), 39);
        assert_eq!(IntelCap(0x00d2_008c_222f_0606).address_bits(), 48);
        // Hardware that is narrower than its tables.
        assert_eq!(IntelCap(0x29 << 16 | 0x400).address_bits(), 42);
    }

    #[test]
    fn regions_of_all_groups_are_unmappable_but_those_that_may_be_mapped() {
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
        assert_eq!(sysfs.unmappable([3, 7, 8]), expected);
    }

    #[test]
    fn regions_are_cut_out_of_what_is_usable() {
        let region = parse_region("0x00000000fee00000 0x00000000feefffff msi").unwrap();
        assert_eq!(region.kind, "msi");
        let all = Range::from_bounds(0, 1 << 39);
        let parts: Vec<Range> = without(&all, &region.range).collect();
        let expected = [
            Range::from_bounds(0, 0xfee0_0000),
            Range::from_bounds(0xfef0_0000, 1 << 39),
        ];
        assert_eq!(parts, expected);
        assert_eq!(without(&expected[0], &region.range).count(), 1);
        assert!(parse_region("nonsense").is_none());
    }

    #[test]
    fn the_parameter_of_another_vendors_iommu_turns_nothing_off() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        let put = |file: &str, text: &str| tree::rewrite(root.path(), file, text).unwrap();
        let both = "quiet amd_iommu=off intel_iommu=off\n";
        for (vendor, cmdline, parameter) in [
            ("GenuineIntel", both, Some(INTEL_OFF)),
            ("GenuineIntel", "amd_iommu=off", None),
            ("AuthenticAMD", "intel_iommu=off", None),
            ("AuthenticAMD", both, Some("amd_iommu=off")),
            ("HygonGenuine", "intel_iommu=off", None),
            (
                "HygonGenuine",
                "intel_iommu=off iommu=off",
                Some("iommu=off"),
            ),
            ("CentaurHauls", "intel_iommu=off", Some(INTEL_OFF)),
            ("CentaurHauls", "amd_iommu=off", Some("amd_iommu=off")),
        ] {
            let cpuinfo = format!("processor\t: 0\nvendor_id\t: {vendor}\n");
            put("proc/cpuinfo", &cpuinfo);
            put("proc/cmdline", cmdline);
            assert_eq!(sysfs.iommu_disabled_by(), parameter, "{vendor}: {cmdline}");
        }
        // A virtual machine may have the one's processor and the other's IOMMU.
        put("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n");
        put("proc/cmdline", "intel_iommu=off");
        put("sys/firmware/acpi/tables/DMAR", "");
        assert_eq!(sysfs.iommu_disabled_by(), Some(INTEL_OFF));
    }
}
