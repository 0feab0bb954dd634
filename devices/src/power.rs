//! How the guest switches itself off or asks for a reset: ACPI's sleep control, sleep status and
//! reset registers (ACPI 6.5, 4.8.3.6 and 4.8.3.7), and the keyboard controller's reset line,
//! which kernels pull when all else fails.

use crate::bus::BusDevice;

/// What the guest asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRequest {
    /// Soft off (S5).
    Off,
    /// Reset.
    Reset,
}

/// Called, on the vCPU that asked, for each request.
pub type PowerHandler = Box<dyn Fn(PowerRequest) + Send + Sync>;

/// Offsets of the registers, one byte each.
const SLEEP_CONTROL: u64 = 0;
const SLEEP_STATUS: u64 = 1;
const RESET: u64 = 2;

/// Sleep control: SLP_EN.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Sleep control: position of SLP_TYP, 3 bits.
const SLEEP_TYPE_SHIFT: u8 = 2;

/// The ACPI registers: sleep control, sleep status, reset.
pub struct PowerRegisters {
    /// SLP_TYP of S5.
    off: u8,
    /// What the reset register wants.
    reset: u8,
    handler: PowerHandler,
}

impl PowerRegisters {
    /// Bytes of the register block.
    pub const LEN: u64 = 3;

    /// `off`: SLP_TYP that `_S5` announces (0 to 7); `reset`: RESET_VALUE of the FADT.
    pub fn new(off: u8, reset: u8, handler: PowerHandler) -> Self {
        Self {
            off,
            reset,
            handler,
        }
    }
}

impl BusDevice for PowerRegisters {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // Nothing to tell: never waking, never asleep.
        if offset <= SLEEP_STATUS {
            data.fill(0);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let Some(value) = data.first() else { return };
        let sleep_type = value >> SLEEP_TYPE_SHIFT & 0b111;
        if offset == SLEEP_CONTROL && value & SLEEP_ENABLE != 0 && sleep_type == self.off {
            (self.handler)(PowerRequest::Off);
        } else if offset == RESET && *value == self.reset {
            (self.handler)(PowerRequest::Reset);
        }
    }
}

/// The command port (0x64) of a keyboard controller that is not there but for its reset line.
pub struct KeyboardReset {
    handler: PowerHandler,
}

impl KeyboardReset {
    /// The port.
    pub const PORT: u64 = 0x64;
    /// "Pulse output line 0", the processor's reset.
    const PULSE_RESET: u8 = 0xFE;

    /// Calls `handler` with [`PowerRequest::Reset`].
    pub fn new(handler: PowerHandler) -> Self {
        Self { handler }
    }
}

impl BusDevice for KeyboardReset {
    /// Nothing answers: a guest that looks for a controller sees that there is none.
    fn read(&self, _: u64, _: &mut [u8]) {}

    fn write(&self, _: u64, data: &[u8]) {
        if data.first() == Some(&Self::PULSE_RESET) {
            (self.handler)(PowerRequest::Reset);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    fn recorder() -> (Arc<Mutex<Vec<PowerRequest>>>, PowerHandler) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        (seen, Box::new(move |request| log.lock().push(request)))
    }

    #[test]
    fn soft_off_needs_the_right_type_and_the_enable_bit() {
        let (seen, handler) = recorder();
        let registers = PowerRegisters::new(5, 1, handler);
        registers.write(SLEEP_CONTROL, &[5 << 2]);
        registers.write(SLEEP_CONTROL, &[SLEEP_ENABLE | 3 << 2]);
        assert!(seen.lock().is_empty());
        registers.write(SLEEP_CONTROL, &[SLEEP_ENABLE | 5 << 2]);
        assert_eq!(*seen.lock(), [PowerRequest::Off]);
    }

    #[test]
    fn reset_needs_the_announced_value() {
        let (seen, handler) = recorder();
        let registers = PowerRegisters::new(5, 1, handler);
        registers.write(RESET, &[0]);
        assert!(seen.lock().is_empty());
        registers.write(RESET, &[1]);
        assert_eq!(*seen.lock(), [PowerRequest::Reset]);
    }

    #[test]
    fn the_keyboard_controller_only_resets() {
        let (seen, handler) = recorder();
        let port = KeyboardReset::new(handler);
        port.write(0, &[0xAA]);
        assert!(seen.lock().is_empty());
        port.write(0, &[0xFE]);
        assert_eq!(*seen.lock(), [PowerRequest::Reset]);
        let mut data = [0xff];
        port.read(0, &mut data);
        assert_eq!(data, [0xff]);
    }
}
