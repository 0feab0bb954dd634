//! The user's terminal, when the command in L1 is to have one.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::termios::{OptionalActions, Termios};

use crate::error::Error;

/// A terminal in raw mode, set back when dropped.
pub struct Raw {
    before: Termios,
}

/// Whether the user sits at both ends.
pub fn is_interactive() -> bool {
    std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
}

/// The terminal's size in the words of `stty`.
pub fn size() -> String {
    let size = rustix::termios::tcgetwinsize(std::io::stdin());
    let (rows, columns) = size.map_or((24, 80), |size| (size.ws_row, size.ws_col));
    format!("rows {rows} cols {columns}\n")
}

impl Raw {
    /// Switches the terminal to raw mode and sends what is typed to `target`.
    pub fn start(target: UnixStream) -> Result<Self, Error> {
        let before = rustix::termios::tcgetattr(std::io::stdin())
            .map_err(Error::channel("read the terminal's settings"))?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)
            .map_err(Error::channel("change the terminal's settings"))?;
        // Ends with the process: a blocked read cannot be interrupted.
        thread::spawn(move || copy(target));
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that has gone.
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Now, &self.before);
    }
}

fn copy(mut target: UnixStream) {
    // Unbuffered, and without the lock that `stdin()` would hold for ever.
    let Ok(input) = rustix::io::dup(rustix::stdio::stdin()) else {
        return;
    };
    let mut input = File::from(input);
    let mut buffer = [0; 1024];
    while let Ok(count) = input.read(&mut buffer) {
        let bytes = buffer.get(..count).unwrap_or_default();
        if count == 0 || target.write_all(bytes).is_err() {
            return;
        }
    }
}
