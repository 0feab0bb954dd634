//! A device's way from open to interrupt on the fake kernel: order and number of calls, and what
//! the guest sees.

use super::testing::{DMABUF, GIB, Rig, bdf};
use super::{DeviceOptions, PeerToPeer};
use crate::fake::{Event, FakeDeviceSpec, Tally};
use crate::pci::bar::BarKind;
use crate::pci::ecam::PciFunction;
use crate::pci::spec::{Command, pcie};

const MEM: u16 = Command::MEMORY.bits();
const MASTER: u16 = Command::MASTER.bits();

fn two_gpus() -> Rig {
    Rig::new(
        vec![
            FakeDeviceSpec::gpu(bdf(1), 16 * GIB),
            FakeDeviceSpec::gpu(bdf(2), 16 * GIB),
        ],
        DeviceOptions::default(),
    )
}

/// Areas of one fake GPU: BAR 0 in three parts around table and PBA, BAR 2 whole.
const AREAS: usize = 4;

#[test]
fn each_area_costs_one_slot_and_one_mapping_and_each_device_one_open() {
    let rig = two_gpus();
    let log = rig.kernel.take_log();
    let opens = log.iter().filter(|e| matches!(e, Event::Open(_))).count();
    assert_eq!(opens, 2);
    let slots = log.iter().filter(|e| matches!(e, Event::SetSlot(_)));
    assert_eq!(slots.count(), 2 * AREAS + 1, "areas and RAM");
    let maps = log.iter().filter(|e| matches!(e, Event::Map(_))).count();
    assert_eq!(maps, 2 * AREAS);
    let last_slot = log.iter().rposition(|e| matches!(e, Event::SetSlot(_)));
    let first_map = log.iter().position(|e| matches!(e, Event::Map(_)));
    assert!(last_slot < first_map);
}

#[test]
fn turning_decode_on_and_off_costs_nothing() {
    let rig = two_gpus();
    rig.kernel.take_log();
    for command in [MEM, 0, MEM, 0, MEM] {
        rig.write_command(0, command);
        rig.write_command(1, command);
    }
    let tally = rig.kernel.take_tally();
    assert_eq!((tally.slots, tally.maps, tally.unmaps), (0, 0, 0));
}

#[test]
fn the_physical_device_keeps_decoding_whatever_the_guest_writes() {
    let rig = two_gpus();
    rig.kernel.take_log();
    rig.write_command(0, MEM | MASTER);
    rig.write_command(0, 0);
    let device = rig.kernel.device(bdf(1)).unwrap();
    for event in rig.kernel.take_log() {
        if let Event::ConfigWrite(_, 4, data) = event {
            assert_eq!(u16::from_le_bytes([data[0], data[1]]) & !MASTER, MEM);
        }
    }
    assert_eq!(device.physical_config()[4], MEM as u8);
}

#[test]
fn bus_mastering_follows_the_guest_after_the_decoders() {
    let rig = two_gpus();
    rig.move_bar(0, 2, rig.placement.mmio64.unwrap().end() - 16 * GIB);
    rig.kernel.take_log();
    rig.write_command(0, MEM | MASTER);
    let log = rig.kernel.take_log();
    let moved = log.iter().position(|e| matches!(e, Event::MoveSlot(..)));
    let master = log
        .iter()
        .position(|e| matches!(e, Event::ConfigWrite(_, 4, data) if data[0] & MASTER as u8 != 0));
    assert!(moved.is_some() && moved < master, "{log:?}");
}

#[test]
fn sizing_a_bar_reads_back_its_size_and_costs_nothing() {
    let rig = two_gpus();
    rig.kernel.take_log();
    for dword in [2, 3] {
        rig.write_bar_register(0, dword, u32::MAX);
    }
    let low = rig.read_config(0, 0x18);
    let high = rig.read_config(0, 0x1c);
    let size = !((u64::from(high) << 32) | u64::from(low & !0xf)) + 1;
    assert_eq!(size, 16 * GIB);
    assert_eq!(low & 0xf, 0xc, "64-bit prefetchable");
    rig.move_bar(0, 2, rig.placed(0, 2));
    rig.write_command(0, MEM);
    let intx = Tally {
        irqs: 2,
        ..Tally::default()
    };
    assert_eq!(rig.kernel.take_tally(), intx, "armed with the decoders");
}

#[test]
fn a_bar_at_an_illegal_address_answers_nowhere_and_comes_back() {
    for high_first in [false, true] {
        for decode_during in [0, MEM] {
            let rig = two_gpus();
            let home = rig.placed(0, 2);
            rig.write_command(0, MEM);
            let bar = rig.slot_at(home).unwrap();
            for illegal in [0, GIB / 2, 0xc000_0000, 1 << 50, !0] {
                rig.write_command(0, decode_during);
                let mut dwords = [(2, illegal as u32), (3, (illegal >> 32) as u32)];
                if high_first {
                    dwords.reverse();
                }
                for (dword, value) in dwords {
                    rig.write_bar_register(0, dword, value);
                }
                rig.write_command(0, MEM);
                // The size mask of 16 GiB leaves bits 34 and up.
                assert_eq!(rig.read_config(0, 0x18), 0xc);
                assert_eq!(rig.read_config(0, 0x1c), (illegal >> 32) as u32 & !3);
                assert_eq!(rig.slot_at(home), None, "{illegal:#x}");
                assert_eq!(rig.answers_at(home), None);
                rig.write_command(0, decode_during);
                rig.move_bar(0, 2, home);
                rig.write_command(0, MEM);
                assert_eq!(rig.slot_at(home), Some(bar));
            }
            assert_eq!(rig.kernel.take_tally().unmaps, 0);
        }
    }
}

#[test]
fn two_devices_swap_their_bars() {
    let rig = two_gpus();
    let (a, b) = (rig.placed(0, 2), rig.placed(1, 2));
    let (first, second) = (rig.slot_at(a), rig.slot_at(b));
    for device in [0, 1] {
        rig.write_command(device, 0);
    }
    rig.move_bar(0, 2, b);
    rig.move_bar(1, 2, a);
    for device in [0, 1] {
        rig.write_command(device, MEM);
    }
    assert_eq!((rig.slot_at(b), rig.slot_at(a)), (first, second));
    let mapped = rig.kernel.mappings();
    let at = |iova| mapped.iter().find(|(r, _)| r.start() == iova).unwrap().1;
    assert_eq!((Some(at(b)), Some(at(a))), (first, second));
}

#[test]
fn the_msix_table_traps_and_the_rest_of_its_page_reaches_the_device() {
    let rig = two_gpus();
    rig.write_command(0, MEM);
    let base = rig.placed(0, 0);
    assert_eq!(rig.slot_at(base + 0x5000), None);
    assert_eq!(rig.slot_at(base + 0xd000), None);
    assert!(rig.slot_at(base + 0x4fff).is_some() && rig.slot_at(base + 0x6000).is_some());
    let (range, window) = &rig.assignment.memory_windows()[0];
    let offset = base - range.start();
    let read = |at: u64| {
        let mut data = [0; 4];
        crate::bus::BusDevice::read(window.as_ref(), offset + at, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(read(0x520c), 1, "vector 0 is masked after reset");
    crate::bus::BusDevice::write(window.as_ref(), offset + 0x5100, &[1, 2, 3, 4]);
    assert_eq!(read(0x5100), 0x0403_0201);
}

#[test]
fn enabling_msix_costs_one_interrupt_setup_and_one_route_update() {
    let rig = two_gpus();
    rig.write_command(0, MEM | MASTER);
    let base = rig.placed(0, 0);
    let (range, window) = &rig.assignment.memory_windows()[0];
    for vector in 0..8u64 {
        let entry = base - range.start() + 0x5200 + 16 * vector;
        crate::bus::BusDevice::write(window.as_ref(), entry, &0xfee0_0000u32.to_le_bytes());
        crate::bus::BusDevice::write(window.as_ref(), entry + 8, &[vector as u8, 0, 0, 0]);
        crate::bus::BusDevice::write(window.as_ref(), entry + 12, &[0, 0, 0, 0]);
    }
    // INTx was enabled with the decoders: its disarming comes first.
    rig.kernel.take_log();
    rig.write_config(0, 0x42, &0x8000u16.to_le_bytes());
    let log = rig.kernel.take_log();
    let count = |what: fn(&Event) -> bool| log.iter().filter(|e| what(e)).count();
    assert_eq!(count(|e| matches!(e, Event::Routes { .. })), 1);
    assert_eq!(
        count(|e| matches!(e, Event::SetIrqs(_, "trigger", 0, v) if *v == [true; 8])),
        1
    );
    assert_eq!(rig.kernel.route_count(), 8);
    rig.write_config(0, 0x42, &0u16.to_le_bytes());
    assert_eq!(rig.kernel.route_count(), 0);
}

#[test]
fn peer_to_peer_is_mapped_only_when_there_is_a_peer_or_it_is_asked_for() {
    let one = |option| {
        let options = DeviceOptions {
            peer_to_peer: option,
            ..DeviceOptions::default()
        };
        let rig = Rig::new(vec![FakeDeviceSpec::gpu(bdf(1), 16 * GIB)], options);
        rig.kernel.take_tally().maps
    };
    assert_eq!(one(PeerToPeer::Auto), 0);
    assert_eq!(one(PeerToPeer::Off), 0);
    assert_eq!(one(PeerToPeer::On), AREAS);
}

#[test]
fn a_bar_that_is_kept_trapped_has_no_slot_and_reaches_the_device() {
    let mut options = DeviceOptions::default();
    options.trapped[2] = true;
    let rig = Rig::new(vec![FakeDeviceSpec::gpu(bdf(1), 16 * GIB)], options);
    rig.write_command(0, MEM);
    let home = rig.placed(0, 2);
    assert_eq!(rig.slot_at(home), None);
    let windows = rig.assignment.memory_windows();
    let (range, window) = windows.iter().find(|(r, _)| r.contains(home)).unwrap();
    crate::bus::BusDevice::write(window.as_ref(), home - range.start() + 8, &[7]);
    let mut data = [0; 2];
    crate::bus::BusDevice::read(window.as_ref(), home - range.start() + 8, &mut data);
    assert_eq!(data, [7, 0]);
}

#[test]
fn a_bar_with_a_fixed_address_gets_it() {
    let mut options = DeviceOptions::default();
    options.fixed[2] = Some(1024 * GIB);
    let rig = Rig::new(vec![FakeDeviceSpec::gpu(bdf(1), 16 * GIB)], options);
    assert_eq!(rig.placed(0, 2), 1024 * GIB);
    rig.write_command(0, MEM);
    assert!(rig.slot_at(1024 * GIB).is_some());
    assert!(rig.answers_at(1024 * GIB).is_some());
}

#[test]
fn an_io_bar_answers_at_its_port_while_decode_is_on() {
    let spec = FakeDeviceSpec::bare(bdf(1)).bar(1, BarKind::Io, 8);
    let rig = Rig::new(vec![spec], DeviceOptions::default());
    let port = rig.placed(0, 1);
    let (range, window) = rig.assignment.io_window();
    let read = || {
        let mut data = [0xff];
        crate::bus::BusDevice::read(window.as_ref(), port - range.start(), &mut data);
        data[0]
    };
    assert_eq!(read(), 0xff);
    rig.write_command(0, Command::IO.bits());
    crate::bus::BusDevice::write(window.as_ref(), port - range.start(), &[0x5a]);
    assert_eq!(read(), 0x5a);
}

#[test]
fn a_rom_answers_only_while_enabled_and_decoded_and_takes_no_writes() {
    let rom: Vec<u8> = (0..3000u32).map(|n| n as u8).collect();
    let source = crate::assign::rom::RomSource::Bytes(rom.into());
    let spec = FakeDeviceSpec::gpu(bdf(1), 16 * GIB);
    let rig = Rig::with(vec![spec], DeviceOptions::default(), |device| {
        device.load_rom(&source).unwrap();
    });
    rig.write_config(0, 0x30, &u32::MAX.to_le_bytes());
    assert_eq!(rig.read_config(0, 0x30), 0xffff_f001);
    let home = rig.placed(0, super::commit::ROM);
    let enabled = home as u32 | 1;
    let cases = [
        (MEM, enabled, true),
        (0, enabled, false),
        (MEM, home as u32, false),
    ];
    for (command, register, answers) in cases {
        rig.write_command(0, command);
        rig.write_config(0, 0x30, &register.to_le_bytes());
        assert_eq!(rig.answers_at(home).is_some(), answers);
    }
    rig.write_config(0, 0x30, &enabled.to_le_bytes());
    let (range, window) = &rig.assignment.memory_windows()[0];
    let at = home - range.start();
    crate::bus::BusDevice::write(window.as_ref(), at, &[0xee; 4]);
    let mut data = [0; 4];
    crate::bus::BusDevice::read(window.as_ref(), at + 2998, &mut data);
    assert_eq!(data, [2998u32 as u8, 2999u32 as u8, 0xff, 0xff]);
}

#[test]
fn the_clique_capability_is_readable_fixed_and_in_the_list() {
    let mut spec = FakeDeviceSpec::gpu(bdf(1), 16 * GIB);
    spec.config[..2].copy_from_slice(&0x10deu16.to_le_bytes());
    let rig = Rig::with(vec![spec], DeviceOptions::default(), |device| {
        device.add_clique(5).unwrap();
    });
    let at = rig.read_config(0, 0x34) as u16 & 0xff;
    rig.write_config(0, at + 4, &[0xff; 4]);
    assert_eq!(rig.read_config(0, at) & 0xff, 9);
    assert_eq!(
        rig.read_config(0, at) >> 16,
        u32::from_le_bytes([8, b'P', 0, 0])
    );
    assert_eq!(rig.read_config(0, at + 4) & 0xff_ffff, 0x28_5032);
    assert_eq!(rig.read_config(0, at) >> 8 & 0xff, 0x40, "MSI-X follows");
}

#[test]
fn a_clique_is_refused_on_another_vendor() {
    let spec = FakeDeviceSpec::gpu(bdf(1), 16 * GIB);
    Rig::with(vec![spec], DeviceOptions::default(), |device| {
        assert!(
            device
                .add_clique(5)
                .unwrap_err()
                .to_string()
                .contains("NVIDIA")
        );
    });
}

#[test]
fn status_is_the_devices_with_the_guests_capability_list() {
    let rig = two_gpus();
    let device = rig.kernel.device(bdf(1)).unwrap();
    rig.write_command(0, MEM);
    device.set_physical_config(6, &[0x08, 0x80]);
    assert_eq!(
        rig.read_config(0, 4) >> 16,
        0x8018,
        "interrupt, parity, list"
    );
    rig.kernel.take_log();
    rig.write_config(0, 7, &[0x80]);
    let wrote = Event::ConfigWrite(bdf(1), 7, vec![0x80]);
    assert_eq!(rig.kernel.take_log(), [wrote], "written 1 clears it there");
}

#[test]
fn status_of_a_function_that_is_not_enabled_costs_nothing_and_is_what_it_was_last() {
    let rig = two_gpus();
    let device = rig.kernel.device(bdf(1)).unwrap();
    device.take_config_reads();
    let status = || rig.read_config(0, 4) >> 16;
    assert_eq!((status(), device.take_config_reads()), (0x10, 0));
    rig.write_command(0, MASTER);
    device.set_physical_config(6, &[0, 0x20]);
    assert_eq!((status(), device.take_config_reads()), (0x2010, 1));
    // Turned off again: read once more, then kept.
    rig.write_command(0, 0);
    assert_eq!(device.take_config_reads(), 1);
    assert_eq!((status(), device.take_config_reads()), (0x2010, 0));
    // Cleared by the guest meanwhile.
    device.set_physical_config(6, &[0, 0]);
    rig.write_config(0, 7, &[0x20]);
    device.set_physical_config(6, &[0, 0]);
    rig.write_config(0, 7, &[0x20]);
    device.take_config_reads();
    assert_eq!(device.take_config_reads(), 0);
}

#[test]
fn what_a_device_can_do_is_read_from_the_shadow_and_its_state_from_the_device() {
    let mut spec = FakeDeviceSpec::gpu(bdf(1), GIB).express();
    // A serial number.
    spec.config[0x100..0x108].copy_from_slice(&[3, 0, 1, 0, 7, 7, 7, 7]);
    let rig = Rig::new(vec![spec], DeviceOptions::default());
    let device = rig.kernel.device(bdf(1)).unwrap();
    device.take_config_reads();
    assert_eq!(rig.read_config(0, 0x104), 0x0707_0707);
    assert_eq!(device.take_config_reads(), 0);
    let cost = |register: u16| {
        rig.read_config(0, 0x60 + register);
        device.take_config_reads()
    };
    let fixed = [0, pcie::DEVCAP, pcie::LNKCAP, pcie::DEVCAP2, pcie::LNKCAP2];
    assert_eq!(fixed.map(cost), [0; 5]);
    // Each of these dwords is a control register and a status register.
    let mixed = [pcie::DEVCTL, pcie::LNKCTL, pcie::LNKCTL2];
    assert_eq!(mixed.map(cost), [1; 3]);
    let read = |register: u16| {
        let mut data = [0; 2];
        rig.assignment.functions()[0].config_read(0x60 + register, &mut data);
        (u16::from_le_bytes(data), device.take_config_reads())
    };
    for register in [pcie::DEVCTL, pcie::LNKCTL, pcie::DEVCTL2, pcie::LNKCTL2] {
        rig.write_config(0, 0x60 + register, &0x0123u16.to_le_bytes());
        rig.write_config(0, 0x61 + register, &[0x45]);
        device.take_config_reads();
        assert_eq!(read(register), (0x4523, 0), "{register:#x}");
    }
}

#[test]
fn disabling_intx_alone_does_not_reach_the_device_and_every_other_write_of_command_does() {
    let rig = two_gpus();
    rig.kernel.take_log();
    let writes = |command: u16| {
        rig.write_command(0, command);
        let log = rig.kernel.take_log();
        let writes = log.iter().filter(|e| matches!(e, Event::ConfigWrite(..)));
        writes.count()
    };
    let off = Command::INTX_DISABLE.bits();
    let commands = [
        MEM,
        MEM | off,
        MEM | MASTER | off,
        MEM | MASTER,
        MEM | MASTER,
        off,
    ];
    assert_eq!(commands.map(writes), [1, 0, 1, 0, 1, 1]);
}

fn options(peer_to_peer: PeerToPeer) -> DeviceOptions {
    DeviceOptions {
        peer_to_peer,
        ..DeviceOptions::default()
    }
}

#[test]
fn each_area_is_exported_once_and_only_where_peers_are_to_reach_it() {
    let gpus = || {
        vec![
            FakeDeviceSpec::gpu(bdf(1), 16 * GIB),
            FakeDeviceSpec::gpu(bdf(2), GIB),
        ]
    };
    let exports = |wishes: &[DeviceOptions]| {
        let rig = Rig::try_on(DMABUF, gpus(), wishes).unwrap();
        let log = rig.kernel.take_log();
        let exports = log.iter().filter(|e| matches!(e, Event::Export(_)));
        (exports.count(), rig.kernel.mappings().len())
    };
    let (auto, off) = (options(PeerToPeer::Auto), options(PeerToPeer::Off));
    assert_eq!(exports(&[auto]), (2 * AREAS, 2 * AREAS));
    assert_eq!(exports(&[auto, off]), (AREAS, AREAS));
    assert_eq!(exports(&[off]), (0, 0));
}

#[test]
fn a_kernel_without_dmabuf_boots_without_peer_to_peer_unless_it_was_asked_for() {
    let gpus = || {
        let mut devices = vec![
            FakeDeviceSpec::gpu(bdf(1), GIB),
            FakeDeviceSpec::gpu(bdf(2), GIB),
        ];
        devices.iter_mut().for_each(|spec| spec.can_export = false);
        devices
    };
    let rig = Rig::on(DMABUF, gpus(), options(PeerToPeer::Auto));
    assert!(rig.kernel.mappings().is_empty());
    rig.write_command(0, MEM);
    rig.move_bar(0, 2, rig.placement.mmio64.unwrap().end() - GIB);
    assert!(rig.kernel.mappings().is_empty());
    let wishes = [options(PeerToPeer::Auto), options(PeerToPeer::On)];
    let error = Rig::try_on(DMABUF, gpus(), &wishes).err().unwrap();
    assert!(error.is_preflight());
    let text = error.to_string();
    assert!(text.starts_with("0000:00:02.0"), "{text}");
    assert!(text.contains("--iommu type1"), "{text}");
}

#[test]
fn all_devices_that_cannot_be_reached_are_named_in_one_warning() {
    let mut peers = super::peers::Peers::new(3, &[], DMABUF);
    assert_eq!(peers.warning(), None);
    for number in [0, 2] {
        let bdf = bdf(number as u8 + 1);
        let source = super::ports::CallError {
            call: "VFIO_DEVICE_FEATURE_DMA_BUF",
            source: std::io::Error::from_raw_os_error(libc::ENOTTY),
        };
        let reason = super::AssignError::Export { bdf, source };
        peers.give_up(number, bdf, reason).unwrap();
    }
    assert_eq!([0, 1, 2].map(|n| peers.wanted(n)), [false, true, false]);
    let text = peers.warning().unwrap();
    assert!(
        text.starts_with("peer-to-peer is off for 0000:00:01.0, 0000:00:03.0:"),
        "{text}"
    );
    assert_eq!(
        text.matches("VFIO_DEVICE_FEATURE_DMA_BUF").count(),
        1,
        "{text}"
    );
}

#[test]
fn a_device_that_reset_itself_decodes_again_with_the_guests_next_command() {
    let spec = FakeDeviceSpec::gpu(bdf(1), GIB).bar(1, BarKind::Io, 8);
    let rig = Rig::new(vec![spec], DeviceOptions::default());
    rig.write_command(0, MEM | MASTER);
    let device = rig.kernel.device(bdf(1)).unwrap();
    device.set_physical_config(4, &[0, 0]);
    rig.write_command(0, MEM | MASTER);
    let physical = u16::from(device.physical_config()[4]);
    assert_eq!(physical, MEM | MASTER | Command::IO.bits());
}

#[test]
fn an_option_for_a_bar_that_does_not_exist_is_refused() {
    let spec = FakeDeviceSpec::gpu(bdf(1), GIB);
    let check = |options: DeviceOptions| {
        let mut result = Ok(());
        let checked = std::cell::RefCell::new(&mut result);
        Rig::with(vec![spec.clone()], DeviceOptions::default(), |device| {
            **checked.borrow_mut() = options.check(device);
        });
        result.map_err(|error| error.to_string())
    };
    let mut options = DeviceOptions::default();
    options.fixed[2] = Some(GIB);
    options.trapped[0] = true;
    assert_eq!(check(options), Ok(()));
    options.trapped[3] = true;
    let text = check(options).unwrap_err();
    assert!(
        text.starts_with("0000:00:01.0: an option names BAR 3"),
        "{text}"
    );
    options.trapped = [true; 6];
    assert_eq!(check(options), Ok(()), "all of those that there are");
}
