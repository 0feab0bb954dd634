//! Random guests against the fake kernel: whatever two devices' COMMAND and BAR registers are
//! written with, slots, mappings and answers are what the rules of `plan.rs` promise; and when the
//! kernel refuses any call, nothing has changed.

use std::cell::RefCell;
use std::sync::Arc;

use super::plan::MAX_STALE_IOVAS;
use super::ports::IommuNature;
use super::testing::{DMABUF, GIB, RAM, Rig, bdf};
use super::{AssignError, DeviceOptions, PeerToPeer};
use crate::fake::{Event, FakeDeviceSpec};
use crate::pci::spec::{Command, pcie};
use crate::range::Range;

const SIZE: u64 = 16 * GIB;
const BAR: u8 = 2;

/// A small, fast, reproducible generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// What a guest may do.
#[derive(Clone, Copy, Debug)]
enum Step {
    Command(usize, u16),
    BarDword(usize, u8, u32),
    /// A function-level reset through PCIe device control.
    Reset(usize),
}

/// The rules, written down a second time: what PCI says each function decodes, in which order.
#[derive(Clone, Default)]
struct Model {
    command: [u16; 2],
    bar: [u64; 2],
    since: [u64; 2],
    clock: u64,
}

impl Model {
    fn decodes(&self, device: usize) -> bool {
        self.command[device] & Command::MEMORY.bits() != 0
    }

    fn take(&mut self, step: Step) {
        self.clock += 1;
        let before = self.clone();
        let device = match step {
            Step::Command(device, command) => {
                self.command[device] = command;
                device
            }
            Step::BarDword(device, high, value) => {
                let shift = if high == 0 { 0 } else { 32 };
                let cleared = self.bar[device] & !(0xffff_ffff << shift);
                self.bar[device] = (cleared | u64::from(value) << shift) & !(SIZE - 1);
                device
            }
            Step::Reset(device) => {
                (self.command[device], self.bar[device]) = (0, 0);
                device
            }
        };
        let moved = before.bar[device] != self.bar[device];
        if self.decodes(device) && (moved || !before.decodes(device)) {
            self.since[device] = self.clock;
        }
    }

    fn answer(&self, device: usize, window: &Range) -> Option<Range> {
        let range = |device: usize| {
            let range = Range::new(self.bar[device], SIZE)?;
            (self.decodes(device) && window.covers(&range)).then_some(range)
        };
        let (mine, other) = (range(device)?, range(1 - device));
        let loses =
            other.is_some_and(|o| o.overlaps(&mine)) && self.since[1 - device] < self.since[device];
        (!loses).then_some(mine)
    }
}

struct Guest {
    rig: Rig,
    model: Model,
    random: Random,
    window: Range,
    /// Host-virtual address of each device's BAR.
    memory: [u64; 2],
    strict: bool,
    nature: IommuNature,
    /// Whether it resets its devices now and then.
    resets: bool,
}

impl Guest {
    fn new(seed: u64, strict: bool, nature: IommuNature) -> Self {
        let bar = crate::pci::bar::BarKind::Mem64 { prefetchable: true };
        let spec = |n| FakeDeviceSpec::bare(bdf(n)).bar(BAR, bar, SIZE).express();
        let options = DeviceOptions {
            peer_to_peer: PeerToPeer::On,
            strict_decode: strict,
            ..DeviceOptions::default()
        };
        let rig = Rig::on(nature, vec![spec(1), spec(2)], options);
        Self::drives(rig, seed, options, nature)
    }

    /// BARs are not mapped for peers yet.
    fn before_maps(seed: u64, peer_to_peer: PeerToPeer) -> Self {
        let bar = crate::pci::bar::BarKind::Mem64 { prefetchable: true };
        let spec = |n| FakeDeviceSpec::bare(bdf(n)).bar(BAR, bar, SIZE).express();
        let options = DeviceOptions {
            peer_to_peer,
            ..DeviceOptions::default()
        };
        let nature = IommuNature::default();
        let rig = Rig::unmapped(nature, vec![spec(1), spec(2)], &[options]).unwrap();
        Self::drives(rig, seed, options, nature)
    }

    fn drives(rig: Rig, seed: u64, options: DeviceOptions, nature: IommuNature) -> Self {
        let placed = [rig.placed(0, BAR), rig.placed(1, BAR)];
        let (mapped, slots) = (rig.kernel.mappings(), rig.kernel.slots());
        let at = |gpa| {
            mapped
                .iter()
                .chain(&slots)
                .find(|(range, _)| range.start() == gpa)
        };
        let memory = placed.map(|gpa| at(gpa).unwrap().1);
        let window = rig.placement.mmio64.unwrap();
        rig.kernel.take_log();
        Self {
            model: Model {
                bar: placed,
                ..Model::default()
            },
            rig,
            random: Random(seed),
            window,
            memory,
            strict: options.strict_decode,
            nature,
            resets: false,
        }
    }

    fn step(&mut self) -> Step {
        let device = self.random.below(2) as usize;
        if self.resets && self.random.below(50) == 0 {
            return Step::Reset(device);
        }
        if self.random.below(3) == 0 {
            // No bus mastering here: that is a call to the device, not to slots or IOMMU.
            let bits = [0, 1, 2, 3, 0x402][self.random.below(5) as usize];
            return Step::Command(device, bits);
        }
        let slots = self.window.len() / SIZE;
        let address = match self.random.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => RAM.start() + 4096 * self.random.below(1000),
            3 => 0xc000_0000,
            4 => self.random.next(),
            _ => self.window.start() + SIZE * self.random.below(slots + 1),
        };
        let high = self.random.below(4).min(1) as u8;
        let value = if high == 1 { address >> 32 } else { address };
        Step::BarDword(device, high, value as u32)
    }

    fn drive(&self, step: Step) {
        match step {
            Step::Command(device, command) => self.rig.write_command(device, command),
            Step::BarDword(device, high, value) => {
                self.rig.write_bar_register(device, BAR + high, value);
            }
            Step::Reset(device) => {
                let control = 0x60 + pcie::DEVCTL;
                self.rig
                    .write_config(device, control, &0x8000u16.to_le_bytes());
            }
        }
    }

    fn check(&self, step: Step) {
        let answers = [0, 1].map(|device| self.model.answer(device, &self.window));
        let slots = self.rig.kernel.slots();
        let mappings = self.rig.kernel.mappings();
        for device in [0, 1] {
            self.check_readback(device);
            let mine = slots.iter().find(|(_, hva)| *hva == self.memory[device]);
            match answers[device] {
                Some(range) => {
                    assert_eq!(mine.map(|(r, _)| *r), Some(range), "{step:?}");
                    let found = self.rig.answers_at(range.start());
                    assert_eq!(found.map(|(key, _)| key.device), Some(device));
                    let mapped = (range, self.memory[device]);
                    assert!(mappings.contains(&mapped), "{step:?}: {mappings:x?}");
                    let foreign = |(r, hva): &&(Range, u64)| {
                        r.overlaps(&range) && *hva != self.memory[device]
                    };
                    assert_eq!(mappings.iter().find(foreign), None, "{step:?}");
                }
                None if self.model.decodes(device) || self.strict => {
                    // Not before the first decoding: the BAR is installed from the start.
                    let untouched = self.model.since[device] == 0 && !self.model.decodes(device);
                    assert!(mine.is_none() || untouched, "{step:?}");
                }
                None => {}
            }
        }
        for (range, hva) in &slots {
            let legal = self.window.covers(range) || *range == RAM;
            assert!(legal, "{step:?}: a slot at {range}");
            assert!(*hva != 0);
        }
        assert!(mappings.len() <= MAX_STALE_IOVAS + 2);
        if self.nature.cheap_unmap {
            self.check_nothing_is_left(&answers, &mappings, step);
        }
    }

    /// Where unmapping is cheap, a device that decodes is mapped where it answers and nowhere else.
    fn check_nothing_is_left(
        &self,
        answers: &[Option<Range>; 2],
        mappings: &[(Range, u64)],
        step: Step,
    ) {
        for (device, answer) in answers.iter().enumerate() {
            let mine = mappings
                .iter()
                .filter(|(_, hva)| *hva == self.memory[device]);
            let mine: Vec<Range> = mine.map(|(range, _)| *range).collect();
            if self.model.decodes(device) {
                assert_eq!(mine, Vec::from_iter(*answer), "{step:?}");
            } else {
                assert!(mine.len() <= 1, "{step:?}");
            }
        }
    }

    /// Where a BAR answers, no slot shows another's memory, whatever was refused.
    fn check_slots_do_not_hide(&self, step: Step) {
        for (range, hva) in self.rig.kernel.slots() {
            let Some((key, _)) = self.rig.answers_at(range.start()) else {
                continue;
            };
            assert_eq!(hva, self.memory[key.device], "{step:?}: {range}");
        }
    }

    fn check_readback(&self, device: usize) {
        let low = self.rig.read_config(device, 0x18);
        let high = self.rig.read_config(device, 0x1c);
        let read = u64::from(high) << 32 | u64::from(low & !0xf);
        assert_eq!((read, low & 0xf), (self.model.bar[device], 0xc));
    }

    /// Where unmapping is dear, it happens only where another BAR answers now.
    fn check_unmaps(&self, log: &[Event]) {
        if self.nature.cheap_unmap {
            return;
        }
        for event in log {
            if let Event::Unmap(range) = event {
                let mut answers = [0, 1]
                    .into_iter()
                    .filter_map(|d| self.model.answer(d, &self.window));
                assert!(answers.any(|a| a.overlaps(range)), "{range} unmapped");
            }
        }
    }
}

#[test]
fn a_hundred_thousand_random_writes_keep_every_promise() {
    let type1 = IommuNature::default();
    for (seed, strict, nature) in [(1, false, type1), (2, true, type1), (4, false, DMABUF)] {
        let mut guest = Guest::new(seed, strict, nature);
        guest.resets = true;
        for _ in 0..100_000 {
            let step = guest.step();
            guest.model.take(step);
            guest.drive(step);
            guest.check(step);
            let log = guest.rig.kernel.take_log();
            guest.check_unmaps(&log);
        }
    }
}

/// Maps BARs for peers while the guest takes a few steps beside each mapping.
fn map_beside(guest: &RefCell<Guest>) -> Result<(), AssignError> {
    let assignment = Arc::clone(&guest.borrow().rig.assignment);
    assignment.map_peers(|| {
        let guest = &mut *guest.borrow_mut();
        for _ in 0..guest.random.below(6) {
            guest.rig.kernel.take_log();
            let step = guest.step();
            guest.model.take(step);
            guest.drive(step);
            let log = guest.rig.kernel.take_log();
            let is_iommu = |e: &&Event| matches!(e, Event::Map(_) | Event::Unmap(_));
            assert_eq!(log.iter().find(is_iommu), None, "{step:?}");
            for device in [0, 1] {
                let slots = guest.rig.kernel.slots();
                let mine = slots.iter().find(|(_, hva)| *hva == guest.memory[device]);
                if let Some(answer) = guest.model.answer(device, &guest.window) {
                    assert_eq!(mine.map(|(range, _)| *range), Some(answer), "{step:?}");
                }
            }
        }
        false
    })
}

#[test]
fn what_a_guest_does_while_bars_are_mapped_is_made_up_for() {
    for seed in 0..500 {
        let guest = RefCell::new(Guest::before_maps(seed, PeerToPeer::On));
        guest.borrow_mut().resets = seed % 2 == 0;
        map_beside(&guest).unwrap();
        let mut guest = guest.into_inner();
        guest.check(Step::Command(0, 0));
        for _ in 0..50 {
            let step = guest.step();
            guest.model.take(step);
            guest.drive(step);
            guest.check(step);
        }
    }
}

#[test]
fn whichever_mapping_is_refused_that_device_alone_is_not_reached() {
    for seed in 0..500 {
        for wish in [PeerToPeer::Auto, PeerToPeer::On] {
            let guest = RefCell::new(Guest::before_maps(seed, wish));
            guest
                .borrow()
                .rig
                .kernel
                .fail_map(seed as usize % 3, libc::ENOMEM);
            let result = map_beside(&guest);
            let mut guest = guest.into_inner();
            let Some(Event::Map(refused)) = guest.rig.kernel.failed() else {
                assert!(result.is_ok());
                continue;
            };
            assert_eq!(result.is_err(), wish == PeerToPeer::On);
            if result.is_err() {
                continue;
            }
            let mut reached = [None; 2];
            for _ in 0..50 {
                let step = guest.step();
                guest.model.take(step);
                guest.drive(step);
                let answers = [0, 1].map(|d| guest.model.answer(d, &guest.window));
                let mapped = guest.rig.kernel.mappings();
                for (device, answer) in answers.into_iter().enumerate() {
                    let Some(range) = answer else { continue };
                    let here = mapped.contains(&(range, guest.memory[device]));
                    // The same each time.
                    assert_eq!(*reached[device].get_or_insert(here), here, "{step:?}");
                }
            }
            assert_ne!(reached, [Some(true); 2], "{refused}");
        }
    }
}

#[test]
fn every_refused_call_leaves_everything_as_it_was() {
    for nature in [IommuNature::default(), DMABUF] {
        refuse_every_call(Guest::new(3, false, nature));
    }
}

fn refuse_every_call(mut guest: Guest) {
    let mut refused = 0;
    for _ in 0..3_000 {
        let step = guest.step();
        for call in 0.. {
            let before = state(&guest);
            guest.rig.kernel.fail_after(call, libc::EIO);
            guest.drive(step);
            if guest.rig.kernel.take_pending_failure() {
                break;
            }
            if matches!(guest.rig.kernel.failed(), Some(Event::ConfigWrite(..))) {
                // Not of slots or mappings: those have followed by then.
                break;
            }
            refused += 1;
            assert_eq!(state(&guest), before, "{step:?}, call {call}");
        }
        guest.model.take(step);
        guest.check(step);
    }
    assert!(refused > 500, "only {refused} calls were refused");
}

#[test]
fn calls_refused_one_after_the_other_are_made_up_for_by_the_next_write() {
    for nature in [IommuNature::default(), DMABUF] {
        for strict in [false, true] {
            let mut guest = Guest::new(5, strict, nature);
            guest.resets = true;
            for _ in 0..10_000 {
                let mut is_short = true;
                for _ in 0..guest.random.below(4) {
                    let after = guest.random.below(3) as usize;
                    let count = 1 + guest.random.below(6) as usize;
                    guest.rig.kernel.fail_run(after, count, libc::EIO);
                    let step = guest.step();
                    guest.model.take(step);
                    guest.drive(step);
                    // A call, and the one that was to take back what was done before it.
                    is_short &= count <= 2;
                    if is_short {
                        guest.check_slots_do_not_hide(step);
                    }
                }
                guest.rig.kernel.take_pending_failure();
                for device in [0, 1] {
                    let command = guest.model.command[device];
                    guest.drive(Step::Command(device, command));
                }
                // Which of two that overlap was there before is not what it would have been.
                let ranges = [0, 1].map(|device| Range::new(guest.model.bar[device], SIZE));
                if let [Some(a), Some(b)] = ranges
                    && !a.overlaps(&b)
                {
                    guest.check(Step::Command(0, 0));
                }
            }
        }
    }
}

type Snapshot = (Vec<(Range, u64)>, Vec<(Range, u64)>, Vec<Option<usize>>);

fn state(guest: &Guest) -> Snapshot {
    let places = (0..guest.window.len() / SIZE).map(|i| guest.window.start() + i * SIZE);
    let answers = places
        .map(|gpa| guest.rig.answers_at(gpa))
        .map(|found| found.map(|(key, _)| key.device));
    (
        guest.rig.kernel.slots(),
        guest.rig.kernel.mappings(),
        answers.collect(),
    )
}
