//! MADT (5.2.12). `acpi_tables` lacks the x2APIC and NMI structures, so the entries are our own.

use acpi_tables::sdt::Sdt;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::layout;

/// From this APIC id on a processor is described by an x2APIC structure: 255 is the broadcast id.
const FIRST_X2APIC_ID: u32 = 255;
const ENABLED: u32 = 1;

/// Processor Local APIC (5.2.12.2).
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
struct LocalApic {
    kind: u8,
    len: u8,
    processor_uid: u8,
    apic_id: u8,
    flags: u32,
}

/// I/O APIC (5.2.12.3).
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
struct IoApic {
    kind: u8,
    len: u8,
    id: u8,
    reserved: u8,
    address: u32,
    gsi_base: u32,
}

/// Local APIC NMI (5.2.12.7): which local interrupt pin carries NMIs.
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
struct LocalApicNmi {
    kind: u8,
    len: u8,
    processor_uid: u8,
    flags: u16,
    lint: u8,
}

/// Processor Local x2APIC (5.2.12.12).
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
struct X2Apic {
    kind: u8,
    len: u8,
    reserved: u16,
    apic_id: u32,
    flags: u32,
    processor_uid: u32,
}

/// Local x2APIC NMI (5.2.12.13).
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, FromBytes, Immutable)]
struct X2ApicNmi {
    kind: u8,
    len: u8,
    flags: u16,
    processor_uid: u32,
    lint: u8,
    reserved: [u8; 3],
}

const _: () = assert!(size_of::<LocalApic>() == 8);
const _: () = assert!(size_of::<IoApic>() == 12);
const _: () = assert!(size_of::<LocalApicNmi>() == 6);
const _: () = assert!(size_of::<X2Apic>() == 16);
const _: () = assert!(size_of::<X2ApicNmi>() == 12);

/// The MADT of `cpus` processors with APIC ids from 0. No PCAT_COMPAT: there is no 8259 for the
/// guest to use, and so no interrupt source override either.
pub(super) fn build(cpus: u32) -> Sdt {
    let mut madt = Sdt::new(*b"APIC", 44, 5, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    madt.write_u32(36, layout::LAPIC as u32);
    let mut entries = Vec::new();
    for id in 0..cpus {
        entries.extend_from_slice(&processor(id));
    }
    let ioapic = IoApic {
        kind: 1,
        len: size_of::<IoApic>() as u8,
        id: 0,
        reserved: 0,
        address: layout::IOAPIC as u32,
        gsi_base: 0,
    };
    let nmi = LocalApicNmi {
        kind: 4,
        len: size_of::<LocalApicNmi>() as u8,
        processor_uid: u8::MAX,
        flags: 0,
        lint: 1,
    };
    entries.extend_from_slice(ioapic.as_bytes());
    entries.extend_from_slice(nmi.as_bytes());
    if cpus > FIRST_X2APIC_ID {
        let nmi = X2ApicNmi {
            kind: 10,
            len: size_of::<X2ApicNmi>() as u8,
            flags: 0,
            processor_uid: u32::MAX,
            lint: 1,
            reserved: [0; 3],
        };
        entries.extend_from_slice(nmi.as_bytes());
    }
    madt.append_slice(&entries);
    madt
}

fn processor(id: u32) -> Vec<u8> {
    match u8::try_from(id) {
        Ok(short) if id < FIRST_X2APIC_ID => LocalApic {
            kind: 0,
            len: size_of::<LocalApic>() as u8,
            processor_uid: short,
            apic_id: short,
            flags: ENABLED,
        }
        .as_bytes()
        .to_vec(),
        _ => X2Apic {
            kind: 9,
            len: size_of::<X2Apic>() as u8,
            reserved: 0,
            apic_id: id,
            flags: ENABLED,
            processor_uid: id,
        }
        .as_bytes()
        .to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (type, length) of every structure.
    fn structures(madt: &Sdt) -> Vec<(u8, u8)> {
        let bytes = madt.as_slice();
        let mut at = 44;
        let mut found = Vec::new();
        while at < bytes.len() {
            found.push((bytes[at], bytes[at + 1]));
            at += usize::from(bytes[at + 1]);
        }
        assert_eq!(at, bytes.len());
        found
    }

    #[test]
    fn two_processors_an_ioapic_and_the_nmi_pin() {
        assert_eq!(structures(&build(2)), [(0, 8), (0, 8), (1, 12), (4, 6)]);
    }

    #[test]
    fn apic_ids_from_255_are_x2apic_structures() {
        let found = structures(&build(257));
        assert_eq!(found.iter().filter(|s| **s == (0, 8)).count(), 255);
        assert_eq!(found.iter().filter(|s| **s == (9, 16)).count(), 2);
        assert_eq!(found.last(), Some(&(10, 12)));
    }
}
