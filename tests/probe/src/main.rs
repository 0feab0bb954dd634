//! Looks at PCI devices from inside a guest and reports in lines that tests can match.
//!
//! Every report is one line, `PROBE <what> key=value …`; numbers are hexadecimal with `0x` unless they count something.
//! `MARK 0x..` accompanies each write to I/O port 0x80, so that a virtual machine monitor that does not report the port
//! itself can be timed by its console.

mod args;
mod coldplug;
mod edu;
mod error;
mod gpus;
mod mmio;
mod moves;
mod pci;
mod port;
mod power;
mod quiet;
mod stamp;
mod vfio;
mod wait;

use std::process::ExitCode;

use args::Args;
use error::Error;

const USAGE: &str = "\
usage: probe COMMAND …
  list [BDF]                           devices and their BARs
  read ADDRESS|BDF:BAR:OFFSET [WIDTH]  read MMIO; WIDTH is 1, 2, 4 (default) or 8
  write ADDRESS|BDF:BAR:OFFSET WIDTH VALUE
  config read BDF OFFSET WIDTH         read configuration space
  config write BDF OFFSET WIDTH VALUE
  enable BDF                           set MEM and MASTER in COMMAND
  moves BDF BAR COUNT                  move a 64-bit BAR that stores data to COUNT new places, and back
  churn BDF BAR BASE COUNT             move it to BASE and on and back and toggle decode, COUNT times, and access it meanwhile
  gpus                                 enable every GPU, touch both ends of each memory BAR, then mark 0x42
  mark N                               write N to I/O port 0x80 and print it
  edu BDF factorial N                  let the device compute N!
  edu BDF dma                          copy a page to the device and back, and compare
  edu BDF copy SOURCE TARGET COUNT     copy COUNT bytes between two bus addresses by DMA
  edu BDF interrupts N                 raise N MSIs one after the other and wait for each; BDF is bound to vfio-pci
  coldplug INDEX                       load the modules that present devices ask for
  modprobe NAME…                       load modules by name, with what they need
  insmod FILE…                         load modules in the order given
  wait PATH [SECONDS]                  wait until PATH exists (30 s)
  quiet CMD [ARG…]                     become CMD half a second after a full one of CLOCK_MONOTONIC, in 1 s or more
  stamp FILE                           write the lines of standard input to FILE, each with CLOCK_MONOTONIC in ns
  off STATUS                           print `GUEST EXIT STATUS` and power off";

fn main() -> ExitCode {
    let mut args = Args::new(std::env::args().skip(1));
    match run(&mut args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error @ (Error::Usage(_) | Error::Number { .. })) => {
            eprintln!("probe: {error}\n{USAGE}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("probe: {}", error::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &mut Args) -> Result<(), Error> {
    match args.word("COMMAND")?.as_str() {
        "list" => pci::list(args),
        "read" => mmio::read(args),
        "write" => mmio::write(args),
        "config" => pci::config(args),
        "enable" => pci::enable(args),
        "moves" => moves::moves(args),
        "churn" => moves::churn(args),
        "gpus" => gpus::run(args),
        "mark" => port::mark_command(args),
        "edu" => edu::run(args),
        "coldplug" => coldplug::run(args),
        "modprobe" => coldplug::modprobe(args),
        "insmod" => coldplug::insmod(args),
        "wait" => wait::run(args),
        "quiet" => quiet::run(args),
        "stamp" => stamp::run(args),
        "off" => power::off(args),
        other => Err(Error::Usage(format!("unknown command `{other}`"))),
    }
}
