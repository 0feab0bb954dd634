//! The profile as a trace that Perfetto and chrome://tracing show: one track for each thread, and
//! one for each assigned device with all that was done about it.
//!
//! The format is the "Trace Event Format" (JSON object form): complete events (`X`) for phases and
//! calls, instant events (`i`) for moments, metadata events (`M`) for names. Times are microseconds.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::lanes::lanes;
use super::{Event, Record, Subject};

/// Stands for the process in the trace: its threads.
const THREADS: u32 = 1;
/// A second "process", whose "threads" are the devices.
const DEVICES: u32 = 2;
/// A device may need so many tracks, where threads work on it at once.
const TRACKS_PER_DEVICE: u64 = 64;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Trace<'a> {
    display_time_unit: &'static str,
    trace_events: Vec<TraceEvent>,
    other_data: OtherData<'a>,
}

#[derive(Serialize)]
struct OtherData<'a> {
    notes: &'a [String],
}

#[derive(Serialize)]
struct TraceEvent {
    name: String,
    cat: &'static str,
    ph: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u64,
    /// Scope of an instant event: all of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<&'static str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    args: BTreeMap<&'static str, String>,
}

/// The trace, a JSON object.
pub fn trace(record: &Record) -> String {
    let mut events = vec![
        name("process_name", THREADS, 0, "mini-vmm: threads"),
        name("process_name", DEVICES, 0, "mini-vmm: devices"),
    ];
    for (thread, called) in &record.threads {
        events.push(name("thread_name", THREADS, track(*thread), called));
    }
    for event in &record.events {
        events.push(match event.length {
            Some(_) => slice(event, "phase", THREADS, track(event.thread)),
            None => moment(event),
        });
    }
    for call in &record.calls {
        events.push(slice(call, "call", THREADS, track(call.thread)));
    }
    add_devices(record, &mut events);
    let trace = Trace {
        display_time_unit: "ms",
        trace_events: events,
        other_data: OtherData {
            notes: &record.notes,
        },
    };
    // Strings and finite numbers only: it cannot fail.
    let mut text = serde_json::to_string(&trace).unwrap_or_default();
    text.push('\n');
    text
}

fn name(what: &str, pid: u32, tid: u64, called: &str) -> TraceEvent {
    TraceEvent {
        name: what.to_owned(),
        cat: "__metadata",
        ph: "M",
        ts: None,
        dur: None,
        pid,
        tid,
        s: None,
        args: BTreeMap::from([("name", called.to_owned())]),
    }
}

fn slice(event: &Event, cat: &'static str, pid: u32, tid: u64) -> TraceEvent {
    let subject = match event.subject {
        Subject::Machine => BTreeMap::new(),
        other => BTreeMap::from([("subject", other.to_string())]),
    };
    TraceEvent {
        name: event.name.to_owned(),
        cat,
        ph: "X",
        ts: Some(microseconds(event.at)),
        dur: Some(microseconds(event.length.unwrap_or_default())),
        pid,
        tid,
        s: None,
        args: subject,
    }
}

fn moment(event: &Event) -> TraceEvent {
    TraceEvent {
        ph: "i",
        dur: None,
        s: Some("p"),
        ..slice(event, "moment", THREADS, track(event.thread))
    }
}

/// One track for each device, or several where threads work on it at once.
fn add_devices(record: &Record, events: &mut Vec<TraceEvent>) {
    let everything = || record.events.iter().chain(&record.calls);
    let mut devices: Vec<_> = everything().filter_map(|e| e.subject.device()).collect();
    devices.sort();
    devices.dedup();
    for (first, bdf) in (1..).step_by(TRACKS_PER_DEVICE as usize).zip(devices) {
        let slices = everything().filter(|e| e.length.is_some() && e.subject.device() == Some(bdf));
        let mut named = 0;
        for placed in lanes(slices) {
            let lane = (placed.lane as u64).min(TRACKS_PER_DEVICE - 1);
            if lane >= named {
                events.push(name("thread_name", DEVICES, first + lane, &bdf.to_string()));
                named = lane + 1;
            }
            events.push(slice(placed.event, "device", DEVICES, first + lane));
        }
    }
}

/// Numbers of threads are positive.
fn track(thread: i32) -> u64 {
    u64::from(thread.unsigned_abs())
}

fn microseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;
    use serde_json::Value;

    fn sample() -> Value {
        let profile = Profile::start();
        let bdf = "0000:41:00.0".parse().unwrap();
        {
            let _outer = profile.span("outer");
            profile.call("map DMA", Subject::Bar(bdf, 2), || ());
            profile.mark("moment");
        }
        profile.note("a \"quoted\" note".to_owned());
        serde_json::from_str(&trace(&profile.snapshot())).unwrap()
    }

    /// "Trace Event Format": the fields that each kind of event has.
    fn check(event: &Value) {
        assert!(event["name"].is_string(), "{event}");
        assert!(event["pid"].is_u64() && event["tid"].is_u64(), "{event}");
        match event["ph"].as_str().unwrap() {
            "X" => {
                assert!(event["cat"].is_string(), "{event}");
                assert!(event["ts"].as_f64().unwrap() >= 0.0, "{event}");
                assert!(event["dur"].as_f64().unwrap() >= 0.0, "{event}");
            }
            "i" => {
                assert!(event["ts"].as_f64().unwrap() >= 0.0, "{event}");
                assert!(["g", "p", "t"].contains(&event["s"].as_str().unwrap()));
            }
            "M" => {
                let known = ["process_name", "thread_name"];
                assert!(known.contains(&event["name"].as_str().unwrap()));
                assert!(event["args"]["name"].is_string(), "{event}");
            }
            other => panic!("{other} is not a phase that is used"),
        }
    }

    #[test]
    fn every_event_has_the_fields_of_its_kind() {
        let trace = sample();
        assert_eq!(trace["displayTimeUnit"], "ms");
        assert_eq!(trace["otherData"]["notes"][0], "a \"quoted\" note");
        let events = trace["traceEvents"].as_array().unwrap();
        events.iter().for_each(check);
        for phase in ["X", "i", "M"] {
            assert!(events.iter().any(|event| event["ph"] == phase), "{phase}");
        }
    }

    #[test]
    fn a_call_about_a_bar_is_on_the_track_of_its_thread_and_on_that_of_its_device() {
        let trace = sample();
        let events = trace["traceEvents"].as_array().unwrap();
        let calls: Vec<_> = events.iter().filter(|e| e["name"] == "map DMA").collect();
        assert_eq!(calls.len(), 2);
        assert_eq!(calls[0]["args"]["subject"], "0000:41:00.0 BAR 2");
        let track = events
            .iter()
            .find(|e| e["ph"] == "M" && e["args"]["name"] == "0000:41:00.0")
            .unwrap();
        assert_eq!(calls[1]["pid"], track["pid"]);
        assert_eq!(calls[1]["tid"], track["tid"]);
    }
}
