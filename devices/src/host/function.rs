//! What sysfs tells of one PCI function without opening it: identity, BARs, interrupts, ways to
//! reset it, link, virtual functions.
//!
//! Formats: Documentation/ABI/testing/sysfs-bus-pci and drivers/pci/pci-sysfs.c of the kernel.

use std::fs;
use std::path::PathBuf;

use super::{Sysfs, link_name};
use crate::pci::address::Bdf;
use crate::pci::bar::{BarError, BarInfo, discover};
use crate::pci::caps::{MsiCap, MsixCap, filter};
use crate::pci::image;
use crate::pci::spec::{BAR_COUNT, HeaderType, LEGACY_CONFIG_SIZE, Reg};

/// Numbers that say what a function is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// PCI vendor id.
    pub vendor: u16,
    /// The vendor's number for it.
    pub device: u16,
    /// Base class, subclass and programming interface: 0xbbssii.
    pub class: u32,
}

/// One line of `resource`: a BAR (0 to 5) or the expansion ROM (6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostResource {
    /// Host-physical address; 0 when it has none.
    pub start: u64,
    /// Bytes; 0 when there is no such BAR.
    pub size: u64,
    /// IORESOURCE_* (include/linux/ioport.h); the low four bits are those of the BAR register.
    pub flags: u64,
}

impl HostResource {
    /// Index of the expansion ROM among the resources.
    pub const ROM: usize = BAR_COUNT;
    /// IORESOURCE_UNSET: the kernel found no address for it.
    const UNSET: u64 = 0x2000_0000;
    /// The type bits of a BAR register (PCI 3.0, 6.2.5.1).
    const TYPE_BITS: u64 = 0xf;

    /// Whether the device has this BAR and the host gave it no address: it cannot be enabled then.
    pub fn is_unassigned(&self) -> bool {
        self.flags & Self::UNSET != 0
    }
}

/// Speed and width of a PCI Express link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// As in `16.0 GT/s PCIe`.
    pub speed: String,
    /// Lanes.
    pub width: u32,
    /// The fastest that the device can.
    pub max_speed: String,
    /// The widest that the device can.
    pub max_width: u32,
}

/// Which interrupts a function has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostInterrupts {
    /// It has an interrupt pin.
    pub intx: bool,
    /// MSI.
    pub msi: Option<MsiCap>,
    /// MSI-X.
    pub msix: Option<MsixCap>,
}

/// SR-IOV of a physical function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VirtualFunctions {
    /// How many it can have.
    pub total: u16,
    /// How many are enabled.
    pub enabled: u16,
}

impl Sysfs {
    /// All PCI functions of the host, ascending.
    pub fn functions(&self) -> Vec<Bdf> {
        let entries = fs::read_dir(self.path("sys/bus/pci/devices"));
        let names = entries.into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        let mut functions: Vec<Bdf> = names.filter_map(|name| name.parse().ok()).collect();
        functions.sort_unstable();
        functions
    }

    fn attribute(&self, bdf: Bdf, name: &str) -> Option<String> {
        let text = fs::read_to_string(self.device_path(bdf).join(name)).ok()?;
        let text = text.trim();
        // Whatever else this is, it is to be printed.
        let is_text = !text.contains(|c: char| c.is_control() && c != '\n');
        (!text.is_empty() && is_text).then(|| text.to_owned())
    }

    fn number<T: std::str::FromStr>(&self, bdf: Bdf, name: &str) -> Option<T> {
        self.attribute(bdf, name)?.parse().ok()
    }

    fn hex(&self, bdf: Bdf, name: &str) -> Option<u32> {
        let text = self.attribute(bdf, name)?;
        u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    }

    /// Vendor, device and class.
    pub fn ids(&self, bdf: Bdf) -> Option<Ids> {
        Some(Ids {
            vendor: u16::try_from(self.hex(bdf, "vendor")?).ok()?,
            device: u16::try_from(self.hex(bdf, "device")?).ok()?,
            class: self.hex(bdf, "class")?,
        })
    }

    /// The function's BARs and its expansion ROM, by index; what it has not has size 0.
    pub fn resources(&self, bdf: Bdf) -> [HostResource; BAR_COUNT + 1] {
        let mut resources = [HostResource::default(); BAR_COUNT + 1];
        let text = self.attribute(bdf, "resource").unwrap_or_default();
        for (resource, line) in resources.iter_mut().zip(text.lines()) {
            *resource = parse_resource(line).unwrap_or_default();
        }
        resources
    }

    /// The function's BARs, by the rule of the boot: what the kernel will say of their sizes when
    /// the device is opened stands in sysfs already (drivers/vfio/pci/vfio_pci_core.c,
    /// `pci_resource_len`).
    pub fn bars(&self, bdf: Bdf) -> Result<Vec<BarInfo>, BarError> {
        let resources = self.resources(bdf);
        let (mut raw, mut sizes) = ([0; BAR_COUNT], [0; BAR_COUNT]);
        for ((raw, size), resource) in raw.iter_mut().zip(&mut sizes).zip(&resources) {
            *raw = (resource.flags & HostResource::TYPE_BITS) as u32;
            *size = resource.size;
        }
        discover(&raw, &sizes)
    }

    /// BARs that the device has and the host gave no address.
    pub fn unassigned_bars(&self, bdf: Bdf) -> Vec<u8> {
        let resources = self.resources(bdf);
        let bars = (0u8..).zip(resources.iter().take(BAR_COUNT));
        let unassigned = bars.filter(|(_, resource)| resource.is_unassigned());
        unassigned.map(|(bar, _)| bar).collect()
    }

    /// The first 256 bytes of configuration space, or the 64 that users without privileges see.
    pub fn config(&self, bdf: Bdf) -> Vec<u8> {
        self.config_bytes(bdf, LEGACY_CONFIG_SIZE)
    }

    pub(super) fn config_bytes(&self, bdf: Bdf, len: usize) -> Vec<u8> {
        use std::io::Read;
        let mut bytes = Vec::with_capacity(len);
        if let Ok(file) = fs::File::open(self.device_path(bdf).join("config")) {
            // What was read before an error is what there is.
            let _ = file.take(len as u64).read_to_end(&mut bytes);
        }
        bytes
    }

    /// The layout of the function's header: 0 for an endpoint; `None` where it does not answer.
    pub fn header_layout(&self, bdf: Bdf) -> Option<u8> {
        let config = self.config(bdf);
        let answers = image::read_u16(&config, Reg::VENDOR_ID.offset()) != u16::MAX
            // The vendor id of a virtual function reads as ones: sysfs knows its physical function.
            || self.physical_function(bdf).is_some();
        let header = HeaderType(image::read_u8(&config, Reg::HEADER_TYPE.offset())).layout();
        answers.then_some(header)
    }

    /// Which interrupts the function has; `None` where its capabilities may not be read (only
    /// root sees more than 64 bytes of configuration space).
    pub fn interrupts(&self, bdf: Bdf) -> Option<HostInterrupts> {
        let mut config = self.config(bdf);
        if config.len() < LEGACY_CONFIG_SIZE {
            return None;
        }
        let pin = image::read_u8(&config, Reg::INTERRUPT_PIN.offset());
        let caps = filter(&mut config);
        Some(HostInterrupts {
            intx: (1..=4).contains(&pin),
            msi: caps.msi,
            msix: caps.msix,
        })
    }

    /// The ways in which the kernel can reset the function, in the order in which it tries them:
    /// flr, pm, bus, …; none when it has no way. Kernels before 5.15 do not tell which.
    pub fn reset_methods(&self, bdf: Bdf) -> Vec<String> {
        match self.attribute(bdf, "reset_method") {
            Some(methods) => methods.split_whitespace().map(str::to_owned).collect(),
            None if self.device_path(bdf).join("reset").exists() => vec!["some way".to_owned()],
            None => Vec::new(),
        }
    }

    /// The function's PCI Express link; `None` where it has none.
    pub fn link(&self, bdf: Bdf) -> Option<Link> {
        let link = Link {
            speed: self.attribute(bdf, "current_link_speed")?,
            width: self.number(bdf, "current_link_width")?,
            max_speed: self.attribute(bdf, "max_link_speed")?,
            max_width: self.number(bdf, "max_link_width")?,
        };
        // Integrated endpoints tell a link of no lanes.
        (link.width != 0).then_some(link)
    }

    /// SR-IOV; `None` where the function has none.
    pub fn virtual_functions(&self, bdf: Bdf) -> Option<VirtualFunctions> {
        Some(VirtualFunctions {
            total: self.number(bdf, "sriov_totalvfs")?,
            enabled: self.number(bdf, "sriov_numvfs").unwrap_or(0),
        })
    }

    /// The physical function of a virtual one; `None` for any other function.
    pub fn physical_function(&self, bdf: Bdf) -> Option<Bdf> {
        link_name(&self.device_path(bdf).join("physfn"))?
            .parse()
            .ok()
    }

    /// The bridges above the function, nearest first; none where sysfs does not tell.
    pub fn upstream(&self, bdf: Bdf) -> Vec<Bdf> {
        let target = fs::read_link(self.device_path(bdf)).unwrap_or_else(|_| PathBuf::new());
        let parts = target.iter().rev().skip(1).filter_map(|part| part.to_str());
        parts.map_while(|part| part.parse().ok()).collect()
    }
}

fn parse_resource(line: &str) -> Option<HostResource> {
    let mut numbers = line.split_ascii_whitespace();
    let mut next = || u64::from_str_radix(numbers.next()?.strip_prefix("0x")?, 16).ok();
    let (start, end, flags) = (next()?, next()?, next()?);
    // A resource that is not there is all zero; one of 1 byte does not exist.
    let size = match end > start {
        true => (end - start).saturating_add(1),
        false => 0,
    };
    Some(HostResource { start, size, flags })
}
