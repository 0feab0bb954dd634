//! Where the initrd goes: as high as the kernel allows, above all that the kernel needs while it
//! unpacks itself (`init_size`).

use vm_memory::GuestMemoryBackend;

use super::{BootError, InputFile, LoadedKernel, read_into};
use crate::layout::AddressRange;

const PAGE: u64 = 4096;

pub(super) fn load<M: GuestMemoryBackend>(
    memory: &M,
    file: &InputFile,
    kernel: &LoadedKernel,
    low: u64,
) -> Result<AddressRange, BootError> {
    let range = place(file.len(), kernel.end, kernel.initrd_max, low)?;
    read_into(
        memory,
        file.file(),
        "the initrd",
        0,
        range.start,
        range.len(),
    )?;
    Ok(range)
}

/// `kernel_end`: first address behind the kernel; `max`: highest address that the last byte may
/// have; `low`: end of the RAM that begins at 0.
fn place(len: u64, kernel_end: u64, max: u64, low: u64) -> Result<AddressRange, BootError> {
    let end = low.min(max.saturating_add(1));
    let lowest = kernel_end.next_multiple_of(PAGE);
    let refused = BootError::InitrdDoesNotFit {
        len,
        space: AddressRange::new(lowest, end.max(lowest)),
        limited_by_ram: low <= max,
    };
    let Some(start) = end.checked_sub(len) else {
        return Err(refused);
    };
    let start = start / PAGE * PAGE;
    if start < lowest {
        return Err(refused);
    }
    Ok(AddressRange::new(start, start + len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{GIB, MIB};

    #[test]
    fn an_initrd_stays_below_the_kernels_limit() {
        let range = place(10 * MIB, 64 * MIB, 0x7fff_ffff, 3 * GIB).unwrap();
        assert_eq!(range.end, 2 * GIB);
    }

    #[test]
    fn an_initrd_stays_above_the_kernel() {
        let range = place(MIB, 3 * MIB + 1, u64::MAX, 5 * MIB).unwrap();
        assert_eq!(range.start, 4 * MIB);
        assert!(place(2 * MIB, 3 * MIB + 1, u64::MAX, 5 * MIB).is_err());
    }

    #[test]
    fn more_ram_is_advised_only_where_it_helps() {
        let by_ram = place(GIB, MIB, 0x7fff_ffff, 512 * MIB).unwrap_err();
        assert!(by_ram.to_string().contains("--memory"));
        let by_kernel = place(3 * GIB, MIB, 0x7fff_ffff, 3 * GIB).unwrap_err();
        assert!(!by_kernel.to_string().contains("--memory"));
    }
}
