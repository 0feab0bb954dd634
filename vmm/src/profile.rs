//! Where the time of a start goes: spans and marks on CLOCK_MONOTONIC, always recorded.
//!
//! A span costs two clock readings and a short lock; there are some dozens of them in a start.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::options::BootProfile;

/// Guest marks on I/O port 0x80 that mean something, with what they tell.
const GUEST_MARKS: [(u8, &str); 3] = [
    (0x40, "guest: kernel entry"),
    (0x41, "guest: user space"),
    (0x42, "guest: devices in use"),
];

/// A phase, or with a zero length a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event {
    name: &'static str,
    /// Since the start of the program.
    at: Duration,
    /// `None` for a moment.
    length: Option<Duration>,
}

/// All that was recorded.
pub struct Profile {
    start: Instant,
    events: Mutex<Vec<Event>>,
}

/// A phase that ends when this is dropped.
#[must_use = "the span ends when it is dropped"]
pub struct Span<'a> {
    profile: &'a Profile,
    name: &'static str,
    begin: Instant,
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        self.profile
            .record(self.name, self.begin, Some(self.begin.elapsed()));
    }
}

impl Profile {
    /// Starts the clock.
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            events: Mutex::new(Vec::with_capacity(64)),
        }
    }

    /// Begins a phase.
    pub fn span(&self, name: &'static str) -> Span<'_> {
        Span {
            profile: self,
            name,
            begin: Instant::now(),
        }
    }

    /// Records a moment.
    pub fn mark(&self, name: &'static str) {
        self.record(name, Instant::now(), None);
    }

    /// Records a mark of the guest, the first of each kind. Other bytes mean nothing: kernels
    /// write to port 0x80 to pass the time.
    pub fn guest_mark(&self, mark: u8) {
        let Some((_, name)) = GUEST_MARKS.iter().find(|(known, _)| *known == mark) else {
            return;
        };
        if !self.events.lock().iter().any(|event| event.name == *name) {
            self.mark(name);
        }
    }

    fn record(&self, name: &'static str, begin: Instant, length: Option<Duration>) {
        let at = begin.duration_since(self.start);
        self.events.lock().push(Event { name, at, length });
    }

    /// The report in the wanted form, by time.
    pub fn report(&self, form: BootProfile) -> String {
        let mut events = self.events.lock().clone();
        events.sort_by_key(|event| event.at);
        match form {
            BootProfile::Table => table(&events),
            BootProfile::Json => json(&events),
        }
    }
}

fn table(events: &[Event]) -> String {
    let mut text = String::from("    at ms    took ms\n");
    for event in events {
        let at = milliseconds(event.at);
        let took = event.length.map_or(String::new(), |length| {
            format!("{:.3}", milliseconds(length))
        });
        // Writing to a String does not fail.
        let _ = writeln!(text, "{at:9.3}  {took:>9}  {}", event.name);
    }
    text
}

fn json(events: &[Event]) -> String {
    let mut items = Vec::new();
    for event in events {
        let took = event.length.map_or(String::new(), |length| {
            format!(",\"took_ns\":{}", length.as_nanos())
        });
        // The names are ours and need no escaping.
        items.push(format!(
            "{{\"name\":\"{}\",\"at_ns\":{}{took}}}",
            event.name,
            event.at.as_nanos()
        ));
    }
    format!("{{\"events\":[{}]}}\n", items.join(","))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
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
        assert!(
            profile
                .report(BootProfile::Table)
                .contains("guest: user space")
        );
    }

    #[test]
    fn json_is_in_order_of_time() {
        let profile = Profile::start();
        {
            let _outer = profile.span("outer");
            profile.mark("inner");
        }
        let text = profile.report(BootProfile::Json);
        assert!(text.find("outer").unwrap() < text.find("inner").unwrap());
        assert!(text.starts_with("{\"events\":[{\"name\":\"outer\",\"at_ns\":"));
    }
}
