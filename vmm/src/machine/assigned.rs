//! The wiring of assigned devices, in the order in which `machine` calls it:
//! [`Opening::begin`], [`Opening::finish`], [`Placed::new`], [`Placed::install`],
//! [`Installed::map_peers`], [`add_to_buses`].

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arch::layout::{self, AddressRange};
use devices::assign::function::AssignedFunction;
use devices::assign::irq::IrqPorts;
use devices::assign::open::open_all;
use devices::assign::ports::{DmaGate, IommuBackend, MemSlots};
use devices::assign::{
    AssignError, Assignment, BarWindows, DeviceOptions, Ports, SizedDevice, place_requests,
    preflight,
};
use devices::bus::Bus;
use devices::host::Sysfs;
use devices::iommu::FAST_BAR_MAPS;
use devices::iommu::choose::choose;
use devices::pci::address::Bdf;
use devices::pci::ecam::{ConfigPorts, Ecam, PciBus};
use devices::pci::host_bridge::HostBridge;
use devices::pci::place::Placement;
use devices::range::Range;
use kvm_ioctls::{DeviceFd, VmFd};

use super::ram::RamPreparation;
use super::slots::guest_addresses;
use crate::config::Config;
use crate::error::{Error, HostError};
use crate::kvm::routes::VmIrqs;
use crate::kvm::vm;
use crate::limits::{self, FewFiles};
use crate::plan::{self, device_options, from_arch, has_peers, io_window, to_arch};
use crate::profile::{Profile, ProfiledExits, ProfiledFunction, ProfiledIommu};
use crate::run::FaultHandler;
use crate::stop::{Outcome, Stop};

/// BARs that take longer to map are worth a word.
const SLOW_MAPS: Duration = Duration::from_secs(5);

/// Devices that are being opened, each in a thread of its own, while the VM is built.
pub struct Opening {
    iommu: Arc<ProfiledIommu>,
    holes: Vec<AddressRange>,
    devfns: Vec<u8>,
    thread: JoinHandle<Result<Vec<SizedDevice>, AssignError>>,
}

impl Opening {
    /// Checks that all devices are fit, chooses one IOMMU context for them and begins to open them
    /// (on iommufd that attaches them as well). `None` without devices.
    pub fn begin(config: &Config, profile: &Arc<Profile>) -> Result<Option<Self>, Error> {
        let bdfs: Vec<Bdf> = config.vfio.iter().map(|option| option.bdf).collect();
        if bdfs.is_empty() {
            return Ok(None);
        }
        let devfns = guest_addresses(&bdfs).ok_or_else(|| {
            let count = bdfs.len();
            Error::Host(HostError::Slots { count })
        })?;
        let groups = {
            let _span = profile.span("check devices");
            let groups = preflight::check(&Sysfs::default(), &bdfs)?;
            for left_out in preflight::left_out(&Sysfs::default(), &groups) {
                tracing::warn!("{left_out}: {}", left_out.remedy());
            }
            groups
        };
        let _span = profile.span("attach IOMMU groups");
        let chosen = choose(
            plan::wanted(config),
            &Sysfs::default(),
            &groups,
            has_peers(config),
        )?;
        let iommu = Arc::new(ProfiledIommu::new(chosen.backend, profile));
        profile.note(format!("IOMMU backend: {}, {}", iommu.name(), chosen.why));
        let holes = match chosen.reserved {
            Some(reserved) => reserved.iter().map(to_arch).collect(),
            None => plan::holes(&iommu.iova_ranges()?),
        };
        let thread = {
            let (iommu, profile) = (Arc::clone(&iommu), Arc::clone(profile));
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
            holes,
            devfns,
            thread,
        }))
    }

    /// The devices' IOMMU.
    pub fn iommu(&self) -> &Arc<ProfiledIommu> {
        &self.iommu
    }

    /// What the IOMMU cannot map as far as is known: no guest RAM may lie there.
    pub fn holes(&self) -> Vec<AddressRange> {
        self.holes.clone()
    }

    /// Waits until all devices are open; adds to them what the options ask for.
    pub fn finish(self, config: &Config, profile: &Profile) -> Result<Opened, Error> {
        let _span = profile.span("wait for devices");
        let opened = self.thread.join();
        let mut devices = opened.unwrap_or_else(|panic| resume_unwind(panic))?;
        for (device, option) in devices.iter_mut().zip(&config.vfio) {
            device.load_rom(&plan::rom_source(&option.rom)?)?;
            if let Some(clique) = option.clique {
                device.add_clique(clique)?;
            }
        }
        let vectors = devices.iter().map(|device| {
            let (msi, msix) = (device.msi.count, device.msix.count);
            u64::from(msi.max(msix))
        });
        let few = limits::open_files().map(|limit| FewFiles::check(vectors.sum(), limit));
        if let Some(Err(few)) = few {
            tracing::warn!("{few}: {}", few.remedy());
        }
        Ok(Opened {
            devices,
            usable: self.iommu.iova_ranges()?,
            iommu: self.iommu,
            devfns: self.devfns,
        })
    }
}

/// Opened devices.
pub struct Opened {
    iommu: Arc<ProfiledIommu>,
    usable: Vec<Range>,
    devices: Vec<SizedDevice>,
    devfns: Vec<u8>,
}

impl Opened {
    /// What the IOMMU cannot map.
    pub fn holes(&self) -> Vec<AddressRange> {
        plan::holes(&self.usable)
    }
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
        let sysfs = Sysfs::default();
        let options = config
            .vfio
            .iter()
            .map(|option| device_options(&sysfs, option));
        let options = options.collect::<Result<Vec<_>, _>>()?;
        for (device, options) in opened.devices.iter().zip(&options) {
            options.check(device)?;
        }
        let bdfs: Vec<Bdf> = opened.devices.iter().map(|device| device.bdf).collect();
        let space = plan::AddressSpace {
            ram,
            usable: &opened.usable,
            guest_phys_bits,
        };
        let requests = place_requests(&opened.devices, &options);
        let placement = plan::place_bars(config, &space, &bdfs, &options, &requests)?;
        if !placement.roomy {
            tracing::warn!("{}: {}", plan::LITTLE_ROOM.0, plan::LITTLE_ROOM.1);
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
        gate: &Arc<dyn DmaGate>,
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
            gate: Arc::clone(gate),
        };
        let memory = [Some(self.placement.mmio32), self.placement.mmio64];
        let windows = BarWindows {
            memory: memory.into_iter().flatten().collect(),
            io: io_window(),
        };
        let devfns = self.opened.devfns;
        let nature = ports.iommu.nature();
        let slot = |number: usize| devfns.get(number).copied().unwrap_or(0) >> 3;
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
            assignment: Arc::new(assignment),
            devfns,
            maps_beside: !nature.bars_by_dmabuf && Sysfs::default().is_older_than(FAST_BAR_MAPS),
            _vfio: vfio,
        })
    }
}

/// Devices that the guest can reach.
pub struct Installed {
    assignment: Arc<Assignment>,
    /// Where each sits on the root bus.
    devfns: Vec<u8>,
    /// Mapping their BARs may take long: see [`Installed::map_peers`].
    maps_beside: bool,
    /// Closing it would undo KVM's registration of the devices.
    _vfio: DeviceFd,
}

impl Installed {
    /// The functions, in the order of the command line.
    pub fn functions(&self) -> &[Arc<AssignedFunction>] {
        self.assignment.functions()
    }

    /// Maps BARs for other devices to reach, then lets guest RAM be mapped, which a device waits for
    /// before it masters the bus. By dma-buf, or in steps of 1 GiB, that takes little time and is done
    /// at once; else it is left to what is returned, for a thread to do while the guest starts
    /// already.
    pub fn map_peers(
        &self,
        ram: &RamPreparation,
        stop: &Arc<Stop>,
        profile: &Arc<Profile>,
    ) -> Result<Option<PeerMaps>, Error> {
        let (assignment, stop) = (Arc::clone(&self.assignment), Arc::clone(stop));
        let (ram, profile) = (ram.maps(), Arc::clone(profile));
        let map = move |is_over: &dyn Fn() -> bool| -> Result<(), Error> {
            let begin = Instant::now();
            {
                let _span = profile.span("map BARs for peers");
                assignment.map_peers(is_over)?;
            }
            if begin.elapsed() > SLOW_MAPS {
                tracing::warn!(
                    "mapping the BARs took {} s: host kernels before Linux 6.15 map them page by page for other devices to reach; p2p=off on each --vfio does without",
                    begin.elapsed().as_secs()
                );
            }
            ram.allow();
            Ok(())
        };
        if !self.maps_beside {
            return map(&|| false).map(|()| None);
        }
        Ok(Some(PeerMaps(Box::new(move || {
            if let Err(error) = map(&|| stop.is_requested()) {
                stop.request(Outcome::Failed(error));
            }
        }))))
    }

    /// Tells which device's memory is missing.
    pub fn fault_handler(&self) -> FaultHandler {
        let assignment = Arc::clone(&self.assignment);
        Box::new(move |gpa| {
            let devices = assignment.functions().iter();
            let devices: Vec<Bdf> = devices.map(|function| function.bdf()).collect();
            missing_memory(gpa, |gpa| assignment.describe(gpa), &devices)
        })
    }
}

/// Mappings of BARs that are made beside the guest.
pub struct PeerMaps(Box<dyn FnOnce() + Send>);

impl PeerMaps {
    /// Starts the thread that makes them.
    pub fn begin(self) -> Result<(), Error> {
        // Never joined: at the end of the run it is left behind rather than waited for.
        let thread = thread::Builder::new()
            .name("peers".to_owned())
            .spawn(self.0);
        thread.map(drop).map_err(Error::system("start a thread"))
    }
}

/// `describe` finds the BAR that decodes an address. Where there is none (older kernels do not
/// even tell the address) all `devices` are named.
fn missing_memory(
    gpa: Option<u64>,
    describe: impl Fn(u64) -> Option<String>,
    devices: &[Bdf],
) -> String {
    const LOOK: &str = "see `dmesg` of the host for errors of the device, a reset or an unbind";
    match gpa.and_then(describe) {
        Some(bar) => format!("it is {bar}, which the host took away: {LOOK}"),
        None => {
            let names: Vec<String> = devices.iter().map(Bdf::to_string).collect();
            let names = names.join(" or ");
            format!("it may be a BAR of {names} that the host took away: {LOOK}")
        }
    }
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
        let functions = installed.functions();
        for (devfn, function) in installed.devfns.iter().zip(functions) {
            let bdf = function.bdf();
            let watched = ProfiledFunction::new(Arc::clone(function) as _, bdf, profile);
            bus.insert(*devfn, Arc::new(watched))?;
        }
        for (range, window) in installed.assignment.memory_windows() {
            mmio.insert(range, window)?;
        }
        let (range, window) = installed.assignment.io_window();
        ports.insert(range, window)?;
    }
    let bus = Arc::new(bus);
    let ecam = ProfiledExits::new(Ecam(Arc::clone(&bus)), "exit: config by memory", profile);
    mmio.insert(from_arch(&layout::ECAM), Arc::new(ecam))?;
    let start = u64::from(layout::PCI_CONFIG_PORTS);
    let range = Range::from_bounds(start, start + ConfigPorts::LEN);
    let config_ports = ProfiledExits::new(ConfigPorts::new(bus), "exit: config by port", profile);
    ports.insert(range, Arc::new(config_ports))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_memory_is_told_with_its_device_and_where_to_look() {
        let bar = |gpa| (gpa == 0x1000).then(|| "0000:41:00.0 BAR 2 + 0x0".to_owned());
        let devices: Vec<Bdf> = ["41:00.0", "42:00.0"]
            .map(|bdf| bdf.parse().unwrap())
            .into();
        let known = missing_memory(Some(0x1000), bar, &devices);
        assert!(known.contains("is 0000:41:00.0 BAR 2"), "{known}");
        assert!(known.contains("dmesg"), "{known}");
        for gpa in [None, Some(0x2000)] {
            let unknown = missing_memory(gpa, bar, &devices);
            let devices = "0000:41:00.0 or 0000:42:00.0";
            assert!(unknown.contains(devices), "{unknown}");
            assert!(unknown.contains("dmesg"), "{unknown}");
        }
    }
}
