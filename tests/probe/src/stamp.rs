//! When each line of a stream was complete.

use std::fmt::Write as _;
use std::io::Read;
use std::path::PathBuf;

use rustix::time::{ClockId, clock_gettime};

use crate::args::Args;
use crate::error::Error;

/// `probe stamp FILE`
///
/// Nothing is written before the stream has ended: while something is timed its lines are kept in memory.
pub fn run(args: &mut Args) -> Result<(), Error> {
    let path = PathBuf::from(args.word("FILE")?);
    args.end()?;
    let file = |action, path: &str| {
        let path = PathBuf::from(path);
        move |source| Error::File {
            action,
            path,
            source,
        }
    };
    let mut input = std::io::stdin().lock();
    let mut lines = Lines::default();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = input
            .read(&mut buffer)
            .map_err(file("read", "standard input"))?;
        if count == 0 {
            break;
        }
        lines.take(monotonic(), buffer.get(..count).unwrap_or_default());
    }
    std::fs::write(&path, lines.text).map_err(file("write", &path.to_string_lossy()))
}

/// CLOCK_MONOTONIC in nanoseconds.
pub fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, rest) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

/// The lines so far, each after its time.
#[derive(Default)]
struct Lines {
    text: String,
    begun: Vec<u8>,
}

impl Lines {
    /// Takes what arrived at that time.
    fn take(&mut self, at: u64, bytes: &[u8]) {
        let mut parts = bytes.split(|&byte| byte == b'\n');
        self.begun.extend(parts.next().unwrap_or_default());
        for part in parts {
            let line = String::from_utf8_lossy(&self.begun);
            // Writing to a String does not fail.
            let _ = writeln!(self.text, "{at} {}", line.trim_end());
            self.begun = part.to_vec();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_time_at_which_it_was_complete() {
        let mut lines = Lines::default();
        lines.take(1, b"MA");
        lines.take(2, b"RK\r");
        lines.take(3, b"\nsecond\nthi");
        lines.take(4, b"rd");
        assert_eq!(lines.text, "3 MARK\n3 second\n");
        lines.take(5, b"\n\n");
        assert_eq!(lines.text, "3 MARK\n3 second\n5 third\n5 \n");
    }

    #[test]
    fn the_clock_goes_forward() {
        let first = monotonic();
        assert!(first > 0 && monotonic() >= first);
    }
}
