//! Notices that a machine hangs, long before its time limit.
//!
//! The emulated CPU now and then delivers an interrupt to a guest of L1 a second time, though the guest has interrupts off
//! (docs/lab.md says why). A handler that holds a lock is then interrupted by itself and spins on that lock for ever. A CPU
//! that is seen for so long in one place with interrupts off does nothing else: the loops that a kernel runs so take
//! microseconds.

use std::time::Duration;

/// How often the CPU is looked at.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// So many looks in a row at a CPU in one place make a hang.
const LOOKS: u32 = 8;
/// A loop that waits for a lock is not longer than this.
const LOOP_BYTES: u64 = 64;
/// RFLAGS.IF.
const INTERRUPTS: u64 = 1 << 9;

/// Where the CPUs have been seen.
#[derive(Default)]
pub struct Watch {
    cpus: Vec<Cpu>,
}

impl Watch {
    /// Takes what `info registers -a` prints; true when a CPU hangs.
    pub fn look(&mut self, registers: &str) -> bool {
        let mut hangs = false;
        for (index, registers) in registers.split("CPU#").skip(1).enumerate() {
            if self.cpus.len() == index {
                self.cpus.push(Cpu::default());
            }
            hangs |= self.cpus[index].look(registers);
        }
        hangs
    }
}

#[derive(Default)]
struct Cpu {
    place: u64,
    /// What a string instruction changes: one that clears much memory stays in its place for long.
    counted: [Option<u64>; 3],
    looks: u32,
}

impl Cpu {
    fn look(&mut self, registers: &str) -> bool {
        let (Some(rip), Some(flags)) = (field(registers, "RIP="), field(registers, "RFL=")) else {
            return false;
        };
        // One that waits for its first instruction, or for ever, does not spin.
        let halted = field(registers, "HLT=") == Some(1);
        let counted = ["RCX=", "RSI=", "RDI="].map(|name| field(registers, name));
        let stays = rip.abs_diff(self.place) <= LOOP_BYTES && counted == self.counted;
        if stays && !halted && flags & INTERRUPTS == 0 {
            self.looks += 1;
        } else {
            *self = Self {
                place: rip,
                counted,
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
            "CPU#0\nRAX=0000000000000001 RBX=0\nRSI=0 RDI=0\nR15=0\n\
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
    fn any_cpu_may_hang() {
        let mut watch = Watch::default();
        let two = |turn: u64| registers(0x1000 * turn, 0x46) + &registers(0x8000, 0x46);
        let looks: Vec<_> = (0..LOOKS)
            .map(|turn| watch.look(&two(turn.into())))
            .collect();
        assert!(looks.ends_with(&[false, true]));
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
        let mut clears = Watch::default();
        for left in 0..4 * LOOKS {
            let registers = registers(0x1000, 0x46).replace("RDI=0", &format!("RDI={left:x}"));
            assert!(!clears.look(&registers));
        }
        let halted = registers(0x1000, 0x46).replace("HLT=0", "HLT=1");
        let mut waits = Watch::default();
        assert!((0..4 * LOOKS).all(|_| !waits.look(&halted)));
    }
}
