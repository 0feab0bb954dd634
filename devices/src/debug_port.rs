//! I/O port 0x80, the POST code port: guests mark here how far they have come.

use crate::bus::BusDevice;

/// Called, on the vCPU that wrote, with each mark.
pub type MarkHandler = Box<dyn Fn(u8) + Send + Sync>;

/// The port. Kernels also write to it to pass the time, so marks are only those values that a
/// reader knows, and only their first occurrence means something.
pub struct DebugPort {
    handler: MarkHandler,
}

impl DebugPort {
    /// The port's number.
    pub const PORT: u64 = 0x80;

    /// Calls `handler` for each byte written.
    pub fn new(handler: MarkHandler) -> Self {
        Self { handler }
    }
}

impl BusDevice for DebugPort {
    fn read(&self, _: u64, _: &mut [u8]) {}

    fn write(&self, _: u64, data: &[u8]) {
        if let [mark] = *data {
            (self.handler)(mark);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    #[test]
    fn bytes_are_marks() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let port = DebugPort::new(Box::new(move |mark| log.lock().push(mark)));
        port.write(0, &[0x41]);
        port.write(0, &[1, 2]);
        assert_eq!(*seen.lock(), [0x41]);
    }
}
