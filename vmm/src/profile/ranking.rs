//! Where the time until the first guest instruction went, by phase of the main thread.

use std::time::Duration;

use super::{Event, FIRST_INSTRUCTION, MAIN_THREAD, Record};

/// A phase and the time that it took itself, without the phases within it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The phase, with the device that it is about.
    pub name: String,
    /// Its own time.
    pub time: Duration,
}

/// The phases of the main thread until the first guest instruction, the longest first, and what is
/// between them. Empty when there has been no instruction yet.
pub fn ranking(record: &Record) -> Vec<Share> {
    let Some(end) = record.moment(FIRST_INSTRUCTION) else {
        return Vec::new();
    };
    let mut phases: Vec<&Event> = record
        .events
        .iter()
        .filter(|event| event.length.is_some() && event.end() <= end)
        .filter(|event| record.thread_name(event.thread) == MAIN_THREAD)
        .collect();
    // An outer phase before those within it.
    phases.sort_by_key(|event| (event.at, std::cmp::Reverse(event.end())));
    let mut shares = vec![Share {
        name: "between the phases".to_owned(),
        time: end,
    }];
    // The phases that are open, outermost first: their ends, and their places in `shares`.
    let mut open: Vec<(Duration, usize)> = Vec::new();
    for phase in phases {
        while open.last().is_some_and(|(end, _)| *end <= phase.at) {
            open.pop();
        }
        let outer = open.last().map_or(0, |(_, place)| *place);
        let time = phase.length.unwrap_or_default();
        if let Some(outer) = shares.get_mut(outer) {
            outer.time = outer.time.saturating_sub(time);
        }
        open.push((phase.end(), shares.len()));
        shares.push(Share {
            name: phase.title(),
            time,
        });
    }
    let start = phases_begin(record);
    if let Some(between) = shares.first_mut() {
        between.time = between.time.saturating_sub(start);
    }
    shares.push(Share {
        name: "start of the process".to_owned(),
        time: start,
    });
    shares.sort_by_key(|share| std::cmp::Reverse(share.time));
    shares
}

/// When the first phase begins: before, the kernel starts the process.
fn phases_begin(record: &Record) -> Duration {
    let first = record.events.iter().map(|event| event.at).min();
    first.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Subject;

    fn phase(name: &'static str, thread: i32, at: u64, took: Option<u64>) -> Event {
        Event {
            name,
            subject: Subject::Machine,
            thread,
            at: Duration::from_millis(at),
            length: took.map(Duration::from_millis),
        }
    }

    #[test]
    fn phases_count_once_and_other_threads_not_at_all() {
        let mut record = Record {
            events: vec![
                phase("outer", 1, 10, Some(50)),
                phase("inner", 1, 20, Some(30)),
                phase("innermost", 1, 25, Some(5)),
                phase("next", 1, 70, Some(10)),
                phase("elsewhere", 2, 12, Some(3)),
                phase(FIRST_INSTRUCTION, 3, 100, None),
                phase("later", 1, 110, Some(5)),
            ],
            ..Record::default()
        };
        record.threads = [(1, MAIN_THREAD), (2, "open"), (3, "vcpu0")]
            .map(|(number, name)| (number, name.to_owned()))
            .into();
        let ranked = ranking(&record);
        let shares: Vec<_> = ranked
            .iter()
            .map(|share| (share.name.as_str(), share.time.as_millis()))
            .collect();
        assert_eq!(
            shares,
            [
                ("between the phases", 30),
                ("inner", 25),
                ("outer", 20),
                ("next", 10),
                ("start of the process", 10),
                ("innermost", 5),
            ]
        );
        let sum: Duration = ranked.iter().map(|share| share.time).sum();
        assert_eq!(sum, Duration::from_millis(100));
    }

    #[test]
    fn nothing_is_ranked_before_the_guest_runs() {
        assert_eq!(ranking(&Record::default()), []);
    }
}
