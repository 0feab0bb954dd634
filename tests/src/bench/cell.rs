//! What is measured: a scenario, with a VMM, on a host.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A VMM that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
pub enum Vmm {
    /// The product.
    #[serde(rename = "mini-vmm")]
    MiniVmm,
    /// The machine's own QEMU; on the host with iommufd QEMU 11.
    #[serde(rename = "qemu")]
    Qemu,
}

impl fmt::Display for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MiniVmm => "mini-vmm",
            Self::Qemu => "qemu",
        })
    }
}

/// The kernel interface through which devices are given IOMMU mappings.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Iommu {
    /// VFIO's own.
    #[default]
    Type1,
    /// /dev/iommu.
    Iommufd,
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Type1 => "type1",
            Self::Iommufd => "iommufd",
        })
    }
}

/// A machine and a guest, by the letter that tables use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[value(rename_all = "verbatim")]
pub enum Scenario {
    /// 4 x 16 GiB, guest 7.3
    A,
    /// 2 x 16 GiB, guest 6.1
    B,
    /// 8 x 64 GiB, guest 7.3
    C,
    /// 8 x 128 GiB, guest 7.3
    D,
    /// A with the guest's kernel unpacked (ELF, entered by PVH)
    E,
    /// 8 x 1 GiB, guest 7.3: what C is compared with
    F,
}

/// What a scenario consists of.
pub struct Setting {
    /// GPUs, each with one big BAR.
    pub gpus: u32,
    /// That BAR's size.
    pub bar_size: &'static str,
    /// The guest's kernel.
    pub guest: &'static str,
    /// It is given as ELF, so that the guest does not unpack it; otherwise as bzImage.
    pub unpacked: bool,
    /// Real seconds that a run may take on a busy machine. A process that ends with BARs mapped pays for each GiB of them,
    /// and QEMU while it runs as well.
    pub limit: u64,
}

impl Scenario {
    /// What it consists of.
    pub fn setting(self) -> Setting {
        let (gpus, bar_size, guest, limit) = match self {
            Self::A => (4, "16G", "7.3", 1200),
            Self::B => (2, "16G", "6.1", 1800),
            Self::C => (8, "64G", "7.3", 5400),
            Self::D => (8, "128G", "7.3", 7200),
            Self::E => (4, "16G", "7.3", 1200),
            Self::F => (8, "1G", "7.3", 1200),
        };
        Setting {
            gpus,
            bar_size,
            guest,
            unpacked: self == Self::E,
            limit,
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.bar_size.trim_end_matches('G');
        let unpacked = if self.unpacked { " as ELF" } else { "" };
        let Self { gpus, guest, .. } = self;
        write!(f, "{gpus} x {size} GiB, guest {guest}{unpacked}")
    }
}

/// One place in the tables: everything that a number depends on, but for versions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Cell {
    /// Devices and guest.
    pub scenario: Scenario,
    /// The host's kernel, by the lab's name.
    pub host_kernel: String,
    /// The kernel interface.
    pub iommu: Iommu,
    /// The guest's memory, in MiB.
    pub ram_mib: u64,
    /// The VMM.
    pub vmm: Vmm,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scenario,
            host_kernel,
            iommu,
            ram_mib,
            vmm,
        } = self;
        write!(
            f,
            "{scenario}, {vmm}, host {host_kernel}, {iommu}, {ram_mib} MiB"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_tells_all_that_it_depends_on() {
        let cell = Cell {
            scenario: Scenario::A,
            host_kernel: "6.12".to_owned(),
            iommu: Iommu::Type1,
            ram_mib: 512,
            vmm: Vmm::MiniVmm,
        };
        assert_eq!(cell.to_string(), "A, mini-vmm, host 6.12, type1, 512 MiB");
        let text = serde_json::to_string(&cell).unwrap();
        assert_eq!(
            text,
            r#"{"scenario":"A","host_kernel":"6.12","iommu":"type1","ram_mib":512,"vmm":"mini-vmm"}"#
        );
        assert_eq!(serde_json::from_str::<Cell>(&text).unwrap(), cell);
    }

    #[test]
    fn scenarios_are_named_as_in_tables() {
        assert_eq!(Scenario::B.setting().to_string(), "2 x 16 GiB, guest 6.1");
        assert_eq!(
            Scenario::E.setting().to_string(),
            "4 x 16 GiB, guest 7.3 as ELF"
        );
        assert_eq!(Scenario::from_str("C", false), Ok(Scenario::C));
    }
}
