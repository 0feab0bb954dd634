//! bzImage by the 64-bit boot protocol.

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::image::BzImage;
use super::{BootError, BootFacts, Entry, LoadedKernel, Protocol, ZERO_PAGE, paging, read_into};
use crate::layout::AddressRange;

/// The 64-bit entry, relative to where the protected-mode kernel was loaded.
const ENTRY_64: u64 = 0x200;
/// type_of_loader: a boot loader without an assigned number.
const LOADER_UNDEFINED: u8 = 0xFF;
/// e820 entries that the zero page holds.
const E820_MAX: usize = 128;

/// Loads the protected-mode kernel at its preferred address. Until it knows the memory map it uses
/// `init_size` bytes from there, so these must be RAM.
pub(super) fn load<M: GuestMemoryBackend>(
    memory: &M,
    image: &BzImage,
    low: u64,
) -> Result<LoadedKernel, BootError> {
    let header = image.header;
    let start = header.pref_address;
    let len = image.file.len() - image.kernel_offset;
    let needed = start.saturating_add(u64::from(header.init_size).max(len));
    if needed > low {
        let needed = AddressRange::new(start, needed);
        return Err(BootError::KernelDoesNotFit { needed, low });
    }
    let file = image.file.file();
    read_into(memory, file, "the kernel", image.kernel_offset, start, len)?;
    Ok(LoadedKernel {
        end: needed,
        initrd_max: header.initrd_addr_max.into(),
        cmdline_limit: header.cmdline_size.into(),
        protocol: Protocol::Long {
            header: Box::new(header),
            load: start,
        },
    })
}

/// Writes the zero page, the page tables and the GDT.
pub(super) fn enter<M: GuestMemoryBackend>(
    memory: &M,
    header: setup_header,
    load: u64,
    facts: &BootFacts,
) -> Result<Entry, BootError> {
    let mut params = boot_params {
        hdr: header,
        acpi_rsdp_addr: facts.rsdp,
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.code32_start = load as u32;
    params.hdr.cmd_line_ptr = facts.cmdline.start as u32;
    if let Some(initrd) = facts.initrd {
        // Below 4 GiB: initrd_addr_max has 32 bits.
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = initrd.len() as u32;
    }
    if facts.map.len() > E820_MAX {
        return Err(BootError::TooManyRanges(facts.map.len()));
    }
    for (entry, slot) in facts.map.iter().zip(params.e820_table.iter_mut()) {
        *slot = boot_e820_entry {
            addr: entry.range.start,
            size: entry.range.len(),
            r#type: entry.kind,
        };
    }
    params.e820_entries = facts.map.len() as u8;
    memory.write_obj(params, GuestAddress(ZERO_PAGE))?;
    let page_table = paging::identity_map(memory)?;
    paging::write_gdt(memory)?;
    Ok(Entry::Long {
        rip: load + ENTRY_64,
        boot_params: ZERO_PAGE,
        page_table,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing::{self, TempFile};
    use crate::boot::{self, BootSource};
    use crate::layout::MIB;

    fn source(cmdline: &str, initrd: Option<&TempFile>) -> (TempFile, BootSource) {
        let kernel = TempFile::new(&testing::bzimage());
        let initrd = initrd.map(TempFile::path);
        let source = BootSource::open(kernel.path(), initrd, cmdline.into()).unwrap();
        (kernel, source)
    }

    #[test]
    fn the_zero_page_tells_what_was_loaded() {
        let memory = testing::memory(16 * MIB);
        let ram = [AddressRange::new(0, 16 * MIB)];
        let initrd = TempFile::new(&[7; 5000]);
        let (_kernel, mut source) = source("console=ttyS0", Some(&initrd));
        let entry = boot::load(&memory, &ram, &mut source, 0xE_0000).unwrap();
        let Entry::Long {
            rip, boot_params, ..
        } = entry
        else {
            panic!("{entry:?}")
        };
        assert_eq!(rip, 0x10_0200);
        let params: boot_params = memory.read_obj(GuestAddress(boot_params)).unwrap();
        assert_eq!({ params.acpi_rsdp_addr }, 0xE_0000);
        assert_eq!(params.e820_entries, 4);
        let image = { params.hdr.ramdisk_image };
        assert_eq!({ params.hdr.ramdisk_size }, 5000);
        // As high as RAM goes, on a page.
        assert_eq!(u64::from(image), 16 * MIB - 8192);
        let last: u8 = memory
            .read_obj(GuestAddress(u64::from(image) + 4999))
            .unwrap();
        assert_eq!(last, 7);
        let cmdline = { params.hdr.cmd_line_ptr };
        let mut text = [0; 14];
        memory
            .read_slice(&mut text, GuestAddress(cmdline.into()))
            .unwrap();
        assert_eq!(&text, b"console=ttyS0\0");
        let code: u8 = memory.read_obj(GuestAddress(0x10_0000)).unwrap();
        assert_eq!(code, 0x90);
    }

    #[test]
    fn ram_below_what_the_kernel_needs_is_refused_with_the_size_to_give() {
        let memory = testing::memory(2 * MIB);
        let ram = [AddressRange::new(0, 2 * MIB)];
        let (_kernel, mut source) = source("", None);
        let error = boot::load(&memory, &ram, &mut source, 0).unwrap_err();
        assert!(
            error.to_string().contains("at least 3 MiB with --memory"),
            "{error}"
        );
    }

    #[test]
    fn an_initrd_that_reaches_into_the_kernel_is_refused() {
        let memory = testing::memory(4 * MIB);
        let ram = [AddressRange::new(0, 4 * MIB)];
        let initrd = TempFile::new(&vec![1; 2 * MIB as usize]);
        let (_kernel, mut source) = source("", Some(&initrd));
        let error = boot::load(&memory, &ram, &mut source, 0).unwrap_err();
        assert!(
            error.to_string().contains("initrd of 2 MiB does not fit"),
            "{error}"
        );
    }
}
