//! What device assignment needs from the kernel: VFIO through an IOMMU backend, memslots and
//! interrupt routes. The real kernel and the fake one of the tests stand behind the same traits.
//!
//! Contract of every call: on error nothing has changed, and the error carries the kernel's
//! reason. Implementations keep a [`HostRange`] alive for as long as the kernel uses it.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use vmm_sys_util::eventfd::EventFd;

use crate::iommu::iommufd_error::IommufdError;
use crate::pci::address::Bdf;
use crate::range::Range;
use crate::sys::{Alignment, HostMap, HostRange};

/// A system call that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{call} failed")]
pub struct CallError {
    /// The ioctl or system call, as in the kernel's headers.
    pub call: &'static str,
    /// The kernel's reason.
    pub source: io::Error,
}

impl CallError {
    /// `call` failed for the reason in errno.
    pub fn last(call: &'static str) -> Self {
        Self {
            call,
            source: io::Error::last_os_error(),
        }
    }

    /// The raw errno, if the reason is one.
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// A VFIO region index of a PCI device (`VFIO_PCI_*_REGION_INDEX`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Region {
    /// BAR 0 to 5.
    Bar(u8),
    /// Expansion ROM.
    Rom,
    /// Configuration space.
    Config,
}

/// What `VFIO_DEVICE_GET_REGION_INFO` says of a region.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionInfo {
    /// Bytes; 0 when the region does not exist.
    pub size: u64,
    /// Reads are allowed.
    pub readable: bool,
    /// Writes are allowed.
    pub writable: bool,
    /// Parts of it can be mmapped.
    pub mappable: bool,
    /// The parts that can, region-relative and exactly as the sparse-mmap capability lists them;
    /// `None` without that capability: then all of it.
    pub sparse: Option<Vec<Range>>,
    /// The kernel allows mapping the pages that hold the MSI-X table (we never do).
    pub msix_mappable: bool,
}

/// A VFIO interrupt index of a PCI device (`VFIO_PCI_*_IRQ_INDEX`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IrqIndex {
    /// Legacy, level triggered.
    Intx,
    /// MSI.
    Msi,
    /// MSI-X.
    Msix,
    /// An uncorrectable error was reported.
    Error,
    /// The host asks for the device back.
    Request,
}

/// What `VFIO_DEVICE_GET_IRQ_INFO` says of an interrupt index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IrqInfo {
    /// Vectors; 0 when the device has none of this kind.
    pub count: u32,
    /// Vectors cannot be added to an armed set: it must be disarmed and armed anew.
    pub noresize: bool,
}

/// One `VFIO_DEVICE_SET_IRQS`.
pub enum IrqRequest<'a> {
    /// Arms the vectors from `start` on with an eventfd each; `None` leaves one unarmed (-1).
    Trigger {
        /// Which kind.
        index: IrqIndex,
        /// First vector.
        start: u32,
        /// One entry a vector.
        fds: &'a [Option<&'a EventFd>],
    },
    /// Disarms all vectors of a kind.
    Disable(IrqIndex),
    /// Sets the eventfd that unmasks INTx when the guest has seen its end of interrupt.
    Resample(&'a EventFd),
    /// Unmasks INTx (it is masked by the kernel each time that it fires).
    UnmaskIntx,
    /// Masks INTx.
    MaskIntx,
}

/// A function that a reset of a slot or bus affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetFunction {
    /// Its host address.
    pub bdf: Bdf,
    /// The kernel takes it for this process's: it is assigned, or in the IOMMU group of one that
    /// is.
    pub ours: bool,
}

/// An opened VFIO device.
pub trait VfioDevice: Send + Sync {
    /// Size, flags and mappable areas of `region`. Not asked for the ROM unless it is wanted:
    /// the kernel then maps and parses it.
    fn region_info(&self, region: Region) -> Result<RegionInfo, CallError>;

    /// Fills `data` from `offset` of `region`.
    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), CallError>;

    /// Writes `data` at `offset` of `region`.
    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), CallError>;

    /// Maps `area` (region-relative, page-aligned) of `region`.
    fn mmap(&self, region: Region, area: Range, at: Alignment) -> Result<HostMap, CallError>;

    /// A dma-buf of `area` of `region`, for [`crate::sys::HostMap::with_dma_file`]. A reset of the
    /// device revokes what was mapped through it; it can be mapped anew afterwards.
    fn export_dmabuf(&self, region: Region, area: Range) -> Result<OwnedFd, CallError>;

    /// How many vectors of a kind the device has.
    fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, CallError>;

    /// Arms, disarms, masks or unmasks interrupts.
    fn set_irqs(&self, request: &IrqRequest<'_>) -> Result<(), CallError>;

    /// Whether the kernel has a way to reset this function alone.
    fn can_reset(&self) -> bool;

    /// `VFIO_DEVICE_RESET`. Interrupts must be disarmed and COMMAND.MASTER clear before.
    fn reset(&self) -> Result<(), CallError>;

    /// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO`: all functions that [`VfioDevice::hot_reset`] resets,
    /// this one among them. ENODEV where there is no slot or bus that could be reset.
    fn hot_reset_functions(&self) -> Result<Vec<ResetFunction>, CallError>;

    /// `VFIO_DEVICE_PCI_HOT_RESET`: resets the function's slot or bus. All that are affected must
    /// be ours, with interrupts disarmed and COMMAND.MASTER clear.
    fn hot_reset(&self) -> Result<(), CallError>;
}

/// One DMA mapping: a device may read and write `memory` at `iova`.
#[derive(Clone, Debug)]
pub struct MapRequest {
    /// First IO-virtual address, page-aligned. mini-vmm maps IOVA = guest-physical address.
    pub iova: u64,
    /// What is behind it.
    pub memory: HostRange,
}

impl MapRequest {
    /// The IO-virtual addresses that the request covers; `None` if they pass the last address.
    pub fn range(&self) -> Option<Range> {
        Range::new(self.iova, self.memory.len())
    }
}

/// In what IOMMU backends differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IommuNature {
    /// BARs are mapped by dma-buf ([`VfioDevice::export_dmabuf`]), which a reset revokes: their
    /// mappings must then be unmapped and made anew.
    pub bars_by_dmabuf: bool,
    /// Unmapping a BAR takes no time worth saving.
    pub cheap_unmap: bool,
    /// Mappings of different ranges are made at the same time when asked for by several threads.
    pub parallel_maps: bool,
}

/// Why a device is not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The call that opens it failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It does not come to iommufd.
    #[error(transparent)]
    Iommufd(#[from] IommufdError),
}

/// An IOMMU context that all assigned devices share.
pub trait IommuBackend: Send + Sync {
    /// `type1` or `iommufd`.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn nature(&self) -> IommuNature;

    /// Opens one device; the kernel resets it meanwhile. Called from several threads at once, once
    /// for each device, and for all devices before anything is mapped.
    fn open(&self, bdf: Bdf) -> Result<Box<dyn VfioDevice>, OpenError>;

    /// Maps `request`. The backend keeps the memory alive until it is unmapped.
    fn map(&self, request: &MapRequest) -> Result<(), CallError>;

    /// Unmaps every mapping inside `range`, which must not cut one in two.
    fn unmap(&self, range: Range) -> Result<(), CallError>;

    /// IO-virtual addresses that can be mapped, ascending. iommufd knows when all devices are open.
    fn iova_ranges(&self) -> Result<Vec<Range>, CallError>;

    /// Group or device descriptors to add to the VM's `KVM_DEV_TYPE_VFIO` device before any vCPU
    /// runs. They stay valid as long as the backend.
    fn kvm_files(&self) -> Vec<RawFd>;
}

/// The id of a memslot that this side owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// The VM's memslots (`KVM_SET_USER_MEMORY_REGION`).
pub trait MemSlots: Send + Sync {
    /// Makes `memory` answer at `gpa`, in a new slot.
    fn set(&self, gpa: u64, memory: &HostRange) -> Result<Slot, CallError>;

    /// Moves a slot to another guest-physical address in one call.
    fn move_to(&self, slot: Slot, gpa: u64) -> Result<(), CallError>;

    /// Removes a slot; its addresses trap from now on.
    fn clear(&self, slot: Slot) -> Result<(), CallError>;
}

/// Address and data of a message-signalled interrupt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MsiMessage {
    /// 64-bit message address.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// Names one vector of one device towards [`MsiRoutes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VectorId {
    /// Index of the device in the VM.
    pub device: u16,
    /// Vector of the device.
    pub vector: u16,
}

/// What becomes of one vector.
pub struct VectorChange<'a> {
    /// Which vector.
    pub id: VectorId,
    /// The eventfd that VFIO signals.
    pub trigger: &'a EventFd,
    /// Where the interrupt goes; `None` disconnects the vector (its eventfd then collects what
    /// arrives, and a later connection delivers it).
    pub message: Option<MsiMessage>,
}

/// The VM's interrupt routes and irqfds for message-signalled interrupts.
pub trait MsiRoutes: Send + Sync {
    /// Applies all changes with at most one table update; GSIs are taken when a vector is first
    /// connected and given back when it is disconnected. Order: disconnect irqfds, update the
    /// table, connect irqfds.
    fn apply(&self, changes: &[VectorChange<'_>]) -> Result<(), CallError>;
}

/// The VM's level-triggered interrupt lines (irqfd with resample).
pub trait IntxLines: Send + Sync {
    /// Lets `trigger` assert `gsi` (16 to 23) until the guest's end of interrupt, which signals
    /// `resample`.
    fn connect(&self, gsi: u32, trigger: &EventFd, resample: &EventFd) -> Result<(), CallError>;

    /// Undoes [`IntxLines::connect`].
    fn disconnect(&self, gsi: u32, trigger: &EventFd) -> Result<(), CallError>;
}

/// Guest RAM will not be mapped for DMA: whoever found out ends the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("guest RAM is not mapped for DMA")]
pub struct GateClosed;

/// What a device passes before it may master the bus: guest RAM must be mapped for DMA by then.
///
/// It is about order, not security: a device that masters the bus without it meets faults of the
/// IOMMU.
pub trait DmaGate: Send + Sync {
    /// Returns when all guest RAM is mapped. May take long, with locks of the caller's held: an
    /// implementation takes no lock of a function or of the BAR engine.
    fn pass(&self) -> Result<(), GateClosed>;
}

/// The gate where guest RAM is mapped already, or is not there.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenGate;

impl DmaGate for OpenGate {
    fn pass(&self) -> Result<(), GateClosed> {
        Ok(())
    }
}
