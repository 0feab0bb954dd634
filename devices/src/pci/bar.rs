//! BARs: which ones a device has, and the registers that the guest writes.
//!
//! Invariants of [`BarRegisters`]:
//! * a register reads back what was last written to it, less the bits below the BAR's size; the
//!   type bits never change; a dword that no BAR uses reads 0 (PCIe 6.0, 7.5.1.2.1),
//! * writing one half of a 64-bit BAR leaves the other half alone,
//! * nothing here judges an address: what is decoded where is the assignment's decision.

use super::spec::{BAR_COUNT, BarBits};

/// What a BAR decodes and how wide its address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BarKind {
    /// I/O ports.
    Io,
    /// Memory below 4 GiB.
    Mem32 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
    /// Memory anywhere; takes two registers.
    Mem64 {
        /// Reads have no side effects.
        prefetchable: bool,
    },
}

/// One BAR of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BarInfo {
    /// Number of its first register, 0 to 5.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// Bytes, a power of two: at least 4 for I/O and 16 for memory.
    pub size: u64,
}

impl BarInfo {
    /// Whether it decodes I/O ports.
    pub const fn is_io(&self) -> bool {
        matches!(self.kind, BarKind::Io)
    }

    /// Whether it takes two registers.
    pub const fn is_64bit(&self) -> bool {
        matches!(self.kind, BarKind::Mem64 { .. })
    }

    /// Whether it is prefetchable memory.
    pub const fn prefetchable(&self) -> bool {
        match self.kind {
            BarKind::Io => false,
            BarKind::Mem32 { prefetchable } | BarKind::Mem64 { prefetchable } => prefetchable,
        }
    }

    /// Its address is a multiple of this: its size (naturally aligned).
    pub const fn alignment(&self) -> u64 {
        self.size
    }

    /// First address that it cannot decode: 64 KiB for I/O (all that x86 has), 4 GiB for 32-bit
    /// memory, the top of the address space (less one byte) for 64-bit memory.
    pub const fn limit(&self) -> u64 {
        match self.kind {
            BarKind::Io => 1 << 16,
            BarKind::Mem32 { .. } => 1 << 32,
            BarKind::Mem64 { .. } => u64::MAX,
        }
    }

    /// The read-only low bits of its register.
    pub const fn type_bits(&self) -> BarBits {
        let mut bits = BarBits::empty();
        if self.is_io() {
            bits = bits.union(BarBits::IO);
        }
        if self.is_64bit() {
            bits = bits.union(BarBits::MEM_64);
        }
        if self.prefetchable() {
            bits = bits.union(BarBits::PREFETCHABLE);
        }
        bits
    }
}

/// A device describes a BAR that cannot exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BarError {
    /// The size is not one that a BAR can encode.
    #[error("BAR {index} has a size of {size:#x} bytes, which is not a power of two")]
    NotAPowerOfTwo {
        /// BAR number.
        index: u8,
        /// Bytes.
        size: u64,
    },
    /// The size is smaller than its type bits allow or larger than its address is wide.
    #[error("BAR {index} has a size of {size:#x} bytes, which its kind ({kind:?}) cannot encode")]
    ImpossibleSize {
        /// BAR number.
        index: u8,
        /// Bytes.
        size: u64,
        /// What the type bits say.
        kind: BarKind,
    },
    /// There is no register for the upper half.
    #[error("BAR 5 says that it is 64 bits wide, but there is no BAR 6 for the upper half")]
    NoUpperHalf,
    /// The register of the upper half claims to be a BAR of its own.
    #[error("BAR {index} is the upper half of BAR {lower}, but has a size of its own")]
    UpperHalfInUse {
        /// The upper half.
        index: u8,
        /// The 64-bit BAR.
        lower: u8,
    },
}

/// Finds the BARs of a device, in ascending order.
///
/// `raw` holds its six BAR registers (only the type bits matter), `sizes` what
/// `VFIO_DEVICE_GET_REGION_INFO` says of each (0 = absent). As in Linux (`__pci_read_base`), memory
/// of an obsolete or reserved type counts as 32-bit.
pub fn discover(
    raw: &[u32; BAR_COUNT],
    sizes: &[u64; BAR_COUNT],
) -> Result<Vec<BarInfo>, BarError> {
    let mut bars: Vec<BarInfo> = Vec::new();
    for (index, (&raw, &size)) in (0u8..).zip(raw.iter().zip(sizes)) {
        if size == 0 {
            continue;
        }
        if let Some(lower) = bars.last().filter(|b| b.is_64bit() && b.index + 1 == index) {
            return Err(BarError::UpperHalfInUse {
                index,
                lower: lower.index,
            });
        }
        let kind = kind_of(raw);
        check_size(index, kind, size)?;
        if matches!(kind, BarKind::Mem64 { .. }) && usize::from(index) + 1 == BAR_COUNT {
            return Err(BarError::NoUpperHalf);
        }
        bars.push(BarInfo { index, kind, size });
    }
    Ok(bars)
}

fn kind_of(raw: u32) -> BarKind {
    let bits = BarBits::from_bits_truncate(raw);
    let prefetchable = bits.contains(BarBits::PREFETCHABLE);
    if bits.contains(BarBits::IO) {
        BarKind::Io
    } else if bits.contains(BarBits::MEM_64) && !bits.contains(BarBits::BELOW_1M) {
        BarKind::Mem64 { prefetchable }
    } else {
        BarKind::Mem32 { prefetchable }
    }
}

fn check_size(index: u8, kind: BarKind, size: u64) -> Result<(), BarError> {
    if !size.is_power_of_two() {
        return Err(BarError::NotAPowerOfTwo { index, size });
    }
    // The largest size is the one that leaves one writable address bit.
    let encodable = match kind {
        BarKind::Io => 4..=1 << 15,
        BarKind::Mem32 { .. } => 16..=1 << 31,
        BarKind::Mem64 { .. } => 16..=1 << 63,
    };
    if encodable.contains(&size) {
        Ok(())
    } else {
        Err(BarError::ImpossibleSize { index, size, kind })
    }
}

/// One dword: its value, which of its bits can be written, and its type bits.
#[derive(Clone, Copy, Debug, Default)]
struct Register {
    value: u32,
    writable: u32,
    type_bits: u32,
}

/// The six BAR registers that the guest sees.
#[derive(Clone, Debug, Default)]
pub struct BarRegisters {
    dwords: [Register; BAR_COUNT],
    /// Bit `n`: BAR `n` starts at dword `n`.
    bars: u8,
    /// Bit `n`: BAR `n` is 64 bits wide.
    wide: u8,
}

impl BarRegisters {
    /// Registers for `bars`, all at address 0. A BAR of an impossible index is ignored
    /// ([`discover`] makes none).
    pub fn new(bars: &[BarInfo]) -> Self {
        let mut registers = Self::default();
        for bar in bars {
            registers.add(bar);
        }
        registers
    }

    fn add(&mut self, bar: &BarInfo) {
        let index = usize::from(bar.index);
        let address_bits = !(bar.size.wrapping_sub(1));
        let Some(low) = self.dwords.get_mut(index) else {
            return;
        };
        *low = Register {
            value: 0,
            writable: address_bits as u32
                & !if bar.is_io() {
                    BarBits::IO_MASK
                } else {
                    BarBits::MEM_MASK
                },
            type_bits: bar.type_bits().bits(),
        };
        self.bars |= 1 << index;
        if !bar.is_64bit() {
            return;
        }
        if let Some(high) = self.dwords.get_mut(index + 1) {
            *high = Register {
                writable: (address_bits >> 32) as u32,
                ..Register::default()
            };
            self.wide |= 1 << index;
        }
    }

    /// What the guest reads from BAR register `dword`; 0 beyond the sixth.
    pub fn read(&self, dword: usize) -> u32 {
        self.dwords.get(dword).map_or(0, |r| r.value | r.type_bits)
    }

    /// The guest writes `value` to BAR register `dword`; `mask` says which bits the access covers
    /// (0xff for a byte write at the register's first byte). Returns whether the register changed.
    pub fn write(&mut self, dword: usize, value: u32, mask: u32) -> bool {
        let Some(register) = self.dwords.get_mut(dword) else {
            return false;
        };
        let mask = mask & register.writable;
        let new = (register.value & !mask) | (value & mask);
        let changed = new != register.value;
        register.value = new;
        changed
    }

    /// The address in BAR `index`, both halves of a 64-bit one; 0 when no BAR starts there.
    pub fn address(&self, index: u8) -> u64 {
        let at = usize::from(index);
        if !self.has(self.bars, index) {
            return 0;
        }
        let half = |n: usize| u64::from(self.dwords.get(n).map_or(0, |r| r.value));
        if self.has(self.wide, index) {
            half(at) | half(at + 1) << 32
        } else {
            half(at)
        }
    }

    /// Programs BAR `index` as if the guest had written `address`; bits that the BAR has not are
    /// dropped, and nothing happens when no BAR starts there.
    pub fn set_address(&mut self, index: u8, address: u64) {
        if !self.has(self.bars, index) {
            return;
        }
        let at = usize::from(index);
        self.write(at, address as u32, u32::MAX);
        if self.has(self.wide, index) {
            self.write(at + 1, (address >> 32) as u32, u32::MAX);
        }
    }

    /// Back to the values after a reset: all addresses 0.
    pub fn reset(&mut self) {
        for register in &mut self.dwords {
            register.value = 0;
        }
    }

    fn has(&self, set: u8, index: u8) -> bool {
        usize::from(index) < BAR_COUNT && set & (1 << index) != 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MEM64: BarKind = BarKind::Mem64 {
        prefetchable: false,
    };
    const MEM64_PREF: BarKind = BarKind::Mem64 { prefetchable: true };
    const MEM32: BarKind = BarKind::Mem32 {
        prefetchable: false,
    };

    fn bar(index: u8, kind: BarKind, size: u64) -> BarInfo {
        BarInfo { index, kind, size }
    }

    #[test]
    fn every_kind_is_found_where_the_device_has_it() {
        // A GPU: 32-bit registers, a huge 64-bit BAR at an odd index, another one, ports.
        let raw = [0, 0xc, 0, 0xc, 0, 1];
        let sizes = [16 << 20, 256 << 30, 0, 32 << 20, 0, 128];
        assert_eq!(
            discover(&raw, &sizes).unwrap(),
            [
                bar(0, MEM32, 16 << 20),
                bar(1, MEM64_PREF, 256 << 30),
                bar(3, MEM64_PREF, 32 << 20),
                bar(5, BarKind::Io, 128),
            ]
        );
    }

    /// Case 14, as the next and the one before.
    #[test]
    fn a_64_bit_bar_may_not_be_prefetchable_and_bar_5_may_be_32_bit() {
        let nvme = discover(&[4, 0, 0, 0, 0, 8], &[0x4000, 0, 0, 0, 0, 0x100]).unwrap();
        assert_eq!(nvme[0], bar(0, MEM64, 0x4000));
        assert!(!nvme[0].prefetchable());
        assert_eq!(nvme[1], bar(5, BarKind::Mem32 { prefetchable: true }, 256));
    }

    #[test]
    fn absent_bars_and_empty_odd_slots_are_skipped() {
        assert_eq!(discover(&[0xc, 1, 4, 8, 2, 6], &[0; 6]).unwrap(), []);
        assert_eq!(
            discover(&[0, 0, 4, 0, 0, 0], &[0, 0, 0x1000, 0, 0, 0]).unwrap(),
            [bar(2, MEM64, 0x1000)]
        );
    }

    #[test]
    fn obsolete_and_reserved_memory_types_count_as_32_bit() {
        let bars = discover(&[2, 6, 0, 0, 0, 0], &[0x100, 0x100, 0, 0, 0, 0]).unwrap();
        assert_eq!([bars[0].kind, bars[1].kind], [MEM32, MEM32]);
    }

    #[test]
    fn impossible_bars_are_refused() {
        let one = |index: usize, raw: u32, size: u64| {
            let (mut raws, mut sizes) = ([0; 6], [0; 6]);
            raws[index] = raw;
            sizes[index] = size;
            discover(&raws, &sizes).unwrap_err()
        };
        assert!(matches!(
            one(2, 0xc, 0x3000),
            BarError::NotAPowerOfTwo {
                index: 2,
                size: 0x3000
            }
        ));
        assert_eq!(one(5, 0xc, 0x4000), BarError::NoUpperHalf);
        for (raw, size) in [(0, 8), (1, 2), (1, 1 << 16), (0, 1 << 32), (4, 8)] {
            assert!(matches!(
                one(0, raw, size),
                BarError::ImpossibleSize { index: 0, .. }
            ));
        }
        assert_eq!(
            discover(&[4, 0, 0, 0, 0, 0], &[0x1000, 0x1000, 0, 0, 0, 0]),
            Err(BarError::UpperHalfInUse { index: 1, lower: 0 })
        );
    }

    #[test]
    fn sizing_shows_exactly_the_size_and_the_type() {
        let mut registers = BarRegisters::new(&[
            bar(0, MEM32, 16 << 20),
            bar(1, MEM64_PREF, 256 << 30),
            bar(3, MEM64, 0x4000),
            bar(5, BarKind::Io, 128),
        ]);
        for dword in 0..8 {
            registers.write(dword, u32::MAX, u32::MAX);
        }
        let seen: Vec<u32> = (0..8).map(|n| registers.read(n)).collect();
        assert_eq!(
            seen,
            [
                0xff00_0000,
                0xc,
                0xffff_ffc0,
                0xffff_c004,
                0xffff_ffff,
                0xffff_ff81,
                0,
                0
            ]
        );
    }

    #[test]
    fn halves_can_be_written_in_any_order_and_by_bytes() {
        let mut registers = BarRegisters::new(&[bar(1, MEM64_PREF, 1 << 20)]);
        assert!(registers.write(2, 0x12, u32::MAX));
        assert_eq!(registers.address(1), 0x12_0000_0000);
        assert!(registers.write(1, 0x3450_0000, 0xffff_0000));
        assert!(registers.write(1, 0xab00_0000, 0xff00_0000));
        assert_eq!(registers.address(1), 0x12_ab50_0000);
        assert!(!registers.write(1, 0xffff, 0xffff), "below the size");
        assert!(!registers.write(2, 0x12, u32::MAX), "the same value");
        assert_eq!((registers.address(0), registers.address(2)), (0, 0));
        registers.reset();
        assert_eq!((registers.address(1), registers.read(1)), (0, 0xc));
    }

    #[test]
    fn addresses_of_absent_bars_stay_zero() {
        let mut registers = BarRegisters::new(&[bar(0, MEM32, 4096), bar(9, MEM32, 4096)]);
        for index in [1, 5, 6, 9, 255] {
            registers.set_address(index, u64::MAX);
            assert_eq!(registers.address(index), 0);
        }
        registers.set_address(0, 0xffff_ffff_8000_0fff);
        assert_eq!(registers.address(0), 0x8000_0000);
    }

    #[test]
    fn a_tiny_bar_keeps_its_type_bits() {
        let mut registers = BarRegisters::new(&[bar(0, MEM32, 16), bar(1, BarKind::Io, 4)]);
        registers.set_address(0, u64::MAX);
        registers.set_address(1, u64::MAX);
        assert_eq!(registers.read(0), 0xffff_fff0);
        assert_eq!(registers.read(1), 0xffff_fffd);
    }

    proptest! {
        #[test]
        fn readback_is_what_was_written_masked_by_size(
            log in 4u32..=63,
            writes in prop::collection::vec((0usize..7, any::<u32>(), any::<u32>()), 0..40),
        ) {
            let mut registers = BarRegisters::new(&[bar(1, MEM64_PREF, 1 << log)]);
            let mut model = [0u32; 7];
            for (dword, value, mask) in writes {
                model[dword] = (model[dword] & !mask) | (value & mask);
                registers.write(dword, value, mask);
            }
            let want = (u64::from(model[1]) | u64::from(model[2]) << 32) & !((1u64 << log) - 1);
            prop_assert_eq!(registers.address(1), want);
            prop_assert_eq!(registers.read(1), want as u32 | 0xc);
            prop_assert_eq!(registers.read(2), (want >> 32) as u32);
            prop_assert_eq!(registers.read(0) | registers.read(3), 0);
        }

        #[test]
        fn discovery_never_panics(raw: [u32; 6], sizes: [u64; 6], logs: [u8; 6]) {
            let _ = discover(&raw, &sizes);
            let powers = logs.map(|l| 1u64.checked_shl(l.into()).unwrap_or(0));
            if let Ok(bars) = discover(&raw, &powers) {
                let mut registers = BarRegisters::new(&bars);
                for b in &bars {
                    registers.set_address(b.index, u64::MAX);
                }
            }
        }
    }
}
