//! What the host tells about assigned devices while the guest runs: a device reported an
//! uncorrectable error, or the host wants a device back.
//!
//! The kernel signals a request 0.1 s after an unbind has begun and every 10 s from then on, and
//! waits until the device is closed (drivers/vfio/vfio_main.c, vfio_unregister_group_dev): the run
//! ends, and so does the wait.

use std::sync::Arc;

use devices::assign::function::AssignedFunction;
use devices::assign::ports::IrqIndex;
use devices::pci::address::Bdf;
use devices::rate::RateLimit;
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;
use crate::profile::Profile;
use crate::stop::{Outcome, Stop};

struct Watched {
    bdf: Bdf,
    kind: IrqIndex,
    event: EventFd,
    repeats: Repeats,
}

/// Keeps a device that reports without end from filling the log and our memory.
#[derive(Default)]
struct Repeats {
    messages: RateLimit,
    noted: bool,
}

impl Repeats {
    /// Whether the profile has no note of it yet.
    fn is_first(&mut self) -> bool {
        !std::mem::replace(&mut self.noted, true)
    }
}

/// The events of all assigned devices.
pub struct DeviceEvents {
    watched: Vec<Watched>,
    stop: Arc<Stop>,
    profile: Arc<Profile>,
}

impl DeviceEvents {
    /// Arms the events of `functions`. One that cannot be armed is told as a warning: the guest
    /// runs without.
    pub fn new(
        functions: &[Arc<AssignedFunction>],
        stop: Arc<Stop>,
        profile: Arc<Profile>,
    ) -> Self {
        let mut watched = Vec::new();
        for function in functions {
            let bdf = function.bdf();
            for kind in [IrqIndex::Error, IrqIndex::Request] {
                match function.watch(kind) {
                    Ok(event) => watched.extend(event.map(|event| Watched {
                        bdf,
                        kind,
                        event,
                        repeats: Repeats::default(),
                    })),
                    Err(error) => tracing::warn!(
                        "{bdf}: the host's events for it will not be seen: {error}: {}",
                        error.source
                    ),
                }
            }
        }
        Self {
            watched,
            stop,
            profile,
        }
    }
}

impl Watched {
    fn tell(&mut self, stop: &Stop, profile: &Profile) {
        let bdf = self.bdf;
        match self.kind {
            IrqIndex::Request => {
                if self.repeats.is_first() {
                    profile.note(format!("{bdf}: the host asked for it back"));
                }
                stop.request(Outcome::Failed(Error::DeviceRequested(bdf)));
            }
            _ => {
                if self.repeats.is_first() {
                    profile.note(format!("{bdf}: reported an uncorrectable error"));
                }
                if self.repeats.messages.allow() {
                    tracing::error!(
                        "{bdf}: the device reported an uncorrectable error (see `dmesg`); the guest goes on and may need to reset it"
                    );
                }
            }
        }
    }
}

impl MutEventSubscriber for DeviceEvents {
    fn init(&mut self, ops: &mut EventOps) {
        for (index, watched) in self.watched.iter().enumerate() {
            let events = Events::with_data(&watched.event, index as u32, EventSet::IN);
            if let Err(error) = ops.add(events) {
                self.stop.request(crate::events::failed(error));
            }
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        if let Some(watched) = self.watched.get_mut(events.data() as usize) {
            // Only to make it quiet; how often it was signalled does not matter.
            let _ = watched.event.read();
            watched.tell(&self.stop, &self.profile);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_events_is_noted_once_and_told_a_few_times() {
        let (stop, profile) = (Stop::new().unwrap(), Profile::start());
        for kind in [IrqIndex::Error, IrqIndex::Request] {
            let mut watched = Watched {
                bdf: Bdf::default(),
                kind,
                event: EventFd::new(0).unwrap(),
                repeats: Repeats::default(),
            };
            (0..1000).for_each(|_| watched.tell(&stop, &profile));
            assert!(!watched.repeats.messages.allow() || kind == IrqIndex::Request);
        }
        assert_eq!(profile.note_count(), 2);
        assert!(stop.is_requested());
    }
}
