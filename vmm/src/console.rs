//! The console: standard input to the guest's serial port.
//!
//! Input is read only when all that was read before has been taken by the guest, so the sender is
//! held back instead of bytes being lost. epoll refuses files and /dev/null: those are read by a
//! thread and come through a pipe.

use std::io::{self, PipeReader, Read, Stdin, Stdout};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use devices::serial::{SerialPort, TryWrite};
use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::timerfd::TimerFd;

use crate::events;
use crate::output::Output;
use crate::stop::{Outcome, Stop};

/// How long a prompt may wait to be written, and refused input to be offered again.
const PAUSE: Duration = Duration::from_millis(5);
/// How long the end of a run waits for its output to be read.
const LAST_WAIT: Duration = Duration::from_millis(200);
const CHUNK: usize = 4096;

const INPUT: u32 = 0;
const ATTENTION: u32 = 1;
const TIMER: u32 = 2;

/// The guest's console port. It writes to standard output, which does not gather lines here: the
/// port does.
pub type ConsolePort = SerialPort<Output<Stdout>>;

/// Writes what `port` has left, at the end of a run. What nobody reads is dropped.
pub fn write_last(port: &SerialPort<impl TryWrite>) {
    let begin = Instant::now();
    while !port.flush() && begin.elapsed() < LAST_WAIT {
        thread::sleep(PAUSE);
    }
}

/// Where input comes from.
enum Source {
    Stdin(Stdin),
    /// A thread reads standard input into this.
    Pipe(PipeReader),
    /// It has ended.
    Ended,
}

impl Source {
    fn descriptor(&self) -> Option<RawFd> {
        match self {
            Self::Stdin(stdin) => Some(stdin.as_raw_fd()),
            Self::Pipe(pipe) => Some(pipe.as_raw_fd()),
            Self::Ended => None,
        }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Stdin(stdin) => Ok(nix::unistd::read(stdin, buffer)?),
            Self::Pipe(pipe) => pipe.read(buffer),
            Self::Ended => Ok(0),
        }
    }
}

/// Feeds the port from standard input.
pub struct Console {
    port: Arc<ConsolePort>,
    source: Source,
    /// Read, but not yet taken by the guest.
    pending: Vec<u8>,
    timer: TimerFd,
    escape: Option<Escape>,
    stop: Arc<Stop>,
}

impl Console {
    /// `interactive`: standard input is a terminal in raw mode, so Ctrl-A is ours.
    pub fn new(port: Arc<ConsolePort>, interactive: bool, stop: Arc<Stop>) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        Ok(Self {
            port,
            source: Source::Stdin(io::stdin()),
            pending: Vec::new(),
            timer,
            escape: interactive.then(Escape::default),
            stop,
        })
    }

    fn watch_input(&mut self, ops: &mut EventOps) {
        let Some(descriptor) = self.source.descriptor() else {
            return;
        };
        let events = Events::with_data_raw(descriptor, INPUT, EventSet::IN);
        match ops.add(events) {
            Ok(()) => {}
            Err(event_manager::Error::Epoll(error)) if error.errno() == libc::EPERM => {
                match pipe_from_stdin() {
                    Ok(pipe) => {
                        self.source = Source::Pipe(pipe);
                        self.watch_input(ops);
                    }
                    // A guest without input is better than none.
                    Err(_) => self.source = Source::Ended,
                }
            }
            Err(error) => self.stop.request(events::failed(error)),
        }
    }

    fn unwatch_input(&self, ops: &mut EventOps) {
        if let Some(descriptor) = self.source.descriptor() {
            // It was added before.
            let _ = ops.remove(Events::with_data_raw(descriptor, INPUT, EventSet::IN));
        }
    }

    fn read_input(&mut self, ops: &mut EventOps) {
        let mut buffer = [0; CHUNK];
        match self.source.read(&mut buffer) {
            Ok(len) if len > 0 => {
                self.accept(&buffer[..len]);
                self.offer();
                if !self.pending.is_empty() {
                    self.unwatch_input(ops);
                    self.wake_later();
                }
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                ) => {}
            // The end, or a terminal that went away.
            _ => {
                self.unwatch_input(ops);
                self.source = Source::Ended;
            }
        }
    }

    /// Takes Ctrl-A sequences out of what was typed.
    fn accept(&mut self, bytes: &[u8]) {
        let Some(escape) = &mut self.escape else {
            self.pending.extend_from_slice(bytes);
            return;
        };
        for byte in bytes {
            match escape.next(*byte) {
                Typed::Byte(byte) => self.pending.push(byte),
                Typed::Nothing => {}
                Typed::Quit => self.stop.request(Outcome::Quit),
            }
        }
    }

    fn offer(&mut self) {
        if !self.pending.is_empty() {
            let taken = self.port.push_input(&self.pending);
            self.pending.drain(..taken);
        }
    }

    /// Offers what is pending; reads on when all is taken.
    fn offer_again(&mut self, ops: &mut EventOps) {
        if self.pending.is_empty() {
            return;
        }
        self.offer();
        if self.pending.is_empty() {
            self.watch_input(ops);
        } else {
            self.wake_later();
        }
    }

    fn wake_later(&mut self) {
        // The arguments are valid, nothing else can fail.
        let _ = self.timer.reset(PAUSE, None);
    }
}

impl MutEventSubscriber for Console {
    fn init(&mut self, ops: &mut EventOps) {
        let attention = Events::with_data(self.port.attention(), ATTENTION, EventSet::IN);
        let timer = Events::with_data(&self.timer, TIMER, EventSet::IN);
        for events in [attention, timer] {
            if let Err(error) = ops.add(events) {
                self.stop.request(events::failed(error));
            }
        }
        self.watch_input(ops);
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            INPUT => self.read_input(ops),
            ATTENTION => {
                // Only clears it.
                let _ = self.port.attention().read();
                self.offer_again(ops);
                self.wake_later();
            }
            _ => {
                // Only clears it.
                let _ = self.timer.wait();
                if !self.port.flush() {
                    self.wake_later();
                }
                self.offer_again(ops);
            }
        }
    }
}

/// A pipe that a thread fills from standard input. The thread ends with the input or with us.
fn pipe_from_stdin() -> io::Result<PipeReader> {
    let (reader, mut writer) = io::pipe()?;
    thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            // Its end closes the pipe, which is all there is to tell.
            let _ = io::copy(&mut io::stdin().lock(), &mut writer);
        })?;
    Ok(reader)
}

/// The key that begins a command: Ctrl-A, as in QEMU.
const ESCAPE: u8 = 1;

/// Finds commands in what is typed.
#[derive(Default)]
struct Escape {
    begun: bool,
}

enum Typed {
    Byte(u8),
    Nothing,
    Quit,
}

impl Escape {
    fn next(&mut self, byte: u8) -> Typed {
        if !std::mem::take(&mut self.begun) {
            self.begun = byte == ESCAPE;
            return if self.begun {
                Typed::Nothing
            } else {
                Typed::Byte(byte)
            };
        }
        match byte {
            b'x' | b'X' => Typed::Quit,
            b'a' | b'A' | ESCAPE => Typed::Byte(ESCAPE),
            _ => Typed::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::tests::full_pipe;
    use devices::bus::BusDevice;
    use vmm_sys_util::eventfd::EventFd;

    #[test]
    fn the_end_does_not_wait_for_a_pipe_that_nobody_reads() {
        let (mut reader, writer) = full_pipe();
        let port = SerialPort::new(EventFd::new(0).unwrap(), Output::new(writer)).unwrap();
        port.write(0, b"#");
        let begin = Instant::now();
        assert!(!port.flush());
        write_last(&port);
        assert!(begin.elapsed() >= LAST_WAIT);

        let reading = thread::spawn(move || {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).map(|_| text)
        });
        write_last(&port);
        drop(port);
        let text = reading.join().unwrap().unwrap();
        assert_eq!(text.last(), Some(&b'#'));
    }

    fn typed(keys: &[u8]) -> (Vec<u8>, bool) {
        let (mut escape, mut bytes, mut quit) = (Escape::default(), Vec::new(), false);
        for key in keys {
            match escape.next(*key) {
                Typed::Byte(byte) => bytes.push(byte),
                Typed::Nothing => {}
                Typed::Quit => quit = true,
            }
        }
        (bytes, quit)
    }

    #[test]
    fn ctrl_a_x_quits_and_ctrl_a_a_is_ctrl_a() {
        assert_eq!(typed(b"ax\r"), (b"ax\r".to_vec(), false));
        assert_eq!(typed(b"\x01x"), (vec![], true));
        assert_eq!(typed(b"b\x01ab"), (b"b\x01b".to_vec(), false));
        assert_eq!(typed(b"\x01q\x01\x01"), (b"\x01".to_vec(), false));
    }
}
