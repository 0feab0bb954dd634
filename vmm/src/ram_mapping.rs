//! Guest RAM is populated and mapped for DMA by threads of its own, while the guest runs or before
//! it does.
//!
//! Meanwhile the guest runs ([`Priority::Low`]): a device's first bus-master write waits at the gate
//! until all of RAM is mapped. The threads give way to the vCPUs until somebody waits; then they are
//! raised again or, since that takes privileges (CAP_SYS_NICE), as many of normal priority join them.
//! Before the guest runs ([`Priority::Normal`]): the first vCPU passes the
//! same gate before its first instruction.
//!
//! A wait of more than a second holds up all vCPUs ([`crate::pauses`]). A failure ends the run and
//! closes the gate. Whoever waits looks for the end of the run himself, so no order of events leaves
//! a thread behind: the gate depends on nothing that a vCPU could hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use devices::assign::AssignError;
use devices::assign::ports::{DmaGate, GateClosed};
use devices::assign::ram::RamWork;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::gettid;

use crate::error::Error;
use crate::pauses::{Pause, Pauses};
use crate::profile::{Profile, Subject};
use crate::ram_progress::ProgressLine;
use crate::stop::{Outcome, Stop};

/// A guest may wait so long without its watchdogs being told.
const UNNOTICED: Duration = Duration::from_secs(1);
/// How often one who waits looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(20);
/// More threads do not clear pages faster: memory is the limit.
const THREADS_MAX: u64 = 32;
/// A thread is started for so many bytes.
const BYTES_PER_THREAD: u64 = 256 << 20;
/// The priority of threads while the guest runs: a tenth of a vCPU's share where they compete. Lower
/// still, and a guest on a busy host would wait longer for its first DMA than it gained before.
const NICE_BACKGROUND: i32 = 10;

/// Whether the threads give way to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// The guest runs meanwhile.
    Low,
    /// The guest waits.
    Normal,
}

/// What the work needs of the rest of the VMM.
pub struct Surroundings {
    /// Where a failure is announced.
    pub stop: Arc<Stop>,
    /// Records the threads' spans.
    pub profile: Arc<Profile>,
    /// Holds up vCPUs.
    pub pauses: Arc<Pauses>,
    /// For tests: the gate stays closed for so long after somebody came to it.
    pub hold: Duration,
}

/// See the module.
pub struct RamMapping {
    work: RamWork,
    threads: usize,
    around: Surroundings,
    /// The gate is open: no need to look at `state`.
    open: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    /// Threads of low priority that are at work.
    low: Mutex<Vec<Pid>>,
}

#[derive(Default)]
struct State {
    end: Option<End>,
    first_wait: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Done,
    Failed,
}

impl RamMapping {
    /// Starts the threads. They populate; mapping begins with [`RamMapping::allow_maps`].
    pub fn begin(
        work: RamWork,
        priority: Priority,
        around: Surroundings,
    ) -> Result<Arc<Self>, Error> {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let useful = work.progress().total.div_ceil(BYTES_PER_THREAD);
        let mapping = Arc::new(Self {
            work,
            threads: cpus.min(useful.clamp(1, THREADS_MAX) as usize),
            around,
            open: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
            low: Mutex::default(),
        });
        for _ in 0..mapping.threads {
            mapping
                .start_thread(priority)
                .map_err(Error::system("start a thread"))?;
        }
        Ok(mapping)
    }

    /// Lets the threads map: BARs are mapped, and no longer have to wait for them.
    pub fn allow_maps(&self) {
        self.work.allow_maps();
    }

    /// The run has ended: the threads end with what they have in hand.
    pub fn cancel(&self) {
        self.work.cancel();
    }

    fn start_thread(self: &Arc<Self>, priority: Priority) -> std::io::Result<()> {
        let mapping = Arc::clone(self);
        let work = move || match priority {
            Priority::Low => mapping.take_part_low(),
            Priority::Normal => mapping.take_part(),
        };
        let name = match priority {
            Priority::Low => "ram-low",
            Priority::Normal => "ram",
        };
        // Never joined: at the end of the run it is left behind rather than waited for.
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map(drop)
    }

    /// On Linux a thread has a priority of its own (setpriority(2), "C library/kernel differences").
    fn take_part_low(&self) {
        // Where it cannot be lowered it competes with the guest.
        let _ = setpriority_process(None, NICE_BACKGROUND);
        let thread = gettid();
        self.low.lock().push(thread);
        self.take_part();
        // Before it ends: its number may be another's then.
        self.low.lock().retain(|low| *low != thread);
    }

    /// Gives the threads the priority of this one; without privileges others help them.
    fn hurry(self: &Arc<Self>) {
        let normal = getpriority_process(None).unwrap_or(0);
        let low = self.low.lock();
        let raised = low
            .iter()
            .all(|thread| setpriority_process(Some(*thread), normal).is_ok());
        drop(low);
        if !raised {
            for _ in 0..self.threads {
                // Without help it takes longer.
                let _ = self.start_thread(Priority::Normal);
            }
        }
    }

    fn take_part(&self) {
        let result = {
            let _span = self.around.profile.span_of("populate RAM", Subject::Ram);
            self.work.take_part()
        };
        match result {
            Ok(()) if self.work.is_done() => self.end(End::Done),
            Ok(()) => {}
            Err(error) => self.fail(error),
        }
    }

    fn fail(&self, error: AssignError) {
        self.around
            .stop
            .request(Outcome::Failed(Error::from(error)));
        self.end(End::Failed);
    }

    fn end(&self, end: End) {
        let mut state = self.state.lock();
        if state.end.is_some() {
            return;
        }
        state.end = Some(end);
        if end == End::Done {
            let mark = match self.work.maps() {
                true => "RAM mapped for DMA",
                false => "RAM populated",
            };
            self.around.profile.mark(mark);
            self.look(&state);
        }
        self.changed.notify_all();
    }

    /// Opens the gate when it is time to; `None` while it is closed.
    fn look(&self, state: &State) -> Option<Result<(), GateClosed>> {
        let hold = self.around.hold;
        let held = match state.first_wait {
            _ if hold.is_zero() => false,
            None => true,
            Some(first) => first.elapsed() < hold,
        };
        match state.end {
            Some(End::Failed) => Some(Err(GateClosed)),
            _ if self.around.stop.is_requested() => Some(Err(GateClosed)),
            Some(End::Done) if !held => {
                self.open.store(true, Ordering::Release);
                Some(Ok(()))
            }
            _ => None,
        }
    }

    fn wait(&self) -> Result<(), GateClosed> {
        let begin = Instant::now();
        let mut line = ProgressLine::new(self.work.progress(), self.work.maps());
        let mut pause: Option<Pause<'_>> = None;
        let mut state = self.state.lock();
        loop {
            if let Some(result) = self.look(&state) {
                return result;
            }
            self.changed.wait_for(&mut state, LOOK);
            if begin.elapsed() >= UNNOTICED {
                let pause = pause.get_or_insert_with(|| self.around.pauses.begin());
                pause.kick();
                line.update(self.work.progress());
            }
        }
    }

    /// Says that somebody waits; whether he is the first.
    fn arrive(&self) -> bool {
        let mut state = self.state.lock();
        let first = state.first_wait.is_none();
        state.first_wait.get_or_insert_with(Instant::now);
        first && state.end.is_none()
    }
}

/// The gate of all assigned devices. It is a type of its own because helpers need the [`Arc`].
pub struct RamGate {
    mapping: Arc<RamMapping>,
    /// Threads are to join the work when somebody waits.
    needs_help: bool,
}

impl RamGate {
    /// The gate before the devices of a guest whose RAM `mapping` maps at that priority.
    pub fn new(mapping: &Arc<RamMapping>, priority: Priority) -> Self {
        Self {
            mapping: Arc::clone(mapping),
            needs_help: priority == Priority::Low,
        }
    }
}

impl DmaGate for RamGate {
    fn pass(&self) -> Result<(), GateClosed> {
        let mapping = &self.mapping;
        if mapping.open.load(Ordering::Acquire) {
            return Ok(());
        }
        let _span = mapping.around.profile.span("wait for guest RAM");
        if mapping.arrive() && self.needs_help {
            mapping.hurry();
        }
        mapping.wait()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use devices::assign::ports::IommuBackend;
    use devices::assign::ram::Populate;
    use devices::fake::{Event, FakeKernel};
    use devices::sys::{Alignment, HostMap, HostRange};

    const GIB: u64 = 1 << 30;

    struct Rig {
        kernel: Arc<FakeKernel>,
        stop: Arc<Stop>,
        pauses: Arc<Pauses>,
        mapping: Arc<RamMapping>,
        gate: RamGate,
    }

    /// 2 GiB of RAM; each piece takes a while.
    fn rig(priority: Priority, hold: Duration, fail_after: Option<usize>) -> Rig {
        let kernel = FakeKernel::new(Vec::new());
        if let Some(after) = fail_after {
            kernel.fail_after(after, libc::ENOMEM);
        }
        let memory = HostMap::anonymous(2 * GIB, Alignment::PAGE).unwrap();
        let faults = Arc::clone(&kernel);
        let populate: Populate = Box::new(move |range, _| {
            thread::sleep(Duration::from_micros(100));
            faults.populate(range)
        });
        let iommu: Arc<dyn IommuBackend> = Arc::new(Arc::clone(&kernel));
        let blocks = [(0, HostRange::whole(Arc::new(memory)))];
        let work = RamWork::new(&blocks, 4096, Some(iommu), populate);
        let stop = Arc::new(Stop::new().unwrap());
        let pauses = Arc::new(Pauses::default());
        let around = Surroundings {
            stop: Arc::clone(&stop),
            profile: Arc::new(Profile::start()),
            pauses: Arc::clone(&pauses),
            hold,
        };
        let mapping = RamMapping::begin(work, priority, around).unwrap();
        mapping.allow_maps();
        Rig {
            gate: RamGate::new(&mapping, priority),
            kernel,
            stop,
            pauses,
            mapping,
        }
    }

    #[test]
    fn whoever_passes_finds_all_ram_mapped() {
        for priority in [Priority::Low, Priority::Normal] {
            let rig = rig(priority, Duration::ZERO, None);
            thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        rig.gate.pass().unwrap();
                        assert_eq!(rig.kernel.mappings().len(), 2);
                    });
                }
            });
            rig.gate.pass().unwrap();
            let log = rig.kernel.take_log();
            let maps = log.iter().filter(|e| matches!(e, Event::Map(_)));
            assert_eq!(maps.count(), 2);
        }
    }

    #[test]
    fn a_failure_ends_the_run_with_its_reason_and_closes_the_gate() {
        for after in [0, 7, 1024, 1025] {
            let rig = rig(Priority::Low, Duration::ZERO, Some(after));
            assert_eq!(rig.gate.pass(), Err(GateClosed));
            assert_eq!(rig.gate.pass(), Err(GateClosed));
            let Some(Outcome::Failed(error)) = rig.stop.take() else {
                panic!("no failure");
            };
            let text = crate::error::chain(&error);
            assert!(text.contains("guest RAM at"), "{text}");
            assert_eq!(text.matches("Cannot allocate").count(), 1, "{text}");
            let populating = text.contains("allocated");
            assert_eq!(error.class().code(), if populating { 1 } else { 3 });
        }
    }

    #[test]
    fn the_end_of_the_run_lets_those_who_wait_go() {
        let rig = rig(Priority::Low, Duration::from_secs(3600), None);
        thread::scope(|scope| {
            let waits: Vec<_> = (0..2).map(|_| scope.spawn(|| rig.gate.pass())).collect();
            thread::sleep(Duration::from_millis(30));
            rig.stop.request(Outcome::Quit);
            for wait in waits {
                assert_eq!(wait.join().unwrap(), Err(GateClosed));
            }
        });
        rig.mapping.cancel();
    }

    #[test]
    fn a_held_gate_opens_in_time_and_holds_up_the_vcpus_after_a_second() {
        let rig = rig(Priority::Normal, Duration::from_millis(1500), None);
        let mut turn = rig.pauses.turn();
        let begin = Instant::now();
        rig.gate.pass().unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(1500));
        assert_eq!(turn.enter(&rig.stop), crate::pauses::Entry::WasHeldUp);
        assert_eq!(turn.enter(&rig.stop), crate::pauses::Entry::Guest);
        let begin = Instant::now();
        rig.gate.pass().unwrap();
        assert!(begin.elapsed() < Duration::from_millis(500));
    }
}
