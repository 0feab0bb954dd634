//! What a guest is shown on request and the device's own registers do not give: its expansion ROM,
//! and NVIDIA's peer-to-peer clique.

use std::sync::Arc;

use super::commit::ROM;
use super::error::AssignError;
use super::ports::Region;
use super::size::SizedDevice;
use crate::pci::address::Bdf;
use crate::pci::bar::{BarInfo, BarKind};
use crate::pci::image;
use crate::pci::spec::{CapId, Reg};

/// The largest ROM that is read: 16 MiB, as 24 address bits were once enough for.
const MOST: u64 = 16 << 20;

/// Where the contents of an expansion ROM come from.
#[derive(Clone, Debug, Default)]
pub enum RomSource {
    /// No ROM is shown.
    #[default]
    Off,
    /// The device's own. The kernel maps and parses it for that, which takes its time.
    Device,
    /// These bytes.
    Bytes(Arc<[u8]>),
}

/// A ROM of `len` bytes as a BAR to be placed: its register holds 32 bits.
pub fn rom_bar(len: u64) -> BarInfo {
    BarInfo {
        index: ROM,
        kind: BarKind::Mem32 {
            prefetchable: false,
        },
        size: len.max(2048).next_power_of_two(),
    }
}

/// Whether a device of that `vendor` can be in a clique.
pub fn check_clique(bdf: Bdf, vendor: u16) -> Result<(), AssignError> {
    const NVIDIA: u16 = 0x10de;
    match vendor {
        NVIDIA => Ok(()),
        _ => Err(AssignError::NotNvidia { bdf }),
    }
}

impl SizedDevice {
    /// The ROM as a BAR to be placed: its register holds 32 bits.
    pub fn rom_bar(&self) -> Option<BarInfo> {
        Some(rom_bar(self.rom.as_ref()?.len() as u64))
    }

    /// Takes the contents of the ROM from `source`.
    pub fn load_rom(&mut self, source: &RomSource) -> Result<(), AssignError> {
        self.rom = match source {
            RomSource::Off => None,
            RomSource::Bytes(bytes) => Some(Arc::clone(bytes)),
            RomSource::Device => Some(self.read_rom()?),
        };
        Ok(())
    }

    fn read_rom(&self) -> Result<Arc<[u8]>, AssignError> {
        let query = AssignError::query(self.bdf, Region::Rom);
        let info = self.device.region_info(Region::Rom).map_err(&query)?;
        if info.size == 0 || info.size > MOST {
            return Err(AssignError::NoRom { bdf: self.bdf });
        }
        let mut bytes = vec![0xff; info.size as usize];
        let read = self.device.read(Region::Rom, 0, &mut bytes);
        read.map_err(query)?;
        Ok(bytes.into())
    }

    /// Adds the vendor capability by which NVIDIA's driver learns that GPUs of one `clique` (0 to
    /// 15) reach each other's BARs: length 8, signature "P2P", the clique in bits 3 to 6.
    pub fn add_clique(&mut self, clique: u8) -> Result<(), AssignError> {
        let bdf = self.bdf;
        check_clique(bdf, image::read_u16(&self.config, Reg::VENDOR_ID.offset()))?;
        let body = [8, b'P', b'2', b'P', (clique & 0xf) << 3, 0];
        let at = self.caps.insert(&mut self.config, CapId::VENDOR, &body);
        let at = at.ok_or(AssignError::NoRoomForClique { bdf })?;
        self.synthetic = Some((at.into(), 8));
        Ok(())
    }
}
