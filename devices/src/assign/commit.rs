//! The BAR engine: what is installed for every BAR of every assigned device, and how it follows
//! what the guests program.
//!
//! Invariants:
//! * One lock covers the planning and the carrying out of a change; a change either happens whole
//!   or leaves slots, mappings and answers as they were.
//! * A slot shows a BAR only where that BAR answers, or, while its decode is off, where it last
//!   answered and nothing else does.
//! * While BARs are still to be mapped for peers ([`super::peer_maps`]) changes leave the IOMMU alone.
//! * Accesses that trap during a change are answered through the device's descriptor, by the map
//!   of decoded BARs, which has a lock of its own that no system call is made under.

use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::plan::{AreaId, AreaState, BarState, Iova, Op, answers, plan};
use super::ports::{CallError, IommuBackend, MapRequest, MemSlots, Slot};
use crate::pci::address::Bdf;
use crate::pci::bar::BarInfo;
use crate::pci::spec::BAR_COUNT;
use crate::range::Range;
use crate::rate::RateLimit;
use crate::sys::HostRange;

/// A BAR as the engine takes it over at boot.
#[derive(Debug)]
pub struct EngineBar {
    /// Index of the device in the VM.
    pub device: usize,
    /// Its host address, for messages.
    pub bdf: Bdf,
    /// Index, kind and size.
    pub info: BarInfo,
    /// Where it was placed.
    pub address: u64,
    /// Decode off takes its slots away.
    pub strict: bool,
    /// Mapped parts: BAR-relative range and the mapping of exactly that length.
    pub areas: Vec<(Range, HostRange)>,
}

/// A BAR of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarKey {
    /// Index of the device in the VM.
    pub device: usize,
    /// BAR index.
    pub bar: u8,
}

/// What the guest has programmed into one function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Programmed {
    /// COMMAND.MEM.
    pub memory: bool,
    /// COMMAND.IO.
    pub io: bool,
    /// Address of each BAR, by the index of its first register, and of the ROM.
    pub addresses: Addresses,
}

/// Addresses of BARs 0 to 5 and of the expansion ROM.
pub type Addresses = [u64; BAR_COUNT + 1];

/// The number that the expansion ROM has among the BARs.
pub const ROM: u8 = BAR_COUNT as u8;

/// A slot or mapping that could not be changed.
#[derive(Debug, thiserror::Error)]
#[error(
    "{bdf}: BAR {bar}, area {area}: cannot {action} {at:#x}{}",
    remedy(source)
)]
pub struct CommitError {
    /// The device.
    pub bdf: Bdf,
    /// BAR index.
    pub bar: u8,
    /// The part of the BAR, BAR-relative.
    pub area: Range,
    /// What was tried.
    pub action: &'static str,
    /// The guest-physical or IO-virtual address.
    pub at: u64,
    /// The kernel's reason.
    pub source: CallError,
}

fn remedy(source: &CallError) -> &'static str {
    match (source.call, source.errno()) {
        ("VFIO_IOMMU_MAP_DMA", Some(libc::ENOSPC)) => {
            " (raise the limit with `echo 1000000 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit`)"
        }
        ("VFIO_IOMMU_MAP_DMA", Some(libc::EFAULT)) => {
            " (the device's memory decode was turned off behind our back, or it is resetting)"
        }
        ("IOMMU_IOAS_MAP_FILE", Some(libc::ENODEV)) => {
            " (the device's memory decode was turned off behind our back, or it is resetting)"
        }
        ("VFIO_IOMMU_MAP_DMA" | "IOMMU_IOAS_MAP_FILE", _) => " (p2p=off does without it)",
        _ => "",
    }
}

/// Decoded BARs of one address space, ascending.
type DecodeMap = RwLock<Vec<(Range, BarKey)>>;

pub(super) struct Space {
    pub(super) windows: Vec<Range>,
    pub(super) keys: Vec<(BarKey, Bdf)>,
    pub(super) bars: Vec<BarState<Slot>>,
    /// Where each was placed.
    pub(super) homes: Vec<u64>,
}

impl Space {
    fn new(windows: Vec<Range>, bars: &[EngineBar]) -> Self {
        let key = |bar: &EngineBar| {
            let (device, bar_index) = (bar.device, bar.info.index);
            let bar = bar_index;
            (BarKey { device, bar }, bar_bdf(device, bars))
        };
        Self {
            windows,
            keys: bars.iter().map(key).collect(),
            bars: bars.iter().map(initial_state).collect(),
            homes: bars.iter().map(|bar| bar.address).collect(),
        }
    }

    /// The present places of all BARs that answer.
    fn decoded(&self) -> Vec<(Range, BarKey)> {
        let found = answers(&self.bars, &self.windows);
        let keyed = found.into_iter().zip(&self.bars).zip(&self.keys);
        let mut map: Vec<_> = keyed
            .filter_map(|((answer, bar), (key, _))| Some((Range::new(answer?, bar.size)?, *key)))
            .collect();
        map.sort_unstable_by_key(|(range, _)| *range);
        map
    }

    /// Takes over what `device` has programmed; `clock` stamps BARs that newly answer somewhere.
    fn program(&mut self, device: usize, decode: bool, addresses: &Addresses, clock: u64) {
        for ((key, _), bar) in self.keys.iter().zip(&mut self.bars) {
            let Some(address) = addresses.get(usize::from(key.bar)) else {
                continue;
            };
            if key.device != device || (bar.decode == decode && bar.programmed == *address) {
                continue;
            }
            if decode {
                bar.since = clock;
            }
            bar.decode = decode;
            bar.programmed = *address;
        }
    }
}

fn bar_bdf(device: usize, bars: &[EngineBar]) -> Bdf {
    let found = bars.iter().find(|bar| bar.device == device);
    found.map(|bar| bar.bdf).unwrap_or_default()
}

fn initial_state(bar: &EngineBar) -> BarState<Slot> {
    let areas = bar.areas.iter().map(|(range, _)| AreaState {
        range: *range,
        slot: None,
        iovas: Vec::new(),
    });
    BarState {
        size: bar.info.size,
        programmed: bar.address,
        decode: false,
        since: 0,
        strict: bar.strict,
        peer_to_peer: false,
        areas: areas.collect(),
    }
}

pub(super) struct State {
    pub(super) memory: Space,
    io: Space,
    /// Counts changes; orders overlapping BARs and the age of mappings.
    pub(super) clock: u64,
    /// BARs are being mapped for peers: changes leave the IOMMU alone.
    pub(super) mapping_peers: bool,
}

/// See the module.
pub struct BarEngine {
    pub(super) state: Mutex<State>,
    memory_map: DecodeMap,
    io_map: DecodeMap,
    /// Mapping of every area, in the order of the memory BARs.
    pub(super) mappings: Vec<Vec<HostRange>>,
    slots: Arc<dyn MemSlots>,
    pub(super) iommu: Arc<dyn IommuBackend>,
    limit: RateLimit,
}

impl BarEngine {
    /// An engine over all BARs of all devices. BARs answer only inside `memory_windows` and
    /// `io_windows`. Nothing is installed yet.
    pub fn new(
        bars: Vec<EngineBar>,
        memory_windows: Vec<Range>,
        io_windows: Vec<Range>,
        slots: Arc<dyn MemSlots>,
        iommu: Arc<dyn IommuBackend>,
    ) -> Self {
        let (io, memory): (Vec<_>, Vec<_>) = bars.into_iter().partition(|b| b.info.is_io());
        let state = State {
            memory: Space::new(memory_windows, &memory),
            io: Space::new(io_windows, &io),
            clock: 0,
            mapping_peers: false,
        };
        let mappings = memory
            .into_iter()
            .map(|bar| bar.areas.into_iter().map(|(_, map)| map).collect());
        Self {
            state: Mutex::new(state),
            memory_map: RwLock::default(),
            io_map: RwLock::default(),
            mappings: mappings.collect(),
            slots,
            iommu,
            limit: RateLimit::default(),
        }
    }

    /// Puts every area into a slot at the address where its BAR was placed, so that a guest's
    /// first COMMAND.MEM=1 finds everything there. (With strict decode they come then.)
    pub fn install_slots(&self) -> Result<(), CommitError> {
        let state = &mut *self.state.lock();
        let ops = plan(
            &state.memory.bars,
            &placed(&state.memory, |bar| !bar.strict),
            false,
        );
        self.apply(&mut state.memory, &ops, &mut state.clock)
    }

    /// Follows what the guest wrote into COMMAND or the BARs of `device`. On error nothing has
    /// changed: the BARs answer where they did before the write.
    pub fn commit(&self, device: usize, programmed: &Programmed) -> Result<(), CommitError> {
        let state = &mut *self.state.lock();
        state.clock += 1;
        let addresses = &programmed.addresses;
        let memory = &mut state.memory;
        let before: Vec<_> = memory.bars.iter().map(guest_side).collect();
        memory.program(device, programmed.memory, addresses, state.clock);
        let cheap_unmap = self.iommu.nature().cheap_unmap;
        let wanted = answers(&memory.bars, &memory.windows);
        let mut ops = plan(&memory.bars, &wanted, cheap_unmap);
        let mapping_peers = state.mapping_peers;
        let is_ours = |op: &Op| !(mapping_peers && op.is_iommu());
        ops.retain(is_ours);
        *self.memory_map.write() = memory.decoded();
        let result = self.apply(memory, &ops, &mut state.clock);
        if result.is_err() {
            for (bar, old) in memory.bars.iter_mut().zip(before) {
                (bar.programmed, bar.decode, bar.since) = old;
            }
            self.repair(memory, is_ours, &mut state.clock);
            *self.memory_map.write() = memory.decoded();
            return result;
        }
        // Ports trap: nothing can fail any more.
        let io = &mut state.io;
        io.program(device, programmed.io, addresses, state.clock);
        *self.io_map.write() = io.decoded();
        Ok(())
    }

    /// After a reset of `device`: its dma-bufs were revoked, so that what is mapped through them
    /// faults until it is unmapped and mapped anew. What cannot be is mapped by the next commit at
    /// which it answers; the first reason is returned.
    pub fn remap(&self, device: usize) -> Result<(), CommitError> {
        if !self.iommu.nature().bars_by_dmabuf {
            return Ok(());
        }
        let state = &mut *self.state.lock();
        let mut result = Ok(());
        for (id, iova) in mapped(&state.memory, device) {
            let remap = [Op::Unmap(id, iova), Op::Map(id, iova)]
                .into_iter()
                .try_for_each(|op| {
                    self.perform(&mut state.memory, op, &mut state.clock)
                        .map(drop)
                });
            result = result.and(remap);
        }
        result
    }

    /// The BAR that answers at a guest-physical address, and the offset in it.
    pub fn find_memory(&self, gpa: u64) -> Option<(BarKey, u64)> {
        find(&self.memory_map.read(), gpa)
    }

    /// The BAR that answers at an I/O port, and the offset in it.
    pub fn find_io(&self, port: u64) -> Option<(BarKey, u64)> {
        find(&self.io_map.read(), port)
    }

    /// Carries out `ops` in order; takes back what was done when one fails.
    pub(super) fn apply(
        &self,
        memory: &mut Space,
        ops: &[Op],
        clock: &mut u64,
    ) -> Result<(), CommitError> {
        let mut undo = Vec::new();
        for op in ops {
            match self.perform(memory, *op, clock) {
                Ok(inverse) => undo.extend(inverse),
                Err(error) => {
                    self.take_back(memory, undo, clock);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn take_back(&self, memory: &mut Space, undo: Vec<Op>, clock: &mut u64) {
        for op in undo.into_iter().rev() {
            if let Err(error) = self.perform(memory, op, clock) {
                self.complain(&error);
            }
        }
    }

    /// After a change that failed: what could not be taken back at first is tried once more, in the
    /// order that brings everything to where it was. Else a slot might lie where another BAR answers.
    fn repair(&self, memory: &mut Space, is_wanted: impl Fn(&Op) -> bool, clock: &mut u64) {
        let wanted = answers(&memory.bars, &memory.windows);
        let ops = plan(&memory.bars, &wanted, self.iommu.nature().cheap_unmap);
        for op in ops.into_iter().filter(is_wanted) {
            // What cannot be restored now either traps (slot) or faults (mapping).
            if let Err(error) = self.perform(memory, op, clock) {
                self.complain(&error);
            }
        }
    }

    fn complain(&self, error: &CommitError) {
        if self.limit.allow() {
            tracing::error!("while undoing a change: {error}: {}", error.source.source);
        }
    }

    /// Carries out one operation and says how to undo it.
    fn perform(
        &self,
        memory: &mut Space,
        op: Op,
        clock: &mut u64,
    ) -> Result<Option<Op>, CommitError> {
        let (Op::ClearSlot(id)
        | Op::MoveSlot(id, _)
        | Op::SetSlot(id, _)
        | Op::Unmap(id, _)
        | Op::Map(id, _)) = op;
        let mapping = self.mappings.get(id.bar).and_then(|m| m.get(id.area));
        let area = memory.bars.get_mut(id.bar);
        let area = area.and_then(|bar| bar.areas.get_mut(id.area));
        let (Some(area), Some(mapping)) = (area, mapping) else {
            return Ok(None);
        };
        *clock += 1;
        let ports = (self.slots.as_ref(), self.iommu.as_ref());
        step(area, mapping, op, *clock, ports).map_err(|source| explain(memory, id, op, source))
    }
}

/// The addresses at which the BARs were placed, as if they answered there.
fn placed(memory: &Space, which: impl Fn(&BarState<Slot>) -> bool) -> Vec<Option<u64>> {
    let bars = memory.bars.iter();
    bars.map(|bar| which(bar).then_some(bar.programmed))
        .collect()
}

/// Every IO-virtual address that maps an area of `device`.
pub(super) fn mapped(memory: &Space, device: usize) -> Vec<(AreaId, u64)> {
    let keyed = memory.keys.iter().zip(&memory.bars).enumerate();
    let mine = keyed.filter(|(_, ((key, _), _))| key.device == device);
    let mut found = Vec::new();
    for (bar, (_, state)) in mine {
        for (area, installed) in state.areas.iter().enumerate() {
            let id = AreaId { bar, area };
            found.extend(installed.iovas.iter().map(|iova| (id, iova.address)));
        }
    }
    found
}

fn guest_side(bar: &BarState<Slot>) -> (u64, bool, u64) {
    (bar.programmed, bar.decode, bar.since)
}

fn find(map: &[(Range, BarKey)], address: u64) -> Option<(BarKey, u64)> {
    let after = map.partition_point(|(range, _)| range.start() <= address);
    let (range, key) = map.get(after.checked_sub(1)?)?;
    range
        .contains(address)
        .then(|| (*key, address - range.start()))
}

/// One operation on one area: the call, then the state that follows from it, then its inverse.
fn step(
    area: &mut AreaState<Slot>,
    mapping: &HostRange,
    op: Op,
    age: u64,
    (slots, iommu): (&dyn MemSlots, &dyn IommuBackend),
) -> Result<Option<Op>, CallError> {
    Ok(match (op, area.slot) {
        (Op::SetSlot(id, gpa), None) => {
            area.slot = Some((slots.set(gpa, mapping)?, gpa));
            Some(Op::ClearSlot(id))
        }
        (Op::MoveSlot(id, gpa), Some((slot, old))) => {
            slots.move_to(slot, gpa)?;
            area.slot = Some((slot, gpa));
            Some(Op::MoveSlot(id, old))
        }
        (Op::ClearSlot(id), Some((slot, old))) => {
            slots.clear(slot)?;
            area.slot = None;
            Some(Op::SetSlot(id, old))
        }
        (Op::Map(id, iova), _) => {
            let memory = mapping.clone();
            iommu.map(&MapRequest { iova, memory })?;
            area.iovas.push(Iova { address: iova, age });
            Some(Op::Unmap(id, iova))
        }
        (Op::Unmap(id, iova), _) => {
            iommu.unmap(Range::from_bounds(iova, iova + area.range.len()))?;
            area.iovas.retain(|known| known.address != iova);
            Some(Op::Map(id, iova))
        }
        // The planner makes none of these: the slot is there, or gone, already.
        (Op::SetSlot(..), Some(_)) | (Op::MoveSlot(..) | Op::ClearSlot(_), None) => None,
    })
}

pub(super) fn explain(memory: &Space, id: AreaId, op: Op, source: CallError) -> CommitError {
    let (key, bdf) = memory.keys.get(id.bar).copied().unwrap_or((
        BarKey {
            device: usize::MAX,
            bar: u8::MAX,
        },
        Bdf::default(),
    ));
    let area = memory.bars.get(id.bar).and_then(|b| b.areas.get(id.area));
    let (action, at) = match op {
        Op::ClearSlot(_) => {
            let gpa = area.and_then(|a| a.slot).map_or(0, |(_, gpa)| gpa);
            ("remove its memslot at", gpa)
        }
        Op::MoveSlot(_, gpa) => ("move its memslot to", gpa),
        Op::SetSlot(_, gpa) => ("make a memslot for it at", gpa),
        Op::Map(_, iova) => ("map it in the IOMMU at", iova),
        Op::Unmap(_, iova) => ("unmap it in the IOMMU at", iova),
    };
    CommitError {
        bdf,
        bar: key.bar,
        area: area.map_or(Range::from_bounds(0, 0), |a| a.range),
        action,
        at,
        source,
    }
}
