//! Which trapped device answers at an address.
//!
//! One [`Bus`] stands for guest-physical memory and one for I/O ports. An address that no device
//! answers reads as all ones and swallows writes, as on hardware.
//!
//! Invariant: ranges on one bus never overlap.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::range::Range;

/// A device that answers trapped accesses. Called from any vCPU thread; must not panic whatever
/// the guest does.
pub trait BusDevice: Send + Sync {
    /// Fills `data` (1 to 8 bytes) from `offset` bytes behind the start of the device's range.
    /// `data` is all ones on entry; a device that does not answer leaves it so.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Takes `data` (1 to 8 bytes) written at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Two devices were put at the same addresses: a fault in the wiring, not in the guest.
#[derive(Debug, thiserror::Error)]
#[error("{new} overlaps the device at {old} on the same bus")]
pub struct BusOverlap {
    new: Range,
    old: Range,
}

/// Address to device.
#[derive(Default)]
pub struct Bus {
    devices: BTreeMap<u64, (Range, Arc<dyn BusDevice>)>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `range`.
    pub fn insert(&mut self, range: Range, device: Arc<dyn BusDevice>) -> Result<(), BusOverlap> {
        if let Some((old, _)) = self.devices.values().find(|(r, _)| r.overlaps(&range)) {
            return Err(BusOverlap {
                new: range,
                old: *old,
            });
        }
        self.devices.insert(range.start(), (range, device));
        Ok(())
    }

    fn find(&self, address: u64) -> Option<(u64, &dyn BusDevice)> {
        let (range, device) = self.devices.range(..=address).next_back()?.1;
        range
            .contains(address)
            .then(|| (address - range.start(), device.as_ref()))
    }

    /// Reads `data.len()` bytes at `address`; all ones where nothing answers.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((offset, device)) = self.find(address) {
            device.read(offset, data);
        }
    }

    /// Writes `data` at `address`; lost where nothing answers.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((offset, device)) = self.find(address) {
            device.write(offset, data);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    struct Echo(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Echo {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().push((offset, data.to_vec()));
        }
    }

    fn echo() -> Arc<Echo> {
        Arc::new(Echo(Mutex::new(Vec::new())))
    }

    #[test]
    fn an_access_reaches_the_device_with_its_offset() {
        let device = echo();
        let mut bus = Bus::new();
        bus.insert(Range::from_bounds(0x3f8, 0x400), device.clone())
            .unwrap();
        let mut data = [0; 2];
        bus.read(0x3fb, &mut data);
        assert_eq!(data, [3, 3]);
        bus.write(0x3f9, &[7]);
        assert_eq!(*device.0.lock(), [(1, vec![7])]);
    }

    #[test]
    fn nothing_answers_with_all_ones() {
        let mut bus = Bus::new();
        bus.insert(Range::from_bounds(0x10, 0x20), echo()).unwrap();
        for address in [0, 0xf, 0x20, u64::MAX] {
            let mut data = [0; 4];
            bus.read(address, &mut data);
            assert_eq!(data, [0xff; 4]);
        }
    }

    #[test]
    fn overlapping_devices_are_refused() {
        let mut bus = Bus::new();
        bus.insert(Range::from_bounds(0x10, 0x20), echo()).unwrap();
        assert!(bus.insert(Range::from_bounds(0x1f, 0x30), echo()).is_err());
        assert!(bus.insert(Range::from_bounds(0x20, 0x30), echo()).is_ok());
    }
}
