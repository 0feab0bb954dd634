//! Holding up all vCPUs together, so that the guest does not notice that one of them waits.
//!
//! A guest that writes COMMAND does so with interrupts off and under a lock: were the others to run
//! on while that takes seconds, their watchdogs would fire. So they are taken out of KVM_RUN and
//! kept out, and when they go on, each is told that it was held up (KVM_KVMCLOCK_CTRL), by which
//! the guest resets its watchdogs.
//!
//! A vCPU that is not in the guest but waits for a lock in one of our devices is as good as held
//! up: it looks here before it enters the guest again. [`Turn::enter`] and [`Pause::kick`] do so in
//! opposite order (each announces itself, then looks for the other), so one always sees the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use vmm_sys_util::signal::{Killable, SIGRTMIN};

use crate::stop::Stop;

/// How often a vCPU that is held up looks whether the run has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The threads of all vCPUs, and whether they are held up.
#[derive(Default)]
pub struct Pauses {
    /// How many want them held up.
    wanted: AtomicUsize,
    /// How often they were.
    times: AtomicU64,
    lock: Mutex<()>,
    released: Condvar,
    runners: Mutex<Vec<Runner>>,
}

struct Runner {
    in_guest: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// vCPUs are held up while this lives.
pub struct Pause<'a>(&'a Pauses);

/// A vCPU's own part.
pub struct Turn {
    pauses: Arc<Pauses>,
    in_guest: Arc<AtomicBool>,
    seen: u64,
}

/// What a vCPU may do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Enter the guest, and say so with [`Turn::left`] when it is back.
    Guest,
    /// It was held up: the guest is to be told, then it may ask again.
    WasHeldUp,
    /// The run has ended.
    End,
}

impl Pauses {
    /// The part of a vCPU whose thread is about to be started.
    pub fn turn(self: &Arc<Self>) -> Turn {
        Turn {
            pauses: Arc::clone(self),
            in_guest: Arc::default(),
            seen: self.times.load(Ordering::SeqCst),
        }
    }

    /// The thread of a vCPU; `in_guest` is that of its turn.
    pub fn add(&self, thread: JoinHandle<()>, in_guest: Arc<AtomicBool>) {
        self.runners.lock().push(Runner { in_guest, thread });
    }

    /// Holds all vCPUs up from now on; those in the guest once they are kicked.
    pub fn begin(&self) -> Pause<'_> {
        self.wanted.fetch_add(1, Ordering::SeqCst);
        self.times.fetch_add(1, Ordering::SeqCst);
        let pause = Pause(self);
        pause.kick();
        pause
    }

    /// Signals every thread that has not ended; whether there was one.
    pub fn interrupt_all(&self) -> bool {
        let runners = self.runners.lock();
        let running = runners.iter().filter(|r| !r.thread.is_finished());
        running.map(Runner::interrupt).count() != 0
    }

    /// Waits for the threads, which have ended.
    pub fn join(&self) {
        for runner in self.runners.lock().drain(..) {
            // A thread that panicked has said so.
            let _ = runner.thread.join();
        }
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::SeqCst) != 0
    }

    fn wait(&self, stop: &Stop) {
        let mut lock = self.lock.lock();
        while self.is_wanted() && !stop.is_requested() {
            self.released.wait_for(&mut lock, LOOK);
        }
    }
}

impl Runner {
    fn interrupt(&self) {
        // Fails for a thread that has ended in between.
        let _ = self.thread.kill(SIGRTMIN());
    }
}

impl Pause<'_> {
    /// Takes vCPUs out of the guest. To be called again and again: a signal that arrives just
    /// before KVM_RUN is lost.
    pub fn kick(&self) {
        for runner in self.0.runners.lock().iter() {
            if runner.in_guest.load(Ordering::SeqCst) && !runner.thread.is_finished() {
                runner.interrupt();
            }
        }
    }
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        if self.0.wanted.fetch_sub(1, Ordering::SeqCst) == 1 {
            // Under the lock, or a vCPU that has just looked would sleep on.
            let _lock = self.0.lock.lock();
            self.0.released.notify_all();
        }
    }
}

impl Turn {
    /// Whether the vCPU is in the guest; shared with [`Pauses::add`].
    pub fn in_guest(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.in_guest)
    }

    /// To be asked before each KVM_RUN. Waits while vCPUs are held up.
    pub fn enter(&mut self, stop: &Stop) -> Entry {
        if stop.is_requested() {
            return Entry::End;
        }
        if self.pauses.times.load(Ordering::SeqCst) != self.seen {
            return self.wait(stop);
        }
        self.in_guest.store(true, Ordering::SeqCst);
        if !self.pauses.is_wanted() {
            return Entry::Guest;
        }
        self.left();
        self.wait(stop)
    }

    fn wait(&mut self, stop: &Stop) -> Entry {
        self.pauses.wait(stop);
        // Should another pause have begun by now, it is met in the next turn.
        self.seen = self.pauses.times.load(Ordering::SeqCst);
        Entry::WasHeldUp
    }

    /// KVM_RUN has returned.
    pub fn left(&self) {
        self.in_guest.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stop::Outcome;
    use std::thread;
    use std::time::Instant;

    fn eventually(what: impl Fn() -> bool) {
        let limit = Instant::now() + Duration::from_secs(20);
        while !what() {
            assert!(Instant::now() < limit);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// "Runs" in a loop; counts entries and how often it was told that it was held up.
    fn vcpu(pauses: &Arc<Pauses>, stop: &Arc<Stop>) -> (Arc<AtomicU64>, Arc<AtomicU64>) {
        let (entries, told) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (stop, mut turn) = (Arc::clone(stop), pauses.turn());
        let in_guest = turn.in_guest();
        let counts = (Arc::clone(&entries), Arc::clone(&told));
        let thread = thread::spawn(move || {
            loop {
                match turn.enter(&stop) {
                    Entry::Guest => {
                        entries.fetch_add(1, Ordering::SeqCst);
                        thread::yield_now();
                        turn.left();
                    }
                    Entry::WasHeldUp => {
                        told.fetch_add(1, Ordering::SeqCst);
                    }
                    Entry::End => return,
                }
            }
        });
        pauses.add(thread, in_guest);
        counts
    }

    fn install_handler() {
        extern "C" fn nothing(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        vmm_sys_util::signal::register_signal_handler(SIGRTMIN(), nothing).unwrap();
    }

    #[test]
    fn none_runs_while_held_up_and_each_is_told_once_afterwards() {
        install_handler();
        let (pauses, stop) = (Arc::new(Pauses::default()), Arc::new(Stop::new().unwrap()));
        let vcpus: Vec<_> = (0..3).map(|_| vcpu(&pauses, &stop)).collect();
        let entries = || -> u64 { vcpus.iter().map(|(e, _)| e.load(Ordering::SeqCst)).sum() };
        eventually(|| vcpus.iter().all(|(e, _)| e.load(Ordering::SeqCst) > 0));
        // Two that hold them up: the second's end counts.
        let (first, second) = (pauses.begin(), pauses.begin());
        let runs = || {
            pauses
                .runners
                .lock()
                .iter()
                .any(|r| r.in_guest.load(Ordering::SeqCst))
        };
        eventually(|| !runs());
        let before = entries();
        thread::sleep(Duration::from_millis(50));
        drop(first);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(entries(), before);
        drop(second);
        eventually(|| entries() > before + 10);
        for (_, told) in &vcpus {
            assert_eq!(told.load(Ordering::SeqCst), 1);
        }
        stop.request(Outcome::Quit);
        pauses.join();
    }

    #[test]
    fn a_stop_ends_those_that_are_held_up() {
        install_handler();
        let (pauses, stop) = (Arc::new(Pauses::default()), Arc::new(Stop::new().unwrap()));
        let pause = pauses.begin();
        let (entries, _) = vcpu(&pauses, &stop);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(entries.load(Ordering::SeqCst), 0);
        stop.request(Outcome::Quit);
        pauses.join();
        drop(pause);
    }
}
