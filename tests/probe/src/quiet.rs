//! Starting a program at a moment of the kernel's clock that is the same each time.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use crate::args::Args;
use crate::error::Error;
use crate::stamp;

const SECOND: u64 = 1_000_000_000;

/// `probe quiet CMD [ARG…]`
///
/// The kernel's timer interrupts come at multiples of their period, and waits for other CPUs or readers end with one of
/// them: what is timed should meet them in the same order. Its own housekeeping it puts off to full seconds, so that half-way
/// between two is the quietest.
pub fn run(args: &mut Args) -> Result<(), Error> {
    let program = args.word("CMD")?;
    let mut command = Command::new(&program);
    while let Some(word) = args.optional() {
        command.arg(word);
    }
    sleep(Duration::from_nanos(pause(stamp::monotonic())));
    Err(Error::File {
        action: "run",
        path: program.into(),
        source: command.exec(),
    })
}

/// How long it is until half a second after a full one, at least a second from now.
fn pause(now: u64) -> u64 {
    2 * SECOND - (now + SECOND / 2) % SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_ends_half_way_between_full_seconds() {
        for now in [0, 1, SECOND - 1, 5 * SECOND + 3] {
            let pause = pause(now);
            assert_eq!((now + pause) % SECOND, SECOND / 2);
            assert!((SECOND..=2 * SECOND).contains(&pause), "{now}");
        }
    }
}
