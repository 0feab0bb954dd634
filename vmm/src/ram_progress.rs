//! How far guest RAM is, in one line on standard error that replaces itself.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use devices::assign::ram::Progress;

use crate::output;

/// Work that takes less is not told of.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two lines.
const INTERVAL: Duration = Duration::from_millis(500);

/// The line, for as long as somebody waits.
pub struct ProgressLine {
    begin: Instant,
    /// When and where the rate counts from.
    shown: Option<Instant>,
    start: Progress,
    maps: bool,
    on: bool,
}

impl ProgressLine {
    /// Begins to wait, with so much done already, for RAM that is mapped or only populated. Says
    /// nothing where standard error is no terminal.
    pub fn new(start: Progress, maps: bool) -> Self {
        Self {
            begin: Instant::now(),
            shown: None,
            start,
            maps,
            on: io::stderr().is_terminal(),
        }
    }

    /// Shows the line when it is time to. A terminal that takes nothing (Ctrl-S) is not waited for.
    pub fn update(&mut self, now: Progress) {
        if let Some(text) = self.due(now, Instant::now()) {
            output::at_once(&format!("\r{text}\x1b[K"));
        }
    }

    /// The line, when it is time to show it.
    fn due(&mut self, now: Progress, time: Instant) -> Option<String> {
        let last = self.shown.map_or(PATIENCE, |_| INTERVAL);
        let since = self.shown.unwrap_or(self.begin);
        if !self.on || time.duration_since(since) < last {
            return None;
        }
        self.shown = Some(time);
        let elapsed = time.duration_since(self.begin);
        Some(line(self.start, now, self.maps, elapsed))
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown.is_some() {
            output::at_once("\r\x1b[K");
        }
    }
}

/// The rate is that of allocating, which takes the time.
fn line(start: Progress, now: Progress, maps: bool, elapsed: Duration) -> String {
    const GIB: f64 = (1u64 << 30) as f64;
    let gib = |bytes: u64| bytes as f64 / GIB;
    let done = now.populated.saturating_sub(start.populated);
    let rate = gib(done) / elapsed.as_secs_f64().max(0.001);
    let left = gib(now.total.saturating_sub(now.populated));
    let time = match rate > 0.0 && left > 0.0 {
        true => format!(", {rate:.1} GiB/s, {:.0} s left", (left / rate).ceil()),
        false => String::new(),
    };
    let mapped = match maps {
        true => format!(", {:.1} mapped for DMA", gib(now.mapped)),
        false => String::new(),
    };
    let (populated, total) = (gib(now.populated), gib(now.total));
    format!("mini-vmm: guest RAM: {populated:.1} of {total:.1} GiB allocated{mapped}{time}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_line_has_bytes_rate_and_time_left() {
        let start = Progress {
            populated: 10 * GIB,
            mapped: 8 * GIB,
            total: 64 * GIB,
        };
        let now = Progress {
            populated: 20 * GIB,
            mapped: 19 * GIB,
            ..start
        };
        assert_eq!(
            line(start, now, true, Duration::from_secs(2)),
            "mini-vmm: guest RAM: 20.0 of 64.0 GiB allocated, 19.0 mapped for DMA, 5.0 GiB/s, 9 s left"
        );
        // Nothing done yet, or nothing left: no time can be told.
        assert!(!line(start, start, true, Duration::from_secs(2)).contains("left"));
        let end = Progress {
            populated: 64 * GIB,
            ..now
        };
        let text = line(start, end, false, Duration::from_secs(2));
        assert_eq!(text, "mini-vmm: guest RAM: 64.0 of 64.0 GiB allocated");
    }

    #[test]
    fn nothing_is_said_within_a_second_and_then_twice_in_one() {
        let some = Progress {
            populated: GIB,
            mapped: 0,
            total: 2 * GIB,
        };
        let mut terminal = ProgressLine {
            on: true,
            ..ProgressLine::new(Progress::default(), true)
        };
        let mut file = ProgressLine {
            on: false,
            ..ProgressLine::new(Progress::default(), true)
        };
        let begin = terminal.begin;
        for (after, shown) in [
            (0, false),
            (999, false),
            (1000, true),
            (1499, false),
            (1500, true),
        ] {
            let time = begin + Duration::from_millis(after);
            assert_eq!(terminal.due(some, time).is_some(), shown, "{after} ms");
            assert_eq!(file.due(some, time), None);
        }
    }
}
