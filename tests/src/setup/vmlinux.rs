//! Takes the ELF kernel out of a boot image.
//!
//! The emulated host boots it by PVH, which spares the emulator the decompression: more than two seconds.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::Error;

/// Offsets in the header of a boot image; see Documentation/arch/x86/boot.rst of the kernel.
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: usize = 0x202;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z'];
/// The kernel's build appends the size to the payload.
const SIZE: usize = 4;

/// Writes the kernel of `image` to `target`.
pub fn extract(image: &Path, target: &Path) -> Result<(), Error> {
    let bytes = fs::read(image).map_err(Error::file("read", image))?;
    let lacks = |what: &str| Error::KernelLacks {
        kernel: image.display().to_string(),
        what: what.to_owned(),
    };
    let payload = payload(&bytes).ok_or_else(|| lacks("payload"))?;
    let (program, arguments) = if payload.starts_with(ZSTD) {
        ("zstd", ["-dc"].as_slice())
    } else if payload.starts_with(XZ) {
        ("xz", ["-dc", "--single-stream"].as_slice())
    } else {
        return Err(lacks("payload compressed with xz or zstd"));
    };
    decompress(program, arguments, payload, target)
}

/// The compressed kernel in a boot image.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let dword = |at: usize| {
        let bytes = image.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    if image.get(MAGIC..)?.get(..4)? != b"HdrS" {
        return None;
    }
    // Zero stands for four, for the sake of very old kernels.
    let sectors = match *image.get(SETUP_SECTORS)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1) * SECTOR + dword(PAYLOAD_OFFSET)?;
    let length = dword(PAYLOAD_LENGTH)?.checked_sub(SIZE)?;
    image.get(start..start.checked_add(length)?)
}

fn decompress(
    program: &str,
    arguments: &[&str],
    payload: &[u8],
    target: &Path,
) -> Result<(), Error> {
    let output = fs::File::create(target).map_err(Error::file("create", target))?;
    let start = |source| Error::Start {
        program: program.to_owned(),
        source,
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(output)
        .spawn()
        .map_err(start)?;
    // A write that fails is a program that failed, which its status tells.
    let _ = child.stdin.take().map(|mut input| input.write_all(payload));
    let status = child.wait().map_err(start)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program {
        program: program.to_owned(),
        status,
        output: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_payload_lies_behind_the_setup_code() {
        let mut image = vec![0; 4 * SECTOR];
        image[SETUP_SECTORS] = 1;
        image[MAGIC..MAGIC + 4].copy_from_slice(b"HdrS");
        image[PAYLOAD_OFFSET] = 16;
        image[PAYLOAD_LENGTH] = 9;
        image[2 * SECTOR + 16..2 * SECTOR + 21].copy_from_slice(b"hello");
        assert_eq!(payload(&image), Some(b"hello".as_slice()));
        image[PAYLOAD_LENGTH + 2] = 1;
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"no kernel"), None);
    }
}
