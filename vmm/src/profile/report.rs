//! The profile in words and in JSON.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::Record;
use super::ranking::ranking;

/// The JSON object; a field's meaning changes only together with `version`.
#[derive(Serialize)]
struct Report {
    version: u32,
    /// CLOCK_MONOTONIC where `at_ns` is 0: the start of the process, as nearly as it is known.
    started_ns: u64,
    /// Decisions with their reasons.
    notes: Vec<String>,
    /// Phases and moments by time.
    events: Vec<EventRow>,
    /// Calls by class and subject.
    calls: Vec<CallRow>,
}

#[derive(Serialize)]
struct EventRow {
    name: &'static str,
    subject: String,
    thread: String,
    /// Since the start of the process.
    at_ns: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    took_ns: Option<u64>,
}

#[derive(Serialize)]
struct CallRow {
    class: &'static str,
    subject: String,
    count: u64,
    total_ns: u64,
    longest_ns: u64,
}

/// For people.
pub fn table(record: &Record) -> String {
    let mut text = String::from("    at ms    took ms\n");
    // Writing to a String does not fail.
    for event in &record.events {
        let at = milliseconds(event.at);
        let took = event.length.map_or(String::new(), |length| {
            format!("{:.3}", milliseconds(length))
        });
        let _ = writeln!(text, "{at:9.3}  {took:>9}  {}", event.title());
    }
    let ranking = ranking(record);
    if !ranking.is_empty() {
        let _ = writeln!(text, "\n       ms  until the first guest instruction");
    }
    for share in ranking {
        let _ = writeln!(text, "{:9.3}  {}", milliseconds(share.time), share.name);
    }
    let _ = writeln!(text, "\n  calls   total ms  longest ms");
    for ((class, subject), tally) in &record.tallies {
        let _ = writeln!(
            text,
            "{:7}  {:9.3}   {:9.3}  {class}: {subject}",
            tally.count,
            milliseconds(tally.total),
            milliseconds(tally.longest)
        );
    }
    for note in &record.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

/// For programs: one line.
pub fn json(record: &Record) -> String {
    let events = record.events.iter().map(|event| EventRow {
        name: event.name,
        subject: event.subject.to_string(),
        thread: record.thread_name(event.thread).to_owned(),
        at_ns: nanoseconds(event.at),
        took_ns: event.length.map(nanoseconds),
    });
    let tallies = record.tallies.iter();
    let calls = tallies.map(|((class, subject), tally)| CallRow {
        class,
        subject: subject.to_string(),
        count: tally.count,
        total_ns: nanoseconds(tally.total),
        longest_ns: nanoseconds(tally.longest),
    });
    let report = Report {
        version: 1,
        started_ns: nanoseconds(record.started),
        notes: record.notes.clone(),
        events: events.collect(),
        calls: calls.collect(),
    };
    // Strings and numbers only: it cannot fail.
    let mut text = serde_json::to_string(&report).unwrap_or_default();
    text.push('\n');
    text
}

/// For people to read.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Profile, Subject};

    #[test]
    fn json_is_in_order_of_time_and_names_subjects() {
        let profile = Profile::start();
        {
            let _outer = profile.span("outer");
            profile.mark("inner");
        }
        profile.call("map DMA", Subject::Ram, || ());
        let text = json(&profile.snapshot());
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["version"], 1);
        assert!(value["started_ns"].as_u64().unwrap() > 0);
        assert_eq!(value["events"][0]["name"], "outer");
        assert_eq!(value["events"][1]["name"], "inner");
        assert!(value["events"][1].get("took_ns").is_none());
        assert_eq!(value["calls"][0]["subject"], "RAM");
        assert_eq!(value["calls"][0]["count"], 1);
    }

    #[test]
    fn the_table_has_a_line_for_each_event_call_and_note() {
        let profile = Profile::start();
        profile.mark("moment");
        profile.call("map DMA", Subject::Ram, || ());
        profile.note("because".to_owned());
        let text = table(&profile.snapshot());
        for wanted in ["moment", "map DMA: RAM", "because"] {
            assert!(text.contains(wanted), "{text}");
        }
    }
}
