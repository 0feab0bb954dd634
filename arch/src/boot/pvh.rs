//! ELF kernels by PVH: 32-bit protected mode without paging, EBX at `struct hvm_start_info`.

use linux_loader::loader::KernelLoader;
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::image::{ElfImage, ImageError, ImageProblem};
use super::{BootError, BootFacts, Entry, LoadedKernel, PVH_INFO, Protocol, ZERO_PAGE, paging};
use crate::layout::AddressRange;

/// XEN_HVM_START_MAGIC_VALUE.
const MAGIC: u32 = 0x336e_c578;
/// First version with a memory map.
const VERSION: u32 = 1;
/// Linux's COMMAND_LINE_SIZE on x86; PVH itself tells no limit.
const CMDLINE_LIMIT: u64 = 2047;
/// An ELF kernel states no limit for the initrd; Linux takes it anywhere below 4 GiB.
const INITRD_MAX: u64 = u32::MAX as u64;
/// Map entries between the module list and the zero page's address.
const MAP_MAX: usize = 128;

const MODULE_LIST: u64 = PVH_INFO + size_of::<hvm_start_info>() as u64;
const MEMORY_MAP: u64 = MODULE_LIST + size_of::<hvm_modlist_entry>() as u64;

const _: () =
    assert!(MEMORY_MAP + (MAP_MAX * size_of::<hvm_memmap_table_entry>()) as u64 <= ZERO_PAGE);

/// Loads the segments at their physical addresses.
pub(super) fn load<M: GuestMemoryBackend>(
    memory: &M,
    image: &ElfImage,
    low: u64,
) -> Result<LoadedKernel, BootError> {
    if image.end > low {
        let needed = AddressRange::new(0, image.end);
        return Err(BootError::KernelDoesNotFit { needed, low });
    }
    let mut file = image.file.file();
    let loaded = Elf::load(memory, None, &mut file, None).map_err(BootError::Load)?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err(no_entry(image).into());
    };
    Ok(LoadedKernel {
        end: image.end,
        initrd_max: INITRD_MAX,
        cmdline_limit: CMDLINE_LIMIT,
        protocol: Protocol::Pvh { entry: entry.0 },
    })
}

fn no_entry(image: &ElfImage) -> ImageError {
    image.file.error(ImageProblem::Unsupported(
        "is an ELF file without a PVH entry (a kernel built without CONFIG_PVH, or no kernel); \
         use the bzImage",
    ))
}

/// Writes start information, module list and memory map.
pub(super) fn enter<M: GuestMemoryBackend>(
    memory: &M,
    entry: u64,
    facts: &BootFacts,
) -> Result<Entry, BootError> {
    if facts.map.len() > MAP_MAX {
        return Err(BootError::TooManyRanges(facts.map.len()));
    }
    for (index, piece) in facts.map.iter().enumerate() {
        let at = MEMORY_MAP + (index * size_of::<hvm_memmap_table_entry>()) as u64;
        let entry = hvm_memmap_table_entry {
            addr: piece.range.start,
            size: piece.range.len(),
            type_: piece.kind,
            reserved: 0,
        };
        memory.write_obj(entry, GuestAddress(at))?;
    }
    let mut info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        cmdline_paddr: facts.cmdline.start,
        rsdp_paddr: facts.rsdp,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: facts.map.len() as u32,
        ..Default::default()
    };
    if let Some(initrd) = facts.initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.len(),
            ..Default::default()
        };
        memory.write_obj(module, GuestAddress(MODULE_LIST))?;
        info.nr_modules = 1;
        info.modlist_paddr = MODULE_LIST;
    }
    memory.write_obj(info, GuestAddress(PVH_INFO))?;
    paging::write_gdt(memory)?;
    Ok(Entry::Pvh {
        rip: entry,
        start_info: PVH_INFO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing::{self, TempFile};
    use crate::boot::{self, BootSource};
    use crate::layout::MIB;

    #[test]
    fn an_elf_kernel_is_entered_at_its_pvh_note() {
        let memory = testing::memory(16 * MIB);
        let ram = [AddressRange::new(0, 16 * MIB)];
        let kernel = TempFile::new(&testing::elf());
        let initrd = TempFile::new(&[1; 100]);
        let mut source =
            BootSource::open(kernel.path(), Some(initrd.path()), "quiet".into()).unwrap();
        let entry = boot::load(&memory, &ram, &mut source, 0xE_0000).unwrap();
        let expected = Entry::Pvh {
            rip: 0x10_0008,
            start_info: PVH_INFO,
        };
        assert_eq!(entry, expected);
        let info: hvm_start_info = memory.read_obj(GuestAddress(PVH_INFO)).unwrap();
        assert_eq!((info.magic, info.nr_modules), (MAGIC, 1));
        assert_eq!(info.rsdp_paddr, 0xE_0000);
        let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
        assert_eq!(module.size, 100);
    }

    #[test]
    fn an_elf_kernel_without_the_note_is_refused_by_name() {
        let memory = testing::memory(16 * MIB);
        let ram = [AddressRange::new(0, 16 * MIB)];
        let mut bytes = testing::elf();
        bytes[184] = 17;
        let kernel = TempFile::new(&bytes);
        let mut source = BootSource::open(kernel.path(), None, String::new()).unwrap();
        let error = boot::load(&memory, &ram, &mut source, 0).unwrap_err();
        assert!(error.to_string().contains("without a PVH entry"), "{error}");
    }
}
