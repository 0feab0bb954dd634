//! The expansion ROM's base address register.
//!
//! Invariants: as for the other BARs, it reads back what was written less the bits below its size;
//! bit 0 is the ROM's own enable, which decodes only together with COMMAND.MEMORY.
//!
//! Source: PCIe 6.0, 7.5.1.2.4.

/// Bit 0: the ROM is decoded (if memory decode is on).
const ENABLE: u32 = 1;
/// The smallest ROM: the address begins at bit 11.
const MIN_SIZE: u64 = 1 << 11;

/// The register at 0x30 as the guest sees it.
#[derive(Clone, Debug, Default)]
pub struct RomRegister {
    value: u32,
    writable: u32,
}

impl RomRegister {
    /// A register for a ROM of `size` bytes, rounded up to a power of two of at least 2 KiB; with
    /// a size of 0, or one that 32 bits cannot express, there is no ROM and it always reads 0.
    pub fn new(size: u64) -> Self {
        let size = size
            .max(MIN_SIZE * u64::from(size != 0))
            .checked_next_power_of_two();
        let writable = match size {
            Some(size @ MIN_SIZE..=0x8000_0000) => !(size as u32 - 1) | ENABLE,
            _ => 0,
        };
        Self { value: 0, writable }
    }

    /// What the guest reads.
    pub fn read(&self) -> u32 {
        self.value
    }

    /// The guest writes the bits of `value` that `mask` covers. Returns whether anything changed.
    pub fn write(&mut self, value: u32, mask: u32) -> bool {
        let mask = mask & self.writable;
        let new = (self.value & !mask) | (value & mask);
        let changed = new != self.value;
        self.value = new;
        changed
    }

    /// The programmed address.
    pub fn address(&self) -> u64 {
        u64::from(self.value & !ENABLE)
    }

    /// Programs the address; the enable bit stays.
    pub fn set_address(&mut self, address: u64) {
        self.write(address as u32, !ENABLE);
    }

    /// Whether the ROM's own enable is on.
    pub fn enabled(&self) -> bool {
        self.value & ENABLE != 0
    }

    /// Back to the value after a reset: 0.
    pub fn reset(&mut self) {
        self.value = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizing_shows_the_size_and_the_enable_bit() {
        let mut rom = RomRegister::new(0x1_8000);
        assert!(rom.write(u32::MAX, u32::MAX));
        assert_eq!(rom.read(), 0xfffe_0001);
        assert!(rom.write(0xfffe_0000, 0xff) && !rom.enabled());
        rom.set_address(0xc123_4567);
        assert_eq!((rom.address(), rom.enabled()), (0xc122_0000, false));
        rom.reset();
        assert_eq!(rom.read(), 0);
        let mut tiny = RomRegister::new(1);
        tiny.write(u32::MAX, u32::MAX);
        assert_eq!(tiny.read(), 0xffff_f801);
    }

    #[test]
    fn an_absent_or_impossible_rom_reads_zero() {
        for size in [0, 1 << 32, u64::MAX] {
            let mut rom = RomRegister::new(size);
            assert!(!rom.write(u32::MAX, u32::MAX));
            assert_eq!(rom.read(), 0);
        }
    }
}
