//! QEMU's `edu` device: a register file with a DMA engine.
//!
//! The device's DMA mask is 28 bits by default; give it `dma_mask=0xffffffffffffffff`.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::error::Error;
use crate::mmio::{DmaPage, PAGE, Page};
use crate::pci::Device;
use crate::vfio::MsiDevice;

const EDU_ID: &str = "1234:11e8";
const IDENTIFICATION: u64 = 0x00;
const FACTORIAL: u64 = 0x08;
const STATUS: u64 = 0x20;
const RAISE: u64 = 0x60;
const ACKNOWLEDGE: u64 = 0x64;
const DMA_SOURCE: u64 = 0x80;
const DMA_TARGET: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;
/// The device's own buffer of one page, as its DMA engine addresses it.
const BUFFER: u64 = 0x4_0000;
const STATUS_COMPUTING: u64 = 1;
const COMMAND_START: u64 = 1;
const COMMAND_FROM_DEVICE: u64 = 2;
const DEADLINE: Duration = Duration::from_secs(20);

/// The device, with its registers mapped.
struct Edu {
    bdf: String,
    registers: Page,
}

impl Edu {
    fn open(bdf: &str) -> Result<Self, Error> {
        let device = Device::find(bdf)?;
        let id = device.id()?;
        if id != EDU_ID {
            return Err(Error::Device(format!(
                "{bdf} is {id}, not an edu device ({EDU_ID})"
            )));
        }
        device.enable()?;
        let registers = Page::of_file(&device.resource_file(0), 0)?;
        let identification = registers.read(IDENTIFICATION, 4)?;
        if identification & 0xff != 0xed {
            return Err(Error::Device(format!(
                "{bdf}: identification is {identification:#x}, which does not end in ed"
            )));
        }
        Ok(Self {
            bdf: bdf.to_owned(),
            registers,
        })
    }

    /// Waits until `register` has none of the `busy` bits.
    fn wait(&self, register: u64, width: u64, busy: u64) -> Result<(), Error> {
        let start = Instant::now();
        while self.registers.read(register, width)? & busy != 0 {
            if start.elapsed() > DEADLINE {
                return Err(Error::Device(format!(
                    "{}: register {register:#x} stays busy",
                    self.bdf
                )));
            }
            sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn factorial(&self, n: u64) -> Result<u64, Error> {
        self.registers.write(FACTORIAL, 4, n)?;
        self.wait(STATUS, 4, STATUS_COMPUTING)?;
        self.registers.read(FACTORIAL, 4)
    }

    fn dma(&self, source: u64, target: u64, count: u64, direction: u64) -> Result<(), Error> {
        self.registers.write(DMA_SOURCE, 8, source)?;
        self.registers.write(DMA_TARGET, 8, target)?;
        self.registers.write(DMA_COUNT, 8, count)?;
        self.registers
            .write(DMA_COMMAND, 8, COMMAND_START | direction)?;
        self.wait(DMA_COMMAND, 8, COMMAND_START)
    }

    /// Copies between two bus addresses, by way of the device's buffer.
    fn copy(&self, source: u64, target: u64, count: u64) -> Result<(), Error> {
        if count == 0 || count > PAGE {
            return Err(Error::Usage(format!(
                "COUNT is {count}; the device's buffer holds 1 to {PAGE} bytes"
            )));
        }
        self.dma(source, BUFFER, count, 0)?;
        self.dma(BUFFER, target, count, COMMAND_FROM_DEVICE)
    }
}

/// `probe edu BDF …`
pub fn run(args: &mut Args) -> Result<(), Error> {
    let bdf = args.word("BDF")?;
    let verb = args.word("factorial, dma, copy or interrupts")?;
    match verb.as_str() {
        "factorial" => {
            let n = args.number("N")?;
            args.end()?;
            factorial(&Edu::open(&bdf)?, n)
        }
        "dma" => {
            args.end()?;
            round_trip(&Edu::open(&bdf)?)
        }
        "interrupts" => {
            let count = args.number("N")?;
            args.end()?;
            interrupts(&bdf, count)
        }
        "copy" => {
            let (source, target) = (args.number("SOURCE")?, args.number("TARGET")?);
            let count = args.number("COUNT")?;
            args.end()?;
            Edu::open(&bdf)?.copy(source, target, count)?;
            println!("PROBE edu bdf={bdf} copied={count} source={source:#x} target={target:#x}");
            Ok(())
        }
        other => Err(Error::Usage(format!(
            "edu `{other}`: not factorial, dma, copy or interrupts"
        ))),
    }
}

fn factorial(edu: &Edu, n: u64) -> Result<(), Error> {
    let expected = (1..=n).fold(1u32, |product, factor| product.wrapping_mul(factor as u32));
    let value = edu.factorial(n)?;
    println!("PROBE edu bdf={} factorial={n} value={value}", edu.bdf);
    if value != u64::from(expected) {
        return Err(Error::Device(format!(
            "{}: {n}! is {expected}, the device says {value}",
            edu.bdf
        )));
    }
    Ok(())
}

/// Raises `count` interrupts, each after the one before has arrived. One that does not arrive ends it.
fn interrupts(bdf: &str, count: u64) -> Result<(), Error> {
    let msi = MsiDevice::open(bdf)?;
    // vfio-pci turned bus mastering off, without which there are no messages.
    Device::find(bdf)?.enable()?;
    let registers = msi.bar(0)?;
    let mut arrived = 0;
    for raised in 1..=count {
        registers.write(RAISE, 4, 1)?;
        let more = msi.wait()?;
        registers.write(ACKNOWLEDGE, 4, 1)?;
        if more == 0 {
            return Err(Error::Device(format!(
                "{bdf}: {raised} interrupts were raised and {arrived} arrived"
            )));
        }
        arrived += more;
    }
    arrived += msi.take()?;
    println!("PROBE edu bdf={bdf} raised={count} arrived={arrived}");
    println!("RAISED {count}");
    println!("ARRIVED {arrived}");
    // Gone from /proc/interrupts once the device is closed.
    for line in std::fs::read_to_string("/proc/interrupts")
        .unwrap_or_default()
        .lines()
    {
        if line.contains("vfio-msi") {
            println!("{}", line.trim());
        }
    }
    Ok(())
}

fn round_trip(edu: &Edu) -> Result<(), Error> {
    let (from, to) = (DmaPage::new()?, DmaPage::new()?);
    for offset in (0..PAGE).step_by(8) {
        from.page.write(offset, 8, pattern(offset))?;
        to.page.write(offset, 8, 0)?;
    }
    edu.copy(from.address, to.address, PAGE)?;
    for offset in (0..PAGE).step_by(8) {
        let value = to.page.read(offset, 8)?;
        if value != pattern(offset) {
            return Err(Error::Device(format!(
                "{}: after DMA the byte offset {offset:#x} holds {value:#x}, not {:#x}",
                edu.bdf,
                pattern(offset)
            )));
        }
    }
    println!(
        "PROBE edu bdf={} dma=ok source={:#x} target={:#x} bytes={PAGE}",
        edu.bdf, from.address, to.address
    );
    Ok(())
}

/// Differs at every offset and in every byte.
fn pattern(offset: u64) -> u64 {
    (offset + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
