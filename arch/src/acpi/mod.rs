//! The ACPI tables: RSDP, XSDT, FADT (hardware-reduced), MADT, MCFG and DSDT.
//!
//! The tables describe only what mini-vmm has: no 8042, VGA, CMOS clock, PIT or PM timer, so that
//! a guest does not probe for them. Section numbers are those of ACPI 6.5.

mod dsdt;
mod madt;

use acpi_tables::Aml;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;

use crate::layout::{self, AddressRange};

const OEM_ID: [u8; 6] = *b"MNIVMM";
const OEM_TABLE_ID: [u8; 8] = *b"MINI-VMM";
const OEM_REVISION: u32 = 1;

/// Length of an RSDP of revision 2 (5.2.5.3), rounded up to the alignment of tables.
const RSDP_SPACE: u64 = 48;
const TABLE_ALIGN: u64 = 16;

/// IAPC_BOOT_ARCH (5.2.9.3): no VGA.
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;
/// IAPC_BOOT_ARCH: ASPM is not to be enabled, we do not control the links.
const BOOT_ARCH_NO_ASPM: u16 = 1 << 4;
/// IAPC_BOOT_ARCH: no CMOS clock.
const BOOT_ARCH_NO_CMOS_RTC: u16 = 1 << 5;

/// What the tables say beyond the fixed layout.
#[derive(Clone, Copy, Debug)]
pub struct AcpiConfig {
    /// vCPUs; their APIC ids are 0 to `cpus - 1`.
    pub cpus: u32,
    /// The 64-bit MMIO window, if there is one.
    pub mmio64: Option<AddressRange>,
}

/// The tables do not fit into the space below 1 MiB.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ACPI tables of {cpus} vCPUs need {len} bytes, {space} are there; use fewer vCPUs")]
pub struct AcpiTooLarge {
    cpus: u32,
    len: u64,
    space: u64,
}

/// Guest-physical address of the tables, which begin with the RSDP.
pub const RSDP: u64 = layout::ACPI_AREA.start;

/// Builds the tables, contiguous, to be written to [`RSDP`].
pub fn build(config: &AcpiConfig) -> Result<Vec<u8>, AcpiTooLarge> {
    let mut image = Image {
        base: RSDP,
        bytes: vec![0; RSDP_SPACE as usize],
    };
    let dsdt = image.append(&dsdt::build(config));
    let fadt = image.append(&fadt(dsdt));
    let madt = image.append(&madt::build(config.cpus));
    let mcfg = image.append(&mcfg());
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for table in [fadt, madt, mcfg] {
        xsdt.add_entry(table);
    }
    let xsdt = image.append(&xsdt);
    let rsdp = to_bytes(&Rsdp::new(OEM_ID, xsdt));
    image.bytes[..rsdp.len()].copy_from_slice(&rsdp);

    let (len, space) = (image.bytes.len() as u64, layout::ACPI_AREA.len());
    if len > space {
        let cpus = config.cpus;
        return Err(AcpiTooLarge { cpus, len, space });
    }
    Ok(image.bytes)
}

/// Tables one behind the other from `base`.
struct Image {
    base: u64,
    bytes: Vec<u8>,
}

impl Image {
    /// Appends a table and returns its address.
    fn append(&mut self, table: &dyn Aml) -> u64 {
        let offset = (self.bytes.len() as u64).next_multiple_of(TABLE_ALIGN);
        self.bytes.resize(offset as usize, 0);
        table.to_aml_bytes(&mut self.bytes);
        self.base + offset
    }
}

fn to_bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        // Hardware-reduced: a guest sets up no PIT, PIC, PM timer or SCI (4.1).
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::Wbinvd)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        // No power or sleep button (the bits say "not a fixed one").
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = (BOOT_ARCH_NO_VGA | BOOT_ARCH_NO_ASPM | BOOT_ARCH_NO_CMOS_RTC).into();
    fadt.reset_reg = port(layout::RESET);
    fadt.reset_value = layout::RESET_VALUE;
    fadt.sleep_control_reg = port(layout::SLEEP_CONTROL);
    fadt.sleep_status_reg = port(layout::SLEEP_STATUS);
    fadt.finalize()
}

/// A register of one byte in I/O space.
fn port(number: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        number.into(),
    )
}

fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(layout::ECAM.start, 0, 0, layout::LAST_BUS);
    mcfg
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    fn tables(cpus: u32) -> Vec<u8> {
        let mmio64 = Some(AddressRange::new(1 << 40, 1 << 42));
        build(&AcpiConfig { cpus, mmio64 }).unwrap()
    }

    /// The table at a guest-physical address, cut by the length in its header.
    fn table(tables: &[u8], address: u64) -> &[u8] {
        let at = (address - RSDP) as usize;
        let len = u32_at(tables, at + 4) as usize;
        &tables[at..at + len]
    }

    #[test]
    fn every_table_is_reachable_and_sums_to_zero() {
        let tables = tables(4);
        assert_eq!(&tables[..8], b"RSD PTR ");
        assert_eq!(sum(&tables[..20]), 0);
        assert_eq!(sum(&tables[..36]), 0);
        let xsdt = table(&tables, u64_at(&tables, 24));
        assert_eq!((&xsdt[..4], sum(xsdt)), (&b"XSDT"[..], 0));
        let mut found = Vec::new();
        for at in (36..xsdt.len()).step_by(8) {
            let entry = table(&tables, u64_at(xsdt, at));
            assert_eq!(sum(entry), 0);
            found.push(entry[..4].to_vec());
        }
        assert_eq!(found, [b"FACP", b"APIC", b"MCFG"]);
        let fadt = table(&tables, u64_at(xsdt, 36));
        let dsdt = table(&tables, u64_at(fadt, 140));
        assert_eq!((&dsdt[..4], sum(dsdt)), (&b"DSDT"[..], 0));
    }

    #[test]
    fn the_fadt_is_hardware_reduced_and_without_legacy_devices() {
        let bytes = to_bytes(&fadt(0x1000));
        assert_eq!(bytes.len(), 276);
        let flags = u32_at(&bytes, 112);
        assert_ne!(flags & (1 << 20), 0, "HW_REDUCED_ACPI");
        assert_ne!(flags & (1 << 10), 0, "RESET_REG_SUP");
        let boot_arch = u16::from_le_bytes([bytes[109], bytes[110]]);
        assert_eq!(
            boot_arch & 0b10,
            0,
            "no 8042: Linux would wait for one that is not there"
        );
        assert_eq!(boot_arch & 0b1000, 0, "MSI is allowed");
        assert_eq!(u64_at(&bytes, 244 + 4), u64::from(layout::SLEEP_CONTROL));
    }

    #[test]
    fn more_vcpus_than_the_space_can_describe_are_refused() {
        assert!(
            build(&AcpiConfig {
                cpus: 4096,
                mmio64: None
            })
            .is_ok()
        );
        let error = build(&AcpiConfig {
            cpus: 10_000,
            mmio64: None,
        });
        assert!(error.is_err());
    }
}
