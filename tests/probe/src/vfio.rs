//! A device through the guest's own vfio-pci, without an IOMMU: the way to a device's interrupts for a program.
//!
//! The kernel's part is to be done before: `probe modprobe vfio-pci`, 1 into
//! /sys/module/vfio/parameters/enable_unsafe_noiommu_mode, then the device bound to vfio-pci.
//!
//! The second place of the probe that needs `unsafe`: ioctls.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};

use crate::error::Error;
use crate::mmio::Page;

/// The ioctls of include/uapi/linux/vfio.h that are used here; none encodes its argument's size.
const SET_IOMMU: Opcode = 0x3b66;
const GROUP_SET_CONTAINER: Opcode = 0x3b68;
const GROUP_GET_DEVICE_FD: Opcode = 0x3b6a;
const DEVICE_GET_REGION_INFO: Opcode = 0x3b6c;
const DEVICE_SET_IRQS: Opcode = 0x3b6e;

const NOIOMMU: usize = 8;
const MSI_INDEX: u32 = 1;
const IRQ_DATA_EVENTFD_ACTION_TRIGGER: u32 = 1 << 2 | 1 << 5;
/// How long an interrupt may take in an emulated machine before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(10);

/// An opened device with its first MSI vector armed.
pub struct MsiDevice {
    device: File,
    path: PathBuf,
    trigger: OwnedFd,
    /// Closing them would take the device away.
    _group: (File, File),
}

/// `struct vfio_region_info`.
#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

/// `struct vfio_irq_set` with one eventfd.
#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    eventfd: c_int,
}

/// An ioctl with its argument, which is a number or a pointer to something that outlives the call.
struct Call(Opcode, *mut c_void);

// SAFETY: opcode and argument are handed on as they are; whoever makes a `Call` answers for them.
unsafe impl Ioctl for Call {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.0
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.1
    }

    unsafe fn output_from_ptr(
        output: IoctlOutput,
        _: *mut c_void,
    ) -> rustix::io::Result<IoctlOutput> {
        Ok(output)
    }
}

impl MsiDevice {
    /// Opens the device, which must be bound to vfio-pci, and arms its first MSI vector.
    pub fn open(bdf: &str) -> Result<Self, Error> {
        let container = open(Path::new("/dev/vfio/vfio"))?;
        let path = group(bdf)?;
        let group = open(&path)?;
        let mut container_fd: c_int = container.as_raw_fd();
        let container_arg = (&raw mut container_fd).cast();
        let name = CString::new(bdf).map_err(|_| Error::Usage("BDF".to_owned()))?;
        // SAFETY: VFIO_GROUP_SET_CONTAINER reads an int, VFIO_SET_IOMMU takes a number, VFIO_GROUP_GET_DEVICE_FD reads a
        // string; all live until the calls return.
        let device = unsafe {
            ioctl(&group, Call(GROUP_SET_CONTAINER, container_arg))
                .and_then(|_| {
                    ioctl(
                        &container,
                        Call(SET_IOMMU, std::ptr::without_provenance_mut(NOIOMMU)),
                    )
                })
                .and_then(|_| {
                    ioctl(
                        &group,
                        Call(GROUP_GET_DEVICE_FD, name.as_ptr().cast_mut().cast()),
                    )
                })
        };
        let device = device.map_err(|errno| error("get the device from", &path)(errno.into()))?;
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        let device = File::from(unsafe { OwnedFd::from_raw_fd(device) });
        let trigger = eventfd(0, EventfdFlags::NONBLOCK)
            .map_err(|errno| error("make an eventfd for", &path)(errno.into()))?;
        let armed = Self {
            device,
            path,
            trigger,
            _group: (group, container),
        };
        armed.arm()?;
        Ok(armed)
    }

    fn arm(&self) -> Result<(), Error> {
        let mut set = IrqSet {
            argsz: size_of::<IrqSet>() as u32,
            flags: IRQ_DATA_EVENTFD_ACTION_TRIGGER,
            index: MSI_INDEX,
            start: 0,
            count: 1,
            eventfd: self.trigger.as_raw_fd(),
        };
        // SAFETY: VFIO_DEVICE_SET_IRQS reads `argsz` bytes of the structure.
        let set = unsafe { ioctl(&self.device, Call(DEVICE_SET_IRQS, (&raw mut set).cast())) };
        set.map(drop)
            .map_err(|errno| error("arm MSI of", &self.path)(errno.into()))
    }

    /// Maps the first page of a BAR.
    pub fn bar(&self, index: u32) -> Result<Page, Error> {
        let mut info = RegionInfo {
            argsz: size_of::<RegionInfo>() as u32,
            index,
            ..RegionInfo::default()
        };
        // SAFETY: VFIO_DEVICE_GET_REGION_INFO reads and writes `argsz` bytes of the structure.
        let asked = unsafe {
            ioctl(
                &self.device,
                Call(DEVICE_GET_REGION_INFO, (&raw mut info).cast()),
            )
        };
        asked.map_err(|errno| error("find a BAR of", &self.path)(errno.into()))?;
        Page::map(&self.device, &self.path, info.offset)
    }

    /// Waits for an interrupt and returns how many have come since the last time; 0 when none came.
    pub fn wait(&self) -> Result<u64, Error> {
        let fail = error("wait for an interrupt of", &self.path);
        let limit = Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.trigger, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&limit)).map_err(|errno| fail(errno.into()))?;
        if ready == 0 {
            return Ok(0);
        }
        self.take()
    }

    /// How many interrupts have come since the last time, without waiting.
    pub fn take(&self) -> Result<u64, Error> {
        let mut count = [0; 8];
        match rustix::io::read(self.trigger.as_fd(), &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            Err(errno) => Err(error("read the eventfd of", &self.path)(errno.into())),
        }
    }
}

/// The group's file: `/dev/vfio/noiommu-N`.
fn group(bdf: &str) -> Result<PathBuf, Error> {
    let link = Path::new("/sys/bus/pci/devices")
        .join(bdf)
        .join("iommu_group");
    let target = std::fs::read_link(&link).map_err(error("read", &link))?;
    let number = target.file_name().unwrap_or_default().to_string_lossy();
    Ok(PathBuf::from(format!("/dev/vfio/noiommu-{number}")))
}

fn open(path: &Path) -> Result<File, Error> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(error("open", path))
}

fn error<'a>(action: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |source| Error::File {
        action,
        path: path.to_path_buf(),
        source,
    }
}
