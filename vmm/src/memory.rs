//! Guest RAM: how it is backed, where it is mapped, and how the rest of the VMM reaches it.
//!
//! Invariants: the host-virtual address of every range is congruent to its guest-physical address
//! modulo 1 GiB, so that KVM and the IOMMU can use huge entries; RAM is mapped shared, so that a
//! device and the guest see the same pages, except where [`Backing::Private`] says otherwise; and
//! once mapped it stays mapped for the life of the process.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use arch::layout::{AddressRange, GIB, MIB};
use devices::sys::{Alignment, DmaFile, HostMap, HostRange};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::options::HugePages;

/// Guest RAM cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The huge pages that were free a moment ago are not any more.
    #[error(
        "guest memory needs {needed} huge pages of {} for {range}, and they are no longer free: \
         reserve more in {pool}/nr_hugepages",
        if *size == GIB { "1G" } else { "2M" }
    )]
    PagesTaken {
        /// Pages needed.
        needed: u64,
        /// Bytes of a page.
        size: u64,
        /// Which guest-physical addresses.
        range: AddressRange,
        /// The pool's directory.
        pool: String,
    },
    /// A call failed.
    #[error("cannot {what} for {range} of guest memory")]
    Call {
        /// What was being done.
        what: &'static str,
        /// Which guest-physical addresses.
        range: AddressRange,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// What is behind guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// A memfd of ordinary pages; the kernel makes them huge where it may.
    Shared,
    /// A memfd of the host's reserved huge pages.
    Huge(HugePages),
    /// Private anonymous memory: the host never gives shared memory huge pages
    /// (`shmem_enabled`), and private memory gets them. Never forked (MADV_DONTFORK).
    Private,
}

/// What was chosen to be behind guest RAM.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// What.
    pub backing: Backing,
    /// It will be pages of 4 KiB.
    pub small_pages: bool,
    /// The reason, for people.
    pub why: &'static str,
}

impl Backing {
    /// Chooses by what was asked for and what the host (sysfs below `root`) allows.
    pub fn choose(root: &Path, huge_pages: Option<HugePages>) -> Choice {
        let choice = |backing, small_pages, why| Choice {
            backing,
            small_pages,
            why,
        };
        let Some(size) = huge_pages else {
            let settings = root.join("sys/kernel/mm/transparent_hugepage");
            let read = |file: &str| fs::read_to_string(settings.join(file)).unwrap_or_default();
            let all = read("shmem_enabled");
            let of_2m = read("hugepages-2048kB/shmem_enabled");
            let anonymous = read("enabled");
            if shmem_may_be_huge(&all, &of_2m) {
                let why = "memfd: the host gives shared memory huge pages (shmem_enabled)";
                return choice(Self::Shared, false, why);
            }
            if matches!(chosen(&anonymous), "never" | "") {
                let why = "memfd: the host gives no memory huge pages";
                return choice(Self::Shared, true, why);
            }
            let why = "private anonymous memory: the host gives it huge pages, and none to shared \
                       memory (shmem_enabled)";
            return choice(Self::Private, false, why);
        };
        choice(Self::Huge(size), false, "hugetlb memfd, as asked for")
    }

    /// What both ends of a RAM range are multiples of.
    pub fn granule(self) -> u64 {
        match self {
            Self::Huge(size) => size.bytes(),
            Self::Shared | Self::Private => 2 * MIB,
        }
    }
}

/// The word in brackets, as in `always [madvise] never`.
fn chosen(setting: &str) -> &str {
    let word = setting.split_once('[').and_then(|(_, s)| s.split_once(']'));
    word.map_or("", |(word, _)| word)
}

/// Whether MADV_HUGEPAGE on a memfd gives 2 MiB pages (Documentation/admin-guide/mm/transhuge.rst,
/// "Shared memory"): `all` is the older setting, `of_2m` the one by size, empty on old kernels.
fn shmem_may_be_huge(all: &str, of_2m: &str) -> bool {
    let allows = |word: &str| matches!(word, "always" | "within_size" | "advise" | "force");
    match chosen(of_2m) {
        "inherit" | "" => allows(chosen(all)),
        word => allows(word),
    }
}

/// Which NUMA node RAM comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodePolicy {
    /// Its number.
    pub node: u32,
    /// From no other, even when this one is full.
    pub strict: bool,
}

/// One contiguous range of guest RAM.
#[derive(Clone, Debug)]
pub struct RamRange {
    /// Guest-physical address.
    pub gpa: u64,
    /// What is behind it.
    pub memory: HostRange,
}

/// All guest RAM.
pub struct GuestRam {
    ranges: Vec<RamRange>,
    access: GuestMemoryMmap,
}

impl GuestRam {
    /// Reserves and maps RAM at `layout`; pages are allocated as they are touched, by `policy`.
    pub fn map(
        layout: &[AddressRange],
        backing: Backing,
        policy: Option<NodePolicy>,
    ) -> Result<Self, MemoryError> {
        let mut ranges = Vec::new();
        let mut regions = Vec::new();
        for range in layout {
            let failed = |what| move |source| call_failed(what, *range, source);
            let map =
                map_range(range, backing).map_err(|error| map_failed(*range, backing, error))?;
            // Fails where the kernel has no transparent huge pages; small pages then.
            let _ = map.advise(0, map.len(), libc::MADV_HUGEPAGE);
            if let Some(policy) = policy {
                // Before any page is touched: it does not move those that are there.
                bind(&map, policy).map_err(failed("choose the NUMA node"))?;
            }
            let region = region_of(&map).map_err(failed("map memory"))?;
            let region = GuestRegionMmap::new(region, GuestAddress(range.start))
                .ok_or(io::ErrorKind::InvalidInput.into())
                .map_err(failed("place memory"))?;
            regions.push(region);
            let memory = HostRange::whole(Arc::new(map));
            // See region_of: never unmapped.
            let _kept = ManuallyDrop::new(memory.clone());
            let gpa = range.start;
            ranges.push(RamRange { gpa, memory });
        }
        let whole = AddressRange::new(0, layout.last().map_or(0, |range| range.end));
        let access = GuestMemoryMmap::from_regions(regions)
            .map_err(|_| io::ErrorKind::InvalidInput.into())
            .map_err(|source| call_failed("order memory", whole, source))?;
        Ok(Self { ranges, access })
    }

    /// The ranges, ascending by guest-physical address: for memslots and DMA mappings.
    pub fn ranges(&self) -> &[RamRange] {
        &self.ranges
    }

    /// Access by guest-physical address.
    pub fn access(&self) -> &GuestMemoryMmap {
        &self.access
    }
}

fn call_failed(what: &'static str, range: AddressRange, source: io::Error) -> MemoryError {
    MemoryError::Call {
        what,
        range,
        source,
    }
}

/// mmap(2) reserves huge pages, or says ENOMEM.
fn map_failed(range: AddressRange, backing: Backing, source: io::Error) -> MemoryError {
    match backing {
        Backing::Huge(pages) if source.raw_os_error() == Some(libc::ENOMEM) => {
            let size = pages.bytes();
            MemoryError::PagesTaken {
                needed: range.len().div_ceil(size),
                size,
                range,
                pool: format!("/sys/kernel/mm/hugepages/hugepages-{}kB", size >> 10),
            }
        }
        _ => call_failed("map memory", range, source),
    }
}

fn map_range(range: &AddressRange, backing: Backing) -> io::Result<HostMap> {
    let alignment = Alignment {
        modulus: GIB,
        phase: range.start,
    };
    let flags = match backing {
        Backing::Private => return HostMap::anonymous(range.len(), alignment),
        Backing::Shared => MFdFlags::empty(),
        Backing::Huge(HugePages::Size2M) => MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB,
        Backing::Huge(HugePages::Size1G) => MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_1GB,
    };
    let file = File::from(memfd_create(c"guest-ram", flags | MFdFlags::MFD_CLOEXEC)?);
    file.set_len(range.len())?;
    let map = match backing {
        Backing::Huge(_) => HostMap::of_huge_pages(file.as_fd(), range.len(), alignment)?,
        _ => HostMap::of_file(file.as_fd(), 0, range.len(), alignment)?,
    };
    Ok(map.with_dma_file(DmaFile::Memory(file.into())))
}

/// mbind(2) on all of `map`; of a memfd it is the file's policy, for whoever touches it first.
fn bind(map: &HostMap, policy: NodePolicy) -> io::Result<()> {
    const BITS: usize = u64::BITS as usize;
    let mode = match policy.strict {
        true => libc::MPOL_BIND,
        false => libc::MPOL_PREFERRED,
    };
    // More nodes than any kernel is built for.
    let mut nodes = [0u64; 1024 / BITS];
    let node = policy.node as usize;
    let word = nodes.get_mut(node / BITS);
    *word.ok_or(io::ErrorKind::InvalidInput)? |= 1 << (node % BITS);
    // The kernel takes one bit less than it is told (mm/mempolicy.c, get_nodes).
    let bits = 1024 + 1;
    // SAFETY: mbind(2) reads `bits` bits of `nodes`, rounded up to words; the last one is not
    // looked at, see above. It changes where pages of a mapping that we own come from, nothing that
    // Rust relies on.
    let rc = unsafe {
        let (address, len) = (map.address(), map.len());
        libc::syscall(libc::SYS_mbind, address, len, mode, nodes.as_ptr(), bits, 0)
    };
    match rc {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A view of `map` for vm-memory, which does not own it.
fn region_of(map: &HostMap) -> io::Result<MmapRegion> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let address = map.address() as *mut u8;
    // SAFETY: `MmapRegion::build_raw` wants a mapping of that length, readable and writable, which
    // lives as long as the region or any clone of it: the only caller forgets a `HostRange` of
    // `map`, so it is never unmapped. The flags only describe; nothing here depends on them.
    unsafe { MmapRegion::build_raw(address, map.len() as usize, protection, flags) }
        .map_err(|_| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn ram_is_congruent_to_its_address_and_readable() {
        let layout = [
            AddressRange::new(0, 4 * MIB),
            AddressRange::new(4 * GIB + 2 * MIB, 4 * GIB + 6 * MIB),
        ];
        for backing in [Backing::Shared, Backing::Private] {
            let ram = GuestRam::map(&layout, backing, None).unwrap();
            for (range, wanted) in ram.ranges().iter().zip(&layout) {
                assert_eq!(range.gpa, wanted.start);
                assert_eq!(range.memory.address() % GIB, wanted.start % GIB);
            }
            let at = GuestAddress(layout[1].end - 8);
            ram.access().write_obj(7u64, at).unwrap();
            for range in ram.ranges() {
                range.memory.advise(libc::MADV_POPULATE_WRITE).unwrap();
            }
            assert_eq!(ram.access().read_obj::<u64>(at).unwrap(), 7);
            assert!(ram.access().write_obj(7u64, GuestAddress(4 * MIB)).is_err());
        }
    }

    #[test]
    fn huge_pages_that_are_not_there_are_missed_when_they_are_mapped() {
        let (range, backing) = (
            AddressRange::new(0, 1 << 42),
            Backing::Huge(HugePages::Size2M),
        );
        let error = map_failed(range, backing, map_range(&range, backing).unwrap_err());
        // A kernel without huge pages has no such files at all.
        if let MemoryError::PagesTaken { needed, .. } = error {
            assert_eq!(needed, 1 << 21);
            let text = error.to_string();
            assert!(text.contains("huge pages of 2M"), "{text}");
            assert!(text.contains("hugepages-2048kB/nr_hugepages"), "{text}");
        }
    }

    #[test]
    fn terabytes_can_be_mapped_without_being_there() {
        let layout = [AddressRange::new(0, 1228 * GIB)];
        assert!(GuestRam::map(&layout, Backing::Private, None).is_ok());
    }

    #[test]
    fn ram_can_be_bound_to_a_node_and_not_to_one_that_is_not_there() {
        let layout = [AddressRange::new(0, 4 * MIB)];
        let map = |node, strict| {
            let policy = NodePolicy { node, strict };
            GuestRam::map(&layout, Backing::Shared, Some(policy))
        };
        for strict in [false, true] {
            let unknown = |error: &MemoryError| {
                // A kernel without NUMA.
                matches!(error, MemoryError::Call { source, .. } if source.raw_os_error() == Some(libc::ENOSYS))
            };
            assert!(map(0, strict).as_ref().err().is_none_or(unknown));
            assert!(map(1023, strict).is_err());
            assert!(map(1 << 20, strict).is_err());
        }
    }

    #[test]
    fn shared_memory_is_huge_only_where_a_setting_says_so() {
        let never = "always within_size advise [never] deny force\n";
        let advise = "always within_size [advise] never deny force\n";
        assert!(!shmem_may_be_huge(never, ""));
        assert!(shmem_may_be_huge(advise, ""));
        assert!(!shmem_may_be_huge("", ""));
        let inherit = "always [inherit] within_size advise never\n";
        assert!(shmem_may_be_huge(advise, inherit));
        assert!(!shmem_may_be_huge(never, inherit));
        assert!(shmem_may_be_huge(
            never,
            "always inherit within_size [advise] never\n"
        ));
        assert!(!shmem_may_be_huge(
            advise,
            "always inherit within_size advise [never]\n"
        ));
    }
}
