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
//! whoever is at the other end; only the vCPU that writes does.

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

/// Gathers bytes into lines.
struct Lines<W> {
    out: W,
    buffer: Vec<u8>,
    attention: Arc<Attention>,
    closing: Arc<AtomicBool>,
}

impl<W: Write> Lines<W> {
    fn write_out(&mut self) {
        let mut rest = &self.buffer[..];
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => break,
                Ok(written) => rest = &rest[written..],
                // A vCPU is being stopped: do not keep it here.
                Err(_) if self.closing.load(Ordering::Relaxed) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
                // Nobody is at the other end any more: the guest must go on.
                Err(_) => break,
            }
        }
        self.buffer.clear();
    }
}

impl<W: Write> Write for Lines<W> {
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
pub struct SerialPort<W: Write + Send> {
    device: Mutex<Serial<Line, Events, Lines<W>>>,
    attention: Arc<Attention>,
    closing: Arc<AtomicBool>,
}

impl<W: Write + Send> SerialPort<W> {
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

    /// Writes what was gathered. Returns false when a vCPU holds the port: try again later.
    pub fn flush(&self) -> bool {
        match self.device.try_lock() {
            Some(mut device) => {
                device.writer_mut().write_out();
                true
            }
            None => false,
        }
    }

    /// From now on a write that a signal interrupts is given up, so that a vCPU which waits for a
    /// full pipe can be stopped.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }
}

/// Whether the guest's driver takes input. Reading these two registers has no side effect.
fn receives<W: Write>(device: &mut Serial<Line, Events, Lines<W>>) -> bool {
    let latch = device.read(LINE_CONTROL) & LCR_DIVISOR_LATCH != 0;
    !latch && device.read(INTERRUPT_ENABLE) & IER_RECEIVED_DATA != 0
}

impl<W: Write + Send> BusDevice for SerialPort<W> {
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

    fn port() -> (SerialPort<Sink>, Sink) {
        let sink = Sink::default();
        let interrupt = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        (SerialPort::new(interrupt, sink.clone()).unwrap(), sink)
    }

    fn print<W: Write + Send>(port: &SerialPort<W>, text: &str) {
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
    fn output_to_a_closed_pipe_is_lost_and_the_guest_goes_on() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let port = SerialPort::new(EventFd::new(0).unwrap(), writer).unwrap();
        print(&port, "a\nb\n");
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
