//! Memslots, IOMMU, interrupt routes and the log of all calls.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::device::{FakeDevice, FakeDeviceSpec};
use crate::assign::ports::{
    CallError, IntxLines, IommuBackend, IommuNature, MapRequest, MemSlots, MsiMessage, MsiRoutes,
    OpenError, Slot, VectorChange, VectorId, VfioDevice,
};
use crate::pci::address::Bdf;
use crate::range::Range;
use crate::sys::{HostRange, is_signalled};

/// A call as it went to the fake kernel (failed ones included).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A device was opened.
    Open(Bdf),
    /// A memslot was made: guest-physical range.
    SetSlot(Range),
    /// A memslot was moved: from, to.
    MoveSlot(Range, u64),
    /// A memslot was removed.
    ClearSlot(Range),
    /// Pages of guest RAM were allocated: guest-physical range.
    Populate(Range),
    /// A DMA mapping was made.
    Map(Range),
    /// DMA mappings were removed.
    Unmap(Range),
    /// One update of the routing table with so many vectors connected and disconnected.
    Routes {
        /// Vectors with a message.
        connected: usize,
        /// Vectors without.
        disconnected: usize,
    },
    /// An INTx line was connected or disconnected.
    Intx(u32, bool),
    /// `VFIO_DEVICE_SET_IRQS`: device, kind as its index, first vector, armed or not for each.
    SetIrqs(Bdf, &'static str, u32, Vec<bool>),
    /// A write into a device's physical configuration space.
    ConfigWrite(Bdf, u64, Vec<u8>),
    /// `VFIO_DEVICE_RESET`.
    Reset(Bdf),
    /// `VFIO_DEVICE_PCI_HOT_RESET`, by this device.
    HotReset(Bdf),
    /// `VFIO_DEVICE_FEATURE_DMA_BUF`.
    Export(Bdf),
}

/// How many calls of the expensive classes a log holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Memslot calls.
    pub slots: usize,
    /// DMA mappings made.
    pub maps: usize,
    /// DMA mappings removed.
    pub unmaps: usize,
    /// Routing-table updates.
    pub routes: usize,
    /// Interrupt set-ups.
    pub irqs: usize,
}

struct Mapping {
    memory: HostRange,
    /// It was made through a dma-buf that was revoked since.
    dead: bool,
}

/// A connected vector. The irqfd stays that of its connection, also when the message changes.
struct Routed {
    message: MsiMessage,
    trigger: EventFd,
}

/// drivers/vfio/pci/vfio_pci_dmabuf.c
pub(super) struct Dmabuf {
    pub owner: Bdf,
    /// The device does not decode, or is being reset.
    pub revoked: bool,
}

#[derive(Default)]
struct State {
    log: Vec<Event>,
    /// These calls, by number, fail with this errno.
    fail_at: Option<(std::ops::Range<usize>, i32)>,
    fail_map: Option<(usize, i32)>,
    failed: Option<Event>,
    calls: usize,
    next_slot: u32,
    slots: BTreeMap<u32, (Range, HostRange)>,
    mappings: BTreeMap<u64, Mapping>,
    /// Host-virtual addresses of BARs.
    bars: Vec<Range>,
    dmabufs: BTreeMap<RawFd, Dmabuf>,
    routes: BTreeMap<VectorId, Routed>,
    intx: Vec<u32>,
}

/// See the module.
pub struct FakeKernel {
    state: Mutex<State>,
    iova_ranges: Vec<Range>,
    mapping_limit: usize,
    nature: IommuNature,
    devices: BTreeMap<Bdf, FakeDeviceSpec>,
    opened: Mutex<BTreeMap<Bdf, Arc<FakeDevice>>>,
}

fn refused(call: &'static str, errno: i32) -> CallError {
    CallError {
        call,
        source: io::Error::from_raw_os_error(errno),
    }
}

impl FakeKernel {
    /// A kernel with these devices, a 48-bit IOMMU and 65535 mappings, as type1 is.
    pub fn new(devices: Vec<FakeDeviceSpec>) -> Arc<Self> {
        Self::with_nature(devices, IommuNature::default())
    }

    /// The same with an IOMMU backend of another nature.
    pub fn with_nature(devices: Vec<FakeDeviceSpec>, nature: IommuNature) -> Arc<Self> {
        let usable = vec![
            Range::from_bounds(0, 0xfee0_0000),
            Range::from_bounds(0xfef0_0000, 1 << 48),
        ];
        Self::with_limits(devices, nature, usable, 65535)
    }

    /// The same with other usable IO-virtual addresses and another limit of mappings.
    pub fn with_limits(
        devices: Vec<FakeDeviceSpec>,
        nature: IommuNature,
        iova_ranges: Vec<Range>,
        mapping_limit: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            iova_ranges,
            mapping_limit,
            nature,
            devices: devices.into_iter().map(|spec| (spec.bdf, spec)).collect(),
            opened: Mutex::default(),
        })
    }

    /// Lets the call after `after` more calls fail with `errno`, once.
    pub fn fail_after(&self, after: usize, errno: i32) {
        self.fail_run(after, 1, errno);
    }

    /// Lets `count` calls fail with `errno`, those after `after` more calls.
    pub fn fail_run(&self, after: usize, count: usize, errno: i32) {
        let state = &mut *self.state.lock();
        let first = state.calls + after;
        state.fail_at = Some((first..first + count, errno));
    }

    /// Lets the DMA mapping after `after` more of them fail with `errno`, once.
    pub fn fail_map(&self, after: usize, errno: i32) {
        self.state.lock().fail_map = Some((after, errno));
    }

    /// The call that failed as asked for, last.
    pub fn failed(&self) -> Option<Event> {
        self.state.lock().failed.clone()
    }

    /// Whether a failure asked for has not happened yet; forgets it.
    pub fn take_pending_failure(&self) -> bool {
        self.state.lock().fail_at.take().is_some()
    }

    /// The log so far; empties it.
    pub fn take_log(&self) -> Vec<Event> {
        std::mem::take(&mut self.state.lock().log)
    }

    /// Counts the log so far; empties it.
    pub fn take_tally(&self) -> Tally {
        let mut tally = Tally::default();
        for event in self.take_log() {
            match event {
                Event::SetSlot(_) | Event::MoveSlot(..) | Event::ClearSlot(_) => tally.slots += 1,
                Event::Map(_) => tally.maps += 1,
                Event::Unmap(_) => tally.unmaps += 1,
                Event::Routes { .. } => tally.routes += 1,
                Event::SetIrqs(..) => tally.irqs += 1,
                _ => {}
            }
        }
        tally
    }

    /// Guest-physical range and host-virtual address of every slot, ascending.
    pub fn slots(&self) -> Vec<(Range, u64)> {
        let state = self.state.lock();
        let mut slots: Vec<_> = state
            .slots
            .values()
            .map(|(range, memory)| (*range, memory.address()))
            .collect();
        slots.sort_unstable();
        slots
    }

    /// IO-virtual range and host-virtual address of every mapping, ascending.
    pub fn mappings(&self) -> Vec<(Range, u64)> {
        let state = self.state.lock();
        let mappings = state.mappings.iter().filter_map(|(iova, mapping)| {
            let memory = &mapping.memory;
            Some((Range::new(*iova, memory.len())?, memory.address()))
        });
        mappings.collect()
    }

    /// How many mappings fault, since their dma-buf was revoked after they were made.
    pub fn dead_mappings(&self) -> usize {
        let state = self.state.lock();
        state.mappings.values().filter(|m| m.dead).count()
    }

    /// The message of a vector, if it is connected.
    pub fn route(&self, id: VectorId) -> Option<MsiMessage> {
        let state = self.state.lock();
        state.routes.get(&id).map(|routed| routed.message)
    }

    /// Whether the vector is connected and its eventfd was signalled since the last time: the guest
    /// has got its message.
    pub fn take_delivery(&self, id: VectorId) -> bool {
        let state = self.state.lock();
        let routed = state.routes.get(&id);
        routed.is_some_and(|routed| is_signalled(&routed.trigger) && routed.trigger.read().is_ok())
    }

    /// How many vectors are connected.
    pub fn route_count(&self) -> usize {
        self.state.lock().routes.len()
    }

    /// The opened device.
    pub fn device(&self, bdf: Bdf) -> Option<Arc<FakeDevice>> {
        self.opened.lock().get(&bdf).cloned()
    }

    /// Logs a call and fails it when its turn has come.
    pub(super) fn call(&self, call: &'static str, event: Event) -> Result<(), CallError> {
        let state = &mut *self.state.lock();
        state.log.push(event.clone());
        state.calls += 1;
        if let (Event::Map(_), Some((left, errno))) = (&event, &mut state.fail_map) {
            let errno = *errno;
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => {
                    state.fail_map = None;
                    state.failed = Some(event);
                    return Err(refused(call, errno));
                }
            }
        }
        let Some((failing, errno)) = &state.fail_at else {
            return Ok(());
        };
        let (number, errno, last) = (state.calls - 1, *errno, failing.end - 1);
        if number < failing.start {
            return Ok(());
        }
        if number >= last {
            state.fail_at = None;
        }
        state.failed = Some(event);
        Err(refused(call, errno))
    }

    /// madvise(2) with MADV_POPULATE_WRITE on guest RAM at `range`.
    pub fn populate(&self, range: Range) -> io::Result<()> {
        let done = self.call("madvise", Event::Populate(range));
        done.map_err(|error| error.source)
    }

    /// `range` of host-virtual addresses shows a BAR.
    pub(super) fn add_bar(&self, range: Range) {
        self.state.lock().bars.push(range);
    }

    /// `file` is a dma-buf of a device from now on.
    pub(super) fn add_dmabuf(&self, file: &OwnedFd, dmabuf: Dmabuf) {
        self.state.lock().dmabufs.insert(file.as_raw_fd(), dmabuf);
    }

    /// vfio_pci_dma_buf_move: what is mapped through dma-bufs of `owner` is dead for good; they
    /// can be mapped anew unless they stay `revoked`.
    pub(super) fn revoke(&self, owner: Bdf, revoked: bool) {
        let state = &mut *self.state.lock();
        for (fd, dmabuf) in &mut state.dmabufs {
            if dmabuf.owner != owner {
                continue;
            }
            dmabuf.revoked = revoked;
            for mapping in state.mappings.values_mut() {
                let file = mapping.memory.dmabuf().map(|(file, _)| file.as_raw_fd());
                mapping.dead |= file == Some(*fd);
            }
        }
    }

    /// Memory can be mapped by address; a BAR only through a dma-buf, where the backend is such.
    fn check_memory(&self, memory: &HostRange) -> Result<(), i32> {
        let state = self.state.lock();
        let is_bar = state.bars.iter().any(|bar| bar.contains(memory.address()));
        if !is_bar || !self.nature.bars_by_dmabuf {
            return Ok(());
        }
        let (file, _) = memory.dmabuf().ok_or(libc::EFAULT)?;
        match state.dmabufs.get(&file.as_raw_fd()) {
            Some(dmabuf) if dmabuf.revoked => Err(libc::ENODEV),
            Some(_) => Ok(()),
            None => Err(libc::EINVAL),
        }
    }

    fn slot_range(&self, slot: Slot) -> Option<Range> {
        let state = self.state.lock();
        state.slots.get(&slot.0).map(|(range, _)| *range)
    }

    fn slot_is_free(&self, range: &Range, except: Option<u32>) -> bool {
        let state = self.state.lock();
        let mut others = state.slots.iter().filter(|(id, _)| Some(**id) != except);
        !others.any(|(_, (taken, _))| taken.overlaps(range))
    }
}

const SLOT_CALL: &str = "KVM_SET_USER_MEMORY_REGION";

impl MemSlots for FakeKernel {
    fn set(&self, gpa: u64, memory: &HostRange) -> Result<Slot, CallError> {
        let range = Range::new(gpa, memory.len()).ok_or(refused(SLOT_CALL, libc::EINVAL))?;
        self.call(SLOT_CALL, Event::SetSlot(range))?;
        if !self.slot_is_free(&range, None) {
            return Err(refused(SLOT_CALL, libc::EEXIST));
        }
        let state = &mut *self.state.lock();
        let id = state.next_slot;
        state.next_slot += 1;
        state.slots.insert(id, (range, memory.clone()));
        Ok(Slot(id))
    }

    fn move_to(&self, slot: Slot, gpa: u64) -> Result<(), CallError> {
        let old = self.slot_range(slot);
        let old = old.ok_or(refused(SLOT_CALL, libc::EINVAL))?;
        self.call(SLOT_CALL, Event::MoveSlot(old, gpa))?;
        let range = Range::new(gpa, old.len()).ok_or(refused(SLOT_CALL, libc::EINVAL))?;
        if !self.slot_is_free(&range, Some(slot.0)) {
            return Err(refused(SLOT_CALL, libc::EEXIST));
        }
        if let Some((place, _)) = self.state.lock().slots.get_mut(&slot.0) {
            *place = range;
        }
        Ok(())
    }

    fn clear(&self, slot: Slot) -> Result<(), CallError> {
        let old = self.slot_range(slot);
        let old = old.ok_or(refused(SLOT_CALL, libc::EINVAL))?;
        self.call(SLOT_CALL, Event::ClearSlot(old))?;
        self.state.lock().slots.remove(&slot.0);
        Ok(())
    }
}

const MAP_CALL: &str = "VFIO_IOMMU_MAP_DMA";
const UNMAP_CALL: &str = "VFIO_IOMMU_UNMAP_DMA";

/// The kernel behind its IOMMU port; a type of its own because opened devices need the [`Arc`].
impl IommuBackend for Arc<FakeKernel> {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn nature(&self) -> IommuNature {
        self.nature
    }

    fn open(&self, bdf: Bdf) -> Result<Box<dyn VfioDevice>, OpenError> {
        const CALL: &str = "VFIO_GROUP_GET_DEVICE_FD";
        self.call(CALL, Event::Open(bdf))?;
        let spec = self.devices.get(&bdf);
        let spec = spec.ok_or(refused(CALL, libc::ENODEV))?.clone();
        let device = Arc::new(FakeDevice::new(spec, Arc::clone(self)));
        self.opened.lock().insert(bdf, Arc::clone(&device));
        Ok(Box::new(device))
    }

    fn map(&self, request: &MapRequest) -> Result<(), CallError> {
        let range = request.range().ok_or(refused(MAP_CALL, libc::EINVAL))?;
        self.call(MAP_CALL, Event::Map(range))?;
        if !self.iova_ranges.iter().any(|usable| usable.covers(&range)) {
            return Err(refused(MAP_CALL, libc::EINVAL));
        }
        if self.mappings().iter().any(|(old, _)| old.overlaps(&range)) {
            return Err(refused(MAP_CALL, libc::EEXIST));
        }
        let usable = self.check_memory(&request.memory);
        usable.map_err(|errno| refused(MAP_CALL, errno))?;
        let mappings = &mut self.state.lock().mappings;
        if mappings.len() >= self.mapping_limit {
            return Err(refused(MAP_CALL, libc::ENOSPC));
        }
        let memory = request.memory.clone();
        let mapping = Mapping {
            memory,
            dead: false,
        };
        mappings.insert(range.start(), mapping);
        Ok(())
    }

    fn unmap(&self, range: Range) -> Result<(), CallError> {
        self.call(UNMAP_CALL, Event::Unmap(range))?;
        let cut = |old: &Range| old.overlaps(&range) && !range.covers(old);
        if self.mappings().iter().any(|(old, _)| cut(old)) {
            return Err(refused(UNMAP_CALL, libc::EINVAL));
        }
        let mappings = &mut self.state.lock().mappings;
        mappings.retain(|iova, _| !range.contains(*iova));
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<Range>, CallError> {
        Ok(self.iova_ranges.clone())
    }

    fn kvm_files(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

impl MsiRoutes for FakeKernel {
    fn apply(&self, changes: &[VectorChange<'_>]) -> Result<(), CallError> {
        let connected = changes.iter().filter(|c| c.message.is_some()).count();
        let disconnected = changes.len() - connected;
        let event = Event::Routes {
            connected,
            disconnected,
        };
        self.call("KVM_SET_GSI_ROUTING", event)?;
        let routes = &mut self.state.lock().routes;
        for change in changes {
            let Some(message) = change.message else {
                routes.remove(&change.id);
                continue;
            };
            if let Some(routed) = routes.get_mut(&change.id) {
                routed.message = message;
                continue;
            }
            let trigger = change.trigger.try_clone();
            let trigger = trigger.map_err(|source| CallError {
                call: "KVM_IRQFD",
                source,
            })?;
            routes.insert(change.id, Routed { message, trigger });
        }
        Ok(())
    }
}

impl IntxLines for FakeKernel {
    fn connect(&self, gsi: u32, _: &EventFd, _: &EventFd) -> Result<(), CallError> {
        self.call("KVM_IRQFD", Event::Intx(gsi, true))?;
        self.state.lock().intx.push(gsi);
        Ok(())
    }

    fn disconnect(&self, gsi: u32, _: &EventFd) -> Result<(), CallError> {
        self.call("KVM_IRQFD", Event::Intx(gsi, false))?;
        self.state.lock().intx.retain(|line| *line != gsi);
        Ok(())
    }
}
