//! Loading a kernel and telling it where things are.
//!
//! A bzImage is entered by the 64-bit boot protocol (Documentation/arch/x86/boot.rst), an ELF
//! kernel by PVH (Xen's docs/misc/pvh.pandoc). [`image`] checks a file before anything of it is
//! loaded, so that every unusable file is named with what is wrong with it.

mod bzimage;
pub mod image;
mod initrd;
mod paging;
mod pvh;
mod reset;
#[cfg(test)]
mod testing;

use std::fs::File;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::layout::{self, AddressRange, MIB};
pub use image::{ImageError, InputFile, KernelImage};

/// Global descriptor table.
pub(crate) const GDT: u64 = 0x500;
/// PVH start information, its module list and memory map.
const PVH_INFO: u64 = 0x6000;
/// The "zero page", struct boot_params.
const ZERO_PAGE: u64 = 0x7000;
/// Page tables of the 64-bit entry: six pages.
const PAGE_TABLES: u64 = 0x9000;
/// Command line; up to [`CMDLINE_SPACE`] bytes with its NUL.
const CMDLINE: u64 = 0x2_0000;
/// Largest command line that x86 kernels take is 2 KiB today; the protocol's field would allow
/// more than there is room for.
const CMDLINE_SPACE: u64 = 0x1_0000;

/// Why a kernel cannot be started in this guest.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The file is not what it should be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Guest RAM is too small for the kernel.
    #[error(
        "the kernel needs guest memory at {needed}, of which {} MiB from 0 are there; \
         give the guest at least {} MiB with --memory",
        low / MIB,
        needed.end.div_ceil(MIB)
    )]
    KernelDoesNotFit {
        /// Where the kernel will run.
        needed: AddressRange,
        /// End of the first RAM range.
        low: u64,
    },
    /// The initrd does not fit between the kernel and its limit.
    #[error(
        "the initrd of {} MiB does not fit into guest memory {space} behind the kernel; \
         use a smaller initrd{}",
        len.div_ceil(MIB),
        if *limited_by_ram { " or give the guest more memory with --memory" } else { "" }
    )]
    InitrdDoesNotFit {
        /// Bytes of the initrd.
        len: u64,
        /// Where it would have to lie.
        space: AddressRange,
        /// More RAM would help.
        limited_by_ram: bool,
    },
    /// The command line is too long.
    #[error("the kernel command line has {len} bytes, this kernel takes at most {limit}")]
    CmdlineTooLong {
        /// Bytes without the NUL.
        len: u64,
        /// Bytes that the kernel takes.
        limit: u64,
    },
    /// The command line cannot be passed on.
    #[error("the kernel command line contains a NUL byte")]
    CmdlineNul,
    /// The crate that loads the segments refused.
    #[error("cannot load the kernel")]
    Load(#[source] linux_loader::loader::Error),
    /// A file could not be read into guest memory.
    #[error("cannot read {what} into guest memory")]
    Read {
        /// Which file.
        what: &'static str,
        /// The reason.
        source: vm_memory::GuestMemoryError,
    },
    /// Guest RAM refused a write at an address that the layout promises.
    #[error("cannot write boot structures into guest memory")]
    Write(#[from] vm_memory::GuestMemoryError),
    /// The memory map has more entries than the boot protocol can carry.
    #[error("guest memory in {0} pieces is more than the boot protocol can describe")]
    TooManyRanges(usize),
}

/// What to boot.
#[derive(Debug)]
pub struct BootSource {
    /// A checked kernel.
    pub kernel: KernelImage,
    /// An initial RAM file system.
    pub initrd: Option<InputFile>,
    /// The kernel's command line.
    pub cmdline: String,
}

impl BootSource {
    /// Opens and checks the files; errors here mean that the user gave the wrong ones.
    pub fn open(kernel: &Path, initrd: Option<&Path>, cmdline: String) -> Result<Self, ImageError> {
        Ok(Self {
            kernel: KernelImage::open(kernel)?,
            initrd: initrd.map(Self::open_initrd).transpose()?,
            cmdline,
        })
    }

    /// Opens and checks an initrd alone.
    pub fn open_initrd(path: &Path) -> Result<InputFile, ImageError> {
        InputFile::open(path, "an initrd")
    }
}

/// How the first vCPU enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit boot protocol: long mode, identity-mapped.
    Long {
        /// First instruction.
        rip: u64,
        /// The zero page.
        boot_params: u64,
        /// Top-level page table.
        page_table: u64,
    },
    /// PVH: 32-bit protected mode without paging.
    Pvh {
        /// First instruction.
        rip: u64,
        /// struct hvm_start_info.
        start_info: u64,
    },
}

/// One entry of the memory map (e820 numbering).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// Where.
    pub range: AddressRange,
    /// [`MapEntry::RAM`] or [`MapEntry::RESERVED`].
    pub kind: u32,
}

impl MapEntry {
    /// Usable RAM.
    pub const RAM: u32 = 1;
    /// Not to be used by the guest.
    pub const RESERVED: u32 = 2;
}

/// The memory map of a guest whose RAM is `ram`: the BIOS area and ECAM are reserved.
pub fn memory_map(ram: &[AddressRange]) -> Vec<MapEntry> {
    let bios = layout::BIOS_AREA;
    let mut map = Vec::new();
    let mut push = |start, end, kind| {
        if end > start {
            let range = AddressRange::new(start, end);
            map.push(MapEntry { range, kind });
        }
    };
    for range in ram {
        push(range.start, range.end.min(bios.start), MapEntry::RAM);
        if range.start < bios.end && range.end > bios.start {
            push(bios.start, bios.end, MapEntry::RESERVED);
        }
        push(range.start.max(bios.end), range.end, MapEntry::RAM);
    }
    push(layout::ECAM.start, layout::ECAM.end, MapEntry::RESERVED);
    map.sort_by_key(|entry| entry.range.start);
    map
}

/// Loads kernel, initrd, command line and boot structures. `ram` are the ranges of `memory`,
/// ascending; `rsdp` is the guest-physical address of the ACPI tables' root.
pub fn load<M: GuestMemoryBackend>(
    memory: &M,
    ram: &[AddressRange],
    source: &mut BootSource,
    rsdp: u64,
) -> Result<Entry, BootError> {
    let low = ram.first().map_or(0, |range| range.end);
    let kernel = match &source.kernel {
        KernelImage::BzImage(image) => bzimage::load(memory, image, low)?,
        KernelImage::Elf(image) => pvh::load(memory, image, low)?,
    };
    write_cmdline(memory, &source.cmdline, kernel.cmdline_limit)?;
    reset::write_vector(memory)?;
    let initrd = match &mut source.initrd {
        Some(file) => Some(initrd::load(memory, file, &kernel, low)?),
        None => None,
    };
    let facts = BootFacts {
        cmdline: AddressRange::new(CMDLINE, CMDLINE + source.cmdline.len() as u64),
        initrd,
        map: memory_map(ram),
        rsdp,
    };
    match kernel.protocol {
        Protocol::Long { header, load } => bzimage::enter(memory, *header, load, &facts),
        Protocol::Pvh { entry } => pvh::enter(memory, entry, &facts),
    }
}

/// What both protocols tell the kernel.
struct BootFacts {
    cmdline: AddressRange,
    initrd: Option<AddressRange>,
    map: Vec<MapEntry>,
    rsdp: u64,
}

/// A kernel in guest memory.
struct LoadedKernel {
    /// First address behind what the kernel needs until it knows the memory map.
    end: u64,
    /// Highest address that the initrd's last byte may have.
    initrd_max: u64,
    /// Bytes that the command line may have without its NUL.
    cmdline_limit: u64,
    protocol: Protocol,
}

enum Protocol {
    Long {
        header: Box<linux_loader::bootparam::setup_header>,
        load: u64,
    },
    Pvh {
        entry: u64,
    },
}

fn write_cmdline<M: GuestMemoryBackend>(
    memory: &M,
    cmdline: &str,
    limit: u64,
) -> Result<(), BootError> {
    let len = cmdline.len() as u64;
    let limit = limit.min(CMDLINE_SPACE - 1);
    if len > limit {
        return Err(BootError::CmdlineTooLong { len, limit });
    }
    if cmdline.bytes().any(|byte| byte == 0) {
        return Err(BootError::CmdlineNul);
    }
    memory.write_slice(cmdline.as_bytes(), GuestAddress(CMDLINE))?;
    memory.write_obj(0u8, GuestAddress(CMDLINE + len))?;
    Ok(())
}

/// Reads `len` bytes of `file` from `offset` to `at`.
fn read_into<M: GuestMemoryBackend>(
    memory: &M,
    file: &File,
    what: &'static str,
    offset: u64,
    at: u64,
    len: u64,
) -> Result<(), BootError> {
    use std::io::{Seek, SeekFrom};
    let mut file = file;
    let failed = |source| BootError::Read { what, source };
    file.seek(SeekFrom::Start(offset))
        .map_err(|error| failed(vm_memory::GuestMemoryError::IOError(error)))?;
    memory
        .read_exact_volatile_from(GuestAddress(at), &mut file, len as usize)
        .map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::GIB;

    #[test]
    fn the_memory_map_reserves_the_bios_area_and_ecam() {
        let ram = [
            AddressRange::new(0, 3 * GIB),
            AddressRange::new(4 * GIB, 5 * GIB),
        ];
        let map: Vec<_> = memory_map(&ram)
            .iter()
            .map(|entry| (entry.range.start, entry.range.end, entry.kind))
            .collect();
        assert_eq!(
            map,
            [
                (0, 0xA_0000, MapEntry::RAM),
                (0xA_0000, 0x10_0000, MapEntry::RESERVED),
                (0x10_0000, 3 * GIB, MapEntry::RAM),
                (layout::ECAM.start, layout::ECAM.end, MapEntry::RESERVED),
                (4 * GIB, 5 * GIB, MapEntry::RAM),
            ]
        );
    }

    #[test]
    fn the_command_line_is_bounded_by_kernel_and_space() {
        let memory = testing::memory(MIB);
        assert!(write_cmdline(&memory, &"x".repeat(2047), 2047).is_ok());
        let error = write_cmdline(&memory, &"x".repeat(2048), 2047).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the kernel command line has 2048 bytes, this kernel takes at most 2047"
        );
        assert!(write_cmdline(&memory, &"x".repeat(0x1_0000), u64::MAX).is_err());
        assert!(write_cmdline(&memory, "a\0b", 2047).is_err());
    }
}
