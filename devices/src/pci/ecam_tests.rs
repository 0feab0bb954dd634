use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;

/// A function whose registers are plain memory.
struct Memory(Mutex<Vec<u8>>);

impl Memory {
    fn new(seed: u8) -> Arc<Self> {
        let bytes = (0..CONFIG_SIZE).map(|n| {
            (n as u8)
                .wrapping_mul(7)
                .wrapping_add((n >> 8) as u8 ^ seed)
        });
        let mut bytes: Vec<u8> = bytes.collect();
        bytes[Reg::HEADER_TYPE.at()] = 0x80;
        Arc::new(Self(Mutex::new(bytes)))
    }

    fn check(offset: u16, len: usize) -> std::ops::Range<usize> {
        let start = usize::from(offset);
        assert!((1..=4).contains(&len));
        assert_eq!(start / 4, (start + len - 1) / 4, "crosses a dword");
        start..start + len
    }
}

impl PciFunction for Memory {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        assert!(data.iter().all(|&b| b == 0xff));
        let range = Self::check(offset, data.len());
        data.copy_from_slice(&self.0.lock()[range]);
    }
    fn config_write(&self, offset: u16, data: &[u8]) {
        let range = Self::check(offset, data.len());
        self.0.lock()[range].copy_from_slice(data);
    }
}

fn machine() -> (Arc<Memory>, Ecam, ConfigPorts) {
    let mut bus = PciBus::new();
    let function = Memory::new(0x55);
    bus.insert(3 << 3, function.clone()).unwrap();
    bus.insert(4 << 3, Memory::new(1)).unwrap();
    bus.insert(4 << 3 | 1, Memory::new(2)).unwrap();
    let bus = Arc::new(bus);
    (function, Ecam(bus.clone()), ConfigPorts::new(bus))
}

fn get(device: &dyn BusDevice, offset: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0xff; len];
    device.read(offset, &mut data);
    data
}

fn select(ports: &ConfigPorts, devfn: u8, register: u16) {
    let register = u32::from(register);
    let address = 1 << 31 | (register & 0xf00) << 16 | u32::from(devfn) << 8 | (register & 0xfc);
    ports.write(0, &address.to_le_bytes());
}

#[test]
fn both_ways_give_the_same_answers_at_every_offset_and_size() {
    let (_, ecam, ports) = machine();
    for devfn in [0, 3 << 3, 4 << 3, 4 << 3 | 1, 0xff] {
        for register in (0..0x120).chain(0xff8..0x1000) {
            for len in [1, 2, 4] {
                let skip = register & 3;
                if usize::from(skip) + len > 4 {
                    continue; // Crosses the end of the data port.
                }
                select(&ports, devfn, register);
                let offset = u64::from(devfn) << 12 | u64::from(register);
                assert_eq!(
                    get(&ecam, offset, len),
                    get(&ports, 4 + u64::from(skip), len)
                );
            }
        }
    }
}

#[test]
fn straddling_and_wide_accesses_reach_each_byte() {
    let (function, ecam, _) = machine();
    let base = 3 << 15;
    let memory = function.0.lock().clone();
    assert_eq!(get(&ecam, base + 0x43, 2), memory[0x43..0x45]);
    assert_eq!(get(&ecam, base + 0x41, 4), memory[0x41..0x45]);
    assert_eq!(get(&ecam, base + 0x47, 8), memory[0x47..0x4f]);
    ecam.write(base + 0x4e, &[1, 2, 3, 4]);
    ecam.write(base + 0x51, &[9; 8]);
    let after = function.0.lock();
    assert_eq!(after[0x4e..0x52], [1, 2, 3, 9]);
    assert_eq!(after[0x51..0x59], [9; 8]);
    assert_eq!(after[0x59], memory[0x59]);
}

#[test]
fn bytes_behind_the_end_of_a_function_are_ones_and_not_the_neighbour() {
    let (_, ecam, ports) = machine();
    let neighbour = get(&ecam, 4 << 15 | 1 << 12, 2);
    let data = get(&ecam, (4 << 15) + 0xffe, 4);
    assert_ne!(data[..2], [0xff; 2]);
    assert_eq!(data[2..], [0xff; 2]);
    ecam.write((4 << 15) + 0xffe, &[0; 4]);
    assert_eq!(get(&ecam, 4 << 15 | 1 << 12, 2), neighbour);
    select(&ports, 3 << 3, 0x40);
    assert_eq!(get(&ports, 6, 4)[2..], [0xff; 2]);
}

#[test]
fn absent_functions_and_other_buses_answer_ones() {
    let (_, ecam, ports) = machine();
    for offset in [
        0,
        3 << 15 | 1 << 12,
        ECAM_BUS_SIZE,
        (3 << 15) + ECAM_BUS_SIZE,
        u64::MAX,
    ] {
        assert_eq!(get(&ecam, offset, 4), [0xff; 4]);
        ecam.write(offset, &[0; 4]);
    }
    ports.write(0, &(1u32 << 31 | 1 << 16 | 3 << 11).to_le_bytes());
    assert_eq!(get(&ports, 4, 4), [0xff; 4]);
}

#[test]
fn the_address_port_takes_dwords_only_and_0xcf9_is_not_ours() {
    let (function, _, ports) = machine();
    select(&ports, 3 << 3, 0x40);
    for (offset, data) in [
        (0, &[0u8; 1][..]),
        (1, &[6]),
        (0, &[0; 2]),
        (3, &[1]),
        (2, &[0; 2]),
    ] {
        ports.write(offset, data);
        assert_eq!(get(&ports, offset, data.len()), vec![0xff; data.len()]);
    }
    assert_eq!(get(&ports, 0, 4), 0x8000_1840u32.to_le_bytes());
    ports.write(4, &[1, 2, 3, 4]);
    assert_eq!(function.0.lock()[0x40..0x44], [1, 2, 3, 4]);
    // Half in the address port, half in the data port.
    ports.write(2, &[0, 0, 8, 9]);
    assert_eq!(function.0.lock()[0x40..0x44], [8, 9, 3, 4]);
    assert_eq!(get(&ports, 2, 4), [0xff, 0xff, 8, 9]);
}

#[test]
fn without_the_enable_bit_nothing_is_selected() {
    let (function, _, ports) = machine();
    ports.write(0, &0x7000_1843u32.to_le_bytes());
    assert_eq!(get(&ports, 0, 4), 0x1840u32.to_le_bytes());
    assert_eq!(get(&ports, 4, 4), [0xff; 4]);
    let before = function.0.lock().clone();
    ports.write(4, &[0; 4]);
    assert_eq!(*function.0.lock(), before);
}

#[test]
fn the_multi_function_bit_is_the_bus_own() {
    let (function, ecam, _) = machine();
    assert_eq!(get(&ecam, 3 << 15 | 0xe, 1), [0], "a lone function");
    assert_eq!(get(&ecam, 4 << 15 | 0xe, 1), [0x80]);
    assert_eq!(get(&ecam, 3 << 15 | 0xc, 4)[2], 0);
    assert_eq!(get(&ecam, 3 << 15 | 0xd, 8)[1], 0);
    function.0.lock()[0xe] = 0xff;
    assert_eq!(get(&ecam, 3 << 15 | 0xe, 1), [0xff], "vanished");
}

#[test]
fn an_address_is_given_once() {
    let mut bus = PciBus::new();
    bus.insert(0xff, Memory::new(0)).unwrap();
    bus.insert(0, Memory::new(0)).unwrap();
    let error = bus.insert(0xff, Memory::new(0)).unwrap_err();
    assert_eq!(error.to_string(), "two functions at 00:1f.7");
}

proptest! {
    #[test]
    fn any_access_is_safe_and_reads_what_was_written(
        accesses in prop::collection::vec((any::<bool>(), 0u64..1 << 21, prop::collection::vec(any::<u8>(), 1..=8)), 0..64),
    ) {
        let (_, ecam, ports) = machine();
        for (io, offset, data) in accesses {
            if io {
                ports.write(offset % 16, &data);
                get(&ports, offset % 16, data.len());
                continue;
            }
            let offset = 3 << 15 | (offset & 0xfff);
            ecam.write(offset, &data);
            let read = get(&ecam, offset, data.len());
            for (n, (read, wrote)) in read.iter().zip(&data).enumerate() {
                match (offset & 0xfff) + n as u64 {
                    0x1000.. => prop_assert_eq!(*read, 0xff),
                    0xe if *wrote != 0xff => prop_assert_eq!(*read, *wrote & 0x7f),
                    _ => prop_assert_eq!(read, wrote),
                }
            }
        }
    }
}
