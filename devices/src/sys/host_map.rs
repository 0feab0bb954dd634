//! Ownership of host-virtual mappings that a guest or a device uses.
//!
//! Invariants: a [`HostMap`] is page-aligned, owns exactly its range of addresses, and unmaps it
//! when the last [`HostRange`] that points into it is gone. Rust code never makes a reference into
//! one: the guest and devices change the bytes at any time. Whoever hands a range to the kernel (a
//! memslot, an IOMMU mapping) keeps the `HostRange` until the kernel has let go of it.
//!
//! A map may carry its *DMA file*: a file that shows the same bytes, by which iommufd maps them
//! without walking page tables.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

const PAGE: u64 = 4096;

/// Where in the address space a mapping must lie: `address ≡ phase (mod modulus)`.
///
/// Huge page-table entries need the host-virtual address, the guest-physical address and what is
/// behind them to be congruent modulo the entry's size (Linux mm/memory.c, `do_huge_pmd_…`;
/// virt/kvm's `__kvm_mmu_max_mapping_level`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// A power of two, at least a page.
    pub modulus: u64,
    /// Page-aligned; only its value modulo `modulus` counts.
    pub phase: u64,
}

impl Alignment {
    /// No more than page alignment.
    pub const PAGE: Self = Self {
        modulus: PAGE,
        phase: 0,
    };
}

/// What can be mapped for DMA by file instead of by address.
#[derive(Debug)]
pub enum DmaFile {
    /// The memfd behind the whole map; by address would do as well.
    Memory(OwnedFd),
    /// A dma-buf of the part of a BAR that is mapped; there is no other way.
    Device(OwnedFd),
}

/// A reserved range of host-virtual addresses with something mapped into it.
#[derive(Debug)]
pub struct HostMap {
    address: u64,
    len: u64,
    dma: Option<DmaFile>,
}

impl HostMap {
    /// Maps `len` bytes of `file` from `offset` (MAP_SHARED, read and write), placed by
    /// `alignment`. `len` and `offset` are multiples of the page size.
    pub fn of_file(
        file: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        alignment: Alignment,
    ) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        Self::place(len, alignment, flags, file.as_raw_fd(), offset)
    }

    /// Maps `len` bytes of `file`, which lies on hugetlbfs or is a memfd of huge pages. The pages
    /// are reserved: none is missing when it is touched (Documentation/mm/hugetlbfs_reserv.rst).
    pub fn of_huge_pages(file: BorrowedFd<'_>, len: u64, alignment: Alignment) -> io::Result<Self> {
        Self::place(len, alignment, libc::MAP_SHARED, file.as_raw_fd(), 0)
    }

    /// Maps `len` bytes of private anonymous memory, excluded from any fork (MADV_DONTFORK): a
    /// copy-on-write copy would part the guest's view from a device's.
    pub fn anonymous(len: u64, alignment: Alignment) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let map = Self::place(len, alignment, flags, -1, 0)?;
        map.advise(0, len, libc::MADV_DONTFORK)?;
        Ok(map)
    }

    fn place(
        len: u64,
        alignment: Alignment,
        flags: i32,
        fd: i32,
        offset: libc::off_t,
    ) -> io::Result<Self> {
        let modulus = alignment.modulus;
        if len == 0 || !len.is_multiple_of(PAGE) || !modulus.is_power_of_two() || modulus < PAGE {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let slack = modulus - PAGE;
        let reserved_len = len.checked_add(slack).ok_or(io::ErrorKind::OutOfMemory)?;
        let reserved = map_raw(
            None,
            reserved_len,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )?;
        let address =
            reserved + (alignment.phase.wrapping_sub(reserved) & (modulus - 1) & !(PAGE - 1));
        unmap_raw(reserved, address - reserved);
        let end = reserved + reserved_len;
        unmap_raw(address + len, end - (address + len));
        // From here on Drop gives the range back, whatever is mapped into it.
        let map = Self {
            address,
            len,
            dma: None,
        };
        map_raw(
            Some(address),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            offset,
        )?;
        Ok(map)
    }

    /// Says which file shows the same bytes, from its first on.
    pub fn with_dma_file(mut self, file: DmaFile) -> Self {
        self.dma = Some(file);
        self
    }

    /// Host-virtual address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// madvise(2) with `advice` on `len` bytes from `offset`. Only advice that keeps the mapping
    /// and its contents is accepted.
    pub fn advise(&self, offset: u64, len: u64, advice: i32) -> io::Result<()> {
        const KEEPING: [i32; 5] = [
            libc::MADV_HUGEPAGE,
            libc::MADV_DONTFORK,
            libc::MADV_DONTDUMP,
            libc::MADV_POPULATE_READ,
            libc::MADV_POPULATE_WRITE,
        ];
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !KEEPING.contains(&advice) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let start = (self.address + offset) as *mut libc::c_void;
        // SAFETY: the range lies inside a mapping that `self` owns, and the advice neither unmaps
        // it nor changes what Rust may rely on (there are no references into it).
        let rc = unsafe { libc::madvise(start, len as usize, advice) };
        if rc == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for HostMap {
    fn drop(&mut self) {
        unmap_raw(self.address, self.len);
    }
}

fn map_raw(
    at: Option<u64>,
    len: u64,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: libc::off_t,
) -> io::Result<u64> {
    let (hint, flags) = match at {
        Some(address) => (address as *mut libc::c_void, flags | libc::MAP_FIXED),
        None => (ptr::null_mut(), flags),
    };
    // SAFETY: without `at` the kernel picks unused addresses; with it, the only caller passes a
    // range that it has just reserved and owns, so MAP_FIXED replaces nobody else's mapping.
    let address = unsafe { libc::mmap(hint, len as usize, prot, flags, fd, offset) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(address as u64)
}

/// munmap(2) of a range that the caller owns. It can only fail for lack of memory to split a
/// mapping, in which case the addresses stay reserved: harmless.
fn unmap_raw(address: u64, len: u64) {
    if len != 0 {
        // SAFETY: the callers own the range (a reservation of theirs, or a `HostMap` at its end),
        // and no Rust reference into it exists.
        unsafe { libc::munmap(address as *mut libc::c_void, len as usize) };
    }
}

/// A page-aligned part of a shared [`HostMap`]; keeps the whole map alive.
#[derive(Clone, Debug)]
pub struct HostRange {
    map: Arc<HostMap>,
    offset: u64,
    len: u64,
}

impl HostRange {
    /// All of `map`.
    pub fn whole(map: Arc<HostMap>) -> Self {
        let len = map.len();
        Self {
            map,
            offset: 0,
            len,
        }
    }

    /// `len` bytes from `offset` of this range; `None` when that is not inside it or not aligned
    /// to pages.
    pub fn part(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        let aligned = offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len != 0;
        (end <= self.len && aligned).then(|| Self {
            map: Arc::clone(&self.map),
            offset: self.offset + offset,
            len,
        })
    }

    /// Host-virtual address of the first byte.
    pub fn address(&self) -> u64 {
        self.map.address() + self.offset
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false: an empty range cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memfd behind the range, if there is one, and the offset of the first byte in it.
    pub fn memory_file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.map.dma {
            Some(DmaFile::Memory(file)) => Some((file.as_fd(), self.offset)),
            _ => None,
        }
    }

    /// The dma-buf of the device memory in the range, if it has one, and the offset in it.
    pub fn dmabuf(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.map.dma {
            Some(DmaFile::Device(file)) => Some((file.as_fd(), self.offset)),
            _ => None,
        }
    }

    /// madvise(2) on the whole range, see [`HostMap::advise`].
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        self.map.advise(self.offset, self.len, advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_congruent_to_its_phase() {
        let alignment = Alignment {
            modulus: 1 << 30,
            phase: 0x1234_5000,
        };
        let map = HostMap::anonymous(1 << 21, alignment).unwrap();
        assert_eq!(map.address() % (1 << 30), 0x1234_5000);
    }

    #[test]
    fn unaligned_or_empty_lengths_are_refused() {
        assert!(HostMap::anonymous(0, Alignment::PAGE).is_err());
        assert!(HostMap::anonymous(100, Alignment::PAGE).is_err());
    }

    #[test]
    fn a_part_stays_inside_and_on_pages() {
        let whole = HostRange::whole(Arc::new(
            HostMap::anonymous(0x4000, Alignment::PAGE).unwrap(),
        ));
        let part = whole.part(0x1000, 0x2000).unwrap();
        assert_eq!(part.address(), whole.address() + 0x1000);
        assert!(whole.part(0x1000, 0x4000).is_none());
        assert!(whole.part(0x800, 0x1000).is_none());
        assert!(part.part(u64::MAX, 1).is_none());
    }

    #[test]
    fn a_part_knows_its_place_in_the_file() {
        let map = HostMap::anonymous(0x4000, Alignment::PAGE).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let map = map.with_dma_file(DmaFile::Memory(file.into()));
        let part = HostRange::whole(Arc::new(map)).part(0x1000, 0x2000);
        assert_eq!(part.unwrap().memory_file().unwrap().1, 0x1000);
    }

    #[test]
    fn advice_that_loses_contents_is_refused() {
        let map = HostMap::anonymous(0x4000, Alignment::PAGE).unwrap();
        assert!(map.advise(0, 0x4000, libc::MADV_DONTNEED).is_err());
        assert!(map.advise(0, 0x4000, libc::MADV_POPULATE_WRITE).is_ok());
    }
}
