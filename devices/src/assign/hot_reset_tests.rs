//! Functions without a reset of their own, on the fake kernel: reset with all that share their bus,
//! or not at all.

use std::thread;

use super::DeviceOptions;
use super::ports::{IommuNature, ResetFunction};
use super::testing::{DMABUF, GIB, Rig, bdf};
use crate::fake::{Event, FakeDeviceSpec};
use crate::pci::spec::{Command, pm};

const ON: u16 = Command::MEMORY.bits() | Command::MASTER.bits();
const PMCSR: u16 = 0xa0 + pm::CONTROL;
const BOTH: [usize; 2] = [0, 1];

/// Two running GPUs on a bus that only is reset as a whole, of which all that is in `foreign` is
/// another's.
fn pair(nature: IommuNature, foreign: &[u8]) -> Rig {
    let on_bus = [1, 2].iter().chain(foreign).map(|device| ResetFunction {
        bdf: bdf(*device),
        ours: !foreign.contains(device),
    });
    let on_bus: Vec<_> = on_bus.collect();
    let gpu = |device| {
        let mut spec = FakeDeviceSpec::gpu(bdf(device), 16 * GIB).express();
        spec.can_reset = false;
        spec.on_bus = on_bus.clone();
        spec
    };
    let rig = Rig::on(nature, vec![gpu(1), gpu(2)], DeviceOptions::default());
    for device in BOTH {
        start(&rig, device);
    }
    rig.kernel.take_log();
    rig
}

/// What a driver does: BARs, decode and bus mastering, one vector.
fn start(rig: &Rig, device: usize) {
    rig.write_bar_register(device, 0, rig.placed(device, 0) as u32);
    rig.move_bar(device, 2, rig.placed(device, 2));
    rig.write_command(device, ON);
    let (range, window) = &rig.assignment.memory_windows()[0];
    let entry = rig.placed(device, 0) - range.start() + 0x5200;
    crate::bus::BusDevice::write(window.as_ref(), entry + 12, &[0; 4]);
    rig.write_config(device, 0x42, &0x8000u16.to_le_bytes());
}

fn sleep(rig: &Rig, device: usize) {
    rig.write_config(device, PMCSR, &3u16.to_le_bytes());
}

fn wake(rig: &Rig, device: usize) {
    rig.write_config(device, PMCSR, &0u16.to_le_bytes());
}

fn has_reset_values(rig: &Rig, device: usize) -> bool {
    let command = rig.read_config(device, 4) as u16;
    let bar = rig.read_config(device, 0x18) & !0xf | rig.read_config(device, 0x1c);
    let msix_on = rig.read_config(device, 0x40) >> 31 != 0;
    let asleep = rig.read_config(device, PMCSR) & 3 != 0;
    let answers = rig.answers_at(rig.placed(device, 2)).is_some();
    command == 0 && bar == 0 && !msix_on && !asleep && !answers
}

fn is_running(rig: &Rig, device: usize) -> bool {
    let found = rig.answers_at(rig.placed(device, 2));
    found.is_some_and(|(key, _)| key.device == device) && masters(rig, device)
}

/// Whether the physical device may master the bus.
fn masters(rig: &Rig, device: usize) -> bool {
    let physical = rig.kernel.device(bdf(device as u8 + 1)).unwrap();
    physical.physical_config()[4] & Command::MASTER.bits() as u8 != 0
}

fn hot_resets(log: &[Event]) -> usize {
    let resets = log.iter().filter(|e| matches!(e, Event::HotReset(_)));
    resets.count()
}

#[test]
fn a_function_that_wakes_up_is_reset_with_its_sleeping_sibling() {
    for nature in [IommuNature::default(), DMABUF] {
        let rig = pair(nature, &[]);
        BOTH.into_iter().for_each(|device| sleep(&rig, device));
        let before = rig.kernel.mappings();
        rig.kernel.take_log();
        wake(&rig, 0);
        let log = rig.kernel.take_log();
        assert_eq!(hot_resets(&log), 1, "{log:?}");
        let at = |what: &dyn Fn(&Event) -> bool| log.iter().position(what).unwrap();
        let reset = at(&|e| matches!(e, Event::HotReset(_)));
        for device in BOTH {
            let this = bdf(device as u8 + 1);
            let disarmed = at(&|e| matches!(e, Event::SetIrqs(b, "disable", ..) if *b == this));
            let master =
                at(&|e| matches!(e, Event::ConfigWrite(b, 4, d) if *b == this && d[0] & 4 == 0));
            assert!(disarmed < master && master < reset, "{log:?}");
            assert!(has_reset_values(&rig, device), "{device}");
        }
        // Nothing is unmapped but what the reset has revoked, and that is mapped anew.
        assert_eq!(rig.kernel.mappings(), before);
        assert_eq!(rig.kernel.dead_mappings(), 0);
        assert_eq!(rig.kernel.route_count(), 0);
        BOTH.into_iter().for_each(|device| start(&rig, device));
        assert!(BOTH.iter().all(|device| is_running(&rig, *device)));
        assert_eq!(rig.kernel.route_count(), 2);
    }
}

#[test]
fn a_sibling_that_the_guest_uses_is_left_alone() {
    let rig = pair(IommuNature::default(), &[]);
    sleep(&rig, 0);
    wake(&rig, 0);
    assert_eq!(hot_resets(&rig.kernel.take_log()), 0);
    assert!(has_reset_values(&rig, 0));
    assert!(is_running(&rig, 1));
    assert_eq!(rig.kernel.route_count(), 1);
    // Once it is not in use any more the bus is reset.
    rig.write_command(1, 0);
    sleep(&rig, 0);
    wake(&rig, 0);
    assert_eq!(hot_resets(&rig.kernel.take_log()), 1);
}

#[test]
fn a_bus_with_functions_of_others_is_not_reset() {
    let rig = pair(IommuNature::default(), &[7]);
    BOTH.into_iter().for_each(|device| sleep(&rig, device));
    wake(&rig, 0);
    assert_eq!(hot_resets(&rig.kernel.take_log()), 0);
    assert!(has_reset_values(&rig, 0));
    assert!(!masters(&rig, 0), "it is not reset, and must be quiet");
    assert_eq!(rig.read_config(1, PMCSR) & 3, 3, "the sibling sleeps on");
    start(&rig, 0);
    assert!(is_running(&rig, 0));
}

#[test]
fn whichever_call_is_refused_both_functions_show_reset_values_and_come_back() {
    for nature in [IommuNature::default(), DMABUF] {
        for call in 0.. {
            let rig = pair(nature, &[]);
            BOTH.into_iter().for_each(|device| sleep(&rig, device));
            rig.kernel.fail_after(call, libc::EBUSY);
            wake(&rig, 0);
            let all_done = rig.kernel.take_pending_failure();
            assert!(has_reset_values(&rig, 0), "call {call}");
            assert!(has_reset_values(&rig, 1), "call {call}");
            // A mapping that could not be unmapped stays dead until the next reset.
            BOTH.into_iter().for_each(|device| sleep(&rig, device));
            wake(&rig, 0);
            for device in BOTH {
                start(&rig, device);
                assert!(is_running(&rig, device), "call {call}");
            }
            assert_eq!(rig.kernel.dead_mappings(), 0, "call {call}");
            if all_done {
                assert!(call > 6, "{call}");
                break;
            }
        }
    }
}

#[test]
fn siblings_that_are_woken_at_the_same_time_do_not_wait_for_each_other() {
    let rig = pair(IommuNature::default(), &[]);
    thread::scope(|scope| {
        for device in BOTH {
            let rig = &rig;
            scope.spawn(move || {
                for _ in 0..500 {
                    sleep(rig, device);
                    wake(rig, device);
                }
            });
        }
    });
    BOTH.into_iter().for_each(|device| start(&rig, device));
    assert!(BOTH.iter().all(|device| is_running(&rig, *device)));
}
