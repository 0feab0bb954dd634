//! Is this file a kernel that can be booted? Pure checks, done before anything is loaded.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use linux_loader::bootparam::setup_header;
use vm_memory::ByteValued;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const EXPECTED_KERNEL: &str = "a Linux kernel (bzImage, or ELF with a PVH entry)";

/// Offset of the setup header in a bzImage.
const SETUP_HEADER: u64 = 0x1F1;
/// "HdrS", setup_header.header.
const HDRS: u32 = 0x5372_6448;
/// 0xAA55, setup_header.boot_flag.
const BOOT_FLAG: u16 = 0xAA55;
/// First protocol version with `xloadflags` (Linux 3.8).
const PROTOCOL_XLOADFLAGS: u16 = 0x020C;
/// xloadflags: the 64-bit entry at 0x200 exists.
const XLF_KERNEL_64: u16 = 1 << 0;
/// loadflags: protected-mode code is loaded at 1 MiB or above.
const LOADED_HIGH: u8 = 1 << 0;
const SECTOR: u64 = 512;

/// A file that cannot be used, with its name.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", path.display())]
pub struct ImageError {
    /// The file as the user named it.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: ImageProblem,
}

/// What is wrong with a kernel or initrd file.
#[derive(Debug)]
pub enum ImageProblem {
    /// It cannot be opened or read.
    Io(io::Error),
    /// It is a directory.
    Directory(&'static str),
    /// It is a pipe, a socket or a device: its length is not known.
    NotAFile(&'static str),
    /// It has no bytes.
    Empty(&'static str),
    /// It is something else; the text says what, where that is known.
    NotAKernel(&'static str),
    /// It ends early.
    Truncated {
        /// Bytes of the file.
        len: u64,
        /// Bytes that its header tells.
        needed: u64,
    },
    /// It is a kernel, but one that cannot be booted.
    Unsupported(&'static str),
}

impl ImageProblem {
    /// This user may not read the file.
    pub fn is_permission(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }
}

impl fmt::Display for ImageProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "cannot be read: {error}"),
            Self::Directory(expected) => write!(f, "is a directory; expected {expected}"),
            Self::NotAFile(expected) => {
                write!(f, "is a pipe or a device; expected a file with {expected}")
            }
            Self::Empty(expected) => write!(f, "is empty; expected {expected}"),
            Self::NotAKernel(what) => write!(f, "is {what}; expected {EXPECTED_KERNEL}"),
            Self::Truncated { len, needed } => write!(
                f,
                "is truncated: {len} bytes, its header tells at least {needed}; copy it again"
            ),
            Self::Unsupported(why) => f.write_str(why),
        }
    }
}

/// A regular file that holds something.
#[derive(Debug)]
pub struct InputFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl InputFile {
    /// Opens `path`, which the user meant to be `expected`.
    pub fn open(path: &Path, expected: &'static str) -> Result<Self, ImageError> {
        let failed = |problem| ImageError {
            path: path.to_owned(),
            problem,
        };
        let io_failed = |error| failed(ImageProblem::Io(error));
        let file = File::open(path).map_err(io_failed)?;
        let metadata = file.metadata().map_err(io_failed)?;
        if metadata.is_dir() {
            return Err(failed(ImageProblem::Directory(expected)));
        }
        if !metadata.is_file() {
            return Err(failed(ImageProblem::NotAFile(expected)));
        }
        if metadata.len() == 0 {
            return Err(failed(ImageProblem::Empty(expected)));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            len: metadata.len(),
        })
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Bytes; not 0.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Always false: an empty file is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn error(&self, problem: ImageProblem) -> ImageError {
        ImageError {
            path: self.path.clone(),
            problem,
        }
    }

    /// Reads `buffer` from `offset`; a file that ends before is truncated.
    fn read(&self, buffer: &mut [u8], offset: u64) -> Result<(), ImageError> {
        let needed = offset.saturating_add(buffer.len() as u64);
        if needed > self.len {
            let len = self.len;
            return Err(self.error(ImageProblem::Truncated { len, needed }));
        }
        self.file
            .read_exact_at(buffer, offset)
            .map_err(|error| self.error(ImageProblem::Io(error)))
    }
}

/// A kernel that passed the checks.
#[derive(Debug)]
pub enum KernelImage {
    /// Compressed image with a setup header.
    BzImage(BzImage),
    /// Uncompressed kernel with a PVH entry.
    Elf(ElfImage),
}

/// A checked bzImage.
#[derive(Debug)]
pub struct BzImage {
    /// The file.
    pub file: InputFile,
    /// Its setup header.
    pub header: setup_header,
    /// Offset of the protected-mode kernel.
    pub kernel_offset: u64,
}

/// A checked ELF kernel.
#[derive(Debug)]
pub struct ElfImage {
    /// The file.
    pub file: InputFile,
    /// First address behind all segments in memory.
    pub end: u64,
}

impl KernelImage {
    /// Opens and checks `path`.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let file = InputFile::open(path, EXPECTED_KERNEL)?;
        let mut magic = [0; 4];
        file.read(&mut magic[..4.min(file.len as usize)], 0)?;
        if magic == *b"\x7fELF" {
            return check_elf(file).map(Self::Elf);
        }
        check_bzimage(file, magic).map(Self::BzImage)
    }
}

fn check_bzimage(file: InputFile, magic: [u8; 4]) -> Result<BzImage, ImageError> {
    let mut header = setup_header::default();
    let header_end = SETUP_HEADER + size_of::<setup_header>() as u64;
    if file.len < header_end {
        return Err(file.error(ImageProblem::NotAKernel(describe(magic))));
    }
    file.read(header.as_mut_slice(), SETUP_HEADER)?;
    if header.boot_flag != BOOT_FLAG || header.header != HDRS {
        return Err(file.error(ImageProblem::NotAKernel(describe(magic))));
    }
    let unsupported = if header.version < PROTOCOL_XLOADFLAGS {
        Some("is a kernel older than Linux 3.8, whose boot protocol has no 64-bit entry")
    } else if header.loadflags & LOADED_HIGH == 0 {
        Some("is a zImage, which cannot be booted; expected a bzImage")
    } else if header.xloadflags & XLF_KERNEL_64 == 0 {
        Some("is a 32-bit kernel; expected an x86-64 one")
    } else if header.relocatable_kernel == 0 {
        Some("is not relocatable (CONFIG_RELOCATABLE), which its 64-bit entry needs")
    } else {
        None
    };
    if let Some(why) = unsupported {
        return Err(file.error(ImageProblem::Unsupported(why)));
    }
    // 0 stands for 4, for the sake of very old boot loaders.
    let setup_sectors = match header.setup_sects {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let kernel_offset = (setup_sectors + 1) * SECTOR;
    // syssize counts 16-byte paragraphs of the protected-mode kernel.
    let needed = kernel_offset + u64::from(header.syssize) * 16;
    if file.len < needed || header.syssize == 0 {
        let (len, needed) = (file.len, needed.max(kernel_offset + 1));
        return Err(file.error(ImageProblem::Truncated { len, needed }));
    }
    Ok(BzImage {
        file,
        header,
        kernel_offset,
    })
}

/// What a file that is no kernel is, by its first bytes.
fn describe(magic: [u8; 4]) -> &'static str {
    match magic {
        [0x1f, 0x8b, ..] => "a gzip file, not a kernel (perhaps an initrd)",
        [0xfd, b'7', b'z', b'X'] => "an xz file, not a kernel",
        [0x28, 0xb5, 0x2f, 0xfd] => "a zstd file, not a kernel (perhaps an initrd)",
        [b'0', b'7', b'0', b'7'] => "a cpio archive, not a kernel (perhaps an initrd)",
        [b'!', b'<', b'a', b'r'] => "a Debian package or static library, not a kernel",
        [b'#', b'!', ..] => "a script, not a kernel",
        _ => "not a kernel",
    }
}

/// ELF64 file header (System V ABI, 4).
#[repr(C)]
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct ElfHeader {
    magic: [u8; 4],
    class: u8,
    data: u8,
    ident: [u8; 10],
    kind: u16,
    machine: u16,
    version: u32,
    entry: u64,
    program_headers: u64,
    section_headers: u64,
    flags: u32,
    header_size: u16,
    program_header_size: u16,
    program_header_count: u16,
    section_header_size: u16,
    section_header_count: u16,
    names: u16,
}

/// ELF64 program header.
#[repr(C)]
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: u64,
    virtual_address: u64,
    physical_address: u64,
    file_size: u64,
    memory_size: u64,
    alignment: u64,
}

const _: () = assert!(size_of::<ElfHeader>() == 64);
const _: () = assert!(size_of::<ProgramHeader>() == 56);

const ELF_CLASS_64: u8 = 2;
const ELF_LITTLE_ENDIAN: u8 = 1;
const ELF_EXECUTABLE: u16 = 2;
const ELF_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;

fn check_elf(file: InputFile) -> Result<ElfImage, ImageError> {
    let mut header = ElfHeader::default();
    file.read(header.as_mut_bytes(), 0)?;
    let unsupported = if header.class != ELF_CLASS_64 || header.data != ELF_LITTLE_ENDIAN {
        Some("is not a 64-bit little-endian ELF file; expected an x86-64 kernel")
    } else if header.machine != ELF_X86_64 {
        Some("is an ELF file for another processor; expected an x86-64 kernel")
    } else if header.kind != ELF_EXECUTABLE {
        Some("is an ELF file, but not a kernel (not statically linked); expected vmlinux")
    } else if usize::from(header.program_header_size) != size_of::<ProgramHeader>()
        || header.program_header_count == 0
    {
        Some("is an ELF file without segments; expected vmlinux")
    } else {
        None
    };
    if let Some(why) = unsupported {
        return Err(file.error(ImageProblem::Unsupported(why)));
    }
    let mut end = 0;
    for index in 0..u64::from(header.program_header_count) {
        let mut segment = ProgramHeader::default();
        let at = header
            .program_headers
            .saturating_add(index * size_of::<ProgramHeader>() as u64);
        file.read(segment.as_mut_bytes(), at)?;
        let needed = segment.offset.saturating_add(segment.file_size);
        if needed > file.len {
            let len = file.len;
            return Err(file.error(ImageProblem::Truncated { len, needed }));
        }
        if segment.kind == SEGMENT_LOAD {
            end = end.max(segment.physical_address.saturating_add(segment.memory_size));
        }
    }
    Ok(ElfImage { file, end })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::testing::{self, TempFile};

    fn message(bytes: &[u8]) -> String {
        let file = TempFile::new(bytes);
        let error = KernelImage::open(file.path()).unwrap_err().to_string();
        let name = format!("{}: ", file.path().display());
        assert!(error.starts_with(&name), "{error} names the file");
        error[name.len()..].to_owned()
    }

    #[test]
    fn a_good_bzimage_passes_also_with_a_signature_behind_it() {
        let mut bytes = testing::bzimage();
        assert!(KernelImage::open(TempFile::new(&bytes).path()).is_ok());
        bytes.extend_from_slice(&[0; 1500]);
        assert!(KernelImage::open(TempFile::new(&bytes).path()).is_ok());
    }

    #[test]
    fn an_empty_file_is_refused() {
        assert_eq!(
            message(b""),
            format!("is empty; expected {EXPECTED_KERNEL}")
        );
    }

    #[test]
    fn a_directory_is_refused() {
        let error = KernelImage::open(Path::new("/")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("/: is a directory; expected {EXPECTED_KERNEL}")
        );
    }

    #[test]
    fn what_has_no_length_is_refused() {
        let error = KernelImage::open(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("/dev/zero: is a pipe or a device; expected a file with {EXPECTED_KERNEL}")
        );
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = KernelImage::open(Path::new("/nowhere/vmlinuz")).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("/nowhere/vmlinuz: cannot be read: No such file")
        );
    }

    #[test]
    fn other_files_are_said_to_be_what_they_are() {
        assert!(message(b"x").starts_with("is not a kernel; expected"));
        assert!(message(&[0; 4096]).starts_with("is not a kernel; expected"));
        assert!(message(&[0x1f, 0x8b, 8, 0, 0]).contains("gzip"));
    }

    #[test]
    fn a_bzimage_cut_anywhere_is_refused() {
        let whole = testing::bzimage();
        for len in [0x1f1, 0x202, 0x280, 2048, whole.len() / 2, whole.len() - 1] {
            let error = message(&whole[..len]);
            assert!(
                error.contains("truncated") || error.contains("is not a kernel"),
                "{len}: {error}"
            );
        }
    }

    #[test]
    fn a_32bit_or_ancient_bzimage_is_refused() {
        let mut bytes = testing::bzimage();
        bytes[0x236] = 0;
        assert!(message(&bytes).contains("32-bit kernel"));
        let mut bytes = testing::bzimage();
        bytes[0x206] = 0x0a;
        assert!(message(&bytes).contains("older than Linux 3.8"));
    }

    #[test]
    fn an_elf_kernel_cut_anywhere_is_refused() {
        let whole = testing::elf();
        assert!(KernelImage::open(TempFile::new(&whole).path()).is_ok());
        for len in [5, 63, 64, 100, whole.len() - 1] {
            assert!(message(&whole[..len]).contains("truncated"), "{len}");
        }
    }

    #[test]
    fn an_elf_program_is_not_a_kernel() {
        let mut bytes = testing::elf();
        bytes[16] = 3;
        assert!(message(&bytes).contains("not a kernel"));
        let mut bytes = testing::elf();
        bytes[18] = 183;
        assert!(message(&bytes).contains("another processor"));
    }

    #[test]
    fn an_initrd_must_exist_and_hold_something() {
        let missing = InputFile::open(Path::new("/nowhere/initrd"), "an initrd").unwrap_err();
        assert!(missing.to_string().starts_with("/nowhere/initrd: "));
        let empty = TempFile::new(b"");
        let error = InputFile::open(empty.path(), "an initrd").unwrap_err();
        assert!(error.to_string().ends_with("is empty; expected an initrd"));
    }
}
