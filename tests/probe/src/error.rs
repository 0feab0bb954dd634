//! What can go wrong in the probe.

use std::path::PathBuf;

/// A failure, printed once by `main`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line does not make sense.
    #[error("{0}")]
    Usage(String),
    /// An argument that has to be a number is not one.
    #[error("{what}: `{text}` is not a number (decimal, or hexadecimal with 0x)")]
    Number {
        /// The argument's name.
        what: &'static str,
        /// What stood there.
        text: String,
    },
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The device has no such BAR.
    #[error("{bdf} has no memory BAR {bar}")]
    NoBar {
        /// The device.
        bdf: String,
        /// The BAR's number.
        bar: u64,
    },
    /// An access outside the BAR or across a page.
    #[error("offset {offset:#x} with width {width} does not lie inside one page of {what}")]
    Range {
        /// What was to be accessed.
        what: String,
        /// The offset asked for.
        offset: u64,
        /// Bytes.
        width: u64,
    },
    /// The device did not do what it was told.
    #[error("{0}")]
    Device(String),
}

/// The error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
