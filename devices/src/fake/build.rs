//! Makes fake devices: configuration space and regions from a few words.

use std::collections::BTreeMap;

use super::device::FakeDeviceSpec;
use crate::assign::ports::{IrqIndex, IrqInfo, RegionInfo};
use crate::pci::address::Bdf;
use crate::pci::bar::BarKind;
use crate::pci::image;
use crate::pci::spec::{CONFIG_SIZE, CapId, DevCap, MsiControl, Reg, Status, pcie};
use crate::range::Range;

impl FakeDeviceSpec {
    /// A PCIe function without BARs, capabilities or interrupts.
    pub fn bare(bdf: Bdf) -> Self {
        let mut config = vec![0; CONFIG_SIZE];
        image::write_u16(&mut config, Reg::VENDOR_ID.offset(), 0x1b36);
        image::write_u16(&mut config, Reg::DEVICE_ID.offset(), 0x0005);
        Self {
            bdf,
            config,
            bars: Default::default(),
            irqs: BTreeMap::new(),
            can_reset: true,
            on_bus: Vec::new(),
            can_export: true,
        }
    }

    /// A GPU: 16 MiB of registers in BAR 0, `memory` bytes of 64-bit prefetchable BAR 2, MSI-X
    /// with 16 vectors in the middle of BAR 0.
    pub fn gpu(bdf: Bdf, memory: u64) -> Self {
        Self::bare(bdf)
            .bar(
                0,
                BarKind::Mem32 {
                    prefetchable: false,
                },
                16 << 20,
            )
            .bar(2, BarKind::Mem64 { prefetchable: true }, memory)
            .msix(16, (0, 0x5200), (0, 0xd600))
            .irq(IrqIndex::Intx, 1)
    }

    /// Adds a mappable BAR of `size` bytes.
    pub fn bar(mut self, index: u8, kind: BarKind, size: u64) -> Self {
        let bits: u32 = match kind {
            BarKind::Io => 1,
            BarKind::Mem32 { prefetchable } => u32::from(prefetchable) << 3,
            BarKind::Mem64 { prefetchable } => 4 | u32::from(prefetchable) << 3,
        };
        let register = Reg::BAR0.offset() + 4 * u16::from(index);
        image::write_u32(&mut self.config, register, bits);
        if let Some(bar) = self.bars.get_mut(usize::from(index)) {
            *bar = RegionInfo {
                size,
                readable: true,
                writable: true,
                mappable: kind != BarKind::Io && size >= 4096,
                ..RegionInfo::default()
            };
        }
        self
    }

    /// Gives a BAR a sparse-mmap capability.
    pub fn sparse(mut self, index: u8, areas: Vec<Range>) -> Self {
        if let Some(bar) = self.bars.get_mut(usize::from(index)) {
            bar.sparse = Some(areas);
        }
        self
    }

    /// Adds MSI-X at 0x40 as the first capability: BAR and offset of table and PBA.
    pub fn msix(mut self, vectors: u16, table: (u8, u32), pba: (u8, u32)) -> Self {
        const AT: u16 = 0x40;
        let old = image::read_u8(&self.config, Reg::CAPABILITIES.offset());
        let config = &mut self.config;
        image::write_u8(config, Reg::CAPABILITIES.offset(), AT as u8);
        image::write_u16(config, Reg::STATUS.offset(), Status::CAP_LIST.bits());
        image::write_u8(config, AT, CapId::MSIX.0);
        image::write_u8(config, AT + 1, old);
        image::write_u16(config, AT + 2, vectors - 1);
        image::write_u32(config, AT + 4, table.1 | u32::from(table.0));
        image::write_u32(config, AT + 8, pba.1 | u32::from(pba.0));
        self.irq(IrqIndex::Msix, vectors.into())
    }

    /// Adds a PCIe capability with function-level reset at 0x60 and power management at 0xa0, in
    /// front of what is there.
    pub fn express(mut self) -> Self {
        let old = image::read_u8(&self.config, Reg::CAPABILITIES.offset());
        let config = &mut self.config;
        image::write_u8(config, Reg::CAPABILITIES.offset(), 0x60);
        image::write_u16(config, Reg::STATUS.offset(), Status::CAP_LIST.bits());
        image::write_u32(config, 0x60, 0x0002_a000 | u32::from(CapId::PCIE.0));
        image::write_u32(config, 0x60 + pcie::DEVCAP, DevCap::FLR.bits());
        image::write_u32(config, 0xa0, 0x0003_0000 | u32::from(CapId::PM.0));
        image::write_u8(config, 0xa1, old);
        self
    }

    /// Adds MSI at 0x80 in front of what is there: 64-bit, `vectors` a power of two, maskable.
    pub fn msi(mut self, vectors: u16) -> Self {
        const AT: u16 = 0x80;
        let old = image::read_u8(&self.config, Reg::CAPABILITIES.offset());
        let config = &mut self.config;
        image::write_u8(config, Reg::CAPABILITIES.offset(), AT as u8);
        image::write_u16(config, Reg::STATUS.offset(), Status::CAP_LIST.bits());
        image::write_u8(config, AT, CapId::MSI.0);
        image::write_u8(config, AT + 1, old);
        let mut control = MsiControl::from_bits_retain((vectors.ilog2() as u16) << 1);
        control |= MsiControl::ADDRESS_64 | MsiControl::MASKABLE;
        image::write_u16(config, AT + 2, control.bits());
        self.irq(IrqIndex::Msi, vectors.into())
    }

    /// Says how many vectors of a kind there are.
    pub fn irq(mut self, index: IrqIndex, count: u32) -> Self {
        if index == IrqIndex::Intx {
            image::write_u8(&mut self.config, Reg::INTERRUPT_PIN.offset(), 1);
        }
        let noresize = index == IrqIndex::Msi;
        self.irqs.insert(index, IrqInfo { count, noresize });
        self
    }
}
