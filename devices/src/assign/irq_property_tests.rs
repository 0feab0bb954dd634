//! Interrupt registers written at random, refused calls included: what is enabled and routed is what
//! the registers say, and nothing is left over.

use super::DeviceOptions;
use super::ports::{IrqIndex, MsiMessage, VectorId};
use super::testing::{Rig, bdf};
use crate::bus::BusDevice;
use crate::fake::FakeDeviceSpec;
use crate::pci::bar::BarKind;
use crate::pci::ecam::PciFunction;
use crate::pci::spec::{Command, pcie};

const VECTORS: u16 = 8;
const TABLE: u64 = 0x1000;
const MSIX_CONTROL: u16 = 0x42;
const MSI: u16 = 0x80;
const DEVCTL: u16 = 0x60 + pcie::DEVCTL;
const STEPS: usize = 20_000;

/// Numbers that look random (xorshift).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 8) % n
    }
}

fn rig() -> Rig {
    let kind = BarKind::Mem32 {
        prefetchable: false,
    };
    let spec = FakeDeviceSpec::bare(bdf(1))
        .bar(0, kind, 0x4000)
        .msix(VECTORS, (0, TABLE as u32), (0, 0x2000))
        .irq(IrqIndex::Intx, 1)
        .msi(4)
        .express();
    Rig::new(vec![spec], DeviceOptions::default())
}

fn trap(rig: &Rig, offset: u64, access: impl FnOnce(&dyn BusDevice, u64)) {
    // Where the BAR answers, if it does: a reset has moved it to 0.
    rig.move_home();
    let address = rig.placed(0, 0) + offset;
    let (range, window) = &rig.assignment.memory_windows()[0];
    access(window.as_ref(), address - range.start());
}

impl Rig {
    fn move_home(&self) {
        if self.read_config(0, 0x10) & !0xf == 0 {
            self.write_bar_register(0, 0, self.placed(0, 0) as u32);
        }
    }

    fn config_word(&self, offset: u16) -> u16 {
        let mut data = [0; 2];
        self.assignment.functions()[0].config_read(offset, &mut data);
        u16::from_le_bytes(data)
    }
}

fn step(rig: &Rig, dice: &mut Dice) {
    let value = dice.next().to_le_bytes();
    match dice.below(8) {
        0..3 => {
            // Half of them at a vector's mask, so that vectors are unmasked often enough.
            let at = match dice.below(2) {
                0 => TABLE + 16 * dice.below(VECTORS.into()) + 12,
                _ => TABLE + dice.below(16 * u64::from(VECTORS)),
            };
            let len = 1 << dice.below(4);
            trap(rig, at, |window, at| window.write(at, &value[..len]));
        }
        3 => rig.write_config(0, MSIX_CONTROL, &value[..2]),
        4 => {
            let at = dice.below(24) as u16;
            let len = 1 + dice.below(4 - u64::from(at % 4)) as usize;
            rig.write_config(0, MSI + at, &value[..len]);
        }
        5 => {
            let commands = [0, 2, 6, 0x406, 0x402];
            rig.write_command(0, commands[dice.below(5) as usize]);
        }
        6 => {
            let device = rig.kernel.device(bdf(1)).unwrap();
            for kind in device.enabled() {
                device.interrupt(kind, dice.below(VECTORS.into()) as usize);
            }
        }
        _ if dice.below(16) == 0 => rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes()),
        _ => {
            trap(rig, 0x2000, |window, at| window.read(at, &mut [0; 8]));
        }
    }
}

/// What the registers, as the guest reads them, ask for.
fn wanted(rig: &Rig) -> (Vec<IrqIndex>, Vec<Option<MsiMessage>>) {
    let control = rig.config_word(MSIX_CONTROL);
    let command = Command::from_bits_retain(rig.config_word(4));
    let active = command.intersects(Command::IO | Command::MEMORY | Command::MASTER);
    if control & 1 << 15 != 0 {
        let entry = |vector: u16| {
            let mut entry = [0; 16];
            // Read behind the decoder: it may be off.
            let function = &rig.assignment.functions()[0];
            function.read_bar(0, TABLE + 16 * u64::from(vector), &mut entry[..8]);
            function.read_bar(0, TABLE + 16 * u64::from(vector) + 8, &mut entry[8..]);
            let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().unwrap());
            let open = word(12) & 1 == 0 && control & 1 << 14 == 0;
            open.then(|| MsiMessage {
                address: u64::from(word(0)) | u64::from(word(4)) << 32,
                data: word(8),
            })
        };
        return (vec![IrqIndex::Msix], (0..VECTORS).map(entry).collect());
    }
    let control = rig.config_word(MSI + 2);
    if control & 1 != 0 {
        let count = 1 << (control >> 4 & 7);
        let dword = |at: u16| rig.read_config(0, MSI + at);
        let message = |vector: u16| {
            let open = vector < count && dword(16) >> vector & 1 == 0;
            open.then(|| MsiMessage {
                address: u64::from(dword(4)) | u64::from(dword(8)) << 32,
                data: u32::from(rig.config_word(MSI + 12) & !(count - 1) | vector),
            })
        };
        return (vec![IrqIndex::Msi], (0..VECTORS).map(message).collect());
    }
    let intx = active && !command.contains(Command::INTX_DISABLE);
    let kinds = intx.then_some(IrqIndex::Intx).into_iter().collect();
    (kinds, vec![None; VECTORS.into()])
}

fn found(rig: &Rig) -> (Vec<IrqIndex>, Vec<Option<MsiMessage>>) {
    let device = rig.kernel.device(bdf(1)).unwrap();
    let route = |vector| rig.kernel.route(VectorId { device: 0, vector });
    (device.enabled(), (0..VECTORS).map(route).collect())
}

/// A vector that is routed is armed as well.
fn check_armed(rig: &Rig, step: usize) {
    let (kinds, routes) = found(rig);
    let device = rig.kernel.device(bdf(1)).unwrap();
    let armed = kinds.first().map(|kind| device.armed(*kind));
    for (vector, _) in routes
        .iter()
        .enumerate()
        .filter(|(_, route)| route.is_some())
    {
        let armed = armed.as_ref().and_then(|armed| armed.get(vector));
        assert_eq!(armed, Some(&true), "step {step}, vector {vector}");
    }
}

/// What a routed vector of the device signals reaches the guest.
fn check_delivered(rig: &Rig, context: &str) {
    let device = rig.kernel.device(bdf(1)).unwrap();
    let (kinds, routes) = found(rig);
    for (vector, route) in (0..VECTORS).zip(routes) {
        let id = VectorId { device: 0, vector };
        rig.kernel.take_delivery(id);
        if route.is_some() {
            assert!(device.interrupt(kinds[0], vector.into()), "{context}");
            assert!(rig.kernel.take_delivery(id), "{context}, vector {vector}");
        }
    }
}

#[test]
fn what_is_enabled_and_routed_is_what_the_registers_say() {
    let (rig, mut dice) = (rig(), Dice(0x1234_5678_9abc_def1));
    for number in 0..STEPS {
        step(&rig, &mut dice);
        assert_eq!(found(&rig), wanted(&rig), "step {number}");
        check_armed(&rig, number);
    }
}

#[test]
fn refused_calls_leave_at_most_one_kind_and_nothing_once_all_is_off() {
    for seed in 1..200 {
        let (rig, mut dice) = (rig(), Dice(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed)));
        for _ in 0..40 {
            if dice.below(3) == 0 {
                rig.kernel.fail_after(dice.below(4) as usize, libc::ENOSPC);
            }
            step(&rig, &mut dice);
            let (kinds, _) = found(&rig);
            assert!(kinds.len() <= 1, "{kinds:?}");
        }
        rig.kernel.take_pending_failure();
        // Off, and everything on again: nothing of the refusals is left.
        rig.write_config(0, MSIX_CONTROL, &[0, 0]);
        rig.write_config(0, MSI + 2, &[0]);
        rig.write_command(0, 0);
        assert_eq!(
            found(&rig),
            (vec![], vec![None; VECTORS.into()]),
            "seed {seed}"
        );
        rig.write_command(0, 6);
        assert_eq!(found(&rig), wanted(&rig), "seed {seed}");
        rig.write_config(0, MSIX_CONTROL, &[0, 0x80]);
        assert_eq!(found(&rig), wanted(&rig), "seed {seed}");
        check_armed(&rig, 0);
    }
}

#[test]
fn calls_refused_one_after_the_other_are_made_up_for_by_the_next_change_of_each_kind() {
    for seed in 1..2000 {
        let (rig, mut dice) = (rig(), Dice(0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed)));
        for _ in 0..30 {
            if dice.below(3) == 0 {
                let (after, count) = (dice.below(3) as usize, 1 + dice.below(6) as usize);
                rig.kernel.fail_run(after, count, libc::EIO);
            }
            step(&rig, &mut dice);
            let (kinds, _) = found(&rig);
            assert!(kinds.len() <= 1, "{kinds:?}");
        }
        rig.kernel.take_pending_failure();
        // What the guest writes last is what counts, for the kind that it has on.
        let context = format!("seed {seed}");
        let control = rig.config_word(MSIX_CONTROL);
        rig.write_config(0, MSIX_CONTROL, &control.to_le_bytes());
        let control = rig.config_word(MSI + 2);
        rig.write_config(0, MSI + 2, &control.to_le_bytes());
        let command = rig.config_word(4);
        rig.write_command(0, command);
        assert_eq!(found(&rig), wanted(&rig), "{context}");
        check_armed(&rig, 0);
        check_delivered(&rig, &context);
    }
}
