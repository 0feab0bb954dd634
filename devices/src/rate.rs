//! A limit on messages that a guest can trigger.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

const WINDOW: Duration = Duration::from_secs(10);
const BURST: u32 = 5;

/// Lets at most five messages through in ten seconds.
#[derive(Debug)]
pub struct RateLimit {
    window: Mutex<(Instant, u32)>,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self {
            window: Mutex::new((Instant::now(), 0)),
        }
    }
}

impl RateLimit {
    /// Whether a message may be written now.
    pub fn allow(&self) -> bool {
        let (start, count) = &mut *self.window.lock();
        if start.elapsed() > WINDOW {
            (*start, *count) = (Instant::now(), 0);
        }
        *count = count.saturating_add(1);
        *count <= BURST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_after_the_burst() {
        let limit = RateLimit::default();
        assert_eq!((0..1000).filter(|_| limit.allow()).count(), BURST as usize);
    }
}
