//! Step 5: one assigned function at run time. Configuration accesses go to the owner of each byte;
//! accesses to BARs that trap go to the MSI-X machine or to the device's descriptor.
//!
//! Invariants: the function's lock is taken before the engine's, never the other way, and no two
//! functions' but by [`super::hot_reset`]; whatever the guest does ends in an answer (all ones where the device refuses), never in an error for the VM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::EventFd;

use super::commit::{BarEngine, CommitError, ROM};
use super::config::{ConfigSpace, Owner};
use super::error::chain;
use super::hot_reset::{FunctionCore, HotReset, HotResetError, Registers};
use super::ports::{CallError, DmaGate, IrqIndex, IrqRequest, Region};
use super::reset::{forward_command, reset_function};
use crate::pci::address::Bdf;
use crate::pci::ecam::PciFunction;
use crate::pci::image;
use crate::pci::spec::{Command, DevCtl, PmControl, PowerState, Reg};
use crate::range::Range;
use crate::rate::RateLimit;

/// See the module.
pub struct AssignedFunction {
    core: Arc<FunctionCore>,
    /// For functions that the host cannot reset alone.
    hot_reset: Arc<HotReset>,
    engine: Arc<BarEngine>,
    gate: Arc<dyn DmaGate>,
    /// MSI-X table and PBA: the BAR and the bytes in it.
    table: Option<(u8, Range)>,
    pba: Option<(u8, Range)>,
    /// Contents of the expansion ROM, if it is shown.
    rom: Option<Arc<[u8]>>,
    limit: RateLimit,
    told_no_reset: AtomicBool,
}

impl AssignedFunction {
    /// Makes a function of its `core`. `msix_bars` says in which BARs its MSI-X table and PBA lie.
    pub fn new(
        core: Arc<FunctionCore>,
        hot_reset: Arc<HotReset>,
        engine: Arc<BarEngine>,
        gate: Arc<dyn DmaGate>,
        msix_bars: Option<(u8, u8)>,
    ) -> Self {
        let located = core.registers.lock().irq.msix_ranges().zip(msix_bars);
        Self {
            core,
            hot_reset,
            engine,
            gate,
            table: located.map(|((table, _), (bar, _))| (bar, table)),
            pba: located.map(|((_, pba), (_, bar))| (bar, pba)),
            rom: None,
            limit: RateLimit::default(),
            told_no_reset: AtomicBool::new(false),
        }
    }

    /// Shows `rom` as the contents of the expansion ROM.
    pub fn with_rom(mut self, rom: Option<Arc<[u8]>>) -> Self {
        self.rom = rom;
        self
    }

    /// The device's host address.
    pub fn bdf(&self) -> Bdf {
        self.core.bdf
    }

    /// Reads `data.len()` (1 to 8) bytes at `offset` of `bar`.
    pub fn read_bar(&self, bar: u8, offset: u64, data: &mut [u8]) {
        if bar == ROM {
            return self.read_rom(offset, data);
        }
        for (part, place) in self.parts(bar, offset, data.len()) {
            let Some(bytes) = data.get_mut(part) else {
                continue;
            };
            match place {
                Place::Table(at) => self.core.registers.lock().irq.read_table(at, bytes),
                Place::Pba(at) => self.core.registers.lock().irq.read_pba(at, bytes),
                Place::Device(at) => {
                    if let Err(error) = self.core.device.read(Region::Bar(bar), at, bytes) {
                        bytes.fill(0xff);
                        self.complain(&format!("read BAR {bar} at {at:#x}"), &error);
                    }
                }
            }
        }
    }

    /// Has the kernel signal an event of the device through the returned eventfd; `None` when it
    /// does not offer this kind ([`IrqIndex::Error`], [`IrqIndex::Request`]) for the device.
    pub fn watch(&self, kind: IrqIndex) -> Result<Option<EventFd>, CallError> {
        match self.core.device.irq_info(kind) {
            Ok(info) if info.count == 0 => return Ok(None),
            // vfio_pci_ioctl_get_irq_info: errors are reported for PCIe devices only.
            Err(error) if error.errno() == Some(libc::EINVAL) => return Ok(None),
            other => drop(other?),
        }
        let fd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let fd = fd.map_err(|source| CallError {
            call: "eventfd",
            source,
        })?;
        self.core.device.set_irqs(&IrqRequest::Trigger {
            index: kind,
            start: 0,
            fds: &[Some(&fd)],
        })?;
        Ok(Some(fd))
    }

    /// All ones behind the end of the contents.
    fn read_rom(&self, offset: u64, data: &mut [u8]) {
        let rom = self.rom.as_deref().unwrap_or_default();
        for (byte, at) in data.iter_mut().zip(offset..) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            *byte = rom.get(at).copied().unwrap_or(0xff);
        }
    }

    /// Writes `data` (1 to 8 bytes) at `offset` of `bar`. A ROM takes none.
    pub fn write_bar(&self, bar: u8, offset: u64, data: &[u8]) {
        if bar == ROM {
            return;
        }
        for (part, place) in self.parts(bar, offset, data.len()) {
            let Some(bytes) = data.get(part) else {
                continue;
            };
            match place {
                Place::Table(at) => self.core.registers.lock().irq.write_table(at, bytes),
                // The pending bits are read-only (PCI 3.0, 6.8.2.10).
                Place::Pba(_) => {}
                Place::Device(at) => {
                    if let Err(error) = self.core.device.write(Region::Bar(bar), at, bytes) {
                        self.complain(&format!("write BAR {bar} at {at:#x}"), &error);
                    }
                }
            }
        }
    }

    /// Splits an access where MSI-X table or PBA begin or end.
    fn parts(&self, bar: u8, offset: u64, len: usize) -> Vec<(std::ops::Range<usize>, Place)> {
        let place = |at: u64| {
            let inside = |what: &Option<(u8, Range)>| {
                let (_, range) = what.as_ref().filter(|(b, r)| *b == bar && r.contains(at))?;
                Some(at - range.start())
            };
            match (inside(&self.table), inside(&self.pba)) {
                (Some(at), _) => Place::Table(at),
                (None, Some(at)) => Place::Pba(at),
                (None, None) => Place::Device(at),
            }
        };
        let mut parts: Vec<(std::ops::Range<usize>, Place)> = Vec::with_capacity(1);
        for i in 0..len {
            let here = place(offset.wrapping_add(i as u64));
            match parts.last_mut() {
                Some((part, first)) if first.same_kind(&here) => part.end = i + 1,
                _ => parts.push((i..i + 1, here)),
            }
        }
        parts
    }

    fn complain(&self, what: &str, error: &CallError) {
        if self.limit.allow() {
            tracing::warn!(
                "{}: cannot {what}: {error}: {}",
                self.core.bdf,
                error.source
            );
        }
    }

    fn read_physical(&self, offset: u16, data: &mut [u8]) {
        if let Err(error) = self.core.device.read(Region::Config, offset.into(), data) {
            data.fill(0xff);
            self.complain(&format!("read configuration space at {offset:#x}"), &error);
        }
    }

    fn write_physical(&self, offset: u16, data: &[u8]) {
        if let Err(error) = self.core.device.write(Region::Config, offset.into(), data) {
            self.complain(&format!("write configuration space at {offset:#x}"), &error);
        }
    }

    fn read_owned(&self, registers: &Registers, owner: Owner, offset: u16, data: &mut [u8]) {
        match owner {
            Owner::Msi => {
                let cap = registers.config.msi_offset();
                registers.irq.read_msi(offset - cap, data);
            }
            Owner::MsixControl => put(data, offset, registers.irq.msix_control()),
            Owner::Status if registers.config.is_quiet() => {
                registers.config.read_shadow(offset, data);
            }
            Owner::Status => {
                let mut raw = [0xff; 2];
                self.read_physical(offset & !1, &mut raw);
                let status = registers.config.present_status(u16::from_le_bytes(raw));
                put(data, offset, status);
            }
            Owner::Device => self.read_physical(offset, data),
            _ => registers.config.read_shadow(offset, data),
        }
    }

    fn write_owned(&self, registers: &mut Registers, owner: Owner, offset: u16, data: &[u8]) {
        match owner {
            Owner::Fixed => {}
            Owner::Scratch => registers.config.write_shadow(offset, data),
            Owner::Command => self.write_command(registers, offset, data),
            Owner::Bars => {
                registers.config.write_bars(offset, data);
                self.commit(registers);
            }
            Owner::Rom => {
                registers.config.write_rom(offset, data);
                self.commit(registers);
            }
            Owner::Msi => {
                let cap = registers.config.msi_offset();
                registers.irq.write_msi(offset - cap, data);
            }
            Owner::MsixControl => {
                let old = registers.irq.msix_control();
                let new = merge(old, usize::from(offset & 1), data);
                registers.irq.write_msix_control(new);
            }
            Owner::PowerControl => self.write_power_control(registers, offset, data),
            Owner::DeviceControl => self.write_device_control(registers, offset, data),
            Owner::Control => self.write_control(registers, offset, data),
            Owner::Device => self.write_physical(offset, data),
            Owner::Status => {
                self.write_physical(offset, data);
                self.keep_status(registers);
            }
        }
    }

    /// For the time in which the function is quiet; while it is not, STATUS is the device's.
    fn keep_status(&self, registers: &mut Registers) {
        if registers.config.is_quiet() {
            let mut raw = [0xff; 2];
            self.read_physical(Reg::STATUS.offset(), &mut raw);
            registers.config.keep_status(u16::from_le_bytes(raw));
        }
    }

    /// COMMAND: decoders through the engine, then the bus master on the physical device, once guest
    /// RAM is mapped for it, then what it means for INTx. Nothing is decoded late and no DMA starts
    /// early.
    fn write_command(&self, registers: &mut Registers, offset: u16, data: &[u8]) {
        let (before, was_quiet) = (registers.config.command(), registers.config.is_quiet());
        registers.config.write_command(offset, data);
        self.commit(registers);
        let command = registers.config.command();
        // The bit that a driver changes most often; INTx is disabled by disarming it.
        if before.symmetric_difference(command) != Command::INTX_DISABLE {
            self.forward(registers);
        }
        let active = command.intersects(Command::MEMORY | Command::IO | Command::MASTER);
        let allowed = active && !command.contains(Command::INTX_DISABLE);
        registers.irq.allow_intx(allowed);
        if !was_quiet {
            self.keep_status(registers);
        }
    }

    /// Passes on what of the guest's COMMAND may reach the device.
    fn forward(&self, registers: &Registers) {
        let decoders = registers.config.decoders();
        let allowed = self.allowed(&registers.config);
        if let Err(error) = forward_command(self.core.device.as_ref(), decoders, allowed) {
            self.complain("pass COMMAND on to it", &error);
        }
    }

    /// What of the guest's COMMAND may reach the device. Asked at every write that keeps the bus
    /// master on, so that none gets past a closed gate. A sleeping function does not master the bus
    /// (PCI PM 1.2, 5.4.1).
    fn allowed(&self, config: &ConfigSpace) -> Command {
        let command = config.command();
        let masters = command.contains(Command::MASTER) && config.is_awake();
        match masters && self.gate.pass().is_ok() {
            true => command,
            false => command.difference(Command::MASTER),
        }
    }

    /// Also when nothing has changed: what could not be followed before may be possible now.
    fn commit(&self, registers: &Registers) {
        let programmed = registers.config.programmed();
        if let Err(error) = self.engine.commit(self.core.number, &programmed)
            && self.limit.allow()
        {
            tracing::error!(
                "{error}: {}: {}; its BARs answer where they did before",
                error.source,
                error.source.source
            );
        }
    }

    /// Device control goes to the device but for the bit that resets it.
    fn write_device_control(&self, registers: &mut Registers, offset: u16, data: &[u8]) {
        let from = usize::from(offset & 1);
        let asked = DevCtl::from_bits_retain(merge(0, from, data));
        if asked.contains(DevCtl::FLR) && registers.config.offers_function_reset() {
            // Whatever else was written would be lost in the reset.
            return self.reset(registers, "a function-level reset");
        }
        let rest = asked.difference(DevCtl::FLR).bits().to_le_bytes();
        let bytes = rest.get(from..from + data.len()).unwrap_or_default();
        self.write_control(registers, offset, bytes);
    }

    /// A 16-bit register that only the guest changes: the shadow takes what the device made of it.
    fn write_control(&self, registers: &mut Registers, offset: u16, data: &[u8]) {
        self.write_physical(offset, data);
        let (aligned, mut raw) = (offset & !1, [0xff; 2]);
        self.read_physical(aligned, &mut raw);
        registers.config.write_shadow(aligned, &raw);
    }

    /// The power state stays in the shadow, the device in D0. Asleep, the BARs are not decoded and
    /// the bus is not mastered; waking up resets the function unless it keeps its state.
    fn write_power_control(&self, registers: &mut Registers, offset: u16, data: &[u8]) {
        let aligned = offset & !1;
        let mut raw = [0; 2];
        registers.config.read_shadow(aligned, &mut raw);
        let old = PmControl::from_bits_retain(u16::from_le_bytes(raw));
        let asked = merge(old.bits(), usize::from(offset & 1), data);
        let state = PmControl::from_bits_retain(asked).state();
        if !registers.config.has_power_state(state) {
            // Such a write changes nothing (PCI PM 1.2, 3.2.4).
            return;
        }
        let new = old.with_state(state);
        let raw = new.bits().to_le_bytes();
        registers.config.write_shadow(aligned, &raw);
        let wakes = old.state() == PowerState::D3Hot && new.state() == PowerState::D0;
        if wakes && !new.contains(PmControl::NO_SOFT_RESET) {
            self.reset(registers, "waking up from D3hot");
        } else if old.state() != new.state() {
            self.commit(registers);
            self.forward(registers);
        }
    }

    /// A function that cannot be reset alone is reset once its lock is free, see
    /// [`PciFunction::config_write`].
    fn reset(&self, registers: &mut Registers, why: &'static str) {
        let (config, irq) = (&mut registers.config, &mut registers.irq);
        if self.core.device.can_reset() {
            if let Err(error) = reset_function(self.core.device.as_ref(), config, irq) {
                self.complain(&format!("do {why}"), &error);
            }
            // Also when it failed: the kernel may have got as far as revoking.
            self.remap();
        } else {
            irq.reset();
            config.reset();
            // Should it not be reset after all: the guest takes it for quiet.
            let decoders = config.decoders();
            let quiet = forward_command(self.core.device.as_ref(), decoders, Command::empty());
            if let Err(error) = quiet {
                self.complain("turn its bus mastering off", &error);
            }
            registers.wanted_reset = Some(why);
        }
        self.keep_status(registers);
        self.commit(registers);
    }

    fn hot_reset(&self, why: &str) {
        let Err(error) = self.hot_reset.reset(&self.core) else {
            return;
        };
        let may_tell = match error {
            HotResetError::Call(_) => self.limit.allow(),
            HotResetError::Remap(error) => return self.complain_of_remap(&error),
            // It will be the same each time.
            _ => !self.told_no_reset.swap(true, Ordering::Relaxed),
        };
        if may_tell {
            tracing::warn!(
                "{}: the guest asked for {why}, and the host does not reset this function: {}; its registers are reset, the device is not",
                self.core.bdf,
                chain(&error)
            );
        }
    }

    fn remap(&self) {
        if let Err(error) = self.engine.remap(self.core.number) {
            self.complain_of_remap(&error);
        }
    }

    fn complain_of_remap(&self, error: &CommitError) {
        if self.limit.allow() {
            tracing::warn!(
                "after a reset: {}; other devices cannot reach it by DMA",
                chain(error)
            );
        }
    }
}

/// Fills `data`, which begins at `offset` of a word-aligned register, from the register's `value`.
fn put(data: &mut [u8], offset: u16, value: u16) {
    let bytes = value.to_le_bytes();
    let part = bytes.iter().skip(usize::from(offset & 1));
    data.iter_mut().zip(part).for_each(|(to, from)| *to = *from);
}

/// `old` with `data` written over its bytes from `at` on.
fn merge(old: u16, at: usize, data: &[u8]) -> u16 {
    let mut bytes = old.to_le_bytes();
    image::write(&mut bytes, at as u16, data);
    u16::from_le_bytes(bytes)
}

/// Who answers an access to a BAR that trapped, and at which offset of theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Table(u64),
    Pba(u64),
    Device(u64),
}

impl Place {
    fn same_kind(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }
}

/// Parts of an access with one owner each, as index ranges into its data.
fn owned_parts(
    config: &ConfigSpace,
    offset: u16,
    len: usize,
) -> Vec<(std::ops::Range<usize>, u16, Owner)> {
    let mut parts: Vec<(std::ops::Range<usize>, u16, Owner)> = Vec::with_capacity(1);
    for i in 0..len {
        let at = offset.saturating_add(i as u16);
        let owner = config.owner(at).unwrap_or(Owner::Fixed);
        match parts.last_mut() {
            Some((part, _, first)) if *first == owner => part.end = i + 1,
            _ => parts.push((i..i + 1, at, owner)),
        }
    }
    parts
}

impl PciFunction for AssignedFunction {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let registers = self.core.registers.lock();
        for (part, at, owner) in owned_parts(&registers.config, offset, data.len()) {
            if let Some(bytes) = data.get_mut(part) {
                self.read_owned(&registers, owner, at, bytes);
            }
        }
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        let wanted_reset = {
            let registers = &mut *self.core.registers.lock();
            for (part, at, owner) in owned_parts(&registers.config, offset, data.len()) {
                if let Some(bytes) = data.get(part) {
                    self.write_owned(registers, owner, at, bytes);
                }
            }
            registers.wanted_reset.take()
        };
        if let Some(why) = wanted_reset {
            self.hot_reset(why);
        }
    }
}
