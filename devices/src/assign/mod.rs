//! Host PCI devices in the guest, from open to interrupt. One step a file, in this order:
//!
//! 1. [`open`]: all devices at once, through an IOMMU backend;
//! 2. [`size`]: configuration space, BARs, interrupts of each; [`windows`]: what can be mapped;
//! 3. [`crate::pci::place`]: a guest-physical address for every BAR;
//! 4. [`map`]: areas into the VMM; [`ram`]: RAM into the IOMMU, possibly while the guest runs
//!    already: a device waits for it before it masters the bus; [`commit`]: areas into memslots;
//!    [`peer_maps`]: where [`peers`] may reach them, into the IOMMU, before the same moment;
//! 5. [`function`]: the guest's configuration accesses ([`config`]) and BAR accesses that
//!    [`trap`]; a write to COMMAND or a BAR is planned ([`plan`]) and committed ([`commit`]), a
//!    [`reset`] is carried out, by [`hot_reset`] where the function cannot be reset alone;
//! 6. [`irq`] and [`vectors`]: INTx, MSI and MSI-X.
//!
//! [`ports`] is what all of it needs from the kernel.

pub mod commit;
pub mod config;
pub mod error;
pub mod function;
pub mod hot_reset;
pub mod irq;
pub mod map;
pub mod open;
pub mod peer_maps;
pub mod peers;
pub mod plan;
pub mod ports;
pub mod preflight;
pub mod ram;
pub mod reset;
pub mod rom;
pub mod size;
pub mod trap;
pub mod vectors;
pub mod windows;

#[cfg(test)]
mod flow_tests;
#[cfg(test)]
mod gate_tests;
#[cfg(test)]
mod hot_reset_tests;
#[cfg(test)]
mod irq_property_tests;
#[cfg(test)]
mod irq_tests;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod reset_tests;
#[cfg(test)]
mod testing;

use std::sync::Arc;

use parking_lot::Mutex;

pub use error::AssignError;
pub use size::SizedDevice;

use crate::pci::address::Bdf;
use crate::pci::bar::BarInfo;
use crate::pci::image;
use crate::pci::place::{PlaceRequest, Placement};
use crate::pci::spec::{BAR_COUNT, Reg};
use crate::range::Range;
use commit::{BarEngine, EngineBar, ROM};
use config::{ConfigSetup, ConfigSpace};
use function::AssignedFunction;
use hot_reset::{FunctionCore, HotReset, Registers};
use irq::{Interrupts, IrqCounts, IrqPorts};
use peer_maps::Unreachable;
use peers::Peers;
use ports::{DmaGate, IommuBackend, MemSlots};
use trap::{BarWindow, Space};

/// Whether other assigned devices may reach a device's BARs by DMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerToPeer {
    /// When there are two or more devices and the IOMMU backend can; otherwise one warning.
    #[default]
    Auto,
    /// Or the VM does not start.
    On,
    /// Never.
    Off,
}

/// How one device is to be assigned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Mapping its BARs for its peers.
    pub peer_to_peer: PeerToPeer,
    /// With memory decode off its BARs read as all ones, instead of staying readable.
    pub strict_decode: bool,
    /// BARs that are not mapped into the guest: every access traps.
    pub trapped: [bool; BAR_COUNT],
    /// Guest-physical addresses that BARs must have.
    pub fixed: [Option<u64>; BAR_COUNT],
}

impl DeviceOptions {
    /// Whether every BAR that is named exists on `device`. All BARs kept trapped means those that
    /// there are.
    pub fn check(&self, device: &SizedDevice) -> Result<(), AssignError> {
        let present = device.bars.iter().map(|bar| bar.info.index).collect();
        self.check_bars(device.bdf, present)
    }

    /// The same of a device that is not open, by the BARs that are `present`.
    pub fn check_bars(&self, bdf: Bdf, present: Vec<u8>) -> Result<(), AssignError> {
        let all_trapped = self.trapped.iter().all(|trapped| *trapped);
        let named = self.trapped.iter().zip(&self.fixed);
        for (bar, (trapped, fixed)) in (0..).zip(named) {
            let asked = (*trapped && !all_trapped) || fixed.is_some();
            if asked && !present.contains(&bar) {
                return Err(AssignError::NoSuchBar { bdf, bar, present });
            }
        }
        Ok(())
    }
}

/// The kernel's side of all devices.
#[derive(Clone)]
pub struct Ports {
    /// VFIO and its IOMMU.
    pub iommu: Arc<dyn IommuBackend>,
    /// Memslots.
    pub slots: Arc<dyn MemSlots>,
    /// Interrupts.
    pub irq: IrqPorts,
    /// Passed before a device masters the bus.
    pub gate: Arc<dyn DmaGate>,
}

/// The address windows that BARs answer in.
#[derive(Clone, Debug)]
pub struct BarWindows {
    /// Guest-physical memory.
    pub memory: Vec<Range>,
    /// I/O ports.
    pub io: Range,
}

/// All assigned devices of a VM.
pub struct Assignment {
    functions: Vec<Arc<AssignedFunction>>,
    engine: Arc<BarEngine>,
    windows: BarWindows,
    peers: Mutex<Peers>,
}

/// The BARs of all `devices`, to be placed.
pub fn place_requests(devices: &[SizedDevice], options: &[DeviceOptions]) -> Vec<PlaceRequest> {
    let bars = devices.iter().map(|device| {
        let bars = device.bars.iter().map(|bar| bar.info);
        bars.chain(device.rom_bar()).collect()
    });
    requests_of(bars.collect(), options)
}

/// The same, given the `bars` of each device.
pub fn requests_of(bars: Vec<Vec<BarInfo>>, options: &[DeviceOptions]) -> Vec<PlaceRequest> {
    let numbered = bars.into_iter().enumerate();
    numbered
        .flat_map(|(device, bars)| {
            let fixed = options.get(device).copied().unwrap_or_default().fixed;
            bars.into_iter().map(move |bar| PlaceRequest {
                device,
                bar,
                fixed: fixed.get(usize::from(bar.index)).copied().flatten(),
            })
        })
        .collect()
}

impl Assignment {
    /// Installs the opened `devices` at their placed addresses. Their BARs are not mapped for peers
    /// yet: [`Assignment::map_peers`] must have been called before any of them masters the bus.
    /// `gsi` tells where the INTx pin (1
    /// to 4) of a device, by its number, is routed.
    pub fn new(
        devices: Vec<SizedDevice>,
        options: &[DeviceOptions],
        placement: &Placement,
        windows: BarWindows,
        ports: &Ports,
        gsi: impl Fn(usize, u8) -> u32,
    ) -> Result<Self, AssignError> {
        let mut peers = Peers::new(devices.len(), options, ports.iommu.nature());
        let engine = engine(&devices, options, &mut peers, placement, &windows, ports)?;
        engine.install_slots()?;
        engine.begin_peers(|device| peers.wanted(device));
        let engine = Arc::new(engine);
        let cores = devices.iter().enumerate();
        let cores: Vec<_> = cores
            .map(|(number, device)| Arc::new(core(number, device, placement, ports, &gsi)))
            .collect();
        let hot_reset = Arc::new(HotReset::new(cores.clone(), Arc::clone(&engine)));
        let functions = devices.into_iter().zip(cores).map(|(device, core)| {
            let shared = (Arc::clone(&hot_reset), Arc::clone(&engine));
            Arc::new(function(device, core, shared, ports))
        });
        let functions = functions.collect();
        Ok(Self {
            functions,
            engine,
            windows,
            peers: Mutex::new(peers),
        })
    }

    /// Maps the BARs that peers are to reach, and follows what the guest does with them from then
    /// on. Takes long on some kernels; may run beside the guest, but for devices that master the
    /// bus. `is_over` ends it between two mappings.
    pub fn map_peers(&self, is_over: impl Fn() -> bool) -> Result<(), AssignError> {
        let give_up = |lost: Unreachable| {
            let bdf = lost.error.bdf;
            let mut peers = self.peers.lock();
            peers.give_up(lost.device, bdf, lost.error.into())
        };
        self.engine.map_peers(give_up, is_over)?;
        if let Some(warning) = self.peers.lock().warning() {
            tracing::warn!("{warning}");
        }
        Ok(())
    }

    /// The functions, in the order of the devices.
    pub fn functions(&self) -> &[Arc<AssignedFunction>] {
        &self.functions
    }

    /// Which BAR decodes the guest-physical address `gpa`, and the offset in it, for messages:
    /// `0000:41:00.0 BAR 2 + 0x1000`.
    pub fn describe(&self, gpa: u64) -> Option<String> {
        let (key, offset) = self.engine.find_memory(gpa)?;
        let bdf = self.functions.get(key.device)?.bdf();
        Some(match key.bar {
            ROM => format!("{bdf} expansion ROM + {offset:#x}"),
            bar => format!("{bdf} BAR {bar} + {offset:#x}"),
        })
    }

    /// What answers accesses that trap, for the memory bus: each window with its range.
    pub fn memory_windows(&self) -> Vec<(Range, Arc<BarWindow>)> {
        let windows = self.windows.memory.iter();
        windows
            .map(|range| (*range, self.window(Space::Memory, range)))
            .collect()
    }

    /// What answers accesses to I/O BARs, for the port bus.
    pub fn io_window(&self) -> (Range, Arc<BarWindow>) {
        let range = self.windows.io;
        (range, self.window(Space::Io, &range))
    }

    fn window(&self, space: Space, range: &Range) -> Arc<BarWindow> {
        let (engine, functions) = (Arc::clone(&self.engine), self.functions.clone());
        Arc::new(BarWindow::new(space, range.start(), engine, functions))
    }
}

fn engine(
    devices: &[SizedDevice],
    options: &[DeviceOptions],
    peers: &mut Peers,
    placement: &Placement,
    windows: &BarWindows,
    ports: &Ports,
) -> Result<BarEngine, AssignError> {
    let mut bars = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let options = options.get(number).copied().unwrap_or_default();
        let address = |bar: u8| placement.address(number, bar).unwrap_or(0);
        bars.extend(device.rom_bar().map(|info| EngineBar {
            device: number,
            bdf: device.bdf,
            info,
            address: address(info.index),
            strict: true,
            areas: Vec::new(),
        }));
        for bar in &device.bars {
            let areas = match options.trapped.get(usize::from(bar.info.index)) {
                Some(true) => Vec::new(),
                _ => map::map_bar(device, bar, peers.export(number, device, bar)?)?,
            };
            bars.push(EngineBar {
                device: number,
                bdf: device.bdf,
                info: bar.info,
                address: address(bar.info.index),
                strict: options.strict_decode,
                areas,
            });
        }
    }
    Ok(BarEngine::new(
        bars,
        windows.memory.clone(),
        vec![windows.io],
        Arc::clone(&ports.slots),
        Arc::clone(&ports.iommu),
    ))
}

/// The registers of a device as the guest sees them.
fn core(
    number: usize,
    device: &SizedDevice,
    placement: &Placement,
    ports: &Ports,
    gsi: &impl Fn(usize, u8) -> u32,
) -> FunctionCore {
    let bars: Vec<BarInfo> = device.bars.iter().map(|bar| bar.info).collect();
    let placed = |bar: u8| Some((bar, placement.address(number, bar)?));
    let addresses: Vec<(u8, u64)> = (0..=ROM).filter_map(placed).collect();
    let pin = image::read_u8(&device.config, Reg::INTERRUPT_PIN.offset());
    let has_intx = (1..=4).contains(&pin) && device.intx.count != 0;
    let gsi = has_intx.then(|| gsi(number, pin));
    let config = ConfigSpace::new(&ConfigSetup {
        filtered: &device.config,
        caps: &device.caps,
        bars: &bars,
        addresses: &addresses,
        rom_size: device.rom.as_ref().map_or(0, |rom| rom.len() as u64),
        interrupt_line: gsi.and_then(|gsi| u8::try_from(gsi).ok()),
        can_reset: device.device.can_reset(),
        synthetic: device.synthetic,
    });
    let counts = IrqCounts {
        intx: device.intx,
        msi: device.msi,
        msix: device.msix,
    };
    let id: (u16, Bdf) = (number as u16, device.bdf);
    let vfio = Arc::clone(&device.device);
    let irq = Interrupts::new(id, vfio, &device.caps, counts, gsi, ports.irq.clone());
    FunctionCore {
        number,
        bdf: device.bdf,
        device: Arc::clone(&device.device),
        registers: Mutex::new(Registers {
            config,
            irq,
            wanted_reset: None,
        }),
    }
}

fn function(
    device: SizedDevice,
    core: Arc<FunctionCore>,
    (hot_reset, engine): (Arc<HotReset>, Arc<BarEngine>),
    ports: &Ports,
) -> AssignedFunction {
    let msix = device.caps.msix.as_ref();
    let msix_bars = msix.map(|cap| (cap.table.bar, cap.pba.bar));
    let gate = Arc::clone(&ports.gate);
    AssignedFunction::new(core, hot_reset, engine, gate, msix_bars).with_rom(device.rom)
}

#[cfg(test)]
mod tests {
    use super::testing::{GIB, RAM, Rig, bdf};
    use super::*;
    use crate::fake::FakeDeviceSpec;
    use crate::pci::spec::Command;

    #[test]
    fn an_address_is_described_by_device_bar_and_offset() {
        let specs = (1..=2).map(|device| FakeDeviceSpec::gpu(bdf(device), 16 * GIB));
        let rig = Rig::new(specs.collect(), DeviceOptions::default());
        rig.write_command(1, Command::MEMORY.bits());
        let at = rig.placed(1, 2) + 0x1000;
        let found = rig.assignment.describe(at);
        assert_eq!(found.as_deref(), Some("0000:00:02.0 BAR 2 + 0x1000"));
        assert_eq!(rig.assignment.describe(RAM.start()), None);
    }
}
