//! Guest RAM into the IOMMU, by any number of threads, before the guest starts or while it runs.
//!
//! Clearing pages is what takes the time, and the kernel does it page by page on one thread when it
//! pins memory that is not there. So pages are allocated (populated) first, in small pieces that
//! all threads take from one list, and then mapped in units of at most 1 GiB: the thread that
//! populates the last piece of a unit maps it. Where the kernel serialises mappings (type1), one
//! thread at a time maps and the others go on populating instead of waiting for it.
//!
//! Populating keeps what the guest or we have written. After a failure nothing is unmapped: the run
//! ends, and the kernel takes all of it down with the process.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Condvar, Mutex};

use super::error::AssignError;
use super::ports::{IommuBackend, MapRequest};
use crate::range::Range;
use crate::sys::HostRange;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A DMA mapping of guest RAM is at most this long: the kernel holds the container's lock while it
/// pins one.
const UNIT: u64 = GIB;

/// What is populated by one call. The kernel holds the process's mmap lock for reading meanwhile:
/// whoever maps a BAR or starts a thread waits that long.
const PIECE: u64 = 2 * MIB;

/// Allocates the pages of a guest-physical range, which the memory is behind.
pub type Populate = Box<dyn Fn(Range, &HostRange) -> io::Result<()> + Send + Sync>;

/// How far the work is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// With pages behind.
    pub populated: u64,
    /// Mapped for DMA.
    pub mapped: u64,
    /// All guest RAM.
    pub total: u64,
}

/// All that is to be done. See the module.
pub struct RamWork {
    units: Vec<(u64, HostRange)>,
    piece: u64,
    total: u64,
    populate: Populate,
    /// `None`: RAM is populated and not mapped.
    iommu: Option<Arc<dyn IommuBackend>>,
    /// How many threads map at a time.
    mappers: usize,
    state: Mutex<State>,
    /// Mapping is allowed, or the work is over.
    changed: Condvar,
    populated: AtomicU64,
    mapped: AtomicU64,
}

struct State {
    /// What is populated next: index of a unit and offset in it.
    next: (usize, u64),
    /// Bytes of each unit without pages.
    left: Vec<u64>,
    /// Units that are populated and not mapped.
    ready: VecDeque<usize>,
    may_map: bool,
    mapping: usize,
    finished: usize,
    cancelled: bool,
}

enum Task {
    Populate { unit: usize, offset: u64, len: u64 },
    Map(usize),
}

impl RamWork {
    /// To populate `ram` (guest-physical address and mapping of each block), whose pages have
    /// `page` bytes at most, and to map it with `iommu`, if there is one.
    pub fn new(
        ram: &[(u64, HostRange)],
        page: u64,
        iommu: Option<Arc<dyn IommuBackend>>,
        populate: Populate,
    ) -> Self {
        let units: Vec<_> = ram.iter().flat_map(|(gpa, b)| units(*gpa, b)).collect();
        let left: Vec<u64> = units.iter().map(|(_, memory)| memory.len()).collect();
        let parallel = iommu.as_ref().is_some_and(|i| i.nature().parallel_maps);
        Self {
            piece: PIECE.max(page),
            total: left.iter().sum(),
            populate,
            mappers: if parallel { usize::MAX } else { 1 },
            state: Mutex::new(State {
                next: (0, 0),
                left,
                ready: VecDeque::new(),
                may_map: iommu.is_none(),
                mapping: 0,
                finished: 0,
                cancelled: false,
            }),
            units,
            iommu,
            changed: Condvar::new(),
            populated: AtomicU64::new(0),
            mapped: AtomicU64::new(0),
        }
    }

    /// Lets the threads map. Before, they only populate: a mapping of RAM would make a BAR's wait.
    pub fn allow_maps(&self) {
        self.state.lock().may_map = true;
        self.changed.notify_all();
    }

    /// The threads end with what they have in hand.
    pub fn cancel(&self) {
        self.state.lock().cancelled = true;
        self.changed.notify_all();
    }

    /// Takes part in the work; called by each thread. Returns when there is nothing left for this
    /// one, which need not be the end of the work: see [`RamWork::is_done`]. After a failure all
    /// threads end.
    pub fn take_part(&self) -> Result<(), AssignError> {
        while let Some(task) = self.take() {
            let result = match task {
                Task::Populate { unit, offset, len } => self.populate(unit, offset, len),
                Task::Map(unit) => self.map(unit),
            };
            if result.is_err() {
                self.cancel();
                return result;
            }
        }
        Ok(())
    }

    /// Whether all guest RAM is populated, and mapped where it is to be.
    pub fn is_done(&self) -> bool {
        self.state.lock().finished == self.units.len()
    }

    /// How far the work is.
    pub fn progress(&self) -> Progress {
        Progress {
            populated: self.populated.load(Ordering::Relaxed),
            mapped: self.mapped.load(Ordering::Relaxed),
            total: self.total,
        }
    }

    /// Whether RAM is mapped for DMA as well.
    pub fn maps(&self) -> bool {
        self.iommu.is_some()
    }

    /// The next thing to do; mapping goes first, since that is what is waited for.
    fn take(&self) -> Option<Task> {
        let mut state = self.state.lock();
        loop {
            if state.cancelled {
                return None;
            }
            if state.may_map
                && state.mapping < self.mappers
                && let Some(unit) = state.ready.pop_front()
            {
                state.mapping += 1;
                return Some(Task::Map(unit));
            }
            if let Some(piece) = self.take_piece(&mut state) {
                return Some(piece);
            }
            if state.may_map {
                // What is still ready, or becomes so, is taken by those who work on it or map.
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn take_piece(&self, state: &mut State) -> Option<Task> {
        let (unit, offset) = state.next;
        let (gpa, memory) = self.units.get(unit)?;
        let at = gpa + offset;
        let end = (at / self.piece + 1).saturating_mul(self.piece);
        let len = (end - at).min(memory.len() - offset);
        state.next = match offset + len == memory.len() {
            true => (unit + 1, 0),
            false => (unit, offset + len),
        };
        Some(Task::Populate { unit, offset, len })
    }

    fn populate(&self, unit: usize, offset: u64, len: u64) -> Result<(), AssignError> {
        let Some((gpa, memory)) = self.units.get(unit) else {
            return Ok(());
        };
        let range = Range::from_bounds(gpa + offset, gpa + offset + len);
        let part = memory.part(offset, len);
        let done = match &part {
            Some(memory) => (self.populate)(range, memory),
            None => Err(io::ErrorKind::InvalidInput.into()),
        };
        done.map_err(|source| AssignError::Populate { range, source })?;
        self.populated.fetch_add(len, Ordering::Relaxed);
        let state = &mut *self.state.lock();
        if let Some(left) = state.left.get_mut(unit) {
            *left -= len;
            match (*left, &self.iommu) {
                (0, Some(_)) => state.ready.push_back(unit),
                (0, None) => state.finished += 1,
                _ => {}
            }
        }
        Ok(())
    }

    fn map(&self, unit: usize) -> Result<(), AssignError> {
        let (Some((iova, memory)), Some(iommu)) = (self.units.get(unit), &self.iommu) else {
            return Ok(());
        };
        let (iova, memory) = (*iova, memory.clone());
        let range = Range::from_bounds(iova, iova + memory.len());
        let result = iommu.map(&MapRequest { iova, memory });
        let state = &mut *self.state.lock();
        state.mapping -= 1;
        result.map_err(|source| AssignError::Ram { range, source })?;
        self.mapped.fetch_add(range.len(), Ordering::Relaxed);
        state.finished += 1;
        Ok(())
    }
}

/// Pieces of a block that start and end at multiples of the unit where they can, so that none
/// splits a huge page.
fn units(gpa: u64, block: &HostRange) -> Vec<(u64, HostRange)> {
    let end = gpa.saturating_add(block.len());
    let mut units = Vec::new();
    let mut at = gpa;
    while at < end {
        let next = (at / UNIT + 1).saturating_mul(UNIT).min(end);
        let Some(unit) = block.part(at - gpa, next - at) else {
            break;
        };
        units.push((at, unit));
        at = next;
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assign::ports::IommuNature;
    use crate::assign::testing::DMABUF;
    use crate::fake::{Event, FakeKernel};
    use crate::sys::{Alignment, HostMap};
    use std::thread;

    fn block(len: u64) -> HostRange {
        HostRange::whole(Arc::new(HostMap::anonymous(len, Alignment::PAGE).unwrap()))
    }

    fn work(kernel: &Arc<FakeKernel>, ram: &[(u64, HostRange)]) -> RamWork {
        let iommu: Arc<dyn IommuBackend> = Arc::new(Arc::clone(kernel));
        let faults = Arc::clone(kernel);
        let populate: Populate = Box::new(move |range, _| faults.populate(range));
        RamWork::new(ram, 4096, Some(iommu), populate)
    }

    /// All of the work on `threads` threads.
    fn run(work: &RamWork, threads: usize) -> Result<(), AssignError> {
        work.allow_maps();
        thread::scope(|scope| {
            let threads: Vec<_> = (0..threads)
                .map(|_| scope.spawn(|| work.take_part()))
                .collect();
            let results = threads.into_iter().map(|thread| thread.join().unwrap());
            results.fold(Ok(()), Result::and)
        })
    }

    #[test]
    fn ram_is_mapped_in_units_that_end_at_multiples_of_a_gibibyte() {
        let kernel = FakeKernel::new(Vec::new());
        let work = work(&kernel, &[(GIB / 2, block(2 * GIB))]);
        run(&work, 1).unwrap();
        let ranges: Vec<Range> = kernel.mappings().iter().map(|(r, _)| *r).collect();
        assert_eq!(
            ranges,
            [
                Range::from_bounds(GIB / 2, GIB),
                Range::from_bounds(GIB, 2 * GIB),
                Range::from_bounds(2 * GIB, 2 * GIB + GIB / 2),
            ]
        );
    }

    #[test]
    fn every_byte_is_populated_once_and_before_it_is_mapped() {
        for nature in [IommuNature::default(), DMABUF] {
            for threads in [1, 4] {
                let kernel = FakeKernel::with_nature(Vec::new(), nature);
                let ram = [(0, block(3 * GIB)), (4 * GIB, block(GIB + 6 * MIB))];
                let work = work(&kernel, &ram);
                run(&work, threads).unwrap();
                assert!(work.is_done());
                let total = 4 * GIB + 6 * MIB;
                let expected = Progress {
                    populated: total,
                    mapped: total,
                    total,
                };
                assert_eq!(work.progress(), expected);
                check_order(&kernel.take_log(), total);
            }
        }
    }

    fn check_order(log: &[Event], total: u64) {
        let mut populated = Vec::new();
        for event in log {
            match event {
                Event::Populate(range) => populated.push(*range),
                Event::Map(unit) => {
                    let inside = populated.iter().filter(|range| unit.covers(range));
                    assert_eq!(inside.map(Range::len).sum::<u64>(), unit.len());
                }
                _ => {}
            }
        }
        assert_eq!(populated.iter().map(Range::len).sum::<u64>(), total);
        populated.sort_unstable();
        populated.dedup();
        assert_eq!(populated.iter().map(Range::len).sum::<u64>(), total);
    }

    #[test]
    fn nothing_is_mapped_before_it_is_allowed_and_nobody_leaves_meanwhile() {
        let kernel = FakeKernel::new(Vec::new());
        let work = work(&kernel, &[(0, block(GIB))]);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|_| scope.spawn(|| work.take_part())).collect();
            while work.progress().populated < GIB {
                thread::yield_now();
            }
            assert!(kernel.mappings().is_empty());
            work.allow_maps();
            for thread in threads {
                thread.join().unwrap().unwrap();
            }
        });
        assert!(work.is_done());
    }

    #[test]
    fn a_failure_ends_all_threads_and_names_the_range_and_the_remedy() {
        let kernel = FakeKernel::new(Vec::new());
        let ram = [(0, block(3 * GIB))];
        let pieces = (GIB / PIECE) as usize;
        // The second mapping comes behind two units' pieces and the first.
        kernel.fail_after(2 * pieces + 1, libc::ENOMEM);
        let mapping = work(&kernel, &ram);
        let text = run(&mapping, 1).unwrap_err().to_string();
        assert!(text.contains("0x40000000-0x7fffffff"), "{text}");
        assert!(text.contains("ulimit -l"), "{text}");
        assert!(!mapping.is_done());

        for threads in [1, 3] {
            let kernel = FakeKernel::new(Vec::new());
            kernel.fail_after(3, libc::EFAULT);
            let populating = work(&kernel, &ram);
            let error = run(&populating, threads).unwrap_err();
            assert!(matches!(error, AssignError::Populate { .. }), "{error}");
            assert!(!error.is_preflight());
            assert!(error.to_string().contains("huge pages"), "{error}");
            assert!(kernel.mappings().is_empty());
            assert!(populating.take_part().is_ok() && !populating.is_done());
        }
    }

    #[test]
    fn without_an_iommu_ram_is_only_populated_in_pieces_of_at_least_a_page() {
        let kernel = FakeKernel::new(Vec::new());
        let faults = Arc::clone(&kernel);
        let populate: Populate = Box::new(move |range, _| faults.populate(range));
        let work = RamWork::new(&[(0, block(2 * GIB))], GIB, None, populate);
        work.take_part().unwrap();
        assert!(work.is_done() && !work.maps());
        let halves = [
            Event::Populate(Range::from_bounds(0, GIB)),
            Event::Populate(Range::from_bounds(GIB, 2 * GIB)),
        ];
        assert_eq!(kernel.take_log(), halves);
    }
}
