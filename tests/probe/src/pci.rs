//! PCI devices as sysfs shows them.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::error::Error;

const DEVICES: &str = "/sys/bus/pci/devices";
const COMMAND: u64 = 4;
const COMMAND_MEMORY_AND_MASTER: u64 = 0b110;
/// Flags in sysfs `resource` lines: include/linux/ioport.h of the kernel.
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_MEM_64: u64 = 0x10_0000;
const IORESOURCE_PREFETCH: u64 = 0x2000;
/// The ROM follows the six BARs in `resource`; what comes after belongs to bridges and SR-IOV.
const BARS: usize = 6;

/// One device.
pub struct Device {
    /// Domain, bus, device and function, as sysfs writes them.
    pub bdf: String,
    path: PathBuf,
}

/// One BAR that has been given an address.
pub struct Bar {
    /// 0 to 5.
    pub index: u64,
    /// The first bus address.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    flags: u64,
}

impl Bar {
    /// Whether this is a memory BAR, not an I/O one.
    pub fn is_memory(&self) -> bool {
        self.flags & IORESOURCE_MEM != 0
    }

    fn kind(&self) -> &'static str {
        match (
            self.is_memory(),
            self.flags & IORESOURCE_MEM_64 != 0,
            self.flags & IORESOURCE_PREFETCH != 0,
        ) {
            (false, _, _) => "io",
            (true, true, true) => "mem64-prefetch",
            (true, true, false) => "mem64",
            (true, false, true) => "mem32-prefetch",
            (true, false, false) => "mem32",
        }
    }
}

impl Device {
    /// The device with this address; the domain may be left out.
    pub fn find(bdf: &str) -> Result<Self, Error> {
        let bdf = if bdf.matches(':').count() == 1 {
            format!("0000:{bdf}")
        } else {
            bdf.to_owned()
        };
        let path = Path::new(DEVICES).join(&bdf);
        match fs::metadata(&path) {
            Ok(_) => Ok(Self { bdf, path }),
            Err(source) => Err(file("find device", &path)(source)),
        }
    }

    /// Every device, in the order of their addresses.
    pub fn all() -> Result<Vec<Self>, Error> {
        let root = Path::new(DEVICES);
        let mut devices = Vec::new();
        for entry in fs::read_dir(root).map_err(file("list", root))? {
            let entry = entry.map_err(file("list", root))?;
            devices.push(Self {
                bdf: entry.file_name().to_string_lossy().into_owned(),
                path: entry.path(),
            });
        }
        devices.sort_by(|a, b| a.bdf.cmp(&b.bdf));
        Ok(devices)
    }

    /// A one-line attribute.
    pub fn attribute(&self, name: &str) -> Result<String, Error> {
        let path = self.path.join(name);
        let text = fs::read_to_string(&path).map_err(file("read", &path))?;
        Ok(text.trim().to_owned())
    }

    /// `vendor:device`, both as four hexadecimal digits.
    pub fn id(&self) -> Result<String, Error> {
        let (vendor, device) = (self.attribute("vendor")?, self.attribute("device")?);
        Ok(format!(
            "{}:{}",
            vendor.trim_start_matches("0x"),
            device.trim_start_matches("0x")
        ))
    }

    /// The BARs that have an address.
    pub fn bars(&self) -> Result<Vec<Bar>, Error> {
        Ok(parse_bars(&self.attribute("resource")?))
    }

    /// The memory BAR of that number.
    pub fn memory_bar(&self, index: u64) -> Result<Bar, Error> {
        self.bars()?
            .into_iter()
            .find(|bar| bar.index == index && bar.is_memory())
            .ok_or_else(|| Error::NoBar {
                bdf: self.bdf.clone(),
                bar: index,
            })
    }

    /// The file through which the BAR can be mapped.
    pub fn resource_file(&self, bar: u64) -> PathBuf {
        self.path.join(format!("resource{bar}"))
    }

    /// Reads configuration space.
    pub fn config_read(&self, offset: u64, width: u64) -> Result<u64, Error> {
        let path = self.path.join("config");
        let config = fs::File::open(&path).map_err(file("open", &path))?;
        let mut bytes = [0; 8];
        let (value, _) = bytes.split_at_mut(width as usize);
        config
            .read_exact_at(value, offset)
            .map_err(file("read", &path))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes configuration space.
    pub fn config_write(&self, offset: u64, width: u64, value: u64) -> Result<(), Error> {
        let path = self.path.join("config");
        let config = OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(file("open", &path))?;
        let bytes = value.to_le_bytes();
        let (bytes, _) = bytes.split_at(width as usize);
        config
            .write_all_at(bytes, offset)
            .map_err(file("write", &path))
    }

    /// Turns on memory decode and bus mastering, and returns what COMMAND reads afterwards.
    pub fn enable(&self) -> Result<u64, Error> {
        let command = self.config_read(COMMAND, 2)?;
        self.config_write(COMMAND, 2, command | COMMAND_MEMORY_AND_MASTER)?;
        let command = self.config_read(COMMAND, 2)?;
        if command & COMMAND_MEMORY_AND_MASTER != COMMAND_MEMORY_AND_MASTER {
            return Err(Error::Device(format!(
                "{}: COMMAND reads {command:#06x} after MEM and MASTER were set",
                self.bdf
            )));
        }
        Ok(command)
    }
}

fn file<'a>(action: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |source| Error::File {
        action,
        path: path.to_path_buf(),
        source,
    }
}

/// Reads the lines `start end flags` of sysfs `resource`.
fn parse_bars(text: &str) -> Vec<Bar> {
    let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
    text.lines()
        .take(BARS)
        .zip(0..)
        .filter_map(|(line, index)| {
            let mut words = line.split_whitespace().map(hex);
            let (start, end, flags) = (words.next()??, words.next()??, words.next()??);
            (flags != 0 && end >= start).then(|| Bar {
                index,
                start,
                size: end - start + 1,
                flags,
            })
        })
        .collect()
}

/// `probe list [BDF]`
pub fn list(args: &mut Args) -> Result<(), Error> {
    let devices = match args.optional() {
        Some(bdf) => vec![Device::find(&bdf)?],
        None => Device::all()?,
    };
    args.end()?;
    for device in devices {
        println!(
            "PROBE device bdf={} id={} class={} irq={}",
            device.bdf,
            device.id()?,
            device.attribute("class")?,
            device.attribute("irq")?
        );
        for bar in device.bars()? {
            println!(
                "PROBE bar bdf={} bar={} address={:#x} size={:#x} kind={}",
                device.bdf,
                bar.index,
                bar.start,
                bar.size,
                bar.kind()
            );
        }
    }
    Ok(())
}

/// `probe config read|write …`
pub fn config(args: &mut Args) -> Result<(), Error> {
    let verb = args.word("read or write")?;
    let device = Device::find(&args.word("BDF")?)?;
    let offset = args.number("OFFSET")?;
    let width = args.width(None)?;
    match verb.as_str() {
        "read" => {
            args.end()?;
            let value = device.config_read(offset, width)?;
            println!(
                "PROBE config bdf={} offset={offset:#x} width={width} value={value:#x}",
                device.bdf
            );
            Ok(())
        }
        "write" => {
            let value = args.number("VALUE")?;
            args.end()?;
            device.config_write(offset, width, value)
        }
        other => Err(Error::Usage(format!("config `{other}`: not read or write"))),
    }
}

/// `probe enable BDF`
pub fn enable(args: &mut Args) -> Result<(), Error> {
    let device = Device::find(&args.word("BDF")?)?;
    args.end()?;
    let command = device.enable()?;
    println!("PROBE enabled bdf={} command={command:#06x}", device.bdf);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bars_with_an_address_are_listed() {
        let bars = parse_bars(
            "0x00000000fe000000 0x00000000fe000fff 0x0000000000040200\n\
             0x000000000000c000 0x000000000000c0ff 0x0000000000040101\n\
             0x0000004000000000 0x00000043ffffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x00000000feb00000 0x00000000feb0ffff 0x0000000000046200\n",
        );
        let seen: Vec<_> = bars
            .iter()
            .map(|bar| (bar.index, bar.start, bar.size, bar.kind()))
            .collect();
        assert_eq!(
            seen,
            [
                (0, 0xfe00_0000, 0x1000, "mem32"),
                (1, 0xc000, 0x100, "io"),
                (2, 0x40_0000_0000, 16 << 30, "mem64-prefetch"),
            ]
        );
    }
}
