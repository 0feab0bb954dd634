//! GDT and identity page tables of the 64-bit entry (boot.rst, "64-bit Boot Protocol": kernel,
//! zero page and command line must be identity-mapped, selectors 0x10 and 0x18 flat).

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use super::{GDT, PAGE_TABLES};
use crate::regs::segments;

const PAGE: u64 = 4096;
const ENTRIES: u64 = 512;
/// Page-table entry: present and writable.
const PRESENT_WRITABLE: u64 = 0b11;
/// Page-directory entry that maps 2 MiB itself.
const LARGE: u64 = 1 << 7;
/// GiB that are mapped: all that a 32-bit boot loader could have used.
const MAPPED_GIB: u64 = 4;

/// Maps the first 4 GiB to themselves in 2 MiB pages; returns the top-level table's address.
pub(super) fn identity_map<M: GuestMemoryBackend>(memory: &M) -> Result<u64, GuestMemoryError> {
    let top = PAGE_TABLES;
    let pointers = top + PAGE;
    let directories = pointers + PAGE;
    memory.write_obj(pointers | PRESENT_WRITABLE, GuestAddress(top))?;
    for gib in 0..MAPPED_GIB {
        let directory = directories + gib * PAGE;
        memory.write_obj(
            directory | PRESENT_WRITABLE,
            GuestAddress(pointers + gib * 8),
        )?;
        let mut entries = Vec::with_capacity(PAGE as usize);
        for index in 0..ENTRIES {
            let address = (gib * ENTRIES + index) << 21;
            entries.extend_from_slice(&(address | LARGE | PRESENT_WRITABLE).to_le_bytes());
        }
        memory.write_slice(&entries, GuestAddress(directory))?;
    }
    Ok(top)
}

/// Writes the descriptors that [`segments`] describes.
pub(super) fn write_gdt<M: GuestMemoryBackend>(memory: &M) -> Result<(), GuestMemoryError> {
    for (index, entry) in segments::GDT_ENTRIES.iter().enumerate() {
        memory.write_obj(*entry, GuestAddress(GDT + index as u64 * 8))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing;
    use crate::layout::MIB;

    #[test]
    fn addresses_below_4_gib_map_to_themselves() {
        let memory = testing::memory(MIB);
        let top = identity_map(&memory).unwrap();
        let read = |at: u64| -> u64 { memory.read_obj(GuestAddress(at)).unwrap() };
        for address in [0u64, 0x12_3456, 0x7654_3210, 0xFFFF_FFFF] {
            let pointers = read(top + (address >> 39) * 8) & !0xFFF;
            let directory = read(pointers + (address >> 30 & 511) * 8) & !0xFFF;
            let entry = read(directory + (address >> 21 & 511) * 8);
            assert_eq!(entry & !0x1F_FFFF, address & !0x1F_FFFF);
            assert_eq!(entry & 0x1FF, LARGE | PRESENT_WRITABLE);
        }
    }
}
