//! The terminal in raw mode, and back: at the end, on a panic, whatever happens.

use std::io::{self, IsTerminal};

use nix::sys::termios::{self, OutputFlags, SetArg, Termios};
use parking_lot::Mutex;

use crate::output;

/// How the terminal was; `Some` while it is raw. Global, because a panic hook has nothing else.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode of standard input's terminal, until dropped.
pub struct RawTerminal(());

impl RawTerminal {
    /// Sets raw mode; `None` when standard input is no terminal. Output processing stays on, so
    /// that our own messages begin at the left.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let before = termios::tcgetattr(&stdin)?;
        let mut raw = before.clone();
        termios::cfmakeraw(&mut raw);
        raw.output_flags |= OutputFlags::OPOST;
        *BEFORE.lock() = Some(before);
        termios::tcsetattr(&stdin, SetArg::TCSANOW, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal back, if it is raw.
pub fn restore() {
    // A panic may have come with the lock held; better a raw terminal than a hang.
    let Some(mut before) = BEFORE.try_lock() else {
        return;
    };
    if let Some(before) = before.take() {
        // There is nobody left to tell.
        let _ = termios::tcsetattr(io::stdin(), SetArg::TCSANOW, &before);
    }
}

/// Makes a panic restore the terminal and say in one line what happened.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        restore();
        let place = panic
            .location()
            .map_or(String::new(), |place| format!(" at {place}"));
        let what = panic.payload_as_str().unwrap_or("no message");
        output::message(&format!(
            "mini-vmm: internal error{place}: {what}; this is a bug, please report it\n"
        ));
    }));
}
