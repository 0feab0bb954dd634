//! Devices assigned to nobody's VM: the whole assignment on the fake kernel, driven through
//! configuration space and trapped accesses as a guest drives it.

use std::sync::Arc;

use super::commit::BarKey;
use super::irq::IrqPorts;
use super::ports::{DmaGate, IommuBackend, IommuNature, MemSlots, OpenGate};
use super::{
    AssignError, Assignment, BarWindows, DeviceOptions, Ports, SizedDevice, place_requests,
};
use crate::assign::open::open_all;
use crate::fake::{FakeDeviceSpec, FakeKernel};
use crate::pci::address::Bdf;
use crate::pci::ecam::PciFunction;
use crate::pci::place::{Placement, Windows, place};
use crate::pci::spec::Reg;
use crate::range::Range;
use crate::sys::{Alignment, HostMap, HostRange};

pub const GIB: u64 = 1 << 30;
/// As iommufd is.
pub const DMABUF: IommuNature = IommuNature {
    bars_by_dmabuf: true,
    cheap_unmap: true,
    parallel_maps: true,
};
/// Guest RAM of every rig; it has a slot, so that nothing may be put over it.
pub const RAM: Range = Range::from_bounds(0, GIB);

/// Assigned fake devices.
pub struct Rig {
    pub kernel: Arc<FakeKernel>,
    pub assignment: Arc<Assignment>,
    pub placement: Placement,
}

pub fn bdf(device: u8) -> Bdf {
    Bdf {
        device,
        ..Bdf::default()
    }
}

pub fn ports(kernel: &Arc<FakeKernel>) -> Ports {
    Ports {
        iommu: Arc::new(Arc::clone(kernel)) as Arc<dyn IommuBackend>,
        slots: Arc::clone(kernel) as Arc<dyn MemSlots>,
        irq: IrqPorts {
            routes: Arc::clone(kernel) as _,
            lines: Arc::clone(kernel) as _,
        },
        gate: Arc::new(OpenGate),
    }
}

impl Rig {
    /// On a backend like type1.
    pub fn new(specs: Vec<FakeDeviceSpec>, options: DeviceOptions) -> Self {
        Self::on(IommuNature::default(), specs, options)
    }

    /// With every opened device adjusted before it is placed.
    pub fn with(
        specs: Vec<FakeDeviceSpec>,
        options: DeviceOptions,
        adjust: impl Fn(&mut SizedDevice),
    ) -> Self {
        let gate = Arc::new(OpenGate);
        let rig = Self::build(IommuNature::default(), specs, &[options], gate, adjust);
        rig.and_then(Self::mapped).unwrap()
    }

    /// Behind a gate, which is made from the kernel.
    pub fn gated(nature: IommuNature, specs: Vec<FakeDeviceSpec>, gate: Arc<dyn DmaGate>) -> Self {
        let options = [DeviceOptions::default()];
        let rig = Self::build(nature, specs, &options, gate, |_| ());
        rig.and_then(Self::mapped).unwrap()
    }

    /// On a backend of any nature.
    pub fn on(nature: IommuNature, specs: Vec<FakeDeviceSpec>, options: DeviceOptions) -> Self {
        let rig = Self::try_on(nature, specs, &[options]);
        rig.unwrap()
    }

    /// The last of `options` holds for all further devices, too.
    pub fn try_on(
        nature: IommuNature,
        specs: Vec<FakeDeviceSpec>,
        options: &[DeviceOptions],
    ) -> Result<Self, AssignError> {
        let rig = Self::unmapped(nature, specs, options)?;
        rig.mapped()
    }

    /// BARs are not mapped for peers yet.
    pub fn unmapped(
        nature: IommuNature,
        specs: Vec<FakeDeviceSpec>,
        options: &[DeviceOptions],
    ) -> Result<Self, AssignError> {
        Self::build(nature, specs, options, Arc::new(OpenGate), |_| ())
    }

    fn mapped(self) -> Result<Self, AssignError> {
        self.assignment.map_peers(|| false)?;
        Ok(self)
    }

    fn build(
        nature: IommuNature,
        specs: Vec<FakeDeviceSpec>,
        options: &[DeviceOptions],
        gate: Arc<dyn DmaGate>,
        adjust: impl Fn(&mut SizedDevice),
    ) -> Result<Self, AssignError> {
        let bdfs: Vec<Bdf> = specs.iter().map(|spec| spec.bdf).collect();
        let kernel = FakeKernel::with_nature(specs, nature);
        let ram = HostMap::anonymous(RAM.len(), Alignment::PAGE).unwrap();
        kernel.set(0, &HostRange::whole(Arc::new(ram))).unwrap();
        let ports = Ports {
            gate,
            ..ports(&kernel)
        };
        let mut devices = open_all(ports.iommu.as_ref(), &bdfs).unwrap();
        devices.iter_mut().for_each(adjust);
        let space = Windows {
            mmio32: Range::from_bounds(0xd000_0000, 0xfec0_0000),
            io: Range::from_bounds(0x1000, 0x1_0000),
            ram: vec![RAM],
            usable_iova: None,
            address_limit: 1 << 46,
            reserved: Vec::new(),
            mmio64_size: None,
        };
        let last = options.last().copied().unwrap_or_default();
        let mut options = options.to_vec();
        options.resize(devices.len(), last);
        let placement = place(&place_requests(&devices, &options), &space).unwrap();
        let windows = BarWindows {
            memory: [Some(placement.mmio32), placement.mmio64]
                .into_iter()
                .flatten()
                .collect(),
            io: space.io,
        };
        let assignment = Assignment::new(
            devices,
            &options,
            &placement,
            windows,
            &ports,
            |number, pin| 16 + (number as u32 + u32::from(pin)) % 8,
        );
        Ok(Self {
            kernel,
            assignment: Arc::new(assignment?),
            placement,
        })
    }

    pub fn write_config(&self, device: usize, offset: u16, data: &[u8]) {
        self.assignment.functions()[device].config_write(offset, data);
    }

    pub fn read_config(&self, device: usize, offset: u16) -> u32 {
        let mut data = [0; 4];
        self.assignment.functions()[device].config_read(offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write_command(&self, device: usize, command: u16) {
        self.write_config(device, Reg::COMMAND.offset(), &command.to_le_bytes());
    }

    pub fn write_bar_register(&self, device: usize, dword: u8, value: u32) {
        let offset = Reg::BAR0.offset() + 4 * u16::from(dword);
        self.write_config(device, offset, &value.to_le_bytes());
    }

    /// Programs a 64-bit BAR, low dword first.
    pub fn move_bar(&self, device: usize, bar: u8, address: u64) {
        self.write_bar_register(device, bar, address as u32);
        self.write_bar_register(device, bar + 1, (address >> 32) as u32);
    }

    pub fn placed(&self, device: usize, bar: u8) -> u64 {
        self.placement.address(device, bar).unwrap()
    }

    /// Which BAR answers a trapped access at `gpa`.
    pub fn answers_at(&self, gpa: u64) -> Option<(BarKey, u64)> {
        self.assignment.engine.find_memory(gpa)
    }

    /// Host-virtual address behind a guest-physical one, if a slot is there.
    pub fn slot_at(&self, gpa: u64) -> Option<u64> {
        let slots = self.kernel.slots();
        let (range, hva) = slots.iter().find(|(range, _)| range.contains(gpa))?;
        Some(hva + (gpa - range.start()))
    }
}
