//! A guest that moves a BAR about: firmware and older kernels do.
//!
//! Each move turns decode off, writes both halves of the address, and turns decode on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rustix::thread::{CpuSet, sched_setaffinity};

use crate::args::Args;
use crate::error::Error;
use crate::mmio::{PAGE, Page, let_an_interrupt_pass};
use crate::pci::{Bar, Device};

const COMMAND: u64 = 4;
const OFF: u64 = 0;
const ON: u64 = 0b110;
const BAR0: u64 = 0x10;
/// What an address reads as where nothing answers.
const NOTHING: u64 = u64::MAX;
/// A word that stays in the BAR while others are written.
const KEPT: u64 = 0x6b65_7074_6b65_7074;

/// A 64-bit BAR that stores what is written into it.
struct Moved {
    device: Device,
    bar: Bar,
}

impl Moved {
    fn new(args: &mut Args) -> Result<Self, Error> {
        let device = Device::find(&args.word("BDF")?)?;
        let bar = device.memory_bar(args.number("BAR")?)?;
        device.enable()?;
        Ok(Self { device, bar })
    }

    fn program(&self, address: u64) -> Result<(), Error> {
        let register = BAR0 + 4 * self.bar.index;
        self.device
            .config_write(register, 4, address & 0xffff_ffff)?;
        self.device.config_write(register + 4, 4, address >> 32)
    }

    fn move_to(&self, address: u64) -> Result<(), Error> {
        self.device.config_write(COMMAND, 2, OFF)?;
        self.program(address)?;
        self.device.config_write(COMMAND, 2, ON)
    }

    /// So many BAR lengths behind where it was placed.
    fn place(&self, number: u64) -> u64 {
        self.bar.start + number * self.bar.size
    }

    fn wrong(&self, what: &str, value: u64, expected: u64) -> Error {
        let bdf = &self.device.bdf;
        Error::Device(format!("{bdf}: {what} holds {value:#x}, not {expected:#x}"))
    }
}

fn memory(address: u64) -> Result<Page, Error> {
    Page::of_file(Path::new("/dev/mem"), address)
}

/// `probe moves BDF BAR COUNT`: to COUNT places one after the other, each new. What was written at one is read at the next, at
/// both ends of the BAR. At last it goes back.
pub fn moves(args: &mut Args) -> Result<(), Error> {
    let moved = Moved::new(args)?;
    let count = args.number("COUNT")?;
    args.end()?;
    let last_page = moved.bar.size - PAGE;
    let ends = |address: u64| Ok([memory(address)?, memory(address + last_page)?]);
    let word = |number: u64, end: u64| number << 8 | end;
    for (page, end) in ends(moved.place(0))?.iter().zip(0..) {
        page.write(0, 8, word(0, end))?;
    }
    for number in 1..=count + 1 {
        let place = moved.place(number % (count + 1));
        moved.move_to(place)?;
        for (page, end) in ends(place)?.iter().zip(0..) {
            let (expected, value) = (word(number - 1, end), page.read(0, 8)?);
            if value != expected {
                return Err(moved.wrong(&format!("{place:#x}, end {end},"), value, expected));
            }
            page.write(0, 8, word(number, end))?;
        }
    }
    let bdf = &moved.device.bdf;
    println!("PROBE moves bdf={bdf} count={count}");
    Ok(())
}

/// `probe churn BDF BAR BASE COUNT`: one CPU toggles decode and moves the BAR between where it was placed and a few places from
/// BASE on, COUNT times; another reads and writes at two of the places all the while. At last the BAR is where it was placed,
/// and nothing has come to where it was not written.
pub fn churn(args: &mut Args) -> Result<(), Error> {
    const PLACES: u64 = 8;
    let moved = Moved::new(args)?;
    let base = args.number("BASE")?;
    let count = args.number("COUNT")?;
    args.end()?;
    let home = memory(moved.place(0))?;
    let away = memory(base)?;
    fill(&home)?;
    let_an_interrupt_pass(8)?;
    let stop = AtomicBool::new(false);
    let accesses = thread::scope(|scope| {
        let worker = scope.spawn(|| access(&home, &away, &stop));
        let result = pin_to(0).and_then(|()| {
            for number in 1..=count {
                match number % 4 {
                    0 => moved.move_to(moved.place(0))?,
                    1 => moved.move_to(base + number / 4 % PLACES * moved.bar.size)?,
                    2 => moved.device.config_write(COMMAND, 2, OFF)?,
                    _ => moved.device.config_write(COMMAND, 2, ON)?,
                }
            }
            moved.move_to(moved.place(0))
        });
        stop.store(true, Ordering::Relaxed);
        let accesses = worker.join().unwrap_or_else(|_| {
            let text = "the accessing thread panicked".to_owned();
            Err(Error::Device(text))
        });
        result.and(accesses)
    })?;
    check(&moved, &home, &away)?;
    let bdf = &moved.device.bdf;
    println!(
        "PROBE churn bdf={bdf} changes={count} accesses={} answered={}",
        accesses.all, accesses.answered
    );
    Ok(())
}

/// Every word of the page differs from what the accesses write.
fn fill(page: &Page) -> Result<(), Error> {
    for offset in (0..PAGE).step_by(8) {
        page.write(offset, 8, KEPT + offset)?;
    }
    Ok(())
}

fn pin_to(cpu: usize) -> Result<(), Error> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set)
        .map_err(|errno| Error::Device(format!("cannot stay on CPU {cpu}: {errno}")))
}

/// Rounds of accesses, and in how many of them the BAR answered at one of the places.
struct Accesses {
    all: u64,
    answered: u64,
}

/// Where the accesses write: the word at home, and that at the other place.
const WRITTEN: [u64; 2] = [8, 16];

fn access(home: &Page, away: &Page, stop: &AtomicBool) -> Result<Accesses, Error> {
    pin_to(1)?;
    let_an_interrupt_pass(8)?;
    let mut accesses = Accesses {
        all: 0,
        answered: 0,
    };
    while !stop.load(Ordering::Relaxed) {
        accesses.all += 1;
        for (page, offset) in [home, away].into_iter().zip(WRITTEN) {
            page.write(offset, 8, accesses.all)?;
            match page.read(0, 8)? {
                KEPT => accesses.answered += 1,
                NOTHING => {}
                other => {
                    let text = format!("a word that stays was read as {other:#x}");
                    return Err(Error::Device(text));
                }
            }
        }
    }
    Ok(accesses)
}

fn check(moved: &Moved, home: &Page, away: &Page) -> Result<(), Error> {
    let_an_interrupt_pass(8)?;
    for offset in (0..PAGE).step_by(8) {
        let value = home.read(offset, 8)?;
        let kept = value == KEPT + offset;
        if !kept && !WRITTEN.contains(&offset) {
            return Err(moved.wrong(&format!("offset {offset:#x}"), value, KEPT + offset));
        }
    }
    for (value, offset) in (1u64..).map(|n| n << 32).zip(WRITTEN) {
        home.write(offset, 8, value)?;
        let read = home.read(offset, 8)?;
        if read != value {
            return Err(moved.wrong(&format!("offset {offset:#x}"), read, value));
        }
    }
    let left = away.read(0, 8)?;
    if left != NOTHING {
        return Err(moved.wrong("a place that it left", left, NOTHING));
    }
    Ok(())
}
