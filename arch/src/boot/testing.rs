//! Files and memory for the tests of this module.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use vm_memory::{GuestAddress, GuestMemoryMmap};

/// A file that goes away with its handle.
pub struct TempFile(PathBuf);

impl TempFile {
    pub fn new(bytes: &[u8]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("mini-vmm-arch-{}-{id}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Guest RAM from 0.
pub fn memory(len: u64) -> GuestMemoryMmap {
    GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap()
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// A bzImage of one setup sector and 4 KiB of kernel that wants 2 MiB at 1 MiB.
pub fn bzimage() -> Vec<u8> {
    let mut bytes = vec![0x90; 1024 + 4096];
    bytes[..1024].fill(0);
    bytes[0x1f1] = 1;
    put(&mut bytes, 0x1f4, &(4096u32 / 16).to_le_bytes());
    put(&mut bytes, 0x1fe, &0xAA55u16.to_le_bytes());
    put(&mut bytes, 0x202, b"HdrS");
    put(&mut bytes, 0x206, &0x020fu16.to_le_bytes());
    bytes[0x211] = 1;
    put(&mut bytes, 0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(&mut bytes, 0x230, &0x20_0000u32.to_le_bytes());
    bytes[0x234] = 1;
    put(&mut bytes, 0x236, &1u16.to_le_bytes());
    put(&mut bytes, 0x238, &2047u32.to_le_bytes());
    put(&mut bytes, 0x258, &0x10_0000u64.to_le_bytes());
    put(&mut bytes, 0x260, &0x20_0000u32.to_le_bytes());
    bytes
}

/// An ELF kernel: one segment of 16 bytes at 1 MiB and a PVH note with entry 0x10_0008.
pub fn elf() -> Vec<u8> {
    let mut bytes = vec![0; 64 + 2 * 56 + 20 + 16];
    put(&mut bytes, 0, b"\x7fELF\x02\x01\x01");
    put(&mut bytes, 16, &2u16.to_le_bytes());
    put(&mut bytes, 18, &62u16.to_le_bytes());
    put(&mut bytes, 24, &0x10_0000u64.to_le_bytes());
    put(&mut bytes, 32, &64u64.to_le_bytes());
    put(&mut bytes, 54, &56u16.to_le_bytes());
    put(&mut bytes, 56, &2u16.to_le_bytes());
    let (note, load) = (64, 64 + 56);
    put(&mut bytes, note, &4u32.to_le_bytes());
    put(&mut bytes, note + 8, &176u64.to_le_bytes());
    put(&mut bytes, note + 32, &20u64.to_le_bytes());
    put(&mut bytes, load, &1u32.to_le_bytes());
    put(&mut bytes, load + 8, &196u64.to_le_bytes());
    put(&mut bytes, load + 24, &0x10_0000u64.to_le_bytes());
    put(&mut bytes, load + 32, &16u64.to_le_bytes());
    put(&mut bytes, load + 40, &0x1000u64.to_le_bytes());
    put(&mut bytes, 176, &4u32.to_le_bytes());
    put(&mut bytes, 180, &4u32.to_le_bytes());
    put(&mut bytes, 184, &18u32.to_le_bytes());
    put(&mut bytes, 188, b"Xen\0");
    put(&mut bytes, 192, &0x10_0008u32.to_le_bytes());
    bytes[196..].fill(0xf4);
    bytes
}
