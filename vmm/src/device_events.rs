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
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::eventfd::EventFd;

use crate::error::Error;
use crate::profile::Profile;
use crate::stop::{Outcome, Stop};

struct Watched {
    bdf: Bdf,
    kind: IrqIndex,
    event: EventFd,
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
                    Ok(event) => watched.extend(event.map(|event| Watched { bdf, kind, event })),
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

    fn tell(&self, bdf: Bdf, kind: IrqIndex) {
        match kind {
            IrqIndex::Request => {
                self.profile
                    .note(format!("{bdf}: the host asked for it back"));
                self.stop
                    .request(Outcome::Failed(Error::DeviceRequested(bdf)));
            }
            _ => {
                self.profile
                    .note(format!("{bdf}: reported an uncorrectable error"));
                tracing::error!(
                    "{bdf}: the device reported an uncorrectable error (see `dmesg`); the guest goes on and may need to reset it"
                );
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
        if let Some(watched) = self.watched.get(events.data() as usize) {
            // Only to make it quiet; how often it was signalled does not matter.
            let _ = watched.event.read();
            self.tell(watched.bdf, watched.kind);
        }
    }
}
