//! How a run ends: whoever knows first says so, everyone else stops.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;

/// Why the guest no longer runs.
#[derive(Debug)]
pub enum Outcome {
    /// The guest switched itself off.
    PoweredOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest crashed; the text says how.
    Crashed(String),
    /// The user left with Ctrl-A x.
    Quit,
    /// A signal ended us.
    Signal(i32),
    /// The VMM cannot go on.
    Failed(Error),
}

impl Outcome {
    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::PoweredOff | Self::Quit => 0,
            Self::Failed(error) => error.class().code(),
            Self::Reset => 32,
            Self::Crashed(_) => 33,
            // As shells do; signal numbers are below 65.
            Self::Signal(number) => 128 + *number as u8,
        }
    }
}

/// Where the end is announced. The first outcome counts.
pub struct Stop {
    stopped: AtomicBool,
    outcome: Mutex<Option<Outcome>>,
    event: EventFd,
}

impl Stop {
    /// Nothing has ended yet.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            stopped: AtomicBool::new(false),
            outcome: Mutex::new(None),
            event: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        })
    }

    /// Ends the run, unless it has ended already.
    pub fn request(&self, outcome: Outcome) {
        self.outcome.lock().get_or_insert(outcome);
        self.stopped.store(true, Ordering::Release);
        // Fails only if the counter is full: then the event loop is being woken anyhow.
        let _ = self.event.write(1);
    }

    /// Whether the run has ended.
    pub fn is_requested(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Readable from [`Stop::request`] on.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The first outcome.
    pub fn take(&self) -> Option<Outcome> {
        self.outcome.lock().take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::HostError;

    #[test]
    fn the_first_outcome_counts() {
        let stop = Stop::new().unwrap();
        assert!(!stop.is_requested());
        stop.request(Outcome::Reset);
        stop.request(Outcome::Crashed("later".to_owned()));
        assert!(stop.is_requested());
        assert_eq!(stop.take().unwrap().code(), 32);
        assert_eq!(stop.event().read().unwrap(), 2);
    }

    #[test]
    fn every_outcome_has_the_documented_code() {
        let codes = [
            Outcome::PoweredOff,
            Outcome::Quit,
            Outcome::Reset,
            Outcome::Crashed(String::new()),
            Outcome::Signal(libc::SIGTERM),
            Outcome::Failed(Error::Host(HostError::Slots { count: 32 })),
        ]
        .map(|outcome| outcome.code());
        assert_eq!(codes, [0, 0, 32, 33, 143, 3]);
    }
}
