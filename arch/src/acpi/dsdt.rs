//! DSDT: the PCI host bridge, the serial port and the soft-off state.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, BufferData, CreateDWordField, Device, EISAName,
    Else, Equal, IO, If, Interrupt, Local, Memory32Fixed, Method, Name, ONE, Package,
    PackageBuilder, Path, ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};
use acpi_tables::sdt::Sdt;

use super::{AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID, to_bytes};
use crate::layout::{self, AddressRange};

/// `_OSC` of a PCI host bridge (PCI Firmware Specification 3.3, 4.5.1).
const OSC_PCI: &str = "33db4d5b-1ff7-401c-9657-7441c03dd766";
/// `_DSM` of a PCI device or host bridge (PCI Firmware Specification 3.3, 4.6).
const DSM_PCI: &str = "e5c937d0-3553-4d7a-9117-ea4d19c3434d";
/// What the guest may control: the PCI Express capability structures, and nothing that we do not
/// emulate (hot plug, PME, AER, LTR, DPC). Linux asks for MSI and ECAM in the support field only.
const OSC_GRANTED: u32 = 1 << 4;
/// `_OSC` status bit: some of the requested control was not granted.
const OSC_CAPABILITIES_MASKED: u32 = 1 << 4;
/// `_OSC` status bit: unknown UUID.
const OSC_UNKNOWN_UUID: u32 = 1 << 2;

pub(super) fn build(config: &AcpiConfig) -> Sdt {
    let mut dsdt = Sdt::new(*b"DSDT", 36, 6, OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for part in [
        system_bus(config),
        motherboard_resources(),
        serial_port(),
        soft_off(),
    ] {
        dsdt.append_slice(&part);
    }
    dsdt
}

/// `\_SB.PCI0`.
fn system_bus(config: &AcpiConfig) -> Vec<u8> {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0A08"));
    let cid = Name::new("_CID".into(), &EISAName::new("PNP0A03"));
    let uid = Name::new("_UID".into(), &ZERO);
    let segment = Name::new("_SEG".into(), &ZERO);
    let bus = Name::new("_BBN".into(), &ZERO);
    // DMA is coherent; said for guests that ask (6.2.17).
    let coherent = Name::new("_CCA".into(), &ONE);
    let windows = windows(config.mmio64);
    let windows: Vec<&dyn Aml> = windows.iter().map(AsRef::as_ref).collect();
    let resources = ResourceTemplate::new(windows);
    let crs = Name::new("_CRS".into(), &resources);
    let (routes, osc, dsm) = (Raw(interrupt_routes()), Raw(osc()), Raw(dsm()));
    let bridge = Device::new(
        "PCI0".into(),
        vec![
            &hid, &cid, &uid, &segment, &bus, &coherent, &crs, &routes, &osc, &dsm,
        ],
    );
    to_bytes(&Scope::new("_SB_".into(), vec![&bridge]))
}

/// AML that was built already.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

/// What `_CRS` of the host bridge says: buses, I/O ports and both MMIO windows. A guest keeps a
/// BAR where it is as long as it lies in one of them.
fn windows(mmio64: Option<AddressRange>) -> Vec<Box<dyn Aml>> {
    let mmio32 = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::MMIO32.start as u32,
        (layout::MMIO32.end - 1) as u32,
        None,
    );
    let mut windows: Vec<Box<dyn Aml>> = vec![
        Box::new(AddressSpace::new_bus_number(0u16, layout::LAST_BUS.into())),
        Box::new(IO::new(
            layout::PCI_CONFIG_PORTS,
            layout::PCI_CONFIG_PORTS,
            1,
            8,
        )),
        Box::new(AddressSpace::new_io(
            *layout::PCI_IO.start(),
            *layout::PCI_IO.end(),
            None,
        )),
        Box::new(mmio32),
    ];
    if let Some(window) = mmio64.filter(|window| !window.is_empty()) {
        // Not marked prefetchable, though it takes prefetchable BARs: Linux refuses a 64-bit BAR
        // that is not prefetchable (NVMe's BAR 0) inside a prefetchable window
        // (drivers/pci/pci.c, pci_find_parent_resource).
        windows.push(Box::new(AddressSpace::new_memory(
            AddressSpaceCacheable::Cacheable,
            true,
            window.start,
            window.end - 1,
            None,
        )));
    }
    windows
}

/// `_PRT`: every pin of every slot to a GSI. A GSI given so is level triggered and active low
/// (6.2.13).
fn interrupt_routes() -> Vec<u8> {
    let mut table = PackageBuilder::new();
    for slot in 0..32u8 {
        for pin in 0..4u8 {
            let address = u32::from(slot) << 16 | 0xFFFF;
            let gsi = layout::intx_gsi(slot, pin);
            table.add_element(&Package::new(vec![&address, &pin, &ZERO, &gsi]));
        }
    }
    to_bytes(&Name::new("_PRT".into(), &table))
}

/// `_OSC(UUID, revision, count, capabilities)` returns the capabilities with the control field
/// masked by what is granted.
fn osc() -> Vec<u8> {
    let uuid = Uuid::new(OSC_PCI);
    let (status, control) = (Path::new("CDW1"), Path::new("CDW3"));
    let status_field = CreateDWordField::new(&status, &Arg(3), &0u8);
    let control_field = CreateDWordField::new(&control, &Arg(3), &8u8);
    let asked = Store::new(&Local(0), &control);
    let grant = And::new(&control, &Local(0), &OSC_GRANTED);
    let masked = acpi_tables::aml::Or::new(&status, &status, &OSC_CAPABILITIES_MASKED);
    let refused = acpi_tables::aml::NotEqual::new(&Local(0), &control);
    let tell = If::new(&refused, vec![&masked]);
    let known = Equal::new(&Arg(0), &uuid);
    let answer = If::new(&known, vec![&control_field, &asked, &grant, &tell]);
    let unknown = acpi_tables::aml::Or::new(&status, &status, &OSC_UNKNOWN_UUID);
    let otherwise = Else::new(vec![&unknown]);
    let done = Return::new(&Arg(3));
    to_bytes(&Method::new(
        "_OSC".into(),
        4,
        // Creates named fields, so two calls must not overlap (5.5.2.4.5).
        true,
        vec![&status_field, &answer, &otherwise, &done],
    ))
}

/// `_DSM`: function 5 returns 0, "preserve the configuration done by firmware" (PCI Firmware
/// Specification 3.3, 4.6.5): BARs stay where they were placed.
fn dsm() -> Vec<u8> {
    let uuid = Uuid::new(DSM_PCI);
    let known = Equal::new(&Arg(0), &uuid);
    let asks_which = Equal::new(&Arg(2), &ZERO);
    let functions = BufferData::new(vec![1 | 1 << 5]);
    let which = Return::new(&functions);
    let asks_preserve = Equal::new(&Arg(2), &5u8);
    let preserve = Return::new(&ZERO);
    let (first, second) = (
        If::new(&asks_which, vec![&which]),
        If::new(&asks_preserve, vec![&preserve]),
    );
    let answer = If::new(&known, vec![&first, &second]);
    let nothing = BufferData::new(vec![0]);
    let otherwise = Return::new(&nothing);
    to_bytes(&Method::new(
        "_DSM".into(),
        4,
        false,
        vec![&answer, &otherwise],
    ))
}

/// PNP0C02 that claims ECAM: without it Linux does not use ECAM (arch/x86/pci/mmconfig-shared.c).
/// It also claims our registers.
fn motherboard_resources() -> Vec<u8> {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0C02"));
    let uid = Name::new("_UID".into(), &ONE);
    let ecam = Memory32Fixed::new(true, layout::ECAM.start as u32, layout::ECAM.len() as u32);
    let registers = IO::new(layout::SLEEP_CONTROL, layout::SLEEP_CONTROL, 1, 4);
    let resources = ResourceTemplate::new(vec![&ecam, &registers]);
    let crs = Name::new("_CRS".into(), &resources);
    let device = Device::new("MRES".into(), vec![&hid, &uid, &crs]);
    to_bytes(&Scope::new("_SB_".into(), vec![&device]))
}

fn serial_port() -> Vec<u8> {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0501"));
    let uid = Name::new("_UID".into(), &ONE);
    let ports = IO::new(layout::COM1, layout::COM1, 1, 8);
    let interrupt = Interrupt::new(true, true, false, false, layout::COM1_GSI);
    let resources = ResourceTemplate::new(vec![&ports, &interrupt]);
    let crs = Name::new("_CRS".into(), &resources);
    let device = Device::new("COM1".into(), vec![&hid, &uid, &crs]);
    to_bytes(&Scope::new("_SB_".into(), vec![&device]))
}

/// `\_S5`: the SLP_TYP that means soft off.
fn soft_off() -> Vec<u8> {
    let package = Package::new(vec![&layout::SLEEP_TYPE_S5, &ZERO, &ZERO, &ZERO]);
    to_bytes(&Name::new("_S5_".into(), &package))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(bytes: &[u8], part: &[u8]) -> bool {
        bytes.windows(part.len()).any(|window| window == part)
    }

    fn dsdt(mmio64: Option<AddressRange>) -> Vec<u8> {
        build(&AcpiConfig { cpus: 1, mmio64 }).as_slice().to_vec()
    }

    #[test]
    fn the_64bit_window_is_told_with_its_ends() {
        let window = AddressRange::new(0x0123_4000_0000, 0x0923_4000_0000);
        let bytes = dsdt(Some(window));
        let mut ends = window.start.to_le_bytes().to_vec();
        ends.extend_from_slice(&(window.end - 1).to_le_bytes());
        assert!(contains(&bytes, &ends));
        assert!(!contains(&dsdt(None), &ends));
    }

    #[test]
    fn ecam_and_its_claim_agree() {
        let mut claim = (layout::ECAM.start as u32).to_le_bytes().to_vec();
        claim.extend_from_slice(&(layout::ECAM.len() as u32).to_le_bytes());
        assert!(contains(&dsdt(None), &claim));
    }

    #[test]
    fn every_pin_of_every_slot_has_a_route() {
        let routes = interrupt_routes();
        // Slot 0 has a shorter encoding. 0x0C is AML's prefix of a double word.
        for slot in 1..32u8 {
            let address = [0x0C, 0xFF, 0xFF, slot, 0];
            assert_eq!(routes.windows(5).filter(|w| *w == address).count(), 4);
        }
    }

    #[test]
    fn all_names_of_the_host_bridge_are_there() {
        let bytes = dsdt(None);
        for name in [
            b"PCI0", b"_CRS", b"_PRT", b"_OSC", b"_DSM", b"COM1", b"MRES",
        ] {
            assert!(contains(&bytes, name));
        }
    }
}
