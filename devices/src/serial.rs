//! The serial console: a 16550 whose output is the VMM's and whose input is fed by the VMM.
//!
//! Output is gathered into lines before it is written: one system call a line, not a byte. What
//! has no line end yet (a prompt) is written by [`SerialPort::flush`], which the event loop calls
//! a moment after [`SerialPort::attention`] was signalled.
//!
//! Input is taken only while the guest's driver has its receive interrupt on, and only as much as
//! the FIFO holds, so that nothing is lost while the guest boots or falls behind. What was not
//! taken is to be offered again when `attention` is signalled.
//!
//! Invariant: neither the event loop nor the exit path waits for the guest's output to be read by
//! whoever is at the other end; only the vCPU that writes does, until [`SerialPort::close`].

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vm_superio::Trigger;
use vm_superio::serial::{Serial, SerialEvents};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::BusDevice;

/// Bytes gathered at most before they are written.
const LINE_MAX: usize = 512;

/// Register offsets and bits of a 16550 (Texas Instruments PC16550D, table 1).
const INTERRUPT_ENABLE: u8 = 1;
const LINE_CONTROL: u8 = 3;
const IER_RECEIVED_DATA: u8 = 1 << 0;
const LCR_DIVISOR_LATCH: u8 = 1 << 7;

/// The interrupt line, edge triggered.
struct Line(EventFd);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Tells the event loop that there is something to do.
struct Attention {
    event: EventFd,
    /// Input was refused and is waiting.
    input_waits: AtomicBool,
}

impl Attention {
    fn signal(&self) {
        // A full counter means that the event loop is yet to wake: nothing is lost.
        let _ = self.event.write(1);
    }
}

struct Events(Arc<Attention>);

impl SerialEvents for Events {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        if self.0.input_waits.swap(false, Ordering::Relaxed) {
            self.0.signal();
        }
    }
}

/// Where output goes.
pub trait TryWrite: Write + Send {
    /// Writes what of `bytes` can be written without waiting; `WouldBlock` when nothing can.
    fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize>;
}

/// Gathers bytes into lines.
struct Lines<W> {
    out: W,
    buffer: Vec<u8>,
    attention: Arc<Attention>,
    closing: Arc<AtomicBool>,
}

impl<W: TryWrite> Lines<W> {
    /// Writes what was gathered, and waits for it.
    fn write_out(&mut self) {
        let mut rest = &self.buffer[..];
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => rest = &[],
                Ok(written) => rest = &rest[written..],
                // A vCPU is being stopped: do not keep it here. The rest is left for a flush.
                Err(_) if self.closing.load(Ordering::Relaxed) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                // Nobody is at the other end any more: the guest must go on.
                Err(_) => rest = &[],
            }
        }
        let left = rest.len();
        self.buffer.drain(..self.buffer.len() - left);
    }

    /// Writes what was gathered as far as it can be without waiting. Returns whether all was.
    fn try_write_out(&mut self) -> bool {
        while !self.buffer.is_empty() {
            match self.out.try_write(&self.buffer) {
                Ok(written) if written > 0 => {
                    self.buffer.drain(..written.min(self.buffer.len()));
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                    ) =>
                {
                    return false;
                }
                // Nobody is at the other end any more.
                _ => self.buffer.clear(),
            }
        }
        true
    }
}

impl<W: TryWrite> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let first = self.buffer.is_empty();
        self.buffer.extend_from_slice(bytes);
        if bytes.contains(&b'\n') || self.buffer.len() >= LINE_MAX {
            self.write_out();
        } else if first {
            self.attention.signal();
        }
        Ok(bytes.len())
    }

    /// The device flushes behind every byte; gathering is the point here.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A serial port. `W` is where output goes.
pub struct SerialPort<W: TryWrite> {
    device: Mutex<Serial<Line, Events, Lines<W>>>,
    attention: Arc<Attention>,
    closing: Arc<AtomicBool>,
}

impl<W: TryWrite> SerialPort<W> {
    /// A port that raises `interrupt` (edge triggered) and writes to `out`.
    pub fn new(interrupt: EventFd, out: W) -> io::Result<Self> {
        let attention = Arc::new(Attention {
            event: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            input_waits: AtomicBool::new(false),
        });
        let closing = Arc::new(AtomicBool::new(false));
        let lines = Lines {
            out,
            buffer: Vec::with_capacity(LINE_MAX),
            attention: Arc::clone(&attention),
            closing: Arc::clone(&closing),
        };
        let events = Events(Arc::clone(&attention));
        Ok(Self {
            device: Mutex::new(Serial::with_events(Line(interrupt), events, lines)),
            attention,
            closing,
        })
    }

    /// Signalled when refused input may be offered again, or when there is output to flush.
    pub fn attention(&self) -> &EventFd {
        &self.attention.event
    }

    /// Offers input; returns how many bytes were taken. Never waits. Offer the rest again when
    /// [`SerialPort::attention`] is signalled, and every few milliseconds: while a vCPU is just
    /// using the port nothing is taken and nothing is signalled.
    pub fn push_input(&self, bytes: &[u8]) -> usize {
        // Set before trying, so that the guest's next read cannot slip in between unseen.
        self.attention.input_waits.store(true, Ordering::Relaxed);
        let taken = self.device.try_lock().map_or(0, |mut device| {
            if receives(&mut device) {
                device.enqueue_raw_bytes(bytes).unwrap_or(0)
            } else {
                0
            }
        });
        if taken == bytes.len() {
            self.attention.input_waits.store(false, Ordering::Relaxed);
        }
        taken
    }

    /// Writes what was gathered as far as it can be without waiting. Returns false when something
    /// is left, or a vCPU holds the port: try again later.
    pub fn flush(&self) -> bool {
        let device = self.device.try_lock();
        device.is_some_and(|mut device| device.writer_mut().try_write_out())
    }

    /// From now on a write that a signal interrupts is given up, so that a vCPU which waits for a
    /// full pipe can be stopped; [`SerialPort::flush`] may still write it.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }
}

/// Whether the guest's driver takes input. Reading these two registers has no side effect.
fn receives<W: TryWrite>(device: &mut Serial<Line, Events, Lines<W>>) -> bool {
    let latch = device.read(LINE_CONTROL) & LCR_DIVISOR_LATCH != 0;
    !latch && device.read(INTERRUPT_ENABLE) & IER_RECEIVED_DATA != 0
}

impl<W: TryWrite> BusDevice for SerialPort<W> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        // The registers are bytes; wider accesses are not answered.
        if let [byte] = data {
            *byte = self.device.lock().read(offset as u8);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let [byte] = *data else { return };
        let mut device = self.device.lock();
        // Fails only if the interrupt's eventfd is full, when one is pending already.
        let _ = device.write(offset as u8, byte);
        if offset == u64::from(INTERRUPT_ENABLE)
            && self.attention.input_waits.load(Ordering::Relaxed)
            && receives(&mut device)
        {
            self.attention.signal();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().push(bytes.to_vec());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl TryWrite for Sink {
        fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write(bytes)
        }
    }

    /// Takes `room` bytes; a write of more waits and is interrupted.
    #[derive(Clone, Default)]
    struct Narrow {
        room: Arc<Mutex<usize>>,
        taken: Sink,
    }

    impl Write for Narrow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let room = &mut *self.room.lock();
            let fits = bytes.len().min(*room);
            if fits == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            *room -= fits;
            self.taken.write(&bytes[..fits])
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl TryWrite for Narrow {
        fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write(bytes)
                .map_err(|_| io::ErrorKind::WouldBlock.into())
        }
    }

    fn narrow_port() -> (SerialPort<Narrow>, Narrow) {
        let out = Narrow::default();
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (SerialPort::new(interrupt, out.clone()).unwrap(), out)
    }

    fn port() -> (SerialPort<Sink>, Sink) {
        let sink = Sink::default();
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (SerialPort::new(interrupt, sink.clone()).unwrap(), sink)
    }

    fn print<W: TryWrite>(port: &SerialPort<W>, text: &str) {
        for byte in text.bytes() {
            port.write(0, &[byte]);
        }
    }

    fn receive(port: &SerialPort<Sink>) -> u8 {
        let mut data = [0];
        port.read(0, &mut data);
        data[0]
    }

    #[test]
    fn output_is_written_by_lines_and_prompts_by_flush() {
        let (port, sink) = port();
        print(&port, "hello\r\nlogin: ");
        assert_eq!(*sink.0.lock(), [b"hello\r\n".to_vec()]);
        assert!(port.attention().read().is_ok());
        assert!(port.flush());
        assert_eq!(sink.0.lock()[1], b"login: ");
    }

    #[test]
    fn a_line_without_end_is_written_in_pieces() {
        let (port, sink) = port();
        print(&port, &"x".repeat(LINE_MAX + 1));
        assert_eq!(sink.0.lock().len(), 1);
    }

    #[test]
    fn input_waits_until_the_driver_receives() {
        let (port, _) = port();
        assert_eq!(port.push_input(b"ls\n"), 0);
        assert!(port.attention().read().is_err());
        port.write(1, &[1]);
        assert!(port.attention().read().is_ok());
        assert_eq!(port.push_input(b"ls\n"), 3);
        assert_eq!(receive(&port), b'l');
    }

    #[test]
    fn input_beyond_the_fifo_is_taken_when_the_guest_has_read() {
        let (port, _) = port();
        port.write(1, &[1]);
        let text: Vec<u8> = (0..200).collect();
        let (mut sent, mut got) = (0, Vec::new());
        while got.len() < text.len() {
            sent += port.push_input(&text[sent..]);
            let waits = sent < text.len();
            while got.len() < sent {
                got.push(receive(&port));
            }
            assert_eq!(port.attention().read().is_ok(), waits);
        }
        assert_eq!(got, text);
    }

    #[test]
    fn a_flush_writes_what_fits_and_keeps_the_rest() {
        let (port, out) = narrow_port();
        print(&port, "login: ");
        assert!(!port.flush());
        *out.room.lock() = 3;
        assert!(!port.flush());
        *out.room.lock() = 10;
        assert!(port.flush());
        assert_eq!(*out.taken.0.lock(), [b"log".to_vec(), b"in: ".to_vec()]);
    }

    #[test]
    fn what_a_stopped_vcpu_could_not_write_is_left_for_the_last_flush() {
        let (port, out) = narrow_port();
        port.close();
        *out.room.lock() = 2;
        print(&port, "down\n");
        *out.room.lock() = 10;
        assert!(port.flush());
        assert_eq!(*out.taken.0.lock(), [b"do".to_vec(), b"wn\n".to_vec()]);
    }

    #[test]
    fn output_to_a_closed_pipe_is_lost_and_the_guest_goes_on() {
        struct Closed(std::io::PipeWriter);
        impl Write for Closed {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        impl TryWrite for Closed {
            fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.write(bytes)
            }
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let port = SerialPort::new(EventFd::new(0).unwrap(), Closed(writer)).unwrap();
        print(&port, "a\nb\n");
        print(&port, "c");
        assert!(port.flush());
    }

    #[test]
    fn accesses_that_are_not_bytes_are_not_answered() {
        let (port, _) = port();
        let mut data = [0xff; 2];
        port.read(0, &mut data);
        port.write(0, &[1, 2]);
        assert_eq!(data, [0xff; 2]);
    }
}
