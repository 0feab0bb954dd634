//! The host bridge at 00:00.0: a function that only says that it is one, so that guests which look
//! for it (Linux' sanity check of 0xCF8 among them) find a PCI bus.
//!
//! Invariant: read-only; it decodes nothing and has no capabilities.

use super::ecam::PciFunction;
use super::image::{read_u8, write_u8, write_u16};
use super::spec::{FIRST_CAP, LEGACY_CONFIG_SIZE, Reg};

/// Vendor id of Red Hat's virtual devices.
const VENDOR: u16 = 0x1b36;
/// "QEMU PCIe Host bridge": the generic one that no guest has a quirk for.
const DEVICE: u16 = 0x0008;
/// Base class "bridge", subclass "host".
const CLASS_BRIDGE: u8 = 0x06;

/// The host bridge.
pub struct HostBridge {
    header: [u8; FIRST_CAP as usize],
}

impl HostBridge {
    /// The host bridge.
    pub fn new() -> Self {
        let mut header = [0; FIRST_CAP as usize];
        write_u16(&mut header, Reg::VENDOR_ID.offset(), VENDOR);
        write_u16(&mut header, Reg::DEVICE_ID.offset(), DEVICE);
        write_u8(&mut header, Reg::CLASS.offset() + 2, CLASS_BRIDGE);
        Self { header }
    }
}

impl Default for HostBridge {
    fn default() -> Self {
        Self::new()
    }
}

impl PciFunction for HostBridge {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = match usize::from(at) {
                at if at < self.header.len() => read_u8(&self.header, at as u16),
                at if at < LEGACY_CONFIG_SIZE => 0,
                // A conventional function: ones tell Linux that there is no extended space.
                _ => 0xff,
            };
        }
    }

    fn config_write(&self, _offset: u16, _data: &[u8]) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dword(offset: u16) -> u32 {
        let mut data = [0xff; 4];
        let bridge = HostBridge::new();
        bridge.config_write(offset, &[0xa5; 4]);
        bridge.config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn it_is_a_host_bridge_without_bars_or_capabilities() {
        assert_eq!(dword(0x00), 0x0008_1b36);
        assert_eq!(dword(0x08), 0x0600_0000);
        for offset in (0x04..0x100).step_by(4).filter(|&o| o != 8) {
            assert_eq!(dword(offset), 0, "{offset:#x}");
        }
        assert_eq!(dword(0x100), u32::MAX);
        assert_eq!(dword(0xffc), u32::MAX);
    }
}
