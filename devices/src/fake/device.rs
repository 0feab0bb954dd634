//! A fake PCI device behind [`VfioDevice`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::kernel::{Dmabuf, Event, FakeKernel};
use crate::assign::ports::{
    CallError, IrqIndex, IrqInfo, IrqRequest, Region, RegionInfo, ResetFunction, VfioDevice,
};
use crate::pci::address::Bdf;
use crate::pci::image;
use crate::pci::spec::{Command, Reg};
use crate::range::Range;
use crate::sys::{Alignment, HostMap};

/// What a fake device is made of.
#[derive(Clone, Debug)]
pub struct FakeDeviceSpec {
    /// Host address.
    pub bdf: Bdf,
    /// Physical configuration space: 256 or 4096 bytes.
    pub config: Vec<u8>,
    /// BARs as REGION_INFO tells them.
    pub bars: [RegionInfo; 6],
    /// Vectors of each kind.
    pub irqs: BTreeMap<IrqIndex, IrqInfo>,
    /// `VFIO_DEVICE_RESET` works.
    pub can_reset: bool,
    /// What a reset of its bus affects, itself included; empty where there is none.
    pub on_bus: Vec<ResetFunction>,
    /// The kernel exports its BARs as dma-buf.
    pub can_export: bool,
}

/// An opened fake device.
pub struct FakeDevice {
    spec: FakeDeviceSpec,
    kernel: Arc<FakeKernel>,
    config: Mutex<Vec<u8>>,
    /// Bytes written into BARs through the descriptor.
    stored: Mutex<BTreeMap<(Region, u64), u8>>,
    armed: Mutex<BTreeMap<IrqIndex, Vec<Option<EventFd>>>>,
    /// Vectors that the host has to give.
    vector_limit: Mutex<u32>,
    config_reads: AtomicUsize,
}

fn refused(call: &'static str, errno: i32) -> CallError {
    CallError {
        call,
        source: std::io::Error::from_raw_os_error(errno),
    }
}

const SET_IRQS: &str = "VFIO_DEVICE_SET_IRQS";

impl FakeDevice {
    /// vfio-pci turns the decoders on when it opens a device.
    pub(super) fn new(spec: FakeDeviceSpec, kernel: Arc<FakeKernel>) -> Self {
        let mut config = spec.config.clone();
        let command = image::read_u16(&config, Reg::COMMAND.offset());
        let command = command | Command::MEMORY.bits();
        image::write_u16(&mut config, Reg::COMMAND.offset(), command);
        Self {
            config: Mutex::new(config),
            spec,
            kernel,
            stored: Mutex::default(),
            armed: Mutex::default(),
            vector_limit: Mutex::new(u32::MAX),
            config_reads: AtomicUsize::new(0),
        }
    }

    /// The physical configuration space as it stands.
    pub fn physical_config(&self) -> Vec<u8> {
        self.config.lock().clone()
    }

    /// Changes the physical configuration space, as a device does by itself.
    pub fn set_physical_config(&self, offset: usize, data: &[u8]) {
        let mut config = self.config.lock();
        if let Some(bytes) = config.get_mut(offset..offset + data.len()) {
            bytes.copy_from_slice(data);
        }
    }

    /// How often configuration space was read since the last time.
    pub fn take_config_reads(&self) -> usize {
        self.config_reads.swap(0, Ordering::Relaxed)
    }

    /// Whether it decodes its memory BARs.
    fn decodes(&self) -> bool {
        let command = image::read_u16(&self.config.lock(), Reg::COMMAND.offset());
        Command::from_bits_retain(command).contains(Command::MEMORY)
    }

    /// Lets arming fail (ENOSPC) beyond so many vectors.
    pub fn set_vector_limit(&self, vectors: u32) {
        *self.vector_limit.lock() = vectors;
    }

    /// Which vectors of a kind are armed.
    pub fn armed(&self, index: IrqIndex) -> Vec<bool> {
        let armed = self.armed.lock();
        let vectors = armed.get(&index).map(Vec::as_slice).unwrap_or_default();
        vectors.iter().map(Option::is_some).collect()
    }

    /// Kinds that are enabled.
    pub fn enabled(&self) -> Vec<IrqIndex> {
        self.armed.lock().keys().copied().collect()
    }

    /// Interrupts; false when the vector is not armed.
    pub fn interrupt(&self, index: IrqIndex, vector: usize) -> bool {
        let armed = self.armed.lock();
        let trigger = armed.get(&index).and_then(|vectors| vectors.get(vector));
        let trigger = trigger.and_then(Option::as_ref);
        trigger.is_some_and(|trigger| trigger.write(1).is_ok())
    }

    /// vfio_pci_set_msi_trigger and vfio_msi_set_block: vectors within the device's number, and
    /// no growth of an armed set that cannot grow.
    fn arm(
        &self,
        index: IrqIndex,
        start: u32,
        wanted: &[Option<&EventFd>],
    ) -> Result<(), CallError> {
        let info = self.spec.irqs.get(&index).copied().unwrap_or_default();
        let end = start as usize + wanted.len();
        let armed = &mut *self.armed.lock();
        let before = armed.get(&index).map_or(0, Vec::len);
        let grows = before != 0 && end > before;
        if wanted.is_empty() || end > info.count as usize || (grows && info.noresize) {
            return Err(refused(SET_IRQS, libc::EINVAL));
        }
        if end > *self.vector_limit.lock() as usize {
            return Err(refused(SET_IRQS, libc::ENOSPC));
        }
        let vectors = armed.entry(index).or_default();
        vectors.resize_with(vectors.len().max(end), || None);
        let places = vectors.iter_mut().skip(start as usize);
        for (place, trigger) in places.zip(wanted) {
            let copy = trigger.map(EventFd::try_clone).transpose();
            *place = copy.map_err(|source| CallError {
                call: SET_IRQS,
                source,
            })?;
        }
        Ok(())
    }
}

impl VfioDevice for Arc<FakeDevice> {
    fn region_info(&self, region: Region) -> Result<RegionInfo, CallError> {
        match region {
            Region::Bar(n) => {
                let info = self.spec.bars.get(usize::from(n)).cloned();
                info.ok_or(refused("VFIO_DEVICE_GET_REGION_INFO", libc::EINVAL))
            }
            Region::Rom => Ok(RegionInfo::default()),
            Region::Config => Ok(RegionInfo {
                size: self.spec.config.len() as u64,
                readable: true,
                writable: true,
                ..RegionInfo::default()
            }),
        }
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        if region == Region::Config {
            self.config_reads.fetch_add(1, Ordering::Relaxed);
            let config = self.config.lock();
            let bytes = config.get(offset as usize..offset as usize + data.len());
            data.copy_from_slice(bytes.ok_or(refused("pread", libc::EINVAL))?);
            return Ok(());
        }
        let stored = self.stored.lock();
        for (byte, at) in data.iter_mut().zip(offset..) {
            *byte = stored.get(&(region, at)).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), CallError> {
        if region == Region::Config {
            let event = Event::ConfigWrite(self.spec.bdf, offset, data.to_vec());
            self.kernel.call("pwrite of the device", event)?;
            let before = self.decodes();
            let mut config = self.config.lock();
            let bytes = config.get_mut(offset as usize..offset as usize + data.len());
            bytes
                .ok_or(refused("pwrite", libc::EINVAL))?
                .copy_from_slice(data);
            drop(config);
            if before != self.decodes() {
                self.kernel.revoke(self.spec.bdf, before);
            }
            return Ok(());
        }
        let mut stored = self.stored.lock();
        stored.extend((offset..).zip(data).map(|(at, byte)| ((region, at), *byte)));
        Ok(())
    }

    fn mmap(&self, region: Region, area: Range, at: Alignment) -> Result<HostMap, CallError> {
        let call = "mmap of the device";
        let size = self.region_info(region)?.size;
        if area.end() > size || !area.start().is_multiple_of(4096) {
            return Err(refused(call, libc::EINVAL));
        }
        let map = HostMap::anonymous(area.len(), at);
        let map = map.map_err(|source| CallError { call, source })?;
        let range = Range::from_bounds(map.address(), map.address() + map.len());
        self.kernel.add_bar(range);
        Ok(map)
    }

    fn export_dmabuf(&self, region: Region, area: Range) -> Result<OwnedFd, CallError> {
        const CALL: &str = "VFIO_DEVICE_FEATURE_DMA_BUF";
        let owner = self.spec.bdf;
        self.kernel.call(CALL, Event::Export(owner))?;
        if !self.spec.can_export {
            return Err(refused(CALL, libc::ENOTTY));
        }
        if area.end() > self.region_info(region)?.size {
            return Err(refused(CALL, libc::EINVAL));
        }
        // Any file will do: it is known by its descriptor.
        let file = File::open("/dev/null").map_err(|source| CallError { call: CALL, source })?;
        let file = OwnedFd::from(file);
        let revoked = !self.decodes();
        self.kernel.add_dmabuf(&file, Dmabuf { owner, revoked });
        Ok(file)
    }

    fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, CallError> {
        Ok(self.spec.irqs.get(&index).copied().unwrap_or_default())
    }

    fn set_irqs(&self, request: &IrqRequest<'_>) -> Result<(), CallError> {
        let bdf = self.spec.bdf;
        let (what, start, wanted) = match request {
            IrqRequest::Trigger { start, fds, .. } => {
                let wanted = fds.iter().map(Option::is_some).collect();
                ("trigger", *start, wanted)
            }
            IrqRequest::Disable(_) => ("disable", 0, Vec::new()),
            IrqRequest::Resample(_) => ("resample", 0, vec![true]),
            IrqRequest::UnmaskIntx => ("unmask", 0, Vec::new()),
            IrqRequest::MaskIntx => ("mask", 0, Vec::new()),
        };
        let event = Event::SetIrqs(bdf, what, start, wanted);
        self.kernel.call(SET_IRQS, event)?;
        match request {
            IrqRequest::Trigger { index, fds, .. } => self.arm(*index, start, fds),
            IrqRequest::Disable(index) => match self.armed.lock().remove(index) {
                Some(_) => Ok(()),
                // vfio_pci_set_msi_trigger: only what is enabled can be disabled.
                None => Err(refused(SET_IRQS, libc::EINVAL)),
            },
            _ => Ok(()),
        }
    }

    fn can_reset(&self) -> bool {
        self.spec.can_reset
    }

    fn reset(&self) -> Result<(), CallError> {
        let bdf = self.spec.bdf;
        self.kernel.call("VFIO_DEVICE_RESET", Event::Reset(bdf))?;
        self.kernel.revoke(bdf, !self.decodes());
        Ok(())
    }

    fn hot_reset_functions(&self) -> Result<Vec<ResetFunction>, CallError> {
        match self.spec.on_bus.as_slice() {
            [] => Err(refused("VFIO_DEVICE_GET_PCI_HOT_RESET_INFO", libc::ENODEV)),
            functions => Ok(functions.to_vec()),
        }
    }

    /// vfio_pci_dev_set_hot_reset
    fn hot_reset(&self) -> Result<(), CallError> {
        const CALL: &str = "VFIO_DEVICE_PCI_HOT_RESET";
        let functions = &self.spec.on_bus;
        self.kernel.call(CALL, Event::HotReset(self.spec.bdf))?;
        if functions.is_empty() || functions.iter().any(|function| !function.ours) {
            return Err(refused(CALL, libc::EINVAL));
        }
        for function in functions {
            let opened = self.kernel.device(function.bdf);
            let decodes = opened.is_none_or(|device| device.decodes());
            self.kernel.revoke(function.bdf, !decodes);
        }
        Ok(())
    }
}
