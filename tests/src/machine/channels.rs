//! The sockets between the lab and QEMU, and what arrives on them.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::thread;

use rustix::io::FdFlags;

use crate::error::Error;
use crate::machine::qemu;

/// Where something came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The console of L1's kernel.
    Console,
    /// The command's standard output.
    Out,
    /// The command's standard error, and messages of L1's init.
    Err,
    /// L1's init.
    Control,
}

/// What the reading threads report.
pub enum Event {
    /// Bytes arrived.
    Bytes(Source, Vec<u8>),
    /// QEMU closed the channel, for good.
    Closed,
}

/// The lab's ends.
pub struct Lab {
    console: UnixStream,
    /// Also takes the command's input, when interactive.
    pub out: UnixStream,
    err: UnixStream,
    /// For answers to L1's init.
    pub control: UnixStream,
    /// QEMU's monitor.
    pub monitor: UnixStream,
}

/// QEMU's ends; to be dropped once QEMU runs, so that its death closes the channels.
pub struct Inherited([UnixStream; 5]);

/// How many channels are read by threads.
pub const READERS: usize = 4;

/// Makes the channels.
pub fn pairs() -> Result<(Lab, Inherited), Error> {
    let pair = || UnixStream::pair().map_err(Error::channel("make a socket pair for QEMU"));
    let (console, qemu_console) = pair()?;
    let (out, qemu_out) = pair()?;
    let (err, qemu_err) = pair()?;
    let (control, qemu_control) = pair()?;
    let (monitor, qemu_monitor) = pair()?;
    let inherited = [qemu_console, qemu_out, qemu_err, qemu_control, qemu_monitor];
    for stream in &inherited {
        rustix::io::fcntl_setfd(stream, FdFlags::empty())
            .map_err(Error::channel("let QEMU inherit a socket"))?;
    }
    let lab = Lab {
        console,
        out,
        err,
        control,
        monitor,
    };
    Ok((lab, Inherited(inherited)))
}

impl Inherited {
    /// The descriptors' numbers, the same in QEMU.
    pub fn numbers(&self) -> qemu::Channels {
        let [console, out, err, control, monitor] = &self.0;
        qemu::Channels {
            console: console.as_raw_fd(),
            out: out.as_raw_fd(),
            err: err.as_raw_fd(),
            control: control.as_raw_fd(),
            monitor: monitor.as_raw_fd(),
        }
    }
}

impl Lab {
    /// Starts a thread for each channel that L1 writes to.
    pub fn read_all(&self, events: &Sender<Event>) -> Result<(), Error> {
        for (source, stream) in [
            (Source::Console, &self.console),
            (Source::Out, &self.out),
            (Source::Err, &self.err),
            (Source::Control, &self.control),
        ] {
            let stream = stream
                .try_clone()
                .map_err(Error::channel("duplicate a socket"))?;
            let events = events.clone();
            thread::spawn(move || read(source, stream, &events));
        }
        Ok(())
    }
}

fn read(source: Source, mut stream: UnixStream, events: &Sender<Event>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match stream.read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // A reset connection is QEMU's end as well.
            Ok(0) | Err(_) => break,
            Ok(count) => {
                let bytes = buffer.get(..count).unwrap_or_default().to_vec();
                if events.send(Event::Bytes(source, bytes)).is_err() {
                    return;
                }
            }
        }
    }
    // The receiver may have given up already.
    let _ = events.send(Event::Closed);
}
