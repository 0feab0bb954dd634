//! Structures passed to the kernel by ioctl, for VFIO and iommufd alike.
//!
//! Invariant: every structure is a buffer of `u64` whose first 32-bit word holds its size in bytes
//! (`argsz`, `size`); the kernel reads and writes no further than that.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vfio_bindings::bindings::vfio;
use zerocopy::IntoBytes;

use crate::assign::ports::CallError;

/// An ioctl whose argument is a structure that starts with its size.
#[derive(Clone, Copy, Debug)]
pub enum StructCall {
    GroupGetStatus,
    DeviceGetInfo,
    DeviceGetRegionInfo,
    DeviceGetIrqInfo,
    DeviceSetIrqs,
    DeviceGetHotResetInfo,
    DeviceHotReset,
    IommuGetInfo,
    IommuMapDma,
    IommuUnmapDma,
    DeviceFeature,
    DeviceBindIommufd,
    DeviceAttachPt,
    IoasAlloc,
    IoasIovaRanges,
    IoasMap,
    IoasMapFile,
    IoasUnmap,
}

/// The request number of a VFIO ioctl.
pub const fn vfio_request(number: u32) -> libc::c_ulong {
    ((vfio::VFIO_TYPE as u32) << 8 | (vfio::VFIO_BASE + number)) as libc::c_ulong
}

/// The request number of an iommufd ioctl.
const fn iommufd_request(number: u32) -> libc::c_ulong {
    ((b';' as u32) << 8 | number) as libc::c_ulong
}

impl StructCall {
    const fn request(self) -> libc::c_ulong {
        match self {
            Self::GroupGetStatus => vfio_request(3),
            Self::DeviceGetInfo => vfio_request(7),
            Self::DeviceGetRegionInfo => vfio_request(8),
            Self::DeviceGetIrqInfo => vfio_request(9),
            Self::DeviceSetIrqs => vfio_request(10),
            // The same number as IommuGetInfo's: of a device, not of a container.
            Self::DeviceGetHotResetInfo | Self::IommuGetInfo => vfio_request(12),
            Self::DeviceHotReset | Self::IommuMapDma => vfio_request(13),
            Self::IommuUnmapDma => vfio_request(14),
            Self::DeviceFeature => vfio_request(17),
            Self::DeviceBindIommufd => vfio_request(18),
            Self::DeviceAttachPt => vfio_request(19),
            Self::IoasAlloc => iommufd_request(0x81),
            Self::IoasIovaRanges => iommufd_request(0x84),
            Self::IoasMap => iommufd_request(0x85),
            Self::IoasUnmap => iommufd_request(0x86),
            Self::IoasMapFile => iommufd_request(0x8f),
        }
    }

    /// As in the kernel's headers.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GroupGetStatus => "VFIO_GROUP_GET_STATUS",
            Self::DeviceGetInfo => "VFIO_DEVICE_GET_INFO",
            Self::DeviceGetRegionInfo => "VFIO_DEVICE_GET_REGION_INFO",
            Self::DeviceGetIrqInfo => "VFIO_DEVICE_GET_IRQ_INFO",
            Self::DeviceSetIrqs => "VFIO_DEVICE_SET_IRQS",
            Self::DeviceGetHotResetInfo => "VFIO_DEVICE_GET_PCI_HOT_RESET_INFO",
            Self::DeviceHotReset => "VFIO_DEVICE_PCI_HOT_RESET",
            Self::IommuGetInfo => "VFIO_IOMMU_GET_INFO",
            Self::IommuMapDma => "VFIO_IOMMU_MAP_DMA",
            Self::IommuUnmapDma => "VFIO_IOMMU_UNMAP_DMA",
            Self::DeviceFeature => "VFIO_DEVICE_FEATURE_DMA_BUF",
            Self::DeviceBindIommufd => "VFIO_DEVICE_BIND_IOMMUFD",
            Self::DeviceAttachPt => "VFIO_DEVICE_ATTACH_IOMMUFD_PT",
            Self::IoasAlloc => "IOMMU_IOAS_ALLOC",
            Self::IoasIovaRanges => "IOMMU_IOAS_IOVA_RANGES",
            Self::IoasMap => "IOMMU_IOAS_MAP",
            Self::IoasUnmap => "IOMMU_IOAS_UNMAP",
            Self::IoasMapFile => "IOMMU_IOAS_MAP_FILE",
        }
    }
}

/// A structure for the kernel, as bytes at their offsets in the uapi header.
pub struct Args {
    words: Vec<u64>,
    len: usize,
}

impl Args {
    /// A structure of `len` bytes, all zero.
    pub fn new(len: usize) -> Self {
        Self {
            words: vec![0; len.div_ceil(8)],
            len,
        }
    }

    fn bytes(&self) -> &[u8] {
        self.words.as_bytes().get(..self.len).unwrap_or_default()
    }

    /// Writes `data` at `offset`, if it fits there.
    pub fn put(&mut self, offset: usize, data: &[u8]) {
        let bytes = self.words.as_mut_bytes();
        if let Some(place) = bytes.get_mut(offset..offset + data.len()) {
            place.copy_from_slice(data);
        }
    }

    /// Writes a number, see [`Args::put`].
    pub fn put_u32(&mut self, offset: usize, value: u32) -> &mut Self {
        self.put(offset, &value.to_ne_bytes());
        self
    }

    /// Writes a number, see [`Args::put`].
    pub fn put_u64(&mut self, offset: usize, value: u64) -> &mut Self {
        self.put(offset, &value.to_ne_bytes());
        self
    }

    fn u16(&self, offset: usize) -> Option<u16> {
        let bytes = self.bytes().get(offset..offset + 2)?;
        Some(u16::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// Reads a number; `None` when it does not lie inside.
    pub fn u32(&self, offset: usize) -> Option<u32> {
        let bytes = self.bytes().get(offset..offset + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// Reads a number; `None` when it does not lie inside.
    pub fn u64(&self, offset: usize) -> Option<u64> {
        let bytes = self.bytes().get(offset..offset + 8)?;
        Some(u64::from_ne_bytes(bytes.try_into().ok()?))
    }

    /// Offsets of the capability chain that starts at `first` (struct vfio_info_cap_header: id
    /// u16, version u16, next u32), each with its id. Ends at the first link that is not inside
    /// or does not go forward.
    pub fn caps(&self, first: u32) -> Vec<(u16, usize)> {
        let mut caps = Vec::new();
        let mut at = first as usize;
        while at != 0 {
            let (Some(id), Some(next)) = (self.u16(at), self.u32(at + 4)) else {
                break;
            };
            caps.push((id, at));
            let next = next as usize;
            at = if next > at { next } else { 0 };
        }
        caps
    }

    /// Calls the kernel with this structure; returns what the ioctl returned.
    pub fn call(&mut self, fd: BorrowedFd<'_>, call: StructCall) -> Result<i32, CallError> {
        self.put_u32(0, self.len as u32);
        // SAFETY: every `StructCall` takes a pointer to a structure of which the kernel reads and
        // writes at most as many bytes as its first word says, which has just been set to the
        // length of the buffer; that is 8-byte aligned and lives across the call. Addresses inside
        // the structure are of memory to map (checked by the kernel, kept by a `HostRange`), or
        // of a buffer that lives across the call (`iommufd::iova_ranges`).
        let rc = unsafe {
            libc::ioctl(
                fd.as_raw_fd(),
                call.request(),
                self.words.as_mut_ptr().cast::<libc::c_void>(),
            )
        };
        if rc < 0 {
            Err(CallError::last(call.name()))
        } else {
            Ok(rc)
        }
    }

    /// Calls again with the size that the kernel asked for while the answer does not fit.
    pub fn call_growing(&mut self, fd: BorrowedFd<'_>, call: StructCall) -> Result<(), CallError> {
        /// More than any answer holds: 65535 areas of a sparse BAR take 1 MiB.
        const MOST: usize = 4 << 20;
        loop {
            self.call(fd, call)?;
            let wanted = self.u32(0).unwrap_or(0) as usize;
            if wanted <= self.len {
                return Ok(());
            }
            if wanted > MOST {
                return Err(CallError {
                    call: call.name(),
                    source: io::Error::other(format!("the answer takes {wanted} bytes")),
                });
            }
            self.words.resize(wanted.div_ceil(8), 0);
            self.len = wanted;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_are_those_of_the_uapi_header() {
        assert_eq!(StructCall::IommuMapDma.request(), 0x3b71);
        assert_eq!(StructCall::IommuUnmapDma.request(), 0x3b72);
        assert_eq!(StructCall::DeviceSetIrqs.request(), 0x3b6e);
        assert_eq!(StructCall::DeviceFeature.request(), 0x3b75);
        assert_eq!(StructCall::IoasMap.request(), 0x3b85);
        assert_eq!(StructCall::IoasMapFile.request(), 0x3b8f);
    }

    #[test]
    fn a_capability_chain_that_loops_or_leaves_the_buffer_ends() {
        let mut args = Args::new(64);
        args.put(24, &1u16.to_ne_bytes());
        args.put_u32(28, 40);
        args.put(40, &2u16.to_ne_bytes());
        args.put_u32(44, 24);
        assert_eq!(args.caps(24), [(1, 24), (2, 40)]);
        args.put_u32(44, 1000);
        assert_eq!(args.caps(24), [(1, 24), (2, 40)]);
        assert!(args.caps(63).is_empty());
    }
}
