//! Resets that a guest asks for, on the fake kernel.

use super::DeviceOptions;
use super::testing::{DMABUF, GIB, Rig, bdf};
use crate::fake::{Event, FakeDeviceSpec};
use crate::pci::spec::{Command, pcie, pm};

const ON: u16 = Command::MEMORY.bits() | Command::MASTER.bits();
const DEVCTL: u16 = 0x60 + pcie::DEVCTL;
const PMCSR: u16 = 0xa0 + pm::CONTROL;

fn running_gpu(can_reset: bool) -> Rig {
    let mut spec = FakeDeviceSpec::gpu(bdf(1), 16 * GIB).express();
    spec.can_reset = can_reset;
    let rig = Rig::new(vec![spec], DeviceOptions::default());
    rig.write_command(0, ON);
    let (range, window) = &rig.assignment.memory_windows()[0];
    let entry = rig.placed(0, 0) - range.start() + 0x5200;
    crate::bus::BusDevice::write(window.as_ref(), entry + 12, &[0; 4]);
    rig.write_config(0, 0x42, &0x8000u16.to_le_bytes());
    assert_eq!(rig.kernel.route_count(), 1);
    rig.kernel.take_log();
    rig
}

/// Interrupts off, then bus mastering off, then the reset, and no DMA until the guest asks.
fn check_order(log: &[Event]) {
    let at = |what: &dyn Fn(&Event) -> bool| log.iter().position(what).unwrap();
    let disarmed = at(&|e| matches!(e, Event::SetIrqs(_, "disable", ..)));
    let master = at(&|e| matches!(e, Event::ConfigWrite(_, 4, d) if d[0] & 4 == 0));
    let reset = at(&|e| matches!(e, Event::Reset(_)));
    assert!(disarmed < master && master < reset, "{log:?}");
    let costly = |e: &&Event| {
        matches!(
            e,
            Event::Unmap(_) | Event::Map(_) | Event::ClearSlot(_) | Event::MoveSlot(..)
        )
    };
    assert_eq!(log.iter().find(costly), None);
}

fn check_guest_sees_reset_values_and_comes_back(rig: &Rig) {
    assert_eq!(rig.read_config(0, 4) as u16, 0);
    assert_eq!(rig.read_config(0, 0x18) & !0xf, 0);
    assert_eq!(rig.read_config(0, 0x1c), 0);
    assert_eq!(rig.read_config(0, 0x40) >> 31, 0, "MSI-X is off");
    let home = rig.placed(0, 2);
    assert_eq!(rig.answers_at(home), None);
    rig.move_bar(0, 2, home);
    rig.write_command(0, ON);
    assert!(rig.answers_at(home).is_some());
    assert!(rig.slot_at(home).is_some());
    let device = rig.kernel.device(bdf(1)).unwrap();
    assert_eq!(device.physical_config()[4] & 4, 4);
}

#[test]
fn a_function_level_reset_is_ordered_and_the_guest_restores_the_function() {
    let rig = running_gpu(true);
    rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
    check_order(&rig.kernel.take_log());
    check_guest_sees_reset_values_and_comes_back(&rig);
}

#[test]
fn waking_up_from_d3hot_resets_and_sleeping_decodes_nothing() {
    let rig = running_gpu(true);
    let home = rig.placed(0, 2);
    rig.write_config(0, PMCSR, &3u16.to_le_bytes());
    assert_eq!(rig.read_config(0, PMCSR) as u16 & 3, 3);
    assert_eq!(rig.answers_at(home), None);
    rig.kernel.take_log();
    rig.write_config(0, PMCSR, &0u16.to_le_bytes());
    check_order(&rig.kernel.take_log());
    check_guest_sees_reset_values_and_comes_back(&rig);
}

#[test]
fn a_sleeping_function_does_not_master_the_bus_and_one_that_keeps_its_state_does_so_again() {
    const NO_SOFT_RESET: u16 = 1 << 3;
    let mut spec = FakeDeviceSpec::gpu(bdf(1), 16 * GIB).express();
    spec.config[usize::from(PMCSR)] = NO_SOFT_RESET as u8;
    let rig = Rig::new(vec![spec], DeviceOptions::default());
    let device = rig.kernel.device(bdf(1)).unwrap();
    let masters = || device.physical_config()[4] & Command::MASTER.bits() as u8 != 0;
    rig.write_command(0, ON);
    assert!(masters());
    rig.write_config(0, PMCSR, &(NO_SOFT_RESET | 3).to_le_bytes());
    assert!(!masters());
    rig.write_command(0, ON);
    assert!(!masters());
    assert_eq!(rig.read_config(0, 4) as u16, ON);
    rig.write_config(0, PMCSR, &NO_SOFT_RESET.to_le_bytes());
    assert!(masters());
    let resets = |e: &Event| matches!(e, Event::Reset(_));
    assert!(!rig.kernel.take_log().iter().any(resets));
}

#[test]
fn the_reset_bit_never_reaches_the_device_and_other_bits_do() {
    let rig = running_gpu(true);
    rig.write_config(0, DEVCTL, &0x8010u16.to_le_bytes());
    rig.write_config(0, DEVCTL + 1, &[0x80]);
    rig.write_config(0, DEVCTL, &0x0810u16.to_le_bytes());
    let log = rig.kernel.take_log();
    let control = u64::from(DEVCTL);
    let writes: Vec<_> = log
        .iter()
        .filter(
            |e| matches!(e, Event::ConfigWrite(_, at, _) if (control..control + 2).contains(at)),
        )
        .collect();
    assert_eq!(
        writes,
        [&Event::ConfigWrite(bdf(1), control, vec![0x10, 0x08])]
    );
    let resets = log.iter().filter(|e| matches!(e, Event::Reset(_)));
    assert_eq!(resets.count(), 2, "by word and by byte");
}

#[test]
fn a_function_that_the_host_cannot_reset_does_not_offer_it() {
    let rig = running_gpu(false);
    assert_eq!(rig.read_config(0, 0x60 + pcie::DEVCAP) >> 28 & 1, 0);
    rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
    assert!(rig.answers_at(rig.placed(0, 2)).is_some());
    let resets = rig.kernel.take_log();
    assert!(!resets.iter().any(|e| matches!(e, Event::Reset(_))));
    // The other bits of such a write hold nevertheless.
    rig.write_config(0, DEVCTL, &0x8810u16.to_le_bytes());
    let wrote = Event::ConfigWrite(bdf(1), DEVCTL.into(), vec![0x10, 0x08]);
    assert_eq!(rig.kernel.take_log(), [wrote]);
}

#[test]
fn a_power_state_that_the_function_does_not_have_is_not_entered() {
    let rig = running_gpu(true);
    let state = |state: u16| {
        rig.write_config(0, PMCSR, &state.to_le_bytes());
        rig.read_config(0, PMCSR) & 3
    };
    // D1 and D2 are not among its capabilities.
    assert_eq!([state(1), state(2)], [0, 0]);
    assert!(rig.answers_at(rig.placed(0, 2)).is_some());
    assert_eq!([state(3), state(2), state(0)], [3, 3, 0]);
}

#[test]
fn a_refused_reset_still_leaves_interrupts_and_bus_mastering_off() {
    let rig = running_gpu(true);
    for call in 0..4 {
        rig.kernel.fail_after(call, libc::EIO);
        rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
        rig.kernel.take_pending_failure();
        assert_eq!(rig.read_config(0, 4) as u16, 0, "call {call}");
        assert_eq!(rig.kernel.route_count(), 0);
        check_guest_sees_reset_values_and_comes_back(&rig);
    }
}

/// Two GPUs that reach each other through dma-bufs, running.
fn dmabuf_peers() -> Rig {
    let gpu = |n| FakeDeviceSpec::gpu(bdf(n), 16 * GIB).express();
    let rig = Rig::on(DMABUF, vec![gpu(1), gpu(2)], DeviceOptions::default());
    for device in [0, 1] {
        rig.write_command(device, ON);
    }
    rig.kernel.take_log();
    rig
}

#[test]
fn a_reset_maps_revoked_dmabufs_anew_where_they_were() {
    let rig = dmabuf_peers();
    let before = rig.kernel.mappings();
    rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
    assert_eq!(rig.kernel.mappings(), before);
    assert_eq!(rig.kernel.dead_mappings(), 0);
    let log = rig.kernel.take_log();
    let reset = log.iter().position(|e| matches!(e, Event::Reset(_)));
    let unmaps = log.iter().filter(|e| matches!(e, Event::Unmap(_)));
    assert_eq!(unmaps.count(), before.len() / 2, "the other device's stay");
    let exports = log.iter().filter(|e| matches!(e, Event::Export(_)));
    assert_eq!(exports.count(), 0, "the same descriptors serve again");
    let first = log.iter().position(|e| matches!(e, Event::Unmap(_)));
    assert!(reset < first, "{log:?}");
    // The guest restores the function elsewhere.
    let elsewhere = rig.placement.mmio64.unwrap().end() - 16 * GIB;
    rig.move_bar(0, 2, elsewhere);
    rig.write_command(0, ON);
    let mapped = rig.kernel.mappings();
    assert!(mapped.iter().any(|(range, _)| range.start() == elsewhere));
    assert!(
        !mapped
            .iter()
            .any(|(range, _)| range.start() == rig.placed(0, 2))
    );
    assert_eq!(rig.kernel.dead_mappings(), 0);
}

#[test]
fn whichever_call_of_a_reset_is_refused_no_dead_mapping_stays_where_a_bar_answers() {
    for call in 0..24 {
        let rig = dmabuf_peers();
        let home = rig.placed(0, 2);
        rig.kernel.fail_after(call, libc::EIO);
        rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
        rig.kernel.take_pending_failure();
        rig.write_config(0, DEVCTL, &0x8000u16.to_le_bytes());
        for (bar, kind) in [(0, 1), (2, 2)] {
            let address = rig.placed(0, bar);
            rig.write_bar_register(0, bar, address as u32);
            if kind == 2 {
                rig.write_bar_register(0, bar + 1, (address >> 32) as u32);
            }
        }
        rig.write_command(0, ON);
        let mapped = rig.kernel.mappings();
        assert!(mapped.iter().any(|(range, _)| range.start() == home));
        assert_eq!(rig.kernel.dead_mappings(), 0, "call {call}");
    }
}
