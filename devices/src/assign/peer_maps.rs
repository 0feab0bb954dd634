//! Mapping BARs in the IOMMU for other devices to reach, while the guest runs.
//!
//! Host kernels before Linux 6.15 take seconds for each 16 GiB, and nobody needs the mappings before
//! a device masters the bus. So they are made by a thread of their own ([`BarEngine::map_peers`]), and
//! the gate that a device passes before it masters the bus ([`super::ports::DmaGate`]) stays closed
//! meanwhile.
//!
//! Invariants, until all is mapped:
//! * The engine is not locked during a mapping: what the guest changes is followed at once.
//! * Nobody else changes mappings of BARs: [`BarEngine::commit`] leaves them as they are.
//! * Whatever the guest changed meanwhile is made up for before the end: then the IOMMU is as if it
//!   had been followed all the time.

use super::commit::{BarEngine, CommitError, Space, explain, mapped};
use super::plan::{AreaId, BarState, Iova, Op, answers, plan};
use super::ports::{CallError, MapRequest, Slot};

/// A device whose BARs could not be mapped.
#[derive(Debug)]
pub struct Unreachable {
    /// Its index in the VM.
    pub device: usize,
    /// The kernel's reason.
    pub error: CommitError,
}

/// One mapping that is to be made.
struct Step {
    id: AreaId,
    request: MapRequest,
}

impl BarEngine {
    /// Says that the BARs of these devices are to be reached. They are mapped by
    /// [`BarEngine::map_peers`]; until then the IOMMU is left alone.
    pub fn begin_peers(&self, devices: impl Fn(usize) -> bool) {
        let state = &mut *self.state.lock();
        let keyed = state.memory.keys.iter().zip(&mut state.memory.bars);
        for ((key, _), bar) in keyed {
            bar.peer_to_peer = devices(key.device);
        }
        state.mapping_peers = true;
    }

    /// Maps what is to be reached: each BAR where it answers, or, while the guest has not decoded it
    /// yet, where it was placed. `give_up` is asked about a device that cannot be reached; its error
    /// ends the work, otherwise the others go on. `is_over` is asked before each mapping.
    pub fn map_peers<E: From<CommitError>>(
        &self,
        mut give_up: impl FnMut(Unreachable) -> Result<(), E>,
        is_over: impl Fn() -> bool,
    ) -> Result<(), E> {
        while let Some(step) = self.next_step()? {
            if is_over() {
                break;
            }
            let done = self.iommu.map(&step.request);
            if let Some(device) = self.record(&step, done)? {
                give_up(device)?;
            }
        }
        Ok(())
    }

    /// Takes over what came of a mapping. Of a device that cannot be reached whole nothing is.
    fn record(
        &self,
        step: &Step,
        done: Result<(), CallError>,
    ) -> Result<Option<Unreachable>, CommitError> {
        let state = &mut *self.state.lock();
        let (id, address) = (step.id, step.request.iova);
        let Err(source) = done else {
            state.clock += 1;
            let age = state.clock;
            let bar = state.memory.bars.get_mut(id.bar);
            if let Some(area) = bar.and_then(|bar| bar.areas.get_mut(id.area)) {
                area.iovas.push(Iova { address, age });
            }
            return Ok(None);
        };
        let memory = &mut state.memory;
        let error = explain(memory, id, Op::Map(id, address), source);
        let key = memory.keys.get(id.bar);
        let device = key.map_or(usize::MAX, |(key, _)| key.device);
        let keyed = memory.keys.iter().zip(&mut memory.bars);
        for (_, bar) in keyed.filter(|((key, _), _)| key.device == device) {
            bar.peer_to_peer = false;
        }
        let unmaps = mapped(memory, device).into_iter();
        let unmaps: Vec<Op> = unmaps.map(|(id, iova)| Op::Unmap(id, iova)).collect();
        self.apply(memory, &unmaps, &mut state.clock)?;
        Ok(Some(Unreachable { device, error }))
    }

    /// The next mapping to be made, after unmapping what is in its way. `None` when all is as it is
    /// to be; from then on changes are followed in the IOMMU at once.
    fn next_step(&self) -> Result<Option<Step>, CommitError> {
        let state = &mut *self.state.lock();
        let bars = as_if_decoded(&state.memory);
        let mut ops = plan(&bars, &answers(&bars, &state.memory.windows), false);
        ops.retain(Op::is_iommu);
        let is_map = |op: &Op| matches!(op, Op::Map(..));
        let maps = ops.iter().position(is_map).unwrap_or(ops.len());
        let (unmaps, maps) = ops.split_at(maps);
        self.apply(&mut state.memory, unmaps, &mut state.clock)?;
        let step = maps.iter().find_map(|op| {
            let Op::Map(id, iova) = *op else { return None };
            let memory = self.mappings.get(id.bar)?.get(id.area)?.clone();
            let request = MapRequest { iova, memory };
            Some(Step { id, request })
        });
        state.mapping_peers = step.is_some();
        Ok(step)
    }
}

/// The BARs as the guest has programmed them. Those that it does not decode, and that are mapped
/// nowhere yet, count as decoded where they were placed, after all others.
fn as_if_decoded(memory: &Space) -> Vec<BarState<Slot>> {
    let homed = memory.bars.iter().zip(&memory.homes);
    let bars = homed.map(|(bar, home)| {
        let mut bar = bar.clone();
        let is_mapped = bar.areas.iter().all(|area| !area.iovas.is_empty());
        if !bar.decode && !is_mapped {
            (bar.programmed, bar.decode, bar.since) = (*home, true, u64::MAX);
        }
        bar
    });
    bars.collect()
}
