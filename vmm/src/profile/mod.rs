//! Where the time of a start goes: phases and moments on CLOCK_MONOTONIC since the process was
//! started, and every system call on the device path, by class, device and BAR. Always recorded.
//!
//! `--boot-profile` asks for it as a table or JSON object on standard error ([`report`]), as a trace for
//! Perfetto ([`trace`]) or as a page for a browser ([`html`]), the last two in files.
//!
//! A record costs two clock readings and a short lock. There are some dozens of phases and some
//! hundreds of calls in a start; the hot paths of a running guest (its BARs, its interrupts) pass
//! here only where they cost a system call anyway.

mod advice;
mod calls;
mod clock;
mod html;
mod lanes;
mod pci;
mod ranking;
mod report;
mod sink;
mod timeline;
mod trace;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use devices::host::Sysfs;
use devices::pci::address::Bdf;
use parking_lot::Mutex;
use rustix::thread::gettid;

use crate::config::UsageError;
use crate::options::{BootProfile, ProfileMoment};

pub use advice::Facts;
pub use calls::{ProfiledIommu, ProfiledSlots};
pub use pci::{ProfiledExits, ProfiledFunction};
pub use sink::can_create;

/// The thread that builds the machine; the standard library calls it so.
const MAIN_THREAD: &str = "main";
/// When the guest begins.
const FIRST_INSTRUCTION: &str = "first guest instruction";
/// The moment in which the guest's kernel looks for PCI devices: it is unpacked by then.
const FIRST_CONFIG_ACCESS: &str = "guest: first PCI config access";
/// Calls of which each is kept; a running guest may cause any number.
const CALLS_KEPT: usize = 4096;

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

impl Subject {
    /// The assigned device that it belongs to.
    fn device(self) -> Option<Bdf> {
        match self {
            Self::Device(bdf) | Self::Bar(bdf, _) => Some(bdf),
            Self::Machine | Self::Ram => None,
        }
    }
}

/// A phase or a call, or without a length a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    name: &'static str,
    subject: Subject,
    /// Kernel's number of the thread that went through it.
    thread: i32,
    /// Since the start of the process.
    at: Duration,
    /// `None` for a moment.
    length: Option<Duration>,
}

impl Event {
    /// Its name, with what it is about.
    fn title(&self) -> String {
        match self.subject {
            Subject::Machine => self.name.to_owned(),
            other => format!("{}: {other}", self.name),
        }
    }

    fn end(&self) -> Duration {
        self.at + self.length.unwrap_or_default()
    }
}

/// All calls of one class about one subject.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    count: u64,
    /// Time in them.
    total: Duration,
    longest: Duration,
}

/// What was recorded; one lock is enough for it.
#[derive(Clone, Default)]
struct Record {
    /// CLOCK_MONOTONIC at the start of the process, for views from outside.
    started: Duration,
    /// Phases and moments.
    events: Vec<Event>,
    /// The first [`CALLS_KEPT`] calls.
    calls: Vec<Event>,
    /// All calls.
    tallies: BTreeMap<(&'static str, Subject), Tally>,
    /// Decisions with their reasons.
    notes: Vec<String>,
    /// Names of threads.
    threads: BTreeMap<i32, String>,
    facts: Facts,
}

impl Record {
    /// By time.
    fn sort(&mut self) {
        self.events.sort_by_key(|event| event.at);
        self.calls.sort_by_key(|call| call.at);
    }

    fn thread_name(&self, thread: i32) -> &str {
        self.threads.get(&thread).map_or("?", String::as_str)
    }

    fn moment(&self, name: &str) -> Option<Duration> {
        let event = self.events.iter().find(|event| event.name == name)?;
        Some(event.at)
    }

    /// The number of the current thread, whose name it learns.
    fn this_thread(&mut self) -> i32 {
        let number = gettid().as_raw_pid();
        self.threads.entry(number).or_insert_with(|| {
            let thread = std::thread::current();
            thread.name().unwrap_or("?").to_owned()
        });
        number
    }
}

/// Records, and reports as asked for.
pub struct Profile {
    origin: Instant,
    /// From the start of the process to `origin`.
    before: Duration,
    record: Mutex<Record>,
    seen_config: AtomicBool,
    seen_master: AtomicBool,
    reports: OnceLock<Vec<sink::Report>>,
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
        let took = self.begin.elapsed();
        self.profile
            .record(self.name, self.subject, self.begin, Some(took));
        tracing::debug!("{}: {} took {took:?}", self.name, self.subject);
    }
}

impl Profile {
    /// Starts the clock; time counts from the start of the process.
    pub fn start() -> Self {
        let before = clock::age_of_process().unwrap_or_default();
        let record = Record {
            started: clock::monotonic().saturating_sub(before),
            ..Record::default()
        };
        Self {
            origin: Instant::now(),
            before,
            record: Mutex::new(record),
            seen_config: AtomicBool::new(false),
            seen_master: AtomicBool::new(false),
            reports: OnceLock::new(),
        }
    }

    /// Asks for reports, each at its moment. Creates the files that they will be written to.
    pub fn request(&self, wanted: &[BootProfile]) -> Result<(), UsageError> {
        let reports = wanted.iter().map(sink::Report::open);
        let reports = reports.collect::<Result<_, _>>()?;
        // Asked for once, by the command line.
        let _ = self.reports.set(reports);
        Ok(())
    }

    /// The end: makes the reports that were asked for, but those whose moment came before.
    pub fn finish(&self) {
        self.report(|_| true);
    }

    fn report(&self, is_due: impl Fn(ProfileMoment) -> bool) {
        for report in self.reports.get().into_iter().flatten() {
            if is_due(report.moment()) {
                report.make(|| self.snapshot());
            }
        }
    }

    fn snapshot(&self) -> Record {
        let mut record = self.record.lock().clone();
        record.facts.kernel = Sysfs::default().kernel_version();
        record.sort();
        record
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
        let at = self.record(name, Subject::Machine, Instant::now(), None);
        tracing::info!("{name} at {:.3} ms", report::milliseconds(at));
    }

    /// Records a decision and its reason.
    pub fn note(&self, text: String) {
        tracing::info!("{text}");
        self.record.lock().notes.push(text);
    }

    /// Records facts from which a report may draw advice.
    pub fn learn(&self, learn: impl FnOnce(&mut Facts)) {
        learn(&mut self.record.lock().facts);
    }

    #[cfg(test)]
    pub(crate) fn note_count(&self) -> usize {
        self.record.lock().notes.len()
    }

    /// Makes `call` and counts it.
    pub fn call<T>(&self, class: &'static str, subject: Subject, call: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = call();
        let took = begin.elapsed();
        let at = self.time_of(begin);
        let mut record = self.record.lock();
        let tally = record.tallies.entry((class, subject)).or_default();
        tally.count += 1;
        tally.total += took;
        tally.longest = tally.longest.max(took);
        if record.calls.len() < CALLS_KEPT {
            let thread = record.this_thread();
            record.calls.push(Event {
                name: class,
                subject,
                thread,
                at,
                length: Some(took),
            });
        }
        drop(record);
        tracing::trace!("{class}: {subject} took {took:?}");
        result
    }

    /// Records a mark of the guest, the first of each kind. Other bytes mean nothing: kernels
    /// write to port 0x80 to pass the time.
    pub fn guest_mark(&self, mark: u8) {
        let Some((_, name)) = GUEST_MARKS.iter().find(|(known, _)| *known == mark) else {
            return;
        };
        if self.record.lock().moment(name).is_some() {
            return;
        }
        self.mark(name);
        self.report(|moment| moment == ProfileMoment::Mark(mark));
    }

    fn first_config_access(&self) {
        if !self.seen_config.swap(true, Ordering::Relaxed) {
            self.mark(FIRST_CONFIG_ACCESS);
        }
    }

    /// Whether the guest has looked at configuration space: calls on it are the guest's from then on.
    fn guest_configures(&self) -> bool {
        self.seen_config.load(Ordering::Relaxed)
    }

    /// Whether this is the first time that the guest turns on bus mastering.
    fn is_first_master(&self) -> bool {
        !self.seen_master.swap(true, Ordering::Relaxed)
    }

    fn time_of(&self, instant: Instant) -> Duration {
        self.before + instant.saturating_duration_since(self.origin)
    }

    /// Returns when it began.
    fn record(
        &self,
        name: &'static str,
        subject: Subject,
        begin: Instant,
        length: Option<Duration>,
    ) -> Duration {
        let at = self.time_of(begin);
        let mut record = self.record.lock();
        let thread = record.this_thread();
        record.events.push(Event {
            name,
            subject,
            thread,
            at,
            length,
        });
        at
    }
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
        assert_eq!(profile.record.lock().events.len(), 1);
    }

    #[test]
    fn calls_are_summed_by_class_and_subject() {
        let profile = Profile::start();
        for subject in [Subject::Ram, Subject::Ram, Subject::Machine] {
            assert_eq!(profile.call("map", subject, || 7), 7);
        }
        let record = profile.snapshot();
        assert_eq!(record.tallies[&("map", Subject::Ram)].count, 2);
        assert_eq!(record.tallies[&("map", Subject::Machine)].count, 1);
    }

    #[test]
    fn every_call_is_counted_but_not_every_one_kept() {
        let profile = Profile::start();
        for _ in 0..CALLS_KEPT + 10 {
            profile.call("map", Subject::Ram, || ());
        }
        let record = profile.snapshot();
        let count = record.tallies[&("map", Subject::Ram)].count;
        assert_eq!(count, CALLS_KEPT as u64 + 10);
        assert_eq!(record.calls.len(), CALLS_KEPT);
        assert_eq!(record.thread_name(record.calls[0].thread), thread_name());
    }

    fn thread_name() -> String {
        std::thread::current().name().unwrap().to_owned()
    }

    #[test]
    fn the_process_is_older_than_its_clock_and_not_by_much() {
        let age = clock::age_of_process().unwrap();
        assert!(age < Duration::from_secs(3600), "{age:?}");
    }
}
