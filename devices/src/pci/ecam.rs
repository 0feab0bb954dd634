//! Configuration space as the guest reaches it: memory-mapped (ECAM) and through the ports 0xCF8
//! and 0xCFC. Both decode to the same functions on one flat bus 0.
//!
//! Invariants:
//! * a function sees accesses of 1 to 4 bytes that never cross a dword; wider and straddling ones
//!   are split, so that every byte reaches its own register;
//! * what nobody answers (absent functions, other buses, bytes behind a function's last register,
//!   parts of the address port) reads as ones and swallows writes;
//! * the multi-function bit that the guest reads is this bus' own, never the function's.
//!
//! Sources: PCIe 6.0, 7.2.2 (ECAM); PCI 3.0, 3.2.2.3.2 (configuration mechanism #1); AMD BIOS and
//! Kernel Developer's Guide, IOCFC (extended registers through 0xCF8).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::spec::{CONFIG_SIZE, HeaderType, Reg};
use crate::bus::BusDevice;

/// One PCI function. Called from any vCPU thread; must not panic whatever the guest does.
pub trait PciFunction: Send + Sync {
    /// Fills `data` from `offset`: 1 to 4 bytes that do not cross a dword, below 4096. `data` is
    /// all ones on entry.
    fn config_read(&self, offset: u16, data: &mut [u8]);

    /// Takes `data`, within the same bounds.
    fn config_write(&self, offset: u16, data: &[u8]);
}

/// Two functions were given one address: a fault in the wiring, not in the guest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("two functions at 00:{:02x}.{}", devfn >> 3, devfn & 7)]
pub struct DevfnTaken {
    devfn: u8,
}

/// Bytes of ECAM that one bus takes.
pub const ECAM_BUS_SIZE: u64 = (FUNCTIONS * CONFIG_SIZE) as u64;
const FUNCTIONS: usize = 256;

/// Bus 0: up to 32 devices of 8 functions.
#[derive(Default)]
pub struct PciBus {
    /// Indexed by devfn; shorter than 256 while nothing is behind.
    functions: Vec<Option<Arc<dyn PciFunction>>>,
}

impl PciBus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `function` at `devfn` (device number in bits 7:3, function number in bits 2:0).
    pub fn insert(&mut self, devfn: u8, function: Arc<dyn PciFunction>) -> Result<(), DevfnTaken> {
        let at = usize::from(devfn);
        if self.functions.len() <= at {
            self.functions.resize_with(at + 1, || None);
        }
        match self.functions.get_mut(at) {
            Some(slot @ None) => {
                *slot = Some(function);
                Ok(())
            }
            _ => Err(DevfnTaken { devfn }),
        }
    }

    fn function(&self, devfn: u8) -> Option<&dyn PciFunction> {
        self.functions.get(usize::from(devfn))?.as_deref()
    }

    /// Whether the device that `devfn` belongs to has more than one function.
    pub fn multi_function(&self, devfn: u8) -> bool {
        let first = devfn & !7;
        let present = |n: &u8| self.function(first + n).is_some();
        (0..8).filter(present).count() > 1
    }

    /// Fills `data` from register `offset` of `devfn`.
    pub fn read(&self, devfn: u8, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        let Some(function) = self.function(devfn) else {
            return;
        };
        for (at, part) in split(offset, data.len()) {
            let Some(part) = data.get_mut(part) else {
                return;
            };
            function.config_read(at, part);
            self.fix_header_type(devfn, at, part);
        }
    }

    /// Writes `data` to register `offset` of `devfn`.
    pub fn write(&self, devfn: u8, offset: u16, data: &[u8]) {
        let Some(function) = self.function(devfn) else {
            return;
        };
        for (at, part) in split(offset, data.len()) {
            if let Some(part) = data.get(part) {
                function.config_write(at, part);
            }
        }
    }

    /// Puts the bus' own multi-function bit into what was read at `offset`.
    fn fix_header_type(&self, devfn: u8, offset: u16, data: &mut [u8]) {
        let header = Reg::HEADER_TYPE.at().checked_sub(usize::from(offset));
        let Some(byte) = header.and_then(|at| data.get_mut(at)) else {
            return;
        };
        // All ones is a function that has vanished; leave that visible.
        if *byte != 0xff {
            *byte = HeaderType(*byte)
                .with_multi_function(self.multi_function(devfn))
                .0;
        }
    }
}

/// Cuts an access of `len` bytes at `offset` at dword boundaries and at the end of configuration
/// space: for each part its register and its place in the data.
fn split(offset: u16, len: usize) -> impl Iterator<Item = (u16, std::ops::Range<usize>)> {
    let offset = usize::from(offset);
    let end = offset.saturating_add(len).min(CONFIG_SIZE);
    let mut next = offset;
    std::iter::from_fn(move || {
        let start = next;
        next = end.min((start | 3) + 1);
        // Below 4096, so it fits.
        (start < end).then_some((start as u16, start - offset..next - offset))
    })
}

/// The memory-mapped configuration space of a [`PciBus`]; its range starts with bus 0.
pub struct Ecam(pub Arc<PciBus>);

impl Ecam {
    /// Function and register at `offset`; `None` on other buses.
    fn decode(offset: u64) -> Option<(u8, u16)> {
        (offset < ECAM_BUS_SIZE).then_some(((offset >> 12) as u8, offset as u16 & 0xfff))
    }
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((devfn, register)) = Self::decode(offset) {
            self.0.read(devfn, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((devfn, register)) = Self::decode(offset) {
            self.0.write(devfn, register, data);
        }
    }
}

/// The address port 0xCF8 and the data port 0xCFC of a [`PciBus`], as one device at
/// [`ConfigPorts::BASE`].
///
/// The address port takes and gives whole dwords only: a byte at 0xCF9 is the reset register of a
/// chipset, not ours. As on AMD, bits 27:24 are bits 11:8 of the register: Linux on an AMD
/// processor uses them before it knows of ECAM, and would else read register 0 for 0x100.
pub struct ConfigPorts {
    bus: Arc<PciBus>,
    address: AtomicU32,
}

impl ConfigPorts {
    /// First port.
    pub const BASE: u64 = 0xcf8;
    /// Number of ports.
    pub const LEN: u64 = 8;
    /// Offset of the data port.
    const DATA: u64 = 4;
    const ENABLE: u32 = 1 << 31;
    /// Bits 30:28 and 1:0 are reserved and read as 0.
    const WRITABLE: u32 = 0x8fff_fffc;

    /// The ports of `bus`.
    pub fn new(bus: Arc<PciBus>) -> Self {
        Self {
            bus,
            address: AtomicU32::new(0),
        }
    }

    /// Function and register that the address port names; `None` when it is off or names another
    /// bus.
    fn target(&self) -> Option<(u8, u16)> {
        let address = self.address.load(Ordering::Relaxed);
        let bus = (address >> 16) as u8;
        if address & Self::ENABLE == 0 || bus != 0 {
            return None;
        }
        let register = (address & 0xfc) | (address >> 16 & 0xf00);
        Some(((address >> 8) as u8, register as u16))
    }

    /// The part of an access of `len` bytes at `offset` that hits the data port, and how far into
    /// the port it begins.
    fn data_part(offset: u64, len: usize) -> Option<(std::ops::Range<usize>, u16)> {
        let end = offset.checked_add(len as u64)?.min(Self::LEN);
        let start = offset.max(Self::DATA);
        let part = (start - offset) as usize..end.checked_sub(offset)? as usize;
        (start < end).then_some((part, (start - Self::DATA) as u16))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            data.copy_from_slice(&self.address.load(Ordering::Relaxed).to_le_bytes());
            return;
        }
        let (Some((part, skip)), Some((devfn, register))) =
            (Self::data_part(offset, data.len()), self.target())
        else {
            return;
        };
        if let Some(part) = data.get_mut(part) {
            self.bus.read(devfn, register + skip, part);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (0, &[a, b, c, d]) = (offset, data) {
            let address = u32::from_le_bytes([a, b, c, d]) & Self::WRITABLE;
            self.address.store(address, Ordering::Relaxed);
            return;
        }
        let (Some((part, skip)), Some((devfn, register))) =
            (Self::data_part(offset, data.len()), self.target())
        else {
            return;
        };
        if let Some(part) = data.get(part) {
            self.bus.write(devfn, register + skip, part);
        }
    }
}

#[cfg(test)]
#[path = "ecam_tests.rs"]
mod tests;
