//! iommufd: /dev/iommu, and a character device for each VFIO device (drivers/iommu/iommufd,
//! drivers/vfio/device_cdev.c).
//!
//! One IO address space, of which the kernel makes one page table for all devices that it fits.
//!
//! Invariants: every device is attached before the first mapping (mappings made with nothing
//! attached are all carried out in the attach, one after the other); a mapping's memory stays
//! alive until it is unmapped.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::iommufd_error::IommufdError;
use crate::assign::ports::{
    CallError, IommuBackend, IommuNature, MapRequest, OpenError, VfioDevice,
};
use crate::host::Sysfs;
use crate::pci::address::Bdf;
use crate::range::Range;
use crate::sys::iommufd as abi;
use crate::sys::vfio;
use crate::sys::{HostRange, VfioPciDevice};

/// How long a device that is busy is asked again: a sibling's reset, or the end of a process that
/// had the device, takes up to a second.
const BUSY_LIMIT: Duration = Duration::from_millis(1500);
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// /dev/iommu and the devices' own files, opened. Opening them changes nothing: a device is reset
/// when it is bound.
pub struct Files {
    iommu: File,
    devices: Vec<Device>,
}

struct Device {
    bdf: Bdf,
    path: PathBuf,
    file: File,
}

fn open(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn open_iommu(sysfs: &Sysfs) -> Result<File, IommufdError> {
    open(&sysfs.path("dev/iommu")).map_err(IommufdError::OpenIommu)
}

fn open_device(sysfs: &Sysfs, bdf: Bdf) -> Result<Device, IommufdError> {
    let name = sysfs.vfio_name(bdf).ok_or(IommufdError::NoCdev { bdf })?;
    let path = sysfs.path(&format!("dev/vfio/devices/{name}"));
    match open(&path) {
        Ok(file) => Ok(Device { bdf, path, file }),
        Err(source) if source.kind() == io::ErrorKind::NotFound => {
            Err(IommufdError::NoCdev { bdf })
        }
        Err(source) => Err(IommufdError::OpenCdev { bdf, path, source }),
    }
}

impl Files {
    /// Opens what iommufd needs for `devices`.
    pub fn open(sysfs: &Sysfs, devices: &[Bdf]) -> Result<Self, IommufdError> {
        let iommu = open_iommu(sysfs)?;
        let devices = devices.iter().map(|bdf| open_device(sysfs, *bdf));
        Ok(Self {
            iommu,
            devices: devices.collect::<Result<_, _>>()?,
        })
    }
}

/// Every file of `devices` that cannot be opened, where [`Files::open`] stops at the first.
pub fn problems(sysfs: &Sysfs, devices: &[Bdf]) -> Vec<IommufdError> {
    let iommu = open_iommu(sysfs).err();
    let devices = devices
        .iter()
        .filter_map(|bdf| open_device(sysfs, *bdf).err());
    iommu.into_iter().chain(devices).collect()
}

/// One IO address space with all assigned devices.
pub struct Iommufd {
    iommu: File,
    ioas: u32,
    devices: BTreeMap<Bdf, Device>,
    mappings: Mutex<BTreeMap<u64, HostRange>>,
    /// The kernel has no IOMMU_IOAS_MAP_FILE (before 6.13): memfds are mapped by address.
    by_address: AtomicBool,
}

impl Iommufd {
    /// An IO address space, into which devices come as they are opened.
    pub fn new(files: Files) -> Result<Self, IommufdError> {
        let Files { iommu, devices } = files;
        let ioas = abi::ioas_alloc(iommu.as_fd()).map_err(IommufdError::Ioas)?;
        let devices = devices.into_iter().map(|device| (device.bdf, device));
        Ok(Self {
            ioas,
            devices: devices.collect(),
            iommu,
            mappings: Mutex::default(),
            by_address: AtomicBool::new(false),
        })
    }

    fn map_by_address(&self, iova: u64, memory: &HostRange) -> Result<(), CallError> {
        let iommu = self.iommu.as_fd();
        abi::map(iommu, self.ioas, iova, memory.address(), memory.len())
    }

    /// By file what has one. A memfd on a kernel that cannot: by address, from now on.
    fn map_memory(&self, iova: u64, memory: &HostRange) -> Result<(), CallError> {
        let by_file = |(file, start)| {
            abi::map_file(
                self.iommu.as_fd(),
                self.ioas,
                iova,
                file,
                start,
                memory.len(),
            )
        };
        if let Some(dmabuf) = memory.dmabuf() {
            return by_file(dmabuf);
        }
        let by_address = self.by_address.load(Ordering::Relaxed);
        match memory.memory_file().filter(|_| !by_address).map(by_file) {
            None => self.map_by_address(iova, memory),
            Some(Err(error)) if matches!(error.errno(), Some(libc::ENOTTY | libc::EOPNOTSUPP)) => {
                self.by_address.store(true, Ordering::Relaxed);
                self.map_by_address(iova, memory)
            }
            Some(done) => done,
        }
    }
}

/// Binding opens and resets the device; attaching puts it behind the page table.
fn bind(iommu: &File, ioas: u32, device: &Device) -> Result<(), IommufdError> {
    let bdf = device.bdf;
    let file = device.file.as_fd();
    let bind = || vfio::bind_iommufd(file, iommu.as_fd());
    // EINVAL: another process has the device open, and may be about to end.
    while_busy(bind, &[libc::EBUSY, libc::EINVAL]).map_err(|source| {
        let path = device.path.clone();
        IommufdError::Bind { bdf, path, source }
    })?;
    let attach = || vfio::attach_ioas(file, ioas);
    while_busy(attach, &[libc::EBUSY]).map_err(|source| IommufdError::Attach { bdf, source })
}

/// Calls again and again, for a while, as long as the answer is one of `busy`.
fn while_busy(call: impl Fn() -> Result<(), CallError>, busy: &[i32]) -> Result<(), CallError> {
    let start = Instant::now();
    loop {
        match call() {
            Err(error)
                if error.errno().is_some_and(|errno| busy.contains(&errno))
                    && start.elapsed() < BUSY_LIMIT =>
            {
                thread::sleep(BUSY_PAUSE);
            }
            done => return done,
        }
    }
}

impl IommuBackend for Iommufd {
    fn name(&self) -> &'static str {
        "iommufd"
    }

    fn nature(&self) -> IommuNature {
        IommuNature {
            bars_by_dmabuf: true,
            cheap_unmap: true,
            parallel_maps: true,
        }
    }

    fn open(&self, bdf: Bdf) -> Result<Box<dyn VfioDevice>, OpenError> {
        let failed = |source| CallError {
            call: "dup of the device",
            source,
        };
        let device = self.devices.get(&bdf);
        let device = device.ok_or(io::ErrorKind::NotFound.into());
        let device = device.map_err(failed)?;
        bind(&self.iommu, self.ioas, device)?;
        let fd = device.file.as_fd().try_clone_to_owned().map_err(failed)?;
        Ok(Box::new(VfioPciDevice::new(fd)?))
    }

    fn map(&self, request: &MapRequest) -> Result<(), CallError> {
        let memory = &request.memory;
        self.map_memory(request.iova, memory)?;
        self.mappings.lock().insert(request.iova, memory.clone());
        Ok(())
    }

    fn unmap(&self, range: Range) -> Result<(), CallError> {
        abi::unmap(self.iommu.as_fd(), self.ioas, range)?;
        let mut mappings = self.mappings.lock();
        mappings.retain(|iova, _| !range.contains(*iova));
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<Range>, CallError> {
        abi::iova_ranges(self.iommu.as_fd(), self.ioas)
    }

    fn kvm_files(&self) -> Vec<RawFd> {
        let files = self.devices.values().map(|device| &device.file);
        files.map(AsRawFd::as_raw_fd).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    fn errno(errno: i32) -> CallError {
        CallError {
            call: "VFIO_DEVICE_BIND_IOMMUFD",
            source: io::Error::from_raw_os_error(errno),
        }
    }

    #[test]
    fn a_busy_device_is_asked_again_and_a_refusal_is_final() {
        let calls = AtomicUsize::new(0);
        let busy_twice = || match calls.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Err(errno(libc::EBUSY)),
            _ => Ok(()),
        };
        assert!(while_busy(busy_twice, &[libc::EBUSY]).is_ok());
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        let start = Instant::now();
        assert!(while_busy(|| Err(errno(libc::EPERM)), &[libc::EBUSY]).is_err());
        assert!(start.elapsed() < BUSY_LIMIT);
    }

    #[test]
    fn a_host_without_iommufd_or_cdev_is_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        let bdf: Bdf = "41:00.0".parse().unwrap();
        let open = || Files::open(&sysfs, &[bdf]).err().unwrap();
        assert!(matches!(open(), IommufdError::OpenIommu(_)));
        std::fs::create_dir_all(root.path().join("dev/vfio/devices")).unwrap();
        std::fs::write(root.path().join("dev/iommu"), "").unwrap();
        assert!(matches!(open(), IommufdError::NoCdev { .. }));
        // A kernel without VFIO_DEVICE_CDEV names the device all the same.
        let names = format!("sys/bus/pci/devices/{bdf}/vfio-dev/vfio3");
        std::fs::create_dir_all(root.path().join(names)).unwrap();
        assert!(matches!(open(), IommufdError::NoCdev { .. }));
        std::fs::write(root.path().join("dev/vfio/devices/vfio3"), "").unwrap();
        assert!(Files::open(&sysfs, &[bdf]).is_ok());
    }
}
