//! Device memory and RAM, one page at a time.
//!
//! One of two places of the probe that need `unsafe`: the kernel offers BARs only for mapping.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};

use crate::args::{self, Args};
use crate::error::Error;
use crate::pci::Device;

/// The granule of every mapping.
pub const PAGE: u64 = 4096;

/// One mapped page of a file.
pub struct Page {
    base: NonNull<u8>,
    what: String,
}

// SAFETY: a shared mapping of the whole process, accessed by volatile reads and writes only.
unsafe impl Send for Page {}
// SAFETY: as for `Send`; what two threads write at once is the device's business.
unsafe impl Sync for Page {}

impl Page {
    /// Maps the page of `path` that holds `offset`, for reading and writing.
    pub fn of_file(path: &Path, offset: u64) -> Result<Self, Error> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(error("open", path))?;
        Self::map(&file, path, offset & !(PAGE - 1))
    }

    /// Maps the page at `start` of an open file; `path` is its name in messages.
    pub fn map(file: &File, path: &Path, start: u64) -> Result<Self, Error> {
        // SAFETY: a fresh shared mapping of one page at an address that the kernel chooses; no Rust object lives there.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                start,
            )
        };
        let base = base.map_err(|errno| error("map", path)(errno.into()))?;
        let what = format!("{} at {start:#x}", path.display());
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, what }),
            None => Err(Error::Device(format!("{what} was mapped at address 0"))),
        }
    }

    fn at(&self, offset: u64, width: u64) -> Result<NonNull<u8>, Error> {
        let inside = offset & (PAGE - 1);
        if inside + width > PAGE || !inside.is_multiple_of(width) {
            return Err(Error::Range {
                what: self.what.clone(),
                offset,
                width,
            });
        }
        // SAFETY: `inside + width` was just found to lie within the one page that is mapped.
        Ok(unsafe { self.base.add(inside as usize) })
    }

    /// Reads at the page offset of `offset`, with one access of that width.
    pub fn read(&self, offset: u64, width: u64) -> Result<u64, Error> {
        let at = self.at(offset, width)?;
        // SAFETY: `at` is inside the mapping and aligned to `width`, which `at()` checked.
        Ok(unsafe {
            match width {
                1 => at.read_volatile().into(),
                2 => at.cast::<u16>().read_volatile().into(),
                4 => at.cast::<u32>().read_volatile().into(),
                _ => at.cast::<u64>().read_volatile(),
            }
        })
    }

    /// Writes at the page offset of `offset`, with one access of that width.
    pub fn write(&self, offset: u64, width: u64, value: u64) -> Result<(), Error> {
        let at = self.at(offset, width)?;
        // SAFETY: as for `read`; the device's memory belongs to no Rust object.
        unsafe {
            match width {
                1 => at.write_volatile(value as u8),
                2 => at.cast::<u16>().write_volatile(value as u16),
                4 => at.cast::<u32>().write_volatile(value as u32),
                _ => at.cast::<u64>().write_volatile(value),
            }
        }
        Ok(())
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: the page was mapped by `map` and nothing refers to it any more. A failure would leave it mapped, which
        // harms nothing.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE as usize) };
    }
}

/// A page of RAM whose bus address is known, for DMA.
///
/// It is anonymous memory, locked so that it stays where it is.
pub struct DmaPage {
    /// The page.
    pub page: Page,
    /// Its guest-physical address.
    pub address: u64,
}

impl DmaPage {
    /// Takes a fresh page and looks up its address.
    pub fn new() -> Result<Self, Error> {
        let what = Path::new("anonymous memory");
        // SAFETY: a fresh private anonymous page at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let base = base.map_err(|errno| error("map", what)(errno.into()))?;
        // SAFETY: the page was mapped just above.
        unsafe { rustix::mm::mlock(base, PAGE as usize) }
            .map_err(|errno| error("lock", what)(errno.into()))?;
        let Some(base) = NonNull::new(base.cast()) else {
            return Err(Error::Device("memory was mapped at address 0".to_owned()));
        };
        let page = Page {
            base,
            what: "a DMA page".to_owned(),
        };
        page.write(0, 1, 0)?;
        let address = physical_address(base.as_ptr() as u64)?;
        Ok(Self { page, address })
    }
}

/// Looks an address of this process up in /proc/self/pagemap.
fn physical_address(address: u64) -> Result<u64, Error> {
    use std::os::unix::fs::FileExt;
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let path = Path::new("/proc/self/pagemap");
    let mut entry = [0; 8];
    File::open(path)
        .map_err(error("open", path))?
        .read_exact_at(&mut entry, address / PAGE * 8)
        .map_err(error("read", path))?;
    let entry = u64::from_le_bytes(entry);
    if entry & PRESENT == 0 || entry & FRAME == 0 {
        return Err(Error::Device(
            "the kernel hides the address of the DMA page: is CAP_SYS_ADMIN missing?".to_owned(),
        ));
    }
    Ok((entry & FRAME) * PAGE)
}

fn error<'a>(action: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |source| Error::File {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// Where an access goes: a BAR's offset, or a bus address through /dev/mem.
struct Target {
    file: PathBuf,
    offset: u64,
}

impl Target {
    fn parse(text: &str) -> Result<Self, Error> {
        // BDF:BAR:OFFSET has three or four colons, a bus address none.
        let mut parts = text.rsplitn(3, ':');
        let (offset, bar, bdf) = (parts.next(), parts.next(), parts.next());
        let (Some(offset), Some(bar), Some(bdf)) = (offset, bar, bdf) else {
            return Ok(Self {
                file: PathBuf::from("/dev/mem"),
                offset: args::number("ADDRESS", text)?,
            });
        };
        let device = Device::find(bdf)?;
        let bar = device.memory_bar(args::number("BAR", bar)?)?;
        let offset = args::number("OFFSET", offset)?;
        if offset >= bar.size {
            return Err(Error::Range {
                what: format!("{bdf} BAR {}", bar.index),
                offset,
                width: 1,
            });
        }
        Ok(Self {
            file: device.resource_file(bar.index),
            offset,
        })
    }
}

/// `probe read …`
pub fn read(args: &mut Args) -> Result<(), Error> {
    let text = args.word("ADDRESS")?;
    let target = Target::parse(&text)?;
    let width = args.width(Some(4))?;
    args.end()?;
    let page = Page::of_file(&target.file, target.offset)?;
    let_an_interrupt_pass(width)?;
    let value = page.read(target.offset, width)?;
    println!("PROBE read at={text} width={width} value={value:#x}");
    Ok(())
}

/// `probe write …`
pub fn write(args: &mut Args) -> Result<(), Error> {
    let target = Target::parse(&args.word("ADDRESS")?)?;
    let width = args.width(None)?;
    let value = args.number("VALUE")?;
    args.end()?;
    let page = Page::of_file(&target.file, target.offset)?;
    let_an_interrupt_pass(width)?;
    page.write(target.offset, width, value)
}

/// The lab's emulated processor leaves the guest's last exception (a page fault, say) in the VMCB's
/// EXITINTINFO, without its valid bit; KVM since 6.14 takes an access that it has to emulate then
/// for one during the delivery of an event, and gives up (svm_check_emulate_instruction). A timer
/// interrupt in between leaves something harmless there.
///
/// The code of an access is brought in before, so that it does not fault itself.
pub fn let_an_interrupt_pass(width: u64) -> Result<(), Error> {
    let zero = Page::of_file(Path::new("/dev/zero"), 0)?;
    let value = zero.read(0, width)?;
    zero.write(0, width, value)?;
    std::thread::sleep(std::time::Duration::from_millis(5));
    Ok(())
}
