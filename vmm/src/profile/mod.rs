//! Where the time of a start goes: phases and moments on CLOCK_MONOTONIC since the process was
//! started, and every system call on the device path, by class, device and BAR. Always recorded.
//!
//! A record costs two clock readings and a short lock. There are some dozens of phases and some
//! hundreds of calls in a start; the hot paths of a running guest (its BARs, its interrupts) pass
//! here only where they cost a system call anyway.

mod calls;
mod pci;
mod report;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use devices::pci::address::Bdf;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};
use parking_lot::Mutex;

use crate::options::{BootProfile, ProfileForm, ProfileMoment};
use crate::output;

pub use calls::{ProfiledIommu, ProfiledSlots};
pub use pci::ProfiledFunction;

/// Guest marks on I/O port 0x80 that mean something, with what they tell.
const GUEST_MARKS: [(u8, &str); 3] = [
    (0x40, "guest: kernel entry"),
    (0x41, "guest: user space"),
    (0x42, "guest: devices in use"),
];

/// What a phase or call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// The VM as a whole.
    Machine,
    /// Guest RAM.
    Ram,
    /// An assigned device.
    Device(Bdf),
    /// A BAR of an assigned device.
    Bar(Bdf, u8),
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("machine"),
            Self::Ram => f.write_str("RAM"),
            Self::Device(bdf) => write!(f, "{bdf}"),
            Self::Bar(bdf, bar) => write!(f, "{bdf} BAR {bar}"),
        }
    }
}

/// A phase, or without a length a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Which.
    pub name: &'static str,
    /// What it is about.
    pub subject: Subject,
    /// Thread that went through it.
    pub thread: String,
    /// Since the start of the process.
    pub at: Duration,
    /// `None` for a moment.
    pub length: Option<Duration>,
}

/// All calls of one class about one subject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Calls.
    pub count: u64,
    /// Time in them.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

/// All that was recorded.
pub struct Profile {
    origin: Instant,
    /// From the start of the process to `origin`.
    before: Duration,
    /// CLOCK_MONOTONIC at the start of the process, for views from outside.
    started: Duration,
    events: Mutex<Vec<Event>>,
    calls: Mutex<BTreeMap<(&'static str, Subject), Tally>>,
    notes: Mutex<Vec<String>>,
    seen_config: AtomicBool,
    seen_master: AtomicBool,
    wanted: OnceLock<BootProfile>,
    printed: AtomicBool,
}

/// A phase that ends when this is dropped.
#[must_use = "the span ends when it is dropped"]
pub struct Span<'a> {
    profile: &'a Profile,
    name: &'static str,
    subject: Subject,
    begin: Instant,
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        let length = Some(self.begin.elapsed());
        self.profile
            .record(self.name, self.subject, self.begin, length);
    }
}

impl Profile {
    /// Starts the clock; time counts from the start of the process.
    pub fn start() -> Self {
        let before = age_of_process().unwrap_or_default();
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
        Self {
            origin: Instant::now(),
            before,
            started: now.saturating_sub(before),
            events: Mutex::new(Vec::with_capacity(64)),
            calls: Mutex::default(),
            notes: Mutex::default(),
            seen_config: AtomicBool::new(false),
            seen_master: AtomicBool::new(false),
            wanted: OnceLock::new(),
            printed: AtomicBool::new(false),
        }
    }

    /// Asks for a report on standard error at its moment.
    pub fn request(&self, wanted: BootProfile) {
        // Asked for once, by the command line.
        let _ = self.wanted.set(wanted);
    }

    /// The end: prints the report that was asked for, unless its moment came before.
    pub fn finish(&self) {
        if let Some(wanted) = self.wanted.get() {
            self.print(wanted.form);
        }
    }

    fn print(&self, form: ProfileForm) {
        if !self.printed.swap(true, Ordering::Relaxed) {
            output::message(&report::report(self, form));
        }
    }

    /// Begins a phase of the whole machine.
    pub fn span(&self, name: &'static str) -> Span<'_> {
        self.span_of(name, Subject::Machine)
    }

    /// Begins a phase.
    pub fn span_of(&self, name: &'static str, subject: Subject) -> Span<'_> {
        Span {
            profile: self,
            name,
            subject,
            begin: Instant::now(),
        }
    }

    /// Records a moment.
    pub fn mark(&self, name: &'static str) {
        self.record(name, Subject::Machine, Instant::now(), None);
    }

    /// Records a decision and its reason.
    pub fn note(&self, text: String) {
        self.notes.lock().push(text);
    }

    #[cfg(test)]
    pub(crate) fn note_count(&self) -> usize {
        self.notes.lock().len()
    }

    /// Makes `call` and counts it.
    pub fn call<T>(&self, class: &'static str, subject: Subject, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        let took = begin.elapsed();
        let mut calls = self.calls.lock();
        let tally = calls.entry((class, subject)).or_default();
        tally.count += 1;
        tally.total += took;
        tally.longest = tally.longest.max(took);
        result
    }

    /// Records a mark of the guest, the first of each kind. Other bytes mean nothing: kernels
    /// write to port 0x80 to pass the time.
    pub fn guest_mark(&self, mark: u8) {
        let Some((_, name)) = GUEST_MARKS.iter().find(|(known, _)| *known == mark) else {
            return;
        };
        if self.events.lock().iter().any(|event| event.name == *name) {
            return;
        }
        self.mark(name);
        match self.wanted.get() {
            Some(wanted) if wanted.moment == ProfileMoment::Mark(mark) => self.print(wanted.form),
            _ => {}
        }
    }

    fn first_config_access(&self) {
        if !self.seen_config.swap(true, Ordering::Relaxed) {
            self.mark("guest: first PCI config access");
        }
    }

    /// Whether this is the first time that the guest turns on bus mastering.
    fn is_first_master(&self) -> bool {
        !self.seen_master.swap(true, Ordering::Relaxed)
    }

    fn record(
        &self,
        name: &'static str,
        subject: Subject,
        begin: Instant,
        length: Option<Duration>,
    ) {
        let at = self.before + begin.saturating_duration_since(self.origin);
        let thread = std::thread::current().name().unwrap_or("?").to_owned();
        self.events.lock().push(Event {
            name,
            subject,
            thread,
            at,
            length,
        });
    }
}

/// How long ago the process was started.
///
/// Field 22 of /proc/self/stat counts clock ticks (10 ms), proc_pid_stat(5); the CPU time that the
/// process has used since then narrows it down: until now it had nothing to wait for.
fn age_of_process() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the name, may hold blanks and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: u64 = rest.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok()?;
    let tick = 1_000_000_000u64.checked_div(per_second)?;
    let started = Duration::from_nanos(ticks.checked_mul(tick)?);
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let busy = Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok()?);
    let longest = now.checked_sub(started)?;
    Some(busy.clamp(longest.saturating_sub(Duration::from_nanos(tick)), longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_marks_count_once_and_other_bytes_not_at_all() {
        let profile = Profile::start();
        for mark in [0x12, 0x41, 0x41, 0xff] {
            profile.guest_mark(mark);
        }
        assert_eq!(profile.events.lock().len(), 1);
    }

    #[test]
    fn calls_are_summed_by_class_and_subject() {
        let profile = Profile::start();
        for subject in [Subject::Ram, Subject::Ram, Subject::Machine] {
            assert_eq!(profile.call("map", subject, || 7), 7);
        }
        let calls = profile.calls.lock();
        assert_eq!(calls[&("map", Subject::Ram)].count, 2);
        assert_eq!(calls[&("map", Subject::Machine)].count, 1);
    }

    #[test]
    fn the_process_is_older_than_its_clock_and_not_by_much() {
        let age = age_of_process().unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
    }
}
