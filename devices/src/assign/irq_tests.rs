//! Interrupts of assigned devices on the fake kernel, driven by table, capability and COMMAND writes
//! as a guest makes them. The cases are layouts and orders that other monitors tripped over.

use super::DeviceOptions;
use super::ports::{IrqIndex, MsiMessage, VectorId};
use super::testing::{Rig, bdf};
use crate::bus::BusDevice;
use crate::fake::{FakeDeviceSpec, Tally};
use crate::pci::bar::BarKind;
use crate::pci::ecam::PciFunction;
use crate::pci::spec::{Command, Reg};
use crate::range::Range;

const ON: u16 = Command::MEMORY.bits() | Command::MASTER.bits();
const ENABLE: u16 = 1 << 15;
const FUNCTION_MASK: u16 = 1 << 14;
/// Message control of the capability that `FakeDeviceSpec::msix` makes, and of `msi`.
const MSIX_CONTROL: u16 = 0x42;
const MSI: u16 = 0x80;
const MEM32: BarKind = BarKind::Mem32 {
    prefetchable: false,
};

/// One device with `vectors` of MSI-X: table and PBA in BAR 0 of that size, INTx beside.
fn device(number: u8, vectors: u16, size: u64, table: u32, pba: u32) -> FakeDeviceSpec {
    FakeDeviceSpec::bare(bdf(number))
        .bar(0, MEM32, size)
        .msix(vectors, (0, table), (0, pba))
        .irq(IrqIndex::Intx, 1)
}

fn rig(specs: Vec<FakeDeviceSpec>) -> Rig {
    let rig = Rig::new(specs, DeviceOptions::default());
    for device in 0..rig.assignment.functions().len() {
        rig.write_command(device, ON);
    }
    rig.kernel.take_log();
    rig
}

/// The guest's accesses to BARs and interrupt registers of one device.
struct Guest<'a> {
    rig: &'a Rig,
    device: usize,
    bar: u8,
    table: u64,
}

impl<'a> Guest<'a> {
    fn new(rig: &'a Rig, device: usize, table: u64) -> Self {
        let bar = 0;
        Self {
            rig,
            device,
            bar,
            table,
        }
    }

    fn trap(&self, bar: u8, offset: u64, access: impl FnOnce(&dyn BusDevice, u64)) {
        let address = self.rig.placed(self.device, bar) + offset;
        let windows = self.rig.assignment.memory_windows();
        let window = windows.iter().find(|(range, _)| range.contains(address));
        let (range, window) = window.unwrap();
        access(window.as_ref(), address - range.start());
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.trap(self.bar, offset, |window, at| window.write(at, data));
    }

    fn read(&self, bar: u8, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.trap(bar, offset, |window, at| window.read(at, &mut data));
        u32::from_le_bytes(data)
    }

    /// Address and data of an entry, as Linux writes them; its mask stays.
    fn program(&self, vector: u64) {
        let entry = self.table + 16 * vector;
        self.write(entry, &0xfee0_1000u32.to_le_bytes());
        self.write(entry + 4, &[0; 4]);
        self.write(entry + 8, &(vector as u32).to_le_bytes());
    }

    fn mask(&self, vector: u64, masked: bool) {
        let control = u32::from(masked).to_le_bytes();
        self.write(self.table + 16 * vector + 12, &control);
    }

    fn control(&self, control: u16) {
        let data = control.to_le_bytes();
        self.rig.write_config(self.device, MSIX_CONTROL, &data);
    }

    fn route(&self, vector: u16) -> Option<MsiMessage> {
        let device = self.device as u16;
        self.rig.kernel.route(VectorId { device, vector })
    }
}

fn costs(rig: &Rig) -> (usize, usize) {
    let tally = rig.kernel.take_tally();
    (tally.irqs, tally.routes)
}

/// Case 5 as well: 129 vectors at 0x5200 and PBA at 0xd600 of a BAR of 64 KiB.
#[test]
fn sixty_four_entries_unmasked_before_enabling_cost_two_calls_and_one_update() {
    let rig = rig(vec![device(1, 129, 0x1_0000, 0x5200, 0xd600)]);
    let guest = Guest::new(&rig, 0, 0x5200);
    for vector in 0..64 {
        guest.program(vector);
        guest.mask(vector, false);
    }
    assert_eq!(costs(&rig), (0, 0));
    guest.control(ENABLE);
    assert_eq!(
        costs(&rig),
        (2, 1),
        "INTx off, MSI-X on; all routes at once"
    );
    let fake = rig.kernel.device(bdf(1)).unwrap();
    assert_eq!(fake.armed(IrqIndex::Msix), [true; 64]);
    // One more: itself and nothing else.
    guest.program(128);
    guest.mask(128, false);
    assert_eq!(costs(&rig), (1, 1));
    // The size that the guest finds is the BAR's own.
    rig.write_bar_register(0, 0, u32::MAX);
    assert_eq!(rig.read_config(0, 0x10), 0xffff_0000);
}

#[test]
fn two_thousand_entries_cost_as_many_calls_as_one_when_enabled_and_one_each_afterwards() {
    let rig = rig(vec![device(1, 2048, 0x1_0000, 0, 0x8000)]);
    let guest = Guest::new(&rig, 0, 0);
    for vector in 0..2048 {
        guest.program(vector);
        guest.mask(vector, false);
    }
    rig.kernel.take_log();
    guest.control(ENABLE);
    assert_eq!(costs(&rig), (2, 1));
    assert_eq!(rig.kernel.route_count(), 2048);
    guest.control(0);
    assert_eq!(rig.kernel.route_count(), 0);

    // The other order: enabled masked, unmasked one by one.
    for vector in 0..2048 {
        guest.mask(vector, true);
    }
    guest.control(ENABLE);
    rig.kernel.take_log();
    for vector in 0..2048 {
        guest.mask(vector, false);
    }
    assert_eq!(costs(&rig), (2048, 2048));
}

/// Case 9.
#[test]
fn four_devices_of_2048_vectors_take_routes_and_files_for_those_in_use() {
    let specs = (1..=4).map(|number| device(number, 2048, 0x1_0000, 0, 0x8000));
    let rig = rig(specs.collect());
    for number in 0..4 {
        let guest = Guest::new(&rig, number, 0);
        // As Linux does: enabled with the function masked, then vector by vector.
        guest.control(ENABLE | FUNCTION_MASK);
        guest.control(ENABLE);
        for vector in (0..2048).step_by(128) {
            guest.program(vector);
            guest.mask(vector, false);
        }
    }
    assert_eq!(rig.kernel.route_count(), 4 * 16);
    for number in 1..=4 {
        let fake = rig.kernel.device(bdf(number)).unwrap();
        let armed = fake.armed(IrqIndex::Msix);
        assert_eq!(armed.iter().filter(|armed| **armed).count(), 16);
    }
}

/// Case 10.
#[test]
fn only_the_unmasked_vector_fires_and_what_comes_while_it_is_masked_is_pending() {
    let rig = rig(vec![device(1, 8, 0x4000, 0x1000, 0x2000)]);
    let guest = Guest::new(&rig, 0, 0x1000);
    // Id, next pointer and control in one dword, of which only control can be written.
    let control = u32::from(ENABLE | FUNCTION_MASK) << 16;
    rig.write_config(0, MSIX_CONTROL - 2, &(control | 0xffff).to_le_bytes());
    assert_eq!(
        rig.read_config(0, MSIX_CONTROL - 2),
        control | 7 << 16 | 0x11
    );
    for vector in 0..8 {
        guest.program(vector);
    }
    guest.mask(3, false);
    assert_eq!(rig.kernel.route_count(), 0, "the function is masked");
    // One byte: the upper half of control.
    rig.write_config(0, MSIX_CONTROL + 1, &[0x80]);
    assert_eq!(
        (rig.kernel.route_count(), guest.route(3).unwrap().data),
        (1, 3)
    );

    let fake = rig.kernel.device(bdf(1)).unwrap();
    guest.mask(3, true);
    assert_eq!((guest.route(3), guest.read(0, 0x2000)), (None, 0));
    assert!(fake.interrupt(IrqIndex::Msix, 3));
    assert_eq!(guest.read(0, 0x2000), 1 << 3, "pending");
    guest.write(0x2000, &[0; 4]);
    assert_eq!(guest.read(0, 0x2000), 1 << 3, "read-only");
    guest.mask(3, false);
    assert!(guest.route(3).is_some(), "KVM delivers what waits in it");
    assert_eq!(guest.read(0, 0x2000), 0);
}

/// Cases 6 and 7.
#[test]
fn table_and_pba_trap_wherever_they_lie() {
    // Both in one page; the table in the last page; PBA in another BAR; the table in a BAR of one
    // page beside an I/O BAR; two sparse areas around them.
    let one_page = device(1, 16, 0x4000, 0x1000, 0x1800);
    let last_page = device(2, 16, 0x4000, 0x3f00, 0x3000);
    let apart = FakeDeviceSpec::bare(bdf(3))
        .bar(0, MEM32, 0x4000)
        .bar(1, MEM32, 0x2000)
        .msix(16, (0, 0x2000), (1, 0x1000));
    let small = FakeDeviceSpec::bare(bdf(4))
        .bar(0, MEM32, 0x1000)
        .bar(1, BarKind::Io, 0x20)
        .msix(16, (0, 0), (0, 0x800));
    let sparse = device(5, 513, 0x8000, 0x4000, 0x3000).sparse(
        0,
        vec![
            Range::from_bounds(0, 0x3000),
            Range::from_bounds(0x7000, 0x8000),
        ],
    );
    let rig = rig(vec![one_page, last_page, apart, small, sparse]);
    let cases = [
        (0, 0x1000, (0, 0x1800)),
        (1, 0x3f00, (0, 0x3000)),
        (2, 0x2000, (1, 0x1000)),
        (3, 0, (0, 0x800)),
        (4, 0x4000, (0, 0x3000)),
    ];
    for (number, table, (bar, pba)) in cases {
        let guest = Guest::new(&rig, number, table);
        let (at, pending) = (rig.placed(number, 0) + table, rig.placed(number, bar) + pba);
        assert_eq!(
            [rig.slot_at(at), rig.slot_at(pending)],
            [None; 2],
            "{number}"
        );
        assert_eq!(guest.read(0, table + 12), 1, "{number}: masked");
        guest.control(ENABLE);
        guest.program(2);
        guest.mask(2, false);
        guest.mask(2, true);
        let fake = rig.kernel.device(bdf(number as u8 + 1)).unwrap();
        assert!(fake.interrupt(IrqIndex::Msix, 2), "{number}");
        assert_eq!(guest.read(bar, pba), 1 << 2, "{number}");
    }
    let sparse = rig.placed(4, 0);
    assert!(rig.slot_at(sparse + 0x2fff).is_some() && rig.slot_at(sparse + 0x7000).is_some());
}

#[test]
fn one_kind_is_enabled_at_a_time_and_each_leads_to_each() {
    let spec = device(1, 4, 0x4000, 0x1000, 0x2000).msi(4);
    let rig = rig(vec![spec]);
    let fake = rig.kernel.device(bdf(1)).unwrap();
    let set = |command: u16, msi: u16, msix: u16| {
        rig.write_command(0, command);
        rig.write_config(0, MSI + 2, &msi.to_le_bytes());
        rig.write_config(0, MSIX_CONTROL, &msix.to_le_bytes());
        fake.enabled()
    };
    let off = ON | Command::INTX_DISABLE.bits();
    let states = [
        ((ON, 0, 0), vec![IrqIndex::Intx]),
        ((off, 0, 0), vec![]),
        ((ON, 1, 0), vec![IrqIndex::Msi]),
        ((off, 0, ENABLE), vec![IrqIndex::Msix]),
        // Both at once are not allowed to software; MSI-X goes first.
        ((ON, 1, ENABLE), vec![IrqIndex::Msix]),
        ((0, 0, 0), vec![]),
    ];
    for (from, before) in &states {
        for (to, after) in &states {
            assert_eq!(&set(from.0, from.1, from.2), before);
            assert_eq!(&set(to.0, to.1, to.2), after, "{from:?} to {to:?}");
        }
    }
    assert_eq!(rig.kernel.route_count(), 0);
}

#[test]
fn messages_of_several_vectors_and_their_masks_follow_the_guest() {
    let spec = FakeDeviceSpec::bare(bdf(1)).bar(0, MEM32, 0x1000).msi(8);
    let rig = rig(vec![spec]);
    let fake = rig.kernel.device(bdf(1)).unwrap();
    rig.write_config(0, MSI + 4, &0xfee0_2000u64.to_le_bytes());
    rig.write_config(0, MSI + 12, &0x4040u16.to_le_bytes());
    rig.write_config(0, MSI + 16, &0b0010u32.to_le_bytes());
    rig.kernel.take_log();
    // Four vectors, on.
    rig.write_config(0, MSI + 2, &0x21u16.to_le_bytes());
    assert_eq!(costs(&rig), (1, 1));
    let data = |vector| {
        let route = rig.kernel.route(VectorId { device: 0, vector });
        route.map(|message| message.data)
    };
    assert_eq!(
        [0, 1, 2, 3, 4].map(data),
        [Some(0x4040), None, Some(0x4042), Some(0x4043), None]
    );
    // Unmasked later: armed without touching the others, though the set could not grow.
    rig.write_config(0, MSI + 16, &[0; 4]);
    assert_eq!((costs(&rig), data(1)), ((1, 1), Some(0x4041)));
    rig.write_config(0, MSI + 16, &[0b0100]);
    assert!(fake.interrupt(IrqIndex::Msi, 2));
    assert_eq!(rig.read_config(0, MSI + 20), 0b0100, "pending");
}

/// A full host: the device stays usable and works once there are vectors again.
#[test]
fn vectors_that_the_host_does_not_have_are_tried_again_with_the_guests_next_change() {
    let rig = rig(vec![device(1, 8, 0x4000, 0x1000, 0x2000)]);
    let guest = Guest::new(&rig, 0, 0x1000);
    let fake = rig.kernel.device(bdf(1)).unwrap();
    fake.set_vector_limit(0);
    guest.control(ENABLE);
    guest.program(1);
    guest.mask(1, false);
    assert_eq!((rig.kernel.route_count(), fake.enabled()), (0, vec![]));
    fake.set_vector_limit(8);
    guest.program(2);
    assert_eq!(fake.armed(IrqIndex::Msix), [false, true]);
    assert!(guest.route(1).is_some());
}

/// Every size and alignment, straddling registers of different owners.
#[test]
fn wide_accesses_read_what_bytes_read_and_write_what_bytes_write() {
    let spec = || device(1, 8, 0x4000, 0x1000, 0x2000).msi(4).express();
    let (wide, bytes) = (rig(vec![spec()]), rig(vec![spec()]));
    let read = |rig: &Rig, offset: u16, len: usize| {
        let mut data = vec![0; len];
        rig.assignment.functions()[0].config_read(offset, &mut data);
        data
    };
    // Not the registers that reset the function, nor where that many kinds of interrupt are set.
    for offset in 0..0x100u16 {
        for len in 1..=4u16.min(4 - offset % 4) {
            let data = [0x5a, 0xa5, 0x3c, 0xc3].map(|byte: u8| byte.wrapping_add(offset as u8));
            let data = &data[..usize::from(len)];
            wide.write_config(0, offset, data);
            for (byte, at) in data.iter().zip(offset..) {
                bytes.write_config(0, at, &[*byte]);
            }
            for base in (0..0x100).step_by(4) {
                let expected = read(&bytes, base, 4);
                assert_eq!(
                    read(&wide, base, 4),
                    expected,
                    "{offset:#x}+{len} at {base:#x}"
                );
                let single: Vec<u8> = (base..base + 4).flat_map(|at| read(&wide, at, 1)).collect();
                assert_eq!(single, expected);
                let halves = [read(&wide, base, 2), read(&wide, base + 2, 2)].concat();
                assert_eq!(halves, expected);
                assert_eq!(read(&wide, base + 1, 3), expected[1..]);
            }
        }
    }
    assert_ne!(wide.kernel.take_tally(), Tally::default());
    assert_eq!(read(&wide, Reg::VENDOR_ID.offset(), 2), [0x36, 0x1b]);
}
