//! The event loop of the main thread: everything that is not a vCPU.

use std::io;
use std::sync::Arc;

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};

use crate::error::Error;
use crate::stop::{Outcome, Stop};

/// One epoll loop.
pub struct EventLoop {
    manager: EventManager<Box<dyn MutEventSubscriber>>,
    stop: Arc<Stop>,
}

impl EventLoop {
    /// A loop that ends with `stop`.
    pub fn new(stop: Arc<Stop>) -> Result<Self, Error> {
        let mut manager = EventManager::new().map_err(error)?;
        let end: Box<dyn MutEventSubscriber> = Box::new(End(Arc::clone(&stop)));
        manager.add_subscriber(end);
        Ok(Self { manager, stop })
    }

    /// Adds what is to be called for its events. `init` cannot return an error: a subscriber that
    /// cannot register requests a stop with [`failed`].
    pub fn add(&mut self, subscriber: Box<dyn MutEventSubscriber>) {
        self.manager.add_subscriber(subscriber);
    }

    /// Dispatches events until the run ends.
    pub fn run(&mut self) -> Result<(), Error> {
        while !self.stop.is_requested() {
            self.manager.run().map_err(error)?;
        }
        Ok(())
    }
}

/// Wakes the loop when the run ends.
struct End(Arc<Stop>);

impl MutEventSubscriber for End {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(self.0.event(), EventSet::IN)) {
            self.0.request(failed(error));
        }
    }

    /// The loop looks at `stop` itself.
    fn process(&mut self, _: Events, _: &mut EventOps) {}
}

fn error(error: event_manager::Error) -> Error {
    Error::System {
        what: "wait for events",
        source: io::Error::other(error),
    }
}

/// The outcome of a subscriber that cannot register its events.
pub fn failed(cause: event_manager::Error) -> Outcome {
    Outcome::Failed(error(cause))
}
