//! Configuration space of one function as the guest sees it: who owns which byte, the shadow, and
//! the registers of the header.
//!
//! Reads cost a system call only for bytes that the device changes by itself
//! ([`Owner::Device`]). Everything else is answered from the shadow or a state machine.
//!
//! Invariants: the physical device keeps memory decode on, whatever the guest writes into COMMAND;
//! a hidden capability reads as zero; a BAR register reads back what was written, masked by size.

use super::commit::{Programmed, ROM};
use crate::pci::bar::{BarInfo, BarRegisters};
use crate::pci::caps::{AnyCapId, Capabilities};
use crate::pci::image;
use crate::pci::rom::RomRegister;
use crate::pci::spec::{
    BAR_COUNT, Command, DevCap, ExtCapId, FIRST_CAP, FIRST_EXT_CAP, PmCapabilities, PmControl,
    PowerState, Reg, Status, Type0Header, msix, pcie, pm,
};

/// Who answers for a byte of configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The shadow; writes are lost.
    Fixed,
    /// The shadow; writes stay in it.
    Scratch,
    /// COMMAND.
    Command,
    /// STATUS: the device's, but for the bit that tells of a capability list. From the shadow while
    /// the function is quiet (see [`ConfigSpace::is_quiet`]).
    Status,
    /// The six BAR registers.
    Bars,
    /// The expansion ROM's register.
    Rom,
    /// The MSI capability.
    Msi,
    /// MSI-X message control.
    MsixControl,
    /// Power-management control and status.
    PowerControl,
    /// PCIe device control: as [`Owner::Control`] but for the bit that resets the function.
    DeviceControl,
    /// Other control registers of the PCIe capability, 16 bits each. Nobody but the guest changes
    /// them: they are written through, and the shadow keeps what the device made of it.
    Control,
    /// The device; reads and writes are forwarded.
    Device,
}

/// Shadow, owners and header registers.
pub struct ConfigSpace {
    shadow: Vec<u8>,
    owners: Vec<Owner>,
    bars: BarRegisters,
    rom: RomRegister,
    msi_offset: u16,
    power_control: Option<u16>,
    offers_reset: bool,
    decoders: Command,
}

/// What a [`ConfigSpace`] is made from.
pub struct ConfigSetup<'a> {
    /// The physical space with its capability lists filtered.
    pub filtered: &'a [u8],
    /// What the filter kept and hid.
    pub caps: &'a Capabilities,
    /// The device's BARs.
    pub bars: &'a [BarInfo],
    /// Where they were placed: BAR index and address; [`ROM`] is the expansion ROM.
    pub addresses: &'a [(u8, u64)],
    /// Bytes of the expansion ROM; 0 shows none.
    pub rom_size: u64,
    /// Where INTx is routed; `None` without an interrupt pin.
    pub interrupt_line: Option<u8>,
    /// A function-level reset can be carried out.
    pub can_reset: bool,
    /// A capability that the device does not have: offset and bytes of it in `filtered`.
    pub synthetic: Option<(u16, u16)>,
}

impl ConfigSpace {
    /// The guest's configuration space. BAR registers hold the placed addresses; decode is off.
    pub fn new(setup: &ConfigSetup<'_>) -> Self {
        let caps = setup.caps;
        let mut bars = BarRegisters::new(setup.bars);
        let mut rom = RomRegister::new(setup.rom_size);
        for (index, address) in setup.addresses {
            match *index {
                ROM => rom.set_address(*address),
                index => bars.set_address(index, *address),
            }
        }
        let mut space = Self {
            owners: owners(setup),
            shadow: setup.filtered.to_vec(),
            bars,
            rom,
            msi_offset: caps.msi.as_ref().map_or(0, |cap| cap.offset),
            power_control: caps.pm.as_ref().map(|cap| cap.offset + pm::CONTROL),
            decoders: decoders(setup.bars),
            offers_reset: setup.can_reset && caps.pcie.as_ref().is_some_and(|cap| cap.flr),
        };
        space.present_header(setup.interrupt_line);
        if let Some(cap) = caps.pcie.as_ref().filter(|_| !space.offers_reset) {
            space.hide_function_reset(cap.offset);
        }
        space
    }

    /// Header fields that differ from the device's: decode off, the VM's interrupt line instead of
    /// the host's, no built-in self-test.
    fn present_header(&mut self, interrupt_line: Option<u8>) {
        let shadow = &mut self.shadow;
        image::write_u16(shadow, Reg::COMMAND.offset(), 0);
        image::write_u8(shadow, Reg::BIST.offset(), 0);
        image::write_u32(shadow, Reg::CARDBUS_CIS.offset(), 0);
        if interrupt_line.is_none() {
            image::write_u8(shadow, Reg::INTERRUPT_PIN.offset(), 0);
        }
        let line = interrupt_line.unwrap_or(0xff);
        image::write_u8(shadow, Reg::INTERRUPT_LINE.offset(), line);
        self.refresh_bars();
    }

    /// What the host cannot carry out is not offered.
    fn hide_function_reset(&mut self, cap: u16) {
        let at = cap + pcie::DEVCAP;
        let devcap = DevCap::from_bits_retain(image::read_u32(&self.shadow, at));
        let devcap = devcap.difference(DevCap::FLR);
        image::write_u32(&mut self.shadow, at, devcap.bits());
    }

    fn refresh_bars(&mut self) {
        for dword in 0..BAR_COUNT {
            let at = Reg::BAR0.offset() + 4 * dword as u16;
            let value = self.bars.read(dword);
            image::write_u32(&mut self.shadow, at, value);
        }
        image::write_u32(&mut self.shadow, Reg::ROM.offset(), self.rom.read());
    }

    /// Whether the guest may ask for a function-level reset.
    pub fn offers_function_reset(&self) -> bool {
        self.offers_reset
    }

    /// Registers to their reset values: decode off, BARs 0, power state D0.
    pub fn reset(&mut self) {
        image::write_u16(&mut self.shadow, Reg::COMMAND.offset(), 0);
        self.bars.reset();
        self.rom.reset();
        self.refresh_bars();
        if let Some(at) = self.power_control {
            let control = self.power().with_state(PowerState::D0);
            image::write_u16(&mut self.shadow, at, control.bits());
        }
    }

    fn power(&self) -> PmControl {
        let raw = self
            .power_control
            .map(|at| image::read_u16(&self.shadow, at));
        PmControl::from_bits_retain(raw.unwrap_or(0))
    }

    /// Whether the guest has left the function in D0.
    pub fn is_awake(&self) -> bool {
        self.power().state() == PowerState::D0
    }

    /// Who owns the byte at `offset`; nobody behind the end of a 256-byte space.
    pub fn owner(&self, offset: u16) -> Option<Owner> {
        self.owners.get(usize::from(offset)).copied()
    }

    /// Fills `data` from the shadow; all ones behind its end, by which a guest sees that a device
    /// has no extended space (Linux drivers/pci/probe.c, pci_cfg_space_size_ext).
    pub fn read_shadow(&self, offset: u16, data: &mut [u8]) {
        for (byte, at) in data.iter_mut().zip(usize::from(offset)..) {
            *byte = self.shadow.get(at).copied().unwrap_or(0xff);
        }
    }

    /// Stores `data` in the shadow.
    pub fn write_shadow(&mut self, offset: u16, data: &[u8]) {
        image::write(&mut self.shadow, offset, data);
    }

    /// The decoders that the device needs: they are on all the time.
    pub fn decoders(&self) -> Command {
        self.decoders
    }

    /// Where the MSI capability lies.
    pub fn msi_offset(&self) -> u16 {
        self.msi_offset
    }

    /// STATUS of the device as the guest reads it.
    pub fn present_status(&self, physical: u16) -> u16 {
        let shown = image::read_u16(&self.shadow, Reg::STATUS.offset());
        let list = Status::CAP_LIST.bits();
        (physical & !list) | (shown & list)
    }

    /// Keeps STATUS of the device for the time in which it is quiet.
    pub fn keep_status(&mut self, physical: u16) {
        let status = self.present_status(physical);
        image::write_u16(&mut self.shadow, Reg::STATUS.offset(), status);
    }

    /// Whether the guest lets the function neither decode nor master the bus: then nothing happens
    /// that would change its STATUS. A guest reads STATUS before each walk of the capability list,
    /// most often before it has enabled the function.
    pub fn is_quiet(&self) -> bool {
        !self
            .command()
            .intersects(Command::IO | Command::MEMORY | Command::MASTER)
    }

    /// Whether the function has that power state.
    pub fn has_power_state(&self, state: PowerState) -> bool {
        let capabilities = self
            .power_control
            .map(|at| image::read_u16(&self.shadow, at - pm::CONTROL + pm::CAPABILITIES));
        PmCapabilities::from_bits_retain(capabilities.unwrap_or(0)).has(state)
    }

    /// COMMAND as the guest last wrote it.
    pub fn command(&self) -> Command {
        let raw = image::read_u16(&self.shadow, Reg::COMMAND.offset());
        Command::from_bits_retain(raw)
    }

    /// Takes a write of `data` at `offset`, inside COMMAND.
    pub fn write_command(&mut self, offset: u16, data: &[u8]) {
        self.write_shadow(offset, data);
        let writable = Command::IO
            | Command::MEMORY
            | Command::MASTER
            | Command::PARITY
            | Command::SERR
            | Command::INTX_DISABLE;
        let after = self.command().intersection(writable);
        image::write_u16(&mut self.shadow, Reg::COMMAND.offset(), after.bits());
    }

    /// Takes a write of `data` at `offset`, inside the BAR registers.
    pub fn write_bars(&mut self, offset: u16, data: &[u8]) {
        let start = offset - Reg::BAR0.offset();
        let mut writes = [(0u32, 0u32); BAR_COUNT];
        for (byte, at) in data.iter().zip(usize::from(start)..) {
            if let Some((value, mask)) = writes.get_mut(at / 4) {
                let shift = 8 * (at % 4);
                *value |= u32::from(*byte) << shift;
                *mask |= 0xff << shift;
            }
        }
        for (dword, (value, mask)) in writes.into_iter().enumerate() {
            self.bars.write(dword, value, mask);
        }
        self.refresh_bars();
    }

    /// Takes a write of `data` at `offset`, inside the ROM's register.
    pub fn write_rom(&mut self, offset: u16, data: &[u8]) {
        let (mut value, mut mask) = (0u32, 0u32);
        for (byte, at) in data.iter().zip(offset - Reg::ROM.offset()..4) {
            value |= u32::from(*byte) << (8 * at);
            mask |= 0xff << (8 * at);
        }
        self.rom.write(value, mask);
        self.refresh_bars();
    }

    /// What the engine has to know. A sleeping function decodes nothing.
    pub fn programmed(&self) -> Programmed {
        let command = if self.is_awake() {
            self.command()
        } else {
            Command::empty()
        };
        let mut addresses = [0; BAR_COUNT + 1];
        for (index, address) in addresses.iter_mut().enumerate() {
            *address = match index as u8 {
                // Address 0 answers nowhere.
                ROM if !self.rom.enabled() => 0,
                ROM => self.rom.address(),
                bar => self.bars.address(bar),
            };
        }
        Programmed {
            memory: command.contains(Command::MEMORY),
            io: command.contains(Command::IO),
            addresses,
        }
    }
}

/// Memory always: vfio-pci takes a function without it for one that must not be touched.
fn decoders(bars: &[BarInfo]) -> Command {
    match bars.iter().any(BarInfo::is_io) {
        true => Command::MEMORY | Command::IO,
        false => Command::MEMORY,
    }
}

fn owners(setup: &ConfigSetup<'_>) -> Vec<Owner> {
    let caps = setup.caps;
    let mut owners = vec![Owner::Device; setup.filtered.len()];
    let mut own = |start: u16, len: u16, owner: Owner| {
        let range = usize::from(start)..usize::from(start) + usize::from(len);
        if let Some(bytes) = owners.get_mut(range) {
            bytes.fill(owner);
        }
    };
    own(0, FIRST_CAP, Owner::Fixed);
    own(Reg::COMMAND.offset(), 2, Owner::Command);
    own(Reg::STATUS.offset(), 2, Owner::Status);
    own(Reg::CACHE_LINE_SIZE.offset(), 2, Owner::Scratch);
    own(Reg::BAR0.offset(), 4 * BAR_COUNT as u16, Owner::Bars);
    own(Reg::ROM.offset(), 4, Owner::Rom);
    own(Reg::INTERRUPT_LINE.offset(), 1, Owner::Scratch);
    const { assert!(std::mem::size_of::<Type0Header>() == FIRST_CAP as usize) };

    // The head of the extended list is the filter's, also when it left nothing there.
    own(FIRST_EXT_CAP, 4, Owner::Fixed);
    for cap in &caps.hidden {
        own(cap.offset, cap.len, Owner::Fixed);
    }
    for cap in &caps.kept {
        // The links are those of the filtered list, never the device's.
        let header = match cap.id {
            AnyCapId::Standard(_) => 2,
            AnyCapId::Extended(_) => 4,
        };
        let fixed = match cap.id {
            AnyCapId::Extended(ExtCapId::SERIAL) => cap.len,
            _ => header,
        };
        own(cap.offset, fixed, Owner::Fixed);
    }
    if let Some((offset, len)) = setup.synthetic {
        own(offset, len, Owner::Fixed);
    }
    if let Some(cap) = &caps.msi {
        own(cap.offset + 2, cap.bytes() - 2, Owner::Msi);
    }
    if let Some(cap) = &caps.msix {
        own(cap.offset + 2, msix::LEN - 2, Owner::Fixed);
        own(cap.offset + msix::CONTROL, 2, Owner::MsixControl);
    }
    if let Some(cap) = &caps.pm {
        own(cap.offset + 2, pm::LEN - 2, Owner::Fixed);
        own(cap.offset + pm::CONTROL, 2, Owner::PowerControl);
    }
    if let Some(cap) = &caps.pcie {
        own(cap.offset + pcie::FLAGS, 2, Owner::Fixed);
        own(cap.offset + pcie::DEVCTL, 2, Owner::DeviceControl);
        for register in [pcie::LNKCTL, pcie::DEVCTL2, pcie::LNKCTL2] {
            if register + 2 <= cap.len {
                own(cap.offset + register, 2, Owner::Control);
            }
        }
        // What a device can do does not change.
        for register in [pcie::DEVCAP, pcie::LNKCAP, pcie::DEVCAP2, pcie::LNKCAP2] {
            if register + 4 <= cap.len {
                own(cap.offset + register, 4, Owner::Fixed);
            }
        }
    }
    owners
}
