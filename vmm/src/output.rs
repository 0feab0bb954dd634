//! Standard output and standard error. They may be pipes that nobody reads: here is what writes to
//! them without waiting, or not for long.

use std::io::{self, Write};
use std::os::fd::AsFd;

use devices::serial::TryWrite;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// What a pipe surely takes when poll(2) calls it writable (a page, fs/pipe.c, pipe_poll).
const CHUNK: usize = 4096;

/// How long a message waits for standard error to take more of it.
const PATIENCE: u16 = 1000;

/// Writes `text` to standard error. What nobody reads is dropped: there is nobody else to tell.
pub fn message(text: &str) {
    let _ = Output::new(io::stderr()).write_patiently(text.as_bytes());
}

/// Writes as much of `text` to standard error as it takes at once; the rest is dropped.
pub fn at_once(text: &str) {
    Output::new(io::stderr()).write_at_once(text.as_bytes());
}

/// Standard error as [`message`] writes to it.
pub struct Messages;

impl Write for Messages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = Output::new(io::stderr()).write_patiently(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An open file to write to.
pub struct Output<F> {
    file: F,
    /// Bytes that it takes when poll(2) calls it writable.
    chunk: usize,
}

impl<F: AsFd> Output<F> {
    /// Writes go to `file`.
    pub fn new(file: F) -> Self {
        // A terminal with any room at all counts as writable (drivers/tty/n_tty.c, n_tty_poll).
        let is_terminal = nix::unistd::isatty(&file).unwrap_or(false);
        let chunk = if is_terminal { 1 } else { CHUNK };
        Self { file, chunk }
    }

    /// Whether a write would not wait: for its end, or for an error.
    fn is_ready(&self, timeout: PollTimeout) -> io::Result<bool> {
        let mut files = [PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut files, timeout) {
            Ok(count) => Ok(count != 0),
            Err(Errno::EINTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes all of `bytes`; gives up when nothing more is taken for [`PATIENCE`] milliseconds.
    fn write_patiently(&mut self, bytes: &[u8]) -> io::Result<()> {
        // A whole line at once, also on a terminal: other output must not get into it.
        for mut rest in bytes.chunks(CHUNK) {
            while !rest.is_empty() {
                if !self.is_ready(PATIENCE.into())? {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                match self.write(rest) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                        ) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

impl<F: AsFd + Send> Output<F> {
    fn write_at_once(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty()
            && let Ok(written @ 1..) = self.try_write(bytes)
        {
            bytes = bytes.get(written..).unwrap_or_default();
        }
    }
}

impl<F: AsFd> Write for Output<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(nix::unistd::write(&self.file, bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<F: AsFd + Send> TryWrite for Output<F> {
    fn try_write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_ready(PollTimeout::ZERO)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.write(bytes.get(..self.chunk).unwrap_or(bytes))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use std::io::{PipeReader, PipeWriter, Read};

    /// A pipe into which nothing more fits.
    pub fn full_pipe() -> (PipeReader, PipeWriter) {
        let (reader, mut writer) = io::pipe().unwrap();
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        while writer.write(&[b'.'; CHUNK]).is_ok() {}
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        (reader, writer)
    }

    #[test]
    fn a_full_pipe_is_not_waited_for() {
        let (mut reader, writer) = full_pipe();
        let mut output = Output::new(writer);
        let error = output.try_write(b"text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        reader.read_exact(&mut [0; CHUNK]).unwrap();
        assert_eq!(output.try_write(&[0; 2 * CHUNK]).unwrap(), CHUNK);
        assert!(output.try_write(b"text").is_err());
        drop(reader);
        let error = output.try_write(b"text").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_message_is_written_whole_or_given_up() {
        let (mut reader, writer) = io::pipe().unwrap();
        let reading = std::thread::spawn(move || {
            let mut text = Vec::new();
            reader.read_to_end(&mut text).map(|_| text.len())
        });
        let long = vec![b'x'; 100 * CHUNK + 1];
        Output::new(writer).write_patiently(&long).unwrap();
        assert_eq!(reading.join().unwrap().unwrap(), long.len());

        let (mut reader, writer) = full_pipe();
        let mut output = Output::new(writer);
        output.write_at_once(b"x");
        reader.read_exact(&mut [0; CHUNK]).unwrap();
        output.write_at_once(&[b'y'; 2 * CHUNK]);
        drop(output);
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        let taken = rest.iter().filter(|byte| **byte != b'.');
        assert!(taken.clone().all(|byte| *byte == b'y') && taken.count() == CHUNK);

        let (_reader, writer) = full_pipe();
        let error = Output::new(writer).write_patiently(b"x").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
