//! The guest-physical address map.
//!
//! ```text
//! 0           640 KiB  RAM: boot structures (zero page, page tables, command line)
//! 0xA_0000    0xF_FFFF RAM marked reserved; ACPI tables from 0xE_0000
//! 0x10_0000   3 GiB    RAM: kernel, initrd
//! 3 GiB       4 GiB    the 32-bit hole: ECAM, 32-bit MMIO window, IOAPIC, LAPIC and MSI
//! 4 GiB       ...      RAM around the HyperTransport hole and what the IOMMU cannot map
//! above RAM            the 64-bit MMIO window, placed by the caller
//! ```

use std::fmt;

/// 1 KiB.
pub const KIB: u64 = 1 << 10;
/// 1 MiB.
pub const MIB: u64 = 1 << 20;
/// 1 GiB.
pub const GIB: u64 = 1 << 30;

/// Addresses from `start` up to, not including, `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// First address behind the range; not below `start`.
    pub end: u64,
}

impl AddressRange {
    /// From `start` up to, not including, `end`.
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end }
    }

    /// Bytes.
    pub const fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// Whether it holds no address.
    pub const fn is_empty(&self) -> bool {
        self.end <= self.start
    }

    /// Whether all of `other` lies inside.
    pub const fn covers(&self, other: &AddressRange) -> bool {
        other.start >= self.start && other.end <= self.end
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end.saturating_sub(1))
    }
}

/// PC memory that BIOSes reserve: 640 KiB to 1 MiB.
pub const BIOS_AREA: AddressRange = AddressRange::new(0xA_0000, 0x10_0000);
/// Where the ACPI tables lie, RSDP first; a guest that is not told by the boot protocol searches
/// the RSDP here (ACPI 6.5, 5.2.5.1).
pub const ACPI_AREA: AddressRange = AddressRange::new(0xE_0000, RESET_VECTOR);
/// Where a processor begins in real mode (FFFF:0000), and where a kernel jumps that wants the BIOS
/// to reset the machine; 16 bytes.
pub const RESET_VECTOR: u64 = 0xF_FFF0;
/// Addresses below 4 GiB that are never RAM.
pub const HOLE_32BIT: AddressRange = AddressRange::new(3 * GIB, 4 * GIB);
/// The last PCI bus. There is one, flat; and Linux looks for devices on every bus that ECAM could
/// have (arch/x86/pci/legacy.c, pcibios_fixup_peer_bridges), 8192 reads for 256 buses.
pub const LAST_BUS: u8 = 0;
/// PCI Express enhanced configuration space of buses 0 to [`LAST_BUS`], 1 MiB each; room for 256.
pub const ECAM: AddressRange = AddressRange::new(0xC000_0000, 0xC010_0000);
/// Window for 32-bit BARs.
pub const MMIO32: AddressRange = AddressRange::new(0xD000_0000, 0xFEC0_0000);
/// Registers of the in-kernel IOAPIC.
pub const IOAPIC: u64 = 0xFEC0_0000;
/// Registers of the local APIC; writes by devices to this and the following MiB are MSIs.
pub const LAPIC: u64 = 0xFEE0_0000;
/// A page that KVM needs on Intel hosts for real mode (KVM_SET_IDENTITY_MAP_ADDR).
pub const KVM_IDENTITY_MAP: u64 = 0xFEFF_C000;
/// Three pages that KVM needs on Intel hosts for real mode (KVM_SET_TSS_ADDR).
pub const KVM_TSS: u64 = 0xFEFF_D000;
/// HyperTransport's addresses: reserved in every AMD IOMMU (AMD IOMMU specification, 2.1.2), and
/// kept free on every host so that a guest looks the same everywhere.
pub const HYPERTRANSPORT_HOLE: AddressRange = AddressRange::new(0xFD_0000_0000, 0x100_0000_0000);

/// I/O ports of the first serial port, 8 of them.
pub const COM1: u16 = 0x3f8;
/// GSI of the first serial port, edge triggered.
pub const COM1_GSI: u32 = 4;
/// ACPI sleep control register, one byte (ACPI 6.5, 4.8.3.7).
pub const SLEEP_CONTROL: u16 = 0x600;
/// ACPI sleep status register, one byte.
pub const SLEEP_STATUS: u16 = 0x601;
/// ACPI reset register, one byte.
pub const RESET: u16 = 0x602;
/// Value that the reset register wants.
pub const RESET_VALUE: u8 = 1;
/// SLP_TYP of S5 (soft off), announced by `_S5`.
pub const SLEEP_TYPE_S5: u8 = 5;
/// PCI configuration mechanism 1: address at the first port, data at the fifth.
pub const PCI_CONFIG_PORTS: u16 = 0xCF8;
/// I/O window for I/O BARs.
pub const PCI_IO: std::ops::RangeInclusive<u16> = 0x1000..=0xFFFF;
/// First GSI of the PCI interrupt lines.
pub const INTX_GSI_BASE: u32 = 16;
/// GSIs of the PCI interrupt lines.
pub const INTX_GSIS: u32 = 8;
/// GSIs that the IOAPIC has pins for.
pub const IOAPIC_GSIS: u32 = 24;

const _: () = {
    assert!(HOLE_32BIT.covers(&ECAM) && HOLE_32BIT.covers(&MMIO32));
    assert!(ECAM.end <= MMIO32.start && MMIO32.end <= IOAPIC);
    assert!(ECAM.len() == (LAST_BUS as u64 + 1) * MIB);
    assert!(ECAM.start + 256 * MIB <= MMIO32.start);
};

/// GSI of an interrupt pin (0 for INTA to 3 for INTD) of the device in `slot` (0 to 31); what
/// `_PRT` says.
pub const fn intx_gsi(slot: u8, pin: u8) -> u32 {
    INTX_GSI_BASE + (slot as u32 + pin as u32) % INTX_GSIS
}

/// Guest RAM cannot be laid out.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Not a positive multiple of the granule.
    #[error(
        "guest memory of {} is not a positive multiple of {}; ask for {}",
        in_units(*size),
        in_units(*granule),
        next(*size, *granule)
    )]
    Granularity {
        /// Bytes asked for.
        size: u64,
        /// Bytes that the size must be a multiple of.
        granule: u64,
    },
    /// More RAM than addresses.
    #[error(
        "guest memory of {} MiB does not fit below guest-physical address {limit:#x}: \
         {} MiB are usable there; ask for less memory",
        size / MIB,
        usable / MIB
    )]
    TooLarge {
        /// Bytes asked for.
        size: u64,
        /// First address that cannot be used.
        limit: u64,
        /// Bytes that could be placed.
        usable: u64,
    },
}

/// The next size that could be asked for.
fn next(size: u64, granule: u64) -> String {
    match size.max(1).checked_next_multiple_of(granule) {
        Some(next) => format!("{} or more", in_units(next)),
        None => "less".to_owned(),
    }
}

/// `size` in the greatest unit that tells it exactly.
fn in_units(size: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = |(shift, _): &(u32, &str)| size != 0 && size.is_multiple_of(1 << shift);
    let (shift, unit) = units.into_iter().find(whole).unwrap_or((0, "bytes"));
    format!("{} {unit}", size >> shift)
}

/// Where guest RAM of `size` bytes lies: ascending ranges below `limit` around the 32-bit hole, the
/// HyperTransport hole and `holes` (in any order, may overlap). `granule` (a power of two: 2 MiB,
/// or the huge page size) divides both ends of every range.
pub fn ram_ranges(
    size: u64,
    granule: u64,
    holes: &[AddressRange],
    limit: u64,
) -> Result<Vec<AddressRange>, LayoutError> {
    if size == 0 || !size.is_multiple_of(granule) {
        return Err(LayoutError::Granularity { size, granule });
    }
    let mut left = size;
    let mut ranges = Vec::new();
    for free in free_ranges(holes, limit) {
        let start = free.start.next_multiple_of(granule);
        let end = free.end / granule * granule;
        let take = end.saturating_sub(start).min(left);
        if take > 0 {
            ranges.push(AddressRange::new(start, start + take));
            left -= take;
        }
        if left == 0 {
            return Ok(ranges);
        }
    }
    Err(LayoutError::TooLarge {
        size,
        limit,
        usable: size - left,
    })
}

/// What is below `limit` and in no hole, ascending.
fn free_ranges(holes: &[AddressRange], limit: u64) -> Vec<AddressRange> {
    let mut all: Vec<_> = [HOLE_32BIT, HYPERTRANSPORT_HOLE]
        .iter()
        .chain(holes)
        .copied()
        .collect();
    all.sort();
    let mut free = Vec::new();
    let mut next = 0;
    for hole in all {
        let end = hole.start.min(limit);
        if end > next {
            free.push(AddressRange::new(next, end));
        }
        next = next.max(hole.end);
    }
    if limit > next {
        free.push(AddressRange::new(next, limit));
    }
    free
}

/// The holes between usable ranges (ascending, not overlapping): what an IOMMU cannot map.
pub fn complement(usable: &[AddressRange]) -> Vec<AddressRange> {
    let mut holes = Vec::new();
    let mut next = 0;
    for range in usable {
        if range.start > next {
            holes.push(AddressRange::new(next, range.start));
        }
        next = range.end;
    }
    if next < u64::MAX {
        holes.push(AddressRange::new(next, u64::MAX));
    }
    holes
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 * MIB;
    const LIMIT: u64 = 1 << 46;

    fn total(ranges: &[AddressRange]) -> u64 {
        ranges.iter().map(AddressRange::len).sum()
    }

    #[test]
    fn small_ram_is_one_range_from_zero() {
        let ranges = ram_ranges(GIB, GRANULE, &[], LIMIT).unwrap();
        assert_eq!(ranges, [AddressRange::new(0, GIB)]);
    }

    #[test]
    fn ram_continues_above_the_32bit_hole() {
        let ranges = ram_ranges(4 * GIB, GRANULE, &[], LIMIT).unwrap();
        assert_eq!(
            ranges,
            [
                AddressRange::new(0, 3 * GIB),
                AddressRange::new(4 * GIB, 5 * GIB)
            ]
        );
    }

    #[test]
    fn terabytes_leave_the_hypertransport_hole_free() {
        let size = 1228 * GIB;
        let ranges = ram_ranges(size, GRANULE, &[], LIMIT).unwrap();
        assert_eq!(total(&ranges), size);
        assert_eq!(ranges.len(), 3);
        assert_eq!(ranges[1], AddressRange::new(4 * GIB, 0xFD_0000_0000));
        assert_eq!(ranges[2].start, 0x100_0000_0000);
    }

    #[test]
    fn reserved_holes_are_left_free_whatever_their_alignment_and_order() {
        let holes = [
            AddressRange::new(0x1_2345_6000, 0x1_2345_7000),
            AddressRange::new(0x4000_1000, 0x4000_2000),
            AddressRange::new(0x4000_0000, 0x4000_1800),
        ];
        let ranges = ram_ranges(4 * GIB, GRANULE, &holes, LIMIT).unwrap();
        assert_eq!(total(&ranges), 4 * GIB);
        for range in &ranges {
            assert!(range.start.is_multiple_of(GRANULE) && range.end.is_multiple_of(GRANULE));
            for hole in holes {
                assert!(
                    range.end <= hole.start || range.start >= hole.end,
                    "{range} {hole}"
                );
            }
        }
        assert_eq!(ranges[0], AddressRange::new(0, 0x4000_0000));
    }

    #[test]
    fn a_size_that_is_no_multiple_is_told_the_next_one_that_is() {
        let told = |size, granule| {
            ram_ranges(size, granule, &[], 1 << 38)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            told(3 * MIB, GRANULE),
            "guest memory of 3 MiB is not a positive multiple of 2 MiB; ask for 4 MiB or more"
        );
        let huge = told(5632 * MIB, GIB);
        assert!(
            huge.ends_with("5632 MiB is not a positive multiple of 1 GiB; ask for 6 GiB or more"),
            "{huge}"
        );
    }

    #[test]
    fn ram_that_does_not_fit_names_what_would() {
        let error = ram_ranges(1 << 39, GRANULE, &[], 1 << 38).unwrap_err();
        assert_eq!(
            error,
            LayoutError::TooLarge {
                size: 1 << 39,
                limit: 1 << 38,
                usable: (1 << 38) - GIB
            }
        );
    }

    #[test]
    fn sizes_between_granules_are_refused() {
        for size in [0, 1, GRANULE + 4096] {
            assert!(ram_ranges(size, GRANULE, &[], LIMIT).is_err());
        }
        assert!(ram_ranges(3 * GIB + GRANULE, GIB, &[], LIMIT).is_err());
    }

    #[test]
    fn the_complement_of_an_intel_iommus_ranges_is_the_msi_window_and_the_top() {
        let usable = [
            AddressRange::new(0, 0xfee0_0000),
            AddressRange::new(0xfef0_0000, 1 << 39),
        ];
        assert_eq!(
            complement(&usable),
            [
                AddressRange::new(0xfee0_0000, 0xfef0_0000),
                AddressRange::new(1 << 39, u64::MAX)
            ]
        );
    }

    #[test]
    fn neighbours_get_different_interrupt_lines() {
        assert_eq!(intx_gsi(0, 0), 16);
        assert_eq!(intx_gsi(31, 3), 16 + 34 % 8);
        for slot in 0..32 {
            for pin in 0..4 {
                assert!((16..24).contains(&intx_gsi(slot, pin)));
            }
        }
    }
}
