//! A BIOS in ten bytes: what a kernel finds that jumps to the reset vector to restart the machine.
//!
//! Linux does so on hardware-reduced ACPI: it prefers EFI's reset there, which we do not have, and
//! then the BIOS (arch/x86/kernel/reboot.c, `reboot_init` and `BOOT_EFI`); the ACPI reset register
//! is not tried.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use crate::layout::{RESET, RESET_VALUE, RESET_VECTOR};

/// 16-bit code that writes the ACPI reset register.
const CODE: [u8; 10] = [
    0xBA,
    RESET as u8,
    (RESET >> 8) as u8, // mov dx, RESET
    0xB0,
    RESET_VALUE, // mov al, RESET_VALUE
    0xEE,        // out dx, al
    0xFA,        // cli
    0xF4,        // hlt
    0xEB,
    0xFD, // jmp to the hlt
];

/// Writes the code to [`RESET_VECTOR`].
pub(super) fn write_vector<M: GuestMemoryBackend>(memory: &M) -> Result<(), GuestMemoryError> {
    memory.write_slice(&CODE, GuestAddress(RESET_VECTOR))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing;
    use crate::layout::{ACPI_AREA, MIB};

    #[test]
    fn the_vector_is_behind_the_tables_and_fits_below_1_mib() {
        let memory = testing::memory(MIB);
        write_vector(&memory).unwrap();
        let first: u8 = memory.read_obj(GuestAddress(ACPI_AREA.end)).unwrap();
        assert_eq!(first, 0xBA);
        assert!(RESET_VECTOR + CODE.len() as u64 <= MIB);
    }
}
