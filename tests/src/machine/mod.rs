//! L1: the emulated host.

mod channels;
mod devices;
mod hang;
pub mod job;
mod monitor;
mod qemu;
pub mod size;
pub mod terminal;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub use channels::Source;
use channels::{Event, READERS};
use monitor::Monitor;

use crate::cli::MachineArgs;
use crate::command;
use crate::error::Error;
use crate::paths;
use crate::setup::{Bootable, tools};

/// Lines of a log that an error repeats.
const LOG_TAIL: usize = 15;
/// How often a run that hangs is started again where nobody has seen its output.
const RETRIES: u32 = 2;

/// One boot of L1.
pub struct Boot<'a> {
    /// The machine.
    pub machine: &'a MachineArgs,
    /// Every kernel that is set up.
    pub kernels: &'a [Bootable],
    /// What L1's shell runs.
    pub body: &'a str,
    /// What it is, for messages.
    pub what: &'a str,
    /// Whether the command gets the user's terminal.
    pub interactive: bool,
}

/// Takes what happens in L1.
pub trait Sink {
    /// A boot begins; its logs are in that directory.
    fn started(&mut self, _log: &Path) {}

    /// Something was printed.
    fn bytes(&mut self, source: Source, bytes: &[u8]);
}

impl<F: FnMut(Source, &[u8])> Sink for F {
    fn bytes(&mut self, source: Source, bytes: &[u8]) {
        self(source, bytes);
    }
}

/// Holds standard output back, which would otherwise be seen again after another try.
struct Held<'a> {
    out: Vec<u8>,
    sink: &'a mut dyn Sink,
}

impl Sink for Held<'_> {
    fn started(&mut self, log: &Path) {
        self.sink.started(log);
    }

    fn bytes(&mut self, source: Source, bytes: &[u8]) {
        match source {
            Source::Out => self.out.extend_from_slice(bytes),
            _ => self.sink.bytes(source, bytes),
        }
    }
}

impl Boot<'_> {
    /// Boots L1, runs the body, and returns its exit status.
    ///
    /// A deterministic machine that hangs is tried again; its standard output is held back until it ends.
    pub fn run(&self, sink: &mut dyn Sink) -> Result<u8, Error> {
        if !self.machine.deterministic {
            return self.once(sink);
        }
        let mut attempt = 0;
        loop {
            let mut held = Held {
                out: Vec::new(),
                sink: &mut *sink,
            };
            let result = self.once(&mut held);
            let out = held.out;
            match result {
                Err(error @ (Error::Timeout { .. } | Error::Hung { .. })) if attempt < RETRIES => {
                    attempt += 1;
                    eprintln!("lab: {error}; trying again ({attempt} of {RETRIES})");
                }
                result => {
                    sink.bytes(Source::Out, &out);
                    return result;
                }
            }
        }
    }

    fn once(&self, sink: &mut dyn Sink) -> Result<u8, Error> {
        let log = paths::run_directory()?;
        sink.started(&log);
        let kernel = self
            .kernels
            .iter()
            .find(|kernel| kernel.name == self.machine.host_kernel)
            .ok_or_else(|| Error::UnknownKernel {
                name: self.machine.host_kernel.clone(),
                known: self
                    .kernels
                    .iter()
                    .map(|k| k.name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })?;
        let guest = crate::setup::DEFAULT_KERNEL;
        let script = job::script(&paths::repository(), self.kernels, guest, self.body);
        write(&log.join("job"), &script)?;
        if self.interactive {
            write(&log.join("interactive"), &terminal::size())?;
        }
        let plan = qemu::plan(self.machine, kernel, &log, self.interactive)?;
        let (lab, inherited) = channels::pairs()?;
        let (sender, events) = channel();
        let mut arguments = inherited.numbers().arguments();
        arguments.extend(plan.arguments.iter().cloned());
        let mut qemu = Qemu::start(&arguments, &log)?;
        drop(inherited);
        lab.read_all(&sender)?;
        drop(sender);
        let _terminal = if self.interactive {
            let keys = lab
                .out
                .try_clone()
                .map_err(Error::channel("duplicate a socket"))?;
            Some(terminal::Raw::start(keys)?)
        } else {
            None
        };
        let mut session = Attendant {
            boot: self,
            plan: &plan,
            lab: &lab,
            log: &log,
            control: String::new(),
            monitor: None,
            watch: hang::Watch::default(),
            status: None,
        };
        session.attend(&events, sink)?;
        qemu.wait();
        match session.status {
            Some(status) => Ok(status),
            None => Err(Error::HostDied {
                tail: last_words(&log),
                log,
            }),
        }
    }
}

/// Looks after one running L1.
struct Attendant<'a> {
    boot: &'a Boot<'a>,
    plan: &'a qemu::Plan,
    lab: &'a channels::Lab,
    log: &'a Path,
    /// What the control channel said since its last whole line.
    control: String,
    /// The monitor, once it has been needed.
    monitor: Option<Monitor>,
    watch: hang::Watch,
    status: Option<u8>,
}

impl Attendant<'_> {
    /// Serves the channels until QEMU has closed them all.
    fn attend(&mut self, events: &Receiver<Event>, sink: &mut dyn Sink) -> Result<(), Error> {
        let console_path = self.log.join("console");
        let mut console =
            File::create(&console_path).map_err(Error::file("create", &console_path))?;
        let limit = self.boot.machine.limit();
        let deadline = Instant::now() + limit;
        let mut look = Instant::now() + hang::INTERVAL;
        let mut open = READERS;
        while open > 0 {
            let now = Instant::now();
            if now >= look && !self.boot.interactive {
                self.look()?;
                look = Instant::now() + hang::INTERVAL;
            }
            let left = deadline.saturating_duration_since(now);
            match events.recv_timeout(left.min(hang::INTERVAL)) {
                Ok(Event::Closed) => open -= 1,
                Ok(Event::Bytes(Source::Console, bytes)) => {
                    console
                        .write_all(&bytes)
                        .map_err(Error::file("write", &console_path))?;
                    if self.boot.machine.verbose {
                        sink.bytes(Source::Console, &bytes);
                    }
                }
                Ok(Event::Bytes(Source::Control, bytes)) => self.listen(&bytes)?,
                Ok(Event::Bytes(source, bytes)) => sink.bytes(source, &bytes),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => return Err(self.timeout(limit)),
            }
        }
        Ok(())
    }

    /// Looks at the CPUs.
    fn look(&mut self) -> Result<(), Error> {
        let Ok(registers) = self.monitor().and_then(Monitor::registers) else {
            // QEMU ends, which its channels tell.
            return Ok(());
        };
        if self.watch.look(&registers) {
            write(&self.log.join("registers"), &registers)?;
            return Err(Error::Hung {
                what: self.boot.what.to_owned(),
                log: self.log.to_path_buf(),
            });
        }
        Ok(())
    }

    fn monitor(&mut self) -> Result<&mut Monitor, Error> {
        let monitor = match self.monitor.take() {
            Some(monitor) => monitor,
            None => Monitor::connect(&self.lab.monitor)?,
        };
        Ok(self.monitor.insert(monitor))
    }

    fn timeout(&self, limit: Duration) -> Error {
        Error::Timeout {
            what: self.boot.what.to_owned(),
            limit,
            log: self.log.to_path_buf(),
        }
    }

    /// Takes what L1's init says.
    fn listen(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.control.push_str(&String::from_utf8_lossy(bytes));
        while let Some((line, rest)) = self.control.split_once('\n') {
            let (line, rest) = (line.to_owned(), rest.to_owned());
            self.control = rest;
            if line == "ready" {
                self.tell_addresses()?;
            } else if let Some(status) = line.strip_prefix("exit ") {
                self.status = status.trim().parse().ok();
            }
        }
        Ok(())
    }

    /// Answers with the addresses of the devices; L1's kernel has numbered the buses by now.
    fn tell_addresses(&mut self) -> Result<(), Error> {
        let addresses = self.monitor()?.addresses()?;
        let answer = answer(&self.plan.assigned, &self.plan.left, &addresses);
        (&self.lab.control)
            .write_all(answer.as_bytes())
            .map_err(Error::channel("answer the init of the lab's host"))
    }
}

/// What L1's init is told: the addresses of the devices to assign, those of the devices to leave, and a variable for each.
///
/// A device that is not a PCI one, such as a disk on a controller, has no address.
fn answer(
    assigned: &[devices::Device],
    left: &[devices::Device],
    addresses: &HashMap<String, String>,
) -> String {
    let mut lines = Vec::new();
    let mut variables = Vec::new();
    for devices in [assigned, left] {
        let mut line = Vec::new();
        for device in devices {
            if let Some(address) = addresses.get(&device.id) {
                line.push(address.as_str());
                let name = device.id.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
                variables.push(format!("LAB_BDF_{name}={address}"));
            }
        }
        lines.push(line.join(" "));
    }
    lines.push(variables.join(" "));
    lines.join("\n") + "\n"
}

/// A running QEMU, killed when dropped.
struct Qemu(Child);

impl Qemu {
    fn start(arguments: &[String], log: &Path) -> Result<Self, Error> {
        let path = log.join("qemu");
        let messages = File::create(&path).map_err(Error::file("create", &path))?;
        let line = format!("{} {}\n", tools::QEMU, job::quote_all(arguments));
        write(&log.join("qemu-command"), &line)?;
        // The emulator must not outlive the lab, however that ends.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", tools::QEMU])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(
                messages
                    .try_clone()
                    .map_err(Error::file("duplicate", &path))?,
            )
            .stderr(messages);
        let child = command.spawn().map_err(|source| Error::Start {
            program: tools::QEMU.to_owned(),
            source,
        })?;
        Ok(Self(child))
    }

    fn wait(&mut self) {
        // Its status says nothing: what counts is what L1's init reported.
        let _ = self.0.wait();
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The end of QEMU's messages, or of the console if there are none.
fn last_words(log: &Path) -> String {
    ["qemu", "console"]
        .iter()
        .map(|name| fs::read(log.join(name)).unwrap_or_default())
        .map(|bytes| command::tail(&String::from_utf8_lossy(&bytes), LOG_TAIL))
        .find(|tail| !tail.is_empty())
        .unwrap_or_default()
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_is_told_addresses_and_names() {
        let device = |id: &str| devices::Device {
            argument: String::new(),
            id: id.to_owned(),
        };
        let addresses = HashMap::from([
            ("gpu-0".to_owned(), "0000:00:03.0".to_owned()),
            ("nic".to_owned(), "0000:01:00.0".to_owned()),
        ]);
        assert_eq!(
            answer(
                &[device("gpu-0")],
                &[device("disk"), device("nic")],
                &addresses
            ),
            "0000:00:03.0\n0000:01:00.0\nLAB_BDF_gpu_0=0000:00:03.0 LAB_BDF_nic=0000:01:00.0\n"
        );
    }
}
