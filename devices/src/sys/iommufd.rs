//! The iommufd ioctls (include/uapi/linux/iommufd.h), one safe function each.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::struct_call::{Args, StructCall};
use crate::assign::ports::CallError;
use crate::range::Range;

/// IOMMU_IOAS_MAP_FIXED_IOVA, _WRITEABLE and _READABLE.
const MAP_FLAGS: u32 = 1 | 2 | 4;
/// More holes than these no machine has: a device's reserved regions make a handful.
const MAX_RANGES: usize = 4096;

/// `IOMMU_IOAS_ALLOC`: the id of a new IO address space.
pub fn ioas_alloc(iommufd: BorrowedFd<'_>) -> Result<u32, CallError> {
    let mut alloc = Args::new(12);
    alloc.call(iommufd, StructCall::IoasAlloc)?;
    Ok(alloc.u32(8).unwrap_or(0))
}

/// `IOMMU_IOAS_IOVA_RANGES`: the IO-virtual addresses that all attached devices can use, ascending.
pub fn iova_ranges(iommufd: BorrowedFd<'_>, ioas: u32) -> Result<Vec<Range>, CallError> {
    let mut room = 16;
    loop {
        // First and last address of each range.
        let mut pairs = vec![0u64; 2 * room];
        let mut query = Args::new(32);
        query
            .put_u32(4, ioas)
            .put_u32(8, room as u32)
            .put_u64(16, pairs.as_mut_ptr() as u64);
        let result = query.call(iommufd, StructCall::IoasIovaRanges);
        let count = query.u32(8).unwrap_or(0) as usize;
        match result {
            Ok(_) => {
                let ranges = pairs.chunks_exact(2).take(count);
                let range = |pair: &[u64]| match pair {
                    [first, last] => Some(Range::from_bounds(*first, last.saturating_add(1))),
                    _ => None,
                };
                return Ok(ranges.filter_map(range).collect());
            }
            Err(error) if error.errno() == Some(libc::EMSGSIZE) && room < MAX_RANGES => {
                room = count.max(2 * room).min(MAX_RANGES);
            }
            Err(error) => return Err(error),
        }
    }
}

/// `IOMMU_IOAS_MAP`, readable and writable, of memory at a host-virtual address. The caller keeps
/// it mapped until it is unmapped here.
pub fn map(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    iova: u64,
    address: u64,
    len: u64,
) -> Result<(), CallError> {
    let mut map = Args::new(40);
    map.put_u32(4, MAP_FLAGS)
        .put_u32(8, ioas)
        .put_u64(16, address)
        .put_u64(24, len)
        .put_u64(32, iova);
    map.call(iommufd, StructCall::IoasMap).map(drop)
}

/// `IOMMU_IOAS_MAP_FILE`, readable and writable, of `len` bytes from `start` of a memfd or dma-buf,
/// which the kernel keeps.
pub fn map_file(
    iommufd: BorrowedFd<'_>,
    ioas: u32,
    iova: u64,
    file: BorrowedFd<'_>,
    start: u64,
    len: u64,
) -> Result<(), CallError> {
    let mut map = Args::new(40);
    map.put_u32(4, MAP_FLAGS).put_u32(8, ioas);
    map.put(12, &file.as_raw_fd().to_ne_bytes());
    map.put_u64(16, start).put_u64(24, len).put_u64(32, iova);
    map.call(iommufd, StructCall::IoasMapFile).map(drop)
}

/// `IOMMU_IOAS_UNMAP` of every mapping inside `range`; none is no error here.
pub fn unmap(iommufd: BorrowedFd<'_>, ioas: u32, range: Range) -> Result<(), CallError> {
    let mut unmap = Args::new(24);
    unmap
        .put_u32(4, ioas)
        .put_u64(8, range.start())
        .put_u64(16, range.len());
    match unmap.call(iommufd, StructCall::IoasUnmap) {
        Err(error) if error.errno() == Some(libc::ENOENT) => Ok(()),
        done => done.map(drop),
    }
}
