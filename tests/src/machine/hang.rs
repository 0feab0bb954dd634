//! Notices that a deterministic machine hangs, long before its time limit.
//!
//! QEMU's counted instructions now and then leave a lock of the kernel taken, and the only CPU then spins on it for ever
//! with its interrupts off. A CPU that is seen for so long in one place with interrupts off does nothing else: the loops
//! that a kernel runs so take microseconds.

use std::time::Duration;

/// How often the CPU is looked at.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// So many looks in a row at a CPU in one place make a hang.
const LOOKS: u32 = 8;
/// A loop that waits for a lock is not longer than this.
const LOOP_BYTES: u64 = 64;
/// RFLAGS.IF.
const INTERRUPTS: u64 = 1 << 9;

/// Where the CPU has been seen.
#[derive(Default)]
pub struct Watch {
    place: u64,
    looks: u32,
}

impl Watch {
    /// Takes what `info registers` prints; true when the CPU hangs.
    pub fn look(&mut self, registers: &str) -> bool {
        let (Some(rip), Some(flags)) = (field(registers, "RIP="), field(registers, "RFL=")) else {
            return false;
        };
        if flags & INTERRUPTS == 0 && rip.abs_diff(self.place) <= LOOP_BYTES {
            self.looks += 1;
        } else {
            *self = Self {
                place: rip,
                looks: 1,
            };
        }
        self.looks >= LOOKS
    }
}

fn field(registers: &str, name: &str) -> Option<u64> {
    let (_, rest) = registers.split_once(name)?;
    let digits = rest.split_whitespace().next()?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(rip: u64, flags: u64) -> String {
        format!(
            "CPU#0\nRAX=0000000000000001 RBX=0\nR15=0\n\
             RIP={rip:016x} RFL={flags:08x} [-------] CPL=0 II=0 A20=1 SMM=0 HLT=0\n"
        )
    }

    #[test]
    fn a_cpu_that_spins_with_interrupts_off_hangs() {
        let mut watch = Watch::default();
        for turn in 0..LOOKS - 1 {
            assert!(!watch.look(&registers(
                0xffff_ffff_8100_0000 + u64::from(turn % 3),
                0x46
            )));
        }
        assert!(watch.look(&registers(0xffff_ffff_8100_0002, 0x46)));
    }

    #[test]
    fn a_cpu_that_moves_or_takes_interrupts_does_not() {
        let mut moves = Watch::default();
        let mut idles = Watch::default();
        for turn in 0..4 * LOOKS {
            assert!(!moves.look(&registers(0x1000 * u64::from(turn), 0x46)));
            assert!(!idles.look(&registers(0x1000, 0x246)));
        }
        assert!(!idles.look("no registers"));
    }
}
