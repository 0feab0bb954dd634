//! The wiring of assigned devices, in the order in which `machine` calls it:
//! [`Opening::begin`], [`Opening::finish`], [`Placed::new`], [`Placed::install`], [`add_to_buses`].

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use arch::layout::{self, AddressRange};
use devices::assign::irq::IrqPorts;
use devices::assign::open::open_all;
use devices::assign::ports::{IommuBackend, MemSlots};
use devices::assign::{
    AssignError, Assignment, BarWindows, DeviceOptions, PeerToPeer, Ports, SizedDevice, map,
    place_requests, preflight,
};
use devices::bus::Bus;
use devices::host::Sysfs;
use devices::iommu::choose::{Wanted, choose};
use devices::pci::address::Bdf;
use devices::pci::ecam::{ConfigPorts, Ecam, PciBus};
use devices::pci::host_bridge::HostBridge;
use devices::pci::place::{Placement, Windows, place};
use devices::range::Range;
use kvm_ioctls::{DeviceFd, VmFd};

use crate::config::{Config, Iommu, P2p};
use crate::error::Error;
use crate::kvm::routes::VmIrqs;
use crate::kvm::vm;
use crate::memory::GuestRam;
use crate::options::{Decode, VfioOption};
use crate::profile::{Profile, ProfiledFunction, ProfiledIommu};

/// Slots of the root bus: 0 is the host bridge's.
const MAX_DEVICES: usize = 31;

/// Devices that are being opened, each in a thread of its own, while the VM is built.
pub struct Opening {
    iommu: Arc<ProfiledIommu>,
    usable: Vec<Range>,
    bdfs: Vec<Bdf>,
    thread: JoinHandle<Result<Vec<SizedDevice>, AssignError>>,
}

impl Opening {
    /// Checks that all devices are fit, attaches them to one IOMMU context and begins to open them
    /// (on iommufd, attaching has opened them). `None` without devices.
    pub fn begin(config: &Config, profile: &Arc<Profile>) -> Result<Option<Self>, Error> {
        let bdfs: Vec<Bdf> = config.vfio.iter().map(|option| option.bdf).collect();
        if bdfs.is_empty() {
            return Ok(None);
        }
        if bdfs.len() > MAX_DEVICES {
            let text = format!(
                "{} devices are more than the {MAX_DEVICES} that the guest's PCI bus has slots for",
                bdfs.len()
            );
            return Err(Error::Host(text));
        }
        let groups = {
            let _span = profile.span("check devices");
            preflight::check(&Sysfs::default(), &bdfs)?
        };
        let _span = profile.span("attach IOMMU groups");
        let wanted = match config.iommu {
            Iommu::Auto => Wanted::Auto,
            Iommu::Type1 => Wanted::Type1,
            Iommu::Iommufd => Wanted::Iommufd,
        };
        let chosen = choose(wanted, &Sysfs::default(), &groups, has_peers(config))?;
        let iommu = Arc::new(ProfiledIommu::new(chosen.backend, profile));
        profile.note(format!("IOMMU backend: {}, {}", iommu.name(), chosen.why));
        let usable = iommu.iova_ranges()?;
        let thread = {
            let (iommu, bdfs, profile) = (Arc::clone(&iommu), bdfs.clone(), Arc::clone(profile));
            thread::Builder::new()
                .name("open".to_owned())
                .spawn(move || {
                    let _span = profile.span("open devices");
                    open_all(iommu.as_ref(), &bdfs)
                })
                .map_err(Error::system("start a thread"))?
        };
        Ok(Some(Self {
            iommu,
            usable,
            bdfs,
            thread,
        }))
    }

    /// The devices' IOMMU.
    pub fn iommu(&self) -> &ProfiledIommu {
        &self.iommu
    }

    /// What the IOMMU cannot map: no guest RAM may lie there.
    pub fn holes(&self) -> Vec<AddressRange> {
        let usable: Vec<_> = self.usable.iter().map(to_arch).collect();
        layout::complement(&usable)
    }

    /// Populates guest RAM and maps it for DMA, while devices are still being opened.
    pub fn map_ram(&self, ram: &GuestRam, profile: &Profile) -> Result<(), Error> {
        {
            let _span = profile.span("populate RAM");
            let threads = thread::available_parallelism().map_or(1, usize::from);
            ram.populate(threads)?;
        }
        let _span = profile.span("map RAM for DMA");
        let ranges = ram.ranges().iter();
        let blocks: Vec<_> = ranges
            .map(|range| (range.gpa, range.memory.clone()))
            .collect();
        Ok(map::map_ram(self.iommu.as_ref(), &blocks)?)
    }

    /// Waits until all devices are open.
    pub fn finish(self, profile: &Profile) -> Result<Opened, Error> {
        let _span = profile.span("wait for devices");
        let first = self.bdfs.first().copied().unwrap_or_default();
        let died = |_| Err(AssignError::OpenThread { bdf: first });
        Ok(Opened {
            devices: self.thread.join().unwrap_or_else(died)?,
            iommu: self.iommu,
            usable: self.usable,
        })
    }
}

/// Opened devices.
pub struct Opened {
    iommu: Arc<ProfiledIommu>,
    usable: Vec<Range>,
    devices: Vec<SizedDevice>,
}

/// Opened devices whose BARs have their addresses.
pub struct Placed {
    opened: Opened,
    placement: Placement,
    options: Vec<DeviceOptions>,
}

impl Placed {
    /// Gives every BAR an address above or between `ram`, below `1 << guest_phys_bits`.
    pub fn new(
        opened: Opened,
        config: &Config,
        ram: &[AddressRange],
        guest_phys_bits: u8,
    ) -> Result<Self, Error> {
        let options: Vec<_> = config.vfio.iter().map(device_options).collect();
        let reachable = |option: &DeviceOptions| option.peer_to_peer != PeerToPeer::Off;
        let windows = Windows {
            mmio32: from_arch(&layout::MMIO32),
            io: io_window(),
            ram: ram.iter().map(from_arch).collect(),
            usable_iova: options.iter().any(reachable).then(|| opened.usable.clone()),
            address_limit: 1 << guest_phys_bits,
            reserved: Vec::new(),
            mmio64_size: config.mmio64_size.map(|size| size.0),
        };
        let placed = place(&place_requests(&opened.devices), &windows);
        let placement = placed.map_err(|source| {
            let device = source.bar().and_then(|bar| opened.devices.get(bar.device));
            Error::Place {
                device: device.map(|device| device.bdf),
                source,
            }
        })?;
        if !placement.roomy {
            tracing::warn!(
                "the 64-bit window has little room: a guest that moves BARs about may not find a place for them"
            );
        }
        Ok(Self {
            opened,
            placement,
            options,
        })
    }

    /// The 64-bit window, to be announced by ACPI.
    pub fn mmio64(&self) -> Option<AddressRange> {
        self.placement.mmio64.as_ref().map(to_arch)
    }

    /// Puts all BARs before the guest and tells KVM of the devices.
    pub fn install(
        self,
        vm: &VmFd,
        slots: &Arc<dyn MemSlots>,
        irqs: &Arc<VmIrqs>,
    ) -> Result<Installed, Error> {
        let iommu = self.opened.iommu;
        let vfio = vm::add_vfio_files(vm, &iommu.kvm_files())?;
        let ports = Ports {
            iommu,
            slots: Arc::clone(slots),
            irq: IrqPorts {
                routes: Arc::clone(irqs) as _,
                lines: Arc::clone(irqs) as _,
            },
        };
        let memory = [Some(self.placement.mmio32), self.placement.mmio64];
        let windows = BarWindows {
            memory: memory.into_iter().flatten().collect(),
            io: io_window(),
        };
        let assignment = Assignment::new(
            self.opened.devices,
            &self.options,
            &self.placement,
            windows,
            &ports,
            // PCI counts pins from 1, the routing table from 0.
            |number, pin| layout::intx_gsi(slot(number), pin.saturating_sub(1)),
        )?;
        Ok(Installed {
            assignment,
            _vfio: vfio,
        })
    }
}

/// Devices that the guest can reach.
pub struct Installed {
    assignment: Assignment,
    /// Closing it would undo KVM's registration of the devices.
    _vfio: DeviceFd,
}

/// The PCI bus: host bridge, assigned functions, configuration space by ECAM and by port, and the
/// windows in which BARs trap.
pub fn add_to_buses(
    installed: Option<&Installed>,
    mmio: &mut Bus,
    ports: &mut Bus,
    profile: &Arc<Profile>,
) -> Result<(), Error> {
    let mut bus = PciBus::new();
    bus.insert(0, Arc::new(HostBridge::new()))?;
    if let Some(installed) = installed {
        for (number, function) in installed.assignment.functions().iter().enumerate() {
            let bdf = function.bdf();
            let watched = ProfiledFunction::new(Arc::clone(function) as _, bdf, profile);
            bus.insert(slot(number) << 3, Arc::new(watched))?;
        }
        for (range, window) in installed.assignment.memory_windows() {
            mmio.insert(range, window)?;
        }
        let (range, window) = installed.assignment.io_window();
        ports.insert(range, window)?;
    }
    let bus = Arc::new(bus);
    mmio.insert(from_arch(&layout::ECAM), Arc::new(Ecam(Arc::clone(&bus))))?;
    let start = u64::from(layout::PCI_CONFIG_PORTS);
    let range = Range::from_bounds(start, start + ConfigPorts::LEN);
    ports.insert(range, Arc::new(ConfigPorts::new(bus)))?;
    Ok(())
}

/// Whether devices are to reach each other's BARs.
fn has_peers(config: &Config) -> bool {
    let count = |p2p| {
        config
            .vfio
            .iter()
            .filter(|option| option.p2p == p2p)
            .count()
    };
    count(P2p::On) > 0 || (config.vfio.len() > 1 && count(P2p::Auto) > 0)
}

/// Slot of device `number` on the root bus.
fn slot(number: usize) -> u8 {
    number as u8 + 1
}

fn device_options(option: &VfioOption) -> DeviceOptions {
    DeviceOptions {
        peer_to_peer: match option.p2p {
            P2p::Auto => PeerToPeer::Auto,
            P2p::On => PeerToPeer::On,
            P2p::Off => PeerToPeer::Off,
        },
        strict_decode: option.decode == Decode::Strict,
    }
}

fn io_window() -> Range {
    let ports = layout::PCI_IO;
    Range::from_bounds((*ports.start()).into(), u64::from(*ports.end()) + 1)
}

fn to_arch(range: &Range) -> AddressRange {
    AddressRange::new(range.start(), range.end())
}

fn from_arch(range: &AddressRange) -> Range {
    Range::from_bounds(range.start, range.end)
}
