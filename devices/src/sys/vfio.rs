//! The VFIO ioctls (include/uapi/linux/vfio.h), one safe function each.
//!
//! Own ioctls where vfio-ioctls has wrappers too, because there a refused group or container
//! loses the kernel's reason, opening always asks for the ROM region, a region that fails shifts
//! the others, and vectors can only be armed from 0 on.
//!
//! Structures are passed as [`Args`]; here are the calls that take something else, too.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use vfio_bindings::bindings::vfio;

use super::struct_call::{Args, StructCall, vfio_request as request};
use crate::assign::ports::CallError;
use crate::pci::address::Bdf;
use crate::range::Range;

/// An ioctl whose argument is a number.
fn plain(
    fd: BorrowedFd<'_>,
    name: &'static str,
    number: u32,
    argument: u64,
) -> Result<i32, CallError> {
    // SAFETY: only called below with calls that take an integer (or nothing), never a pointer.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), request(number), argument) };
    if rc < 0 {
        Err(CallError::last(name))
    } else {
        Ok(rc)
    }
}

/// `VFIO_GET_API_VERSION` of a container.
pub fn api_version(container: BorrowedFd<'_>) -> Result<i32, CallError> {
    plain(container, "VFIO_GET_API_VERSION", 0, 0)
}

/// `VFIO_CHECK_EXTENSION`: whether the container supports the IOMMU type.
pub fn has_extension(container: BorrowedFd<'_>, extension: u32) -> Result<bool, CallError> {
    Ok(plain(container, "VFIO_CHECK_EXTENSION", 1, extension.into())? != 0)
}

/// `VFIO_SET_IOMMU`; possible once the container holds a group.
pub fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> Result<(), CallError> {
    plain(container, "VFIO_SET_IOMMU", 2, kind.into()).map(drop)
}

/// `VFIO_GROUP_GET_STATUS`: whether every device of the group is bound to VFIO or to nothing.
pub fn group_is_viable(group: BorrowedFd<'_>) -> Result<bool, CallError> {
    let mut status = Args::new(8);
    status.call(group, StructCall::GroupGetStatus)?;
    Ok(status.u32(4).unwrap_or(0) & vfio::VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub fn group_set_container(
    group: BorrowedFd<'_>,
    container: BorrowedFd<'_>,
) -> Result<(), CallError> {
    let fd = container.as_raw_fd();
    // SAFETY: the argument is a pointer to an int that the kernel only reads.
    let rc = unsafe { libc::ioctl(group.as_raw_fd(), request(4), &raw const fd) };
    if rc < 0 {
        return Err(CallError::last("VFIO_GROUP_SET_CONTAINER"));
    }
    Ok(())
}

/// `VFIO_GROUP_GET_DEVICE_FD`: opens the device, which the kernel resets meanwhile.
pub fn group_device(group: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, CallError> {
    const CALL: &str = "VFIO_GROUP_GET_DEVICE_FD";
    let name = CString::new(name).map_err(|e| CallError {
        call: CALL,
        source: e.into(),
    })?;
    // SAFETY: the argument is a pointer to a NUL-terminated string that lives across the call.
    let fd = unsafe { libc::ioctl(group.as_raw_fd(), request(6), name.as_ptr()) };
    if fd < 0 {
        return Err(CallError::last(CALL));
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What `VFIO_DEVICE_GET_INFO` says.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInfo {
    /// A PCI device.
    pub is_pci: bool,
    /// `VFIO_DEVICE_RESET` works.
    pub can_reset: bool,
}

/// `VFIO_DEVICE_GET_INFO`.
pub fn device_info(device: BorrowedFd<'_>) -> Result<DeviceInfo, CallError> {
    let mut info = Args::new(24);
    info.call(device, StructCall::DeviceGetInfo)?;
    let flags = info.u32(4).unwrap_or(0);
    Ok(DeviceInfo {
        is_pci: flags & vfio::VFIO_DEVICE_FLAGS_PCI != 0,
        can_reset: flags & vfio::VFIO_DEVICE_FLAGS_RESET != 0,
    })
}

/// What `VFIO_DEVICE_GET_REGION_INFO` says.
#[derive(Clone, Debug)]
pub struct RawRegionInfo {
    /// `VFIO_REGION_INFO_FLAG_*`.
    pub flags: u32,
    /// Bytes.
    pub size: u64,
    /// Offset on the device's descriptor.
    pub offset: u64,
    /// Areas of the sparse-mmap capability, region-relative.
    pub sparse: Option<Vec<Range>>,
    /// The MSI-X-mappable capability is there.
    pub msix_mappable: bool,
}

/// `VFIO_DEVICE_GET_REGION_INFO` (struct vfio_region_info: argsz, flags, index, cap_offset, size
/// at 16, offset at 24).
pub fn region_info(device: BorrowedFd<'_>, index: u32) -> Result<RawRegionInfo, CallError> {
    let mut info = Args::new(32);
    info.put_u32(8, index);
    info.call_growing(device, StructCall::DeviceGetRegionInfo)?;
    let flags = info.u32(4).unwrap_or(0);
    let mut region = RawRegionInfo {
        flags,
        size: info.u64(16).unwrap_or(0),
        offset: info.u64(24).unwrap_or(0),
        sparse: None,
        msix_mappable: false,
    };
    if flags & vfio::VFIO_REGION_INFO_FLAG_CAPS != 0 {
        for (id, at) in info.caps(info.u32(12).unwrap_or(0)) {
            match u32::from(id) {
                vfio::VFIO_REGION_INFO_CAP_SPARSE_MMAP => {
                    region.sparse = Some(sparse_areas(&info, at));
                }
                vfio::VFIO_REGION_INFO_CAP_MSIX_MAPPABLE => region.msix_mappable = true,
                _ => {}
            }
        }
    }
    Ok(region)
}

/// struct vfio_region_info_cap_sparse_mmap: header (8 bytes), nr_areas, reserved, then offset and
/// size of each area.
fn sparse_areas(info: &Args, at: usize) -> Vec<Range> {
    let count = info.u32(at + 8).unwrap_or(0) as usize;
    (0..count)
        .map_while(|i| {
            let offset = info.u64(at + 16 + 16 * i)?;
            let size = info.u64(at + 24 + 16 * i)?;
            Range::new(offset, size)
        })
        .filter(|area| !area.is_empty())
        .collect()
}

/// `VFIO_DEVICE_GET_IRQ_INFO`: flags and number of vectors.
pub fn irq_info(device: BorrowedFd<'_>, index: u32) -> Result<(u32, u32), CallError> {
    let mut info = Args::new(16);
    info.put_u32(8, index);
    info.call(device, StructCall::DeviceGetIrqInfo)?;
    Ok((info.u32(4).unwrap_or(0), info.u32(12).unwrap_or(0)))
}

/// `VFIO_DEVICE_SET_IRQS` with `fds` (-1 for none) as its data, or with `count` and no data.
pub fn set_irqs(
    device: BorrowedFd<'_>,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    fds: &[i32],
) -> Result<(), CallError> {
    let mut set = Args::new(20 + 4 * fds.len());
    set.put_u32(4, flags)
        .put_u32(8, index)
        .put_u32(12, start)
        .put_u32(16, count);
    for (i, fd) in fds.iter().enumerate() {
        set.put(20 + 4 * i, &fd.to_ne_bytes());
    }
    match set.call(device, StructCall::DeviceSetIrqs)? {
        0 => Ok(()),
        // Fewer vectors than asked for are to be had (pci_alloc_irq_vectors): nothing is armed.
        _ => Err(CallError {
            call: StructCall::DeviceSetIrqs.name(),
            source: io::Error::from_raw_os_error(libc::ENOSPC),
        }),
    }
}

/// `VFIO_DEVICE_RESET`.
pub fn device_reset(device: BorrowedFd<'_>) -> Result<(), CallError> {
    plain(device, "VFIO_DEVICE_RESET", 11, 0).map(drop)
}

/// A function that a reset of a slot or bus affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotResetFunction {
    /// Where it is.
    pub bdf: Bdf,
    /// Its IOMMU group; or the device's number in our iommufd, where the device was opened
    /// through its own file.
    pub owner: HotResetOwner,
}

/// How the kernel tells whose a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HotResetOwner {
    /// Its IOMMU group's.
    Group(u32),
    /// Ours, by the iommufd that the device is bound to.
    Ours,
    /// Another's.
    Others,
}

/// `VFIO_DEVICE_GET_PCI_HOT_RESET_INFO` (struct vfio_pci_hot_reset_info: argsz, flags, count; then
/// for each function u32 group or device number, u16 segment, u8 bus, u8 devfn).
pub fn hot_reset_info(device: BorrowedFd<'_>) -> Result<Vec<HotResetFunction>, CallError> {
    /// Functions of a bus.
    const MOST: usize = 256;
    let mut room = 8;
    loop {
        let mut info = Args::new(12 + 8 * room);
        match info.call(device, StructCall::DeviceGetHotResetInfo) {
            Ok(_) => return Ok(hot_reset_functions(&info)),
            Err(error) if error.errno() == Some(libc::ENOSPC) && room < MOST => {
                let wanted = info.u32(8).unwrap_or(0) as usize;
                room = wanted.clamp(room + 1, MOST);
            }
            Err(error) => return Err(error),
        }
    }
}

fn hot_reset_functions(info: &Args) -> Vec<HotResetFunction> {
    let by_device = info.u32(4).unwrap_or(0) & vfio::VFIO_PCI_HOT_RESET_FLAG_DEV_ID != 0;
    let count = info.u32(8).unwrap_or(0) as usize;
    let functions = (0..count).map_while(|i| {
        let number = info.u32(12 + 8 * i)?;
        let [low, high, bus, devfn] = info.u32(16 + 8 * i)?.to_ne_bytes();
        let owner = match (by_device, number) {
            (false, group) => HotResetOwner::Group(group),
            // VFIO_PCI_DEVID_NOT_OWNED
            (true, u32::MAX) => HotResetOwner::Others,
            (true, _) => HotResetOwner::Ours,
        };
        let bdf = Bdf {
            segment: u16::from_ne_bytes([low, high]),
            bus,
            device: devfn >> 3,
            function: devfn & 7,
        };
        Some(HotResetFunction { bdf, owner })
    });
    functions.collect()
}

/// `VFIO_DEVICE_PCI_HOT_RESET` with the groups of all that are affected; without any for a device
/// that is bound to an iommufd (struct vfio_pci_hot_reset: argsz, flags, count, descriptors).
pub fn hot_reset(device: BorrowedFd<'_>, groups: &[BorrowedFd<'_>]) -> Result<(), CallError> {
    let mut reset = Args::new(12 + 4 * groups.len());
    reset.put_u32(8, groups.len() as u32);
    for (i, group) in groups.iter().enumerate() {
        reset.put(12 + 4 * i, &group.as_raw_fd().to_ne_bytes());
    }
    reset.call(device, StructCall::DeviceHotReset).map(drop)
}

/// `VFIO_DEVICE_BIND_IOMMUFD` of a device's own character device: opens the device, which the
/// kernel resets meanwhile (struct vfio_device_bind_iommufd without the token of later kernels).
pub fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> Result<(), CallError> {
    let mut bind = Args::new(16);
    bind.put(8, &iommufd.as_raw_fd().to_ne_bytes());
    bind.call(device, StructCall::DeviceBindIommufd).map(drop)
}

/// `VFIO_DEVICE_ATTACH_IOMMUFD_PT` to an IO address space; closing the device detaches it.
pub fn attach_ioas(device: BorrowedFd<'_>, ioas: u32) -> Result<(), CallError> {
    let mut attach = Args::new(12);
    attach.put_u32(8, ioas);
    attach.call(device, StructCall::DeviceAttachPt).map(drop)
}

/// `VFIO_DEVICE_FEATURE_DMA_BUF`: a dma-buf of one range of a region. iommufd takes no dma-buf of
/// several. (struct vfio_device_feature: argsz, flags; struct vfio_device_feature_dma_buf from 8:
/// region index, open flags, flags, nr_ranges; then offset and length of each range.)
pub fn export_dmabuf(
    device: BorrowedFd<'_>,
    index: u32,
    area: Range,
) -> Result<OwnedFd, CallError> {
    let mut feature = Args::new(40);
    let get = vfio::VFIO_DEVICE_FEATURE_GET | vfio::VFIO_DEVICE_FEATURE_DMA_BUF;
    feature
        .put_u32(4, get)
        .put_u32(8, index)
        .put_u32(12, (libc::O_RDWR | libc::O_CLOEXEC) as u32)
        .put_u32(20, 1)
        .put_u64(24, area.start())
        .put_u64(32, area.len());
    let fd = feature.call(device, StructCall::DeviceFeature)?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The usable IO-virtual addresses of a type1 container (`VFIO_IOMMU_GET_INFO`, capability
/// `IOVA_RANGE`), ascending; `None` where the kernel does not tell.
pub fn iova_ranges(container: BorrowedFd<'_>) -> Result<Option<Vec<Range>>, CallError> {
    let mut info = Args::new(24);
    info.call_growing(container, StructCall::IommuGetInfo)?;
    if info.u32(4).unwrap_or(0) & vfio::VFIO_IOMMU_INFO_CAPS == 0 {
        return Ok(None);
    }
    let caps = info.caps(info.u32(16).unwrap_or(0));
    let id = vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE as u16;
    let Some((_, at)) = caps.into_iter().find(|(cap, _)| *cap == id) else {
        return Ok(None);
    };
    // header (8 bytes), nr_iovas, reserved, then first and last address of each range.
    let count = info.u32(at + 8).unwrap_or(0) as usize;
    let ranges = (0..count).map_while(|i| {
        let first = info.u64(at + 16 + 16 * i)?;
        let last = info.u64(at + 24 + 16 * i)?;
        Some(Range::from_bounds(first, last.saturating_add(1)))
    });
    Ok(Some(ranges.collect()))
}

/// `VFIO_IOMMU_MAP_DMA`, readable and writable. The caller keeps what `address` points to mapped
/// until it is unmapped.
pub fn map_dma(
    container: BorrowedFd<'_>,
    iova: u64,
    address: u64,
    len: u64,
) -> Result<(), CallError> {
    let mut map = Args::new(32);
    map.put_u32(
        4,
        vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE,
    )
    .put_u64(8, address)
    .put_u64(16, iova)
    .put_u64(24, len);
    map.call(container, StructCall::IommuMapDma).map(drop)
}

/// `VFIO_IOMMU_UNMAP_DMA` of every mapping inside `range`.
pub fn unmap_dma(container: BorrowedFd<'_>, range: Range) -> Result<(), CallError> {
    let mut unmap = Args::new(24);
    unmap.put_u64(8, range.start()).put_u64(16, range.len());
    unmap.call(container, StructCall::IommuUnmapDma).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sparse_areas_are_read_as_given_and_stop_at_the_buffer_end() {
        let mut args = Args::new(64);
        args.put_u32(8, 9);
        args.put_u64(16, 0x1000).put_u64(24, 0x2000);
        args.put_u64(32, 0x5000).put_u64(40, 0);
        args.put_u64(48, 0x8000).put_u64(56, 0x1000);
        assert_eq!(
            sparse_areas(&args, 0),
            [
                Range::from_bounds(0x1000, 0x3000),
                Range::from_bounds(0x8000, 0x9000)
            ]
        );
    }

    #[test]
    fn functions_that_a_hot_reset_affects_are_told_with_their_owners() {
        let mut args = Args::new(12 + 8 * 2);
        args.put_u32(8, 3).put_u32(12, 7).put_u32(20, u32::MAX);
        args.put(16, &[0, 0, 0x41, 0x01]);
        args.put(24, &[2, 0, 0x42, 0xf8]);
        let bdf = |text: &str| text.parse::<Bdf>().unwrap();
        let [group, others] = [HotResetOwner::Group(7), HotResetOwner::Group(u32::MAX)];
        let found = |args: &Args| -> Vec<_> {
            let found = hot_reset_functions(args);
            found.into_iter().map(|f| (f.bdf, f.owner)).collect()
        };
        let [first, second] = [bdf("0000:41:00.1"), bdf("0002:42:1f.0")];
        assert_eq!(found(&args), [(first, group), (second, others)]);
        args.put_u32(4, vfio::VFIO_PCI_HOT_RESET_FLAG_DEV_ID);
        let [ours, others] = [HotResetOwner::Ours, HotResetOwner::Others];
        assert_eq!(found(&args), [(first, ours), (second, others)]);
    }

    #[test]
    fn an_ioctl_on_the_wrong_file_carries_the_reason() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = device_info(std::os::fd::AsFd::as_fd(&null)).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOTTY));
        assert_eq!(error.call, "VFIO_DEVICE_GET_INFO");
    }
}
