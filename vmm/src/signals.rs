//! Signals that end mini-vmm, through the event loop, so that the terminal is restored and the
//! threads are stopped.

use std::io;
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::stop::{Outcome, Stop};

const ENDING: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// The ending signals as events.
pub struct Signals {
    descriptor: SignalFd,
    stop: Arc<Stop>,
}

impl Signals {
    /// Blocks the signals in this thread, and so in all threads that it starts from now on.
    pub fn block(stop: Arc<Stop>) -> io::Result<Self> {
        let set: SigSet = ENDING.into_iter().collect();
        set.thread_block()?;
        let descriptor =
            SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        Ok(Self { descriptor, stop })
    }
}

impl MutEventSubscriber for Signals {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.descriptor, EventSet::IN)) {
            self.stop.request(crate::events::failed(error));
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps) {
        if let Ok(Some(signal)) = self.descriptor.read_signal() {
            self.stop.request(Outcome::Signal(signal.ssi_signo as i32));
        }
    }
}
