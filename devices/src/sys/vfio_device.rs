//! An opened VFIO PCI device behind the port [`VfioDevice`].

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use vfio_bindings::bindings::vfio;
use vmm_sys_util::eventfd::EventFd;

use super::host_map::{Alignment, HostMap};
use super::vfio::{self as abi, HotResetOwner};
use crate::assign::ports::{
    CallError, IrqIndex, IrqInfo, IrqRequest, Region, RegionInfo, ResetFunction, VfioDevice,
};
use crate::range::Range;

/// Region indices 0 to 8 of a PCI device.
const REGIONS: usize = vfio::VFIO_PCI_CONFIG_REGION_INDEX as usize + 2;

/// How often a reset is tried while a page fault on a BAR is in its way (EBUSY), or somebody else on
/// the host has the function or its bus locked (EAGAIN: drivers/pci/pci.c, pci_try_reset_function).
const RESET_TRIES: usize = 20;
const RESET_PAUSE: Duration = Duration::from_millis(10);

/// Opened groups by their numbers.
pub type Groups = Arc<BTreeMap<u32, File>>;

/// A VFIO PCI device's descriptor.
pub struct VfioPciDevice {
    file: File,
    can_reset: bool,
    /// All groups of the container; none where the device is bound to an iommufd.
    groups: Groups,
    /// Offset of each region on the descriptor, once asked for.
    offsets: Mutex<[Option<u64>; REGIONS]>,
}

impl VfioPciDevice {
    /// Takes over the descriptor of an opened device; fails when it is not a PCI device.
    pub fn new(fd: OwnedFd) -> Result<Self, CallError> {
        let info = abi::device_info(fd.as_fd())?;
        if !info.is_pci {
            return Err(CallError {
                call: "VFIO_DEVICE_GET_INFO",
                source: std::io::Error::other("not a PCI device"),
            });
        }
        Ok(Self {
            file: File::from(fd),
            can_reset: info.can_reset,
            groups: Arc::default(),
            offsets: Mutex::new([None; REGIONS]),
        })
    }

    /// Says which groups are ours, for a device of a group.
    pub fn with_groups(mut self, groups: &Groups) -> Self {
        self.groups = Arc::clone(groups);
        self
    }

    fn raw_info(&self, region: Region) -> Result<abi::RawRegionInfo, CallError> {
        let index = region_index(region);
        let info = abi::region_info(self.file.as_fd(), index)?;
        if let Some(slot) = self.offsets.lock().get_mut(index as usize) {
            *slot = Some(info.offset);
        }
        Ok(info)
    }

    fn offset(&self, region: Region) -> Result<u64, CallError> {
        let known = self
            .offsets
            .lock()
            .get(region_index(region) as usize)
            .copied();
        match known.flatten() {
            Some(offset) => Ok(offset),
            None => Ok(self.raw_info(region)?.offset),
        }
    }

    fn set(&self, flags: u32, index: IrqIndex, start: u32, fds: &[i32]) -> Result<(), CallError> {
        let count = fds.len() as u32;
        let device = self.file.as_fd();
        abi::set_irqs(device, flags, irq_index(index), start, count, fds)
    }

    fn set_without_data(&self, flags: u32, index: IrqIndex, count: u32) -> Result<(), CallError> {
        let flags = vfio::VFIO_IRQ_SET_DATA_NONE | flags;
        let device = self.file.as_fd();
        abi::set_irqs(device, flags, irq_index(index), 0, count, &[])
    }
}

fn region_index(region: Region) -> u32 {
    match region {
        Region::Bar(n) => u32::from(n),
        Region::Rom => vfio::VFIO_PCI_ROM_REGION_INDEX,
        Region::Config => vfio::VFIO_PCI_CONFIG_REGION_INDEX,
    }
}

fn irq_index(index: IrqIndex) -> u32 {
    match index {
        IrqIndex::Intx => vfio::VFIO_PCI_INTX_IRQ_INDEX,
        IrqIndex::Msi => vfio::VFIO_PCI_MSI_IRQ_INDEX,
        IrqIndex::Msix => vfio::VFIO_PCI_MSIX_IRQ_INDEX,
        IrqIndex::Error => vfio::VFIO_PCI_ERR_IRQ_INDEX,
        IrqIndex::Request => vfio::VFIO_PCI_REQ_IRQ_INDEX,
    }
}

fn is_busy(error: &CallError) -> bool {
    matches!(error.errno(), Some(libc::EBUSY | libc::EAGAIN))
}

fn call_error(call: &'static str) -> impl Fn(std::io::Error) -> CallError {
    move |source| CallError { call, source }
}

impl VfioDevice for VfioPciDevice {
    fn region_info(&self, region: Region) -> Result<RegionInfo, CallError> {
        let raw = self.raw_info(region)?;
        Ok(RegionInfo {
            size: raw.size,
            readable: raw.flags & vfio::VFIO_REGION_INFO_FLAG_READ != 0,
            writable: raw.flags & vfio::VFIO_REGION_INFO_FLAG_WRITE != 0,
            mappable: raw.flags & vfio::VFIO_REGION_INFO_FLAG_MMAP != 0,
            sparse: raw.sparse,
            msix_mappable: raw.msix_mappable,
        })
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        let at = self.offset(region)?.saturating_add(offset);
        self.file
            .read_exact_at(data, at)
            .map_err(call_error("pread of the device"))
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), CallError> {
        let at = self.offset(region)?.saturating_add(offset);
        self.file
            .write_all_at(data, at)
            .map_err(call_error("pwrite of the device"))
    }

    fn mmap(&self, region: Region, area: Range, at: Alignment) -> Result<HostMap, CallError> {
        let offset = self.offset(region)?.saturating_add(area.start());
        HostMap::of_file(self.file.as_fd(), offset, area.len(), at)
            .map_err(call_error("mmap of the device"))
    }

    fn export_dmabuf(&self, region: Region, area: Range) -> Result<OwnedFd, CallError> {
        abi::export_dmabuf(self.file.as_fd(), region_index(region), area)
    }

    fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, CallError> {
        let (flags, count) = abi::irq_info(self.file.as_fd(), irq_index(index))?;
        Ok(IrqInfo {
            count,
            noresize: flags & vfio::VFIO_IRQ_INFO_NORESIZE != 0,
        })
    }

    fn set_irqs(&self, request: &IrqRequest<'_>) -> Result<(), CallError> {
        let eventfds = vfio::VFIO_IRQ_SET_DATA_EVENTFD;
        match request {
            IrqRequest::Trigger { index, start, fds } => {
                let raw: Vec<i32> = fds
                    .iter()
                    .map(|fd| fd.map_or(-1, EventFd::as_raw_fd))
                    .collect();
                let flags = eventfds | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;
                self.set(flags, *index, *start, &raw)
            }
            IrqRequest::Disable(index) => {
                self.set_without_data(vfio::VFIO_IRQ_SET_ACTION_TRIGGER, *index, 0)
            }
            IrqRequest::Resample(fd) => {
                let flags = eventfds | vfio::VFIO_IRQ_SET_ACTION_UNMASK;
                self.set(flags, IrqIndex::Intx, 0, &[fd.as_raw_fd()])
            }
            IrqRequest::UnmaskIntx => {
                self.set_without_data(vfio::VFIO_IRQ_SET_ACTION_UNMASK, IrqIndex::Intx, 1)
            }
            IrqRequest::MaskIntx => {
                self.set_without_data(vfio::VFIO_IRQ_SET_ACTION_MASK, IrqIndex::Intx, 1)
            }
        }
    }

    fn can_reset(&self) -> bool {
        self.can_reset
    }

    fn reset(&self) -> Result<(), CallError> {
        while_busy(|| abi::device_reset(self.file.as_fd()))
    }

    fn hot_reset_functions(&self) -> Result<Vec<ResetFunction>, CallError> {
        let functions = abi::hot_reset_info(self.file.as_fd())?;
        let functions = functions.into_iter().map(|function| ResetFunction {
            bdf: function.bdf,
            ours: match function.owner {
                HotResetOwner::Group(group) => self.groups.contains_key(&group),
                HotResetOwner::Ours => true,
                HotResetOwner::Others => false,
            },
        });
        Ok(functions.collect())
    }

    /// The kernel takes no more groups than functions are affected, so only theirs are given.
    fn hot_reset(&self) -> Result<(), CallError> {
        let device = self.file.as_fd();
        let affected = abi::hot_reset_info(device)?;
        let is_affected = |number: u32| {
            let owner = HotResetOwner::Group(number);
            affected.iter().any(|function| function.owner == owner)
        };
        let groups = self
            .groups
            .iter()
            .filter(|(number, _)| is_affected(**number));
        let groups: Vec<BorrowedFd<'_>> = groups.map(|(_, file)| file.as_fd()).collect();
        while_busy(|| abi::hot_reset(device, &groups))
    }
}

/// Calls again and again, for a while, as long as the answer is that something is busy.
fn while_busy(call: impl Fn() -> Result<(), CallError>) -> Result<(), CallError> {
    let mut tries = 1;
    loop {
        match call() {
            Err(error) if is_busy(&error) && tries < RESET_TRIES => {
                tries += 1;
                thread::sleep(RESET_PAUSE);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::io;

    #[test]
    fn a_reset_that_is_in_somebodys_way_is_tried_again_and_any_other_refusal_is_final() {
        let answers = |errno: i32, times: usize| {
            let calls = Cell::new(0);
            let result = while_busy(|| {
                calls.set(calls.get() + 1);
                match calls.get() > times {
                    true => Ok(()),
                    false => Err(CallError {
                        call: "VFIO_DEVICE_RESET",
                        source: io::Error::from_raw_os_error(errno),
                    }),
                }
            });
            (result.is_ok(), calls.get())
        };
        assert_eq!(answers(libc::EAGAIN, 2), (true, 3));
        assert_eq!(answers(libc::EBUSY, usize::MAX), (false, RESET_TRIES));
        assert_eq!(answers(libc::ENOTTY, 2), (false, 1));
    }
}
