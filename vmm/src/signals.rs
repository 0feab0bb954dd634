//! Signals that end mini-vmm. While the guest runs they end the run, so that the terminal is
//! restored and the threads are stopped; before and after, when the main thread may be in a call
//! that takes minutes, they end the process.

use std::io;
use std::process;
use std::sync::Arc;
use std::thread;

use nix::sys::signal::{SigSet, Signal};
use parking_lot::Mutex;

use crate::profile::Profile;
use crate::stop::{Outcome, Stop};
use crate::terminal;

const ENDING: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// The thread that takes the ending signals.
pub struct Signals {
    runs: Arc<Mutex<bool>>,
}

impl Signals {
    /// Blocks the signals in this thread, and so in all threads that it starts from now on but the
    /// one that takes them.
    pub fn take(stop: Arc<Stop>, profile: Arc<Profile>) -> io::Result<Self> {
        let set: SigSet = ENDING.into_iter().collect();
        set.thread_block()?;
        let runs = Arc::new(Mutex::new(false));
        let signals = Self {
            runs: Arc::clone(&runs),
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || {
                // Fails only for a set that is none.
                while let Ok(signal) = set.wait() {
                    let outcome = Outcome::Signal(signal as i32);
                    let runs = runs.lock();
                    if *runs {
                        stop.request(outcome);
                    } else {
                        // With the lock held: the run does not begin any more.
                        terminal::restore();
                        // Where a start takes long is when its profile is wanted most.
                        profile.finish();
                        process::exit(outcome.code().into());
                    }
                }
            })?;
        Ok(signals)
    }

    /// Signals end the run, not the process, until the result is dropped.
    pub fn end_run(&self) -> EndRun<'_> {
        *self.runs.lock() = true;
        EndRun(self)
    }
}

/// See [`Signals::end_run`].
#[must_use = "it lasts until it is dropped"]
pub struct EndRun<'a>(&'a Signals);

impl Drop for EndRun<'_> {
    fn drop(&mut self) {
        *self.0.runs.lock() = false;
    }
}
