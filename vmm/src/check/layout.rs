//! The plan: where RAM and BARs will lie, by the boot's own functions.

use arch::layout::{self, AddressRange};
use devices::assign::requests_of;
use devices::host::Sysfs;
use devices::pci::address::Bdf;
use devices::pci::bar::{BarInfo, BarKind};
use devices::pci::place_error::Bytes;
use devices::pci::spec::BAR_COUNT;
use devices::range::Range;
use devices::remedy::Remedy;
use serde::Serialize;

use super::device::Device;
use super::iommu::{Iommu, Source};
use super::process::Process;
use super::report::Report;
use crate::config::Config;
use crate::error::Error;
use crate::memory::{Backing, Choice};
use crate::plan::{self, AddressSpace, LITTLE_ROOM, to_arch};

/// Where everything goes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Plan {
    /// What is behind guest RAM, and why.
    pub backing: String,
    /// Guest RAM.
    pub ram: Vec<String>,
    /// The window of 32-bit BARs.
    pub mmio32: String,
    /// The window of 64-bit BARs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mmio64: Option<String>,
    /// BARs, by device.
    pub bars: Vec<PlannedBar>,
    /// IOMMU backend, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu: Option<String>,
}

/// A BAR and its place.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedBar {
    /// The device.
    pub device: String,
    /// 0 to 5, or `rom`.
    pub bar: String,
    /// Bytes.
    pub size: u64,
    /// What it decodes.
    pub kind: &'static str,
    /// Guest-physical address, or port.
    pub address: String,
    /// The biggest page that maps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<&'static str>,
}

/// Lays everything out. `None` when that fails, or the devices already have.
pub fn all(
    report: &mut Report,
    sysfs: &Sysfs,
    config: &Config,
    process: &Process,
    devices: &[Device],
    iommu: &Iommu,
) -> Option<Plan> {
    let everywhere = || vec![Range::from_bounds(0, u64::MAX)];
    let usable = iommu.usable.clone().unwrap_or_else(everywhere);
    if !devices.is_empty() {
        addresses(report, sysfs, iommu);
    }
    let guest_phys_bits = process.guest_phys_bits();
    let Choice {
        backing,
        why,
        small_pages,
    } = Backing::choose(&sysfs.path(""), config.memory.huge_pages);
    if small_pages {
        let text = "the host gives guest RAM no huge pages: the guest is slower, and its RAM takes longer to prepare";
        let command = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
        report.warn("memory", text, Remedy::run(command));
    }
    let holes = match devices {
        [] => Vec::new(),
        _ => plan::holes(&usable),
    };
    let limit = 1 << guest_phys_bits;
    let size = config.memory.size.0;
    let ram = match layout::ram_ranges(size, backing.granule(), &holes, limit) {
        Ok(ram) => ram,
        Err(error) => {
            report.fail("ram", None, &error.into());
            return None;
        }
    };
    report.ok("ram", format!("{} at {}", Bytes(size), list(&ram)));
    let mut result = Plan {
        backing: why.to_owned(),
        ram: ram.iter().map(ToString::to_string).collect(),
        mmio32: layout::MMIO32.to_string(),
        iommu: iommu.backend.clone(),
        ..Plan::default()
    };
    let space = AddressSpace {
        ram: &ram,
        usable: &usable,
        guest_phys_bits,
    };
    match bars(report, sysfs, config, &space, devices, &mut result) {
        Ok(()) => Some(result),
        Err((device, error)) => {
            report.fail("bar", device, &error);
            None
        }
    }
}

fn bars(
    report: &mut Report,
    sysfs: &Sysfs,
    config: &Config,
    space: &AddressSpace<'_>,
    devices: &[Device],
    result: &mut Plan,
) -> Result<(), (Option<Bdf>, Error)> {
    let bdfs: Vec<Bdf> = devices.iter().map(|device| device.bdf).collect();
    let options: Vec<_> = devices.iter().map(|device| device.options).collect();
    let bars = devices.iter().map(|device| device.bars.clone()).collect();
    let requests = requests_of(bars, &options);
    let placed = plan::place_bars(config, space, &bdfs, &options, &requests);
    let placement = placed.map_err(|error| match &error {
        Error::Place { device, .. } => (*device, error),
        _ => (None, error),
    })?;
    for (number, device) in devices.iter().enumerate() {
        let resources = sysfs.resources(device.bdf);
        for bar in &device.bars {
            let Some(address) = placement.address(number, bar.index) else {
                continue;
            };
            let host = resources.get(usize::from(bar.index)).map_or(0, |r| r.start);
            let planned = planned(device.bdf, bar, address, host);
            let text = planned.text();
            report.device_ok("bar", device.bdf, &text);
            result.bars.push(planned);
        }
    }
    if let Some(window) = placement.mmio64 {
        let window = to_arch(&window);
        let bits = space.guest_phys_bits;
        report.ok(
            "window",
            format!(
                "{} for 64-bit BARs at {window}, below the guest's limit of 2^{bits}",
                Bytes(window.len())
            ),
        );
        result.mmio64 = Some(window.to_string());
    }
    if !placement.roomy {
        report.warn("window", LITTLE_ROOM.0, Remedy::advice(LITTLE_ROOM.1));
    }
    Ok(())
}

/// What the IOMMU maps.
fn addresses(report: &mut Report, sysfs: &Sysfs, iommu: &Iommu) {
    if !sysfs.has_iommu() {
        // Each device says so.
        return;
    }
    let usable = iommu.usable.as_deref().unwrap_or_default();
    let maps = || {
        let ranges: Vec<AddressRange> = usable.iter().map(to_arch).collect();
        format!("the IOMMU maps {}", list(&ranges))
    };
    let holes = match iommu.usable {
        Some(_) => plan::holes(usable),
        None => Vec::new(),
    };
    let text = match (iommu.source, holes.as_slice()) {
        (Source::Kernel, _) => maps(),
        (Source::Registers, _) => format!(
            "{} by its registers; what the kernel says is known at boot",
            maps()
        ),
        (Source::Boot, []) => "which addresses the IOMMU maps is known at boot".to_owned(),
        (Source::Boot, holes) => format!(
            "the IOMMU does not map {}; how far it reaches is known at boot",
            list(holes)
        ),
    };
    report.ok("iova", text);
}

fn list(ranges: &[AddressRange]) -> String {
    let texts: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

fn planned(device: Bdf, bar: &BarInfo, address: u64, host: u64) -> PlannedBar {
    PlannedBar {
        device: device.to_string(),
        bar: match usize::from(bar.index) {
            BAR_COUNT => "rom".to_owned(),
            _ => bar.index.to_string(),
        },
        size: bar.size,
        kind: kind_name(bar.kind),
        address: format!("{address:#x}"),
        page: biggest_page(bar, address, host),
    }
}

/// A BAR's kind, in words.
pub fn kind_name(kind: BarKind) -> &'static str {
    match kind {
        BarKind::Io => "I/O ports",
        BarKind::Mem32 { prefetchable: true } => "32-bit prefetchable",
        BarKind::Mem32 {
            prefetchable: false,
        } => "32-bit",
        BarKind::Mem64 { prefetchable: true } => "64-bit prefetchable",
        BarKind::Mem64 {
            prefetchable: false,
        } => "64-bit",
    }
}

/// The biggest page that can map a BAR whose guest-physical and host-physical address are these:
/// both must be congruent modulo its size.
fn biggest_page(bar: &BarInfo, address: u64, host: u64) -> Option<&'static str> {
    if bar.is_io() || host == 0 || bar.size < 4096 {
        return None;
    }
    let pages = [(1u64 << 30, "1 GiB"), (2 << 20, "2 MiB")];
    let fits = |(size, _): &&(u64, &str)| bar.size >= *size && address % size == host % size;
    Some(pages.iter().find(fits).map_or("4 KiB", |(_, name)| name))
}

impl PlannedBar {
    /// For people.
    pub fn text(&self) -> String {
        let name = match self.bar.as_str() {
            "rom" => "expansion ROM".to_owned(),
            number => format!("BAR {number}"),
        };
        let page = match self.page {
            Some("1 GiB") => ", congruent modulo 1 GiB: pages of 1 GiB".to_owned(),
            Some(page) => format!(", pages of {page}"),
            None => String::new(),
        };
        format!(
            "{name}, {} {}, at {}{page}",
            Bytes(self.size),
            self.kind,
            self.address
        )
    }
}
