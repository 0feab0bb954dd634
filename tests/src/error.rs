//! What can go wrong in the lab.

use std::path::{Path, PathBuf};
use std::time::Duration;

/// A failure, printed once by `main` together with its causes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Options that do not go together.
    #[error("{0}")]
    Usage(String),
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
    /// A program could not be started.
    #[error("cannot start {program}")]
    Start {
        /// Its name.
        program: String,
        /// Why not.
        source: std::io::Error,
    },
    /// A program ran and failed.
    #[error("{program} ended with {status}{output}")]
    Program {
        /// Its name and the arguments that tell what it was to do.
        program: String,
        /// How it ended.
        status: std::process::ExitStatus,
        /// The end of what it printed, on lines of its own.
        output: String,
    },
    /// Packages are missing and cannot be installed from here.
    #[error(
        "the lab needs packages that are not installed: {packages}\n{reason}; as root on Debian 12 or 13 run\n    \
         apt-get install {packages}\n\
         (QEMU must be 10.0 or newer: on Debian 12 that is in the suite bookworm-backports)"
    )]
    Packages {
        /// Their names, separated by spaces.
        packages: String,
        /// Why the lab does not install them itself.
        reason: String,
    },
    /// This machine's package sources do not help.
    #[error("{0}")]
    Sources(String),
    /// No package carries the kernel.
    #[error("no package {pattern} found in {suites}")]
    NoKernel {
        /// The names looked for.
        pattern: String,
        /// Where.
        suites: String,
    },
    /// A kernel name that is not in the table.
    #[error("unknown kernel `{name}`; known are {known}")]
    UnknownKernel {
        /// The name given.
        name: String,
        /// The names that would do.
        known: String,
    },
    /// An unpacked kernel lacks something that the lab needs.
    #[error("kernel {kernel} has no {what}")]
    KernelLacks {
        /// The kernel's name.
        kernel: String,
        /// A module or file.
        what: String,
    },
    /// An option's value does not make sense.
    #[error("{option} `{value}`: {problem}")]
    Option {
        /// The option.
        option: &'static str,
        /// What stood there.
        value: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The lab could not set up a channel to QEMU.
    #[error("cannot {action}")]
    Channel {
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// QEMU's monitor answered with something unexpected.
    #[error("QEMU's monitor: {0}")]
    Monitor(String),
    /// The machine ended before its init reported a status.
    #[error("the lab's host ended without reporting a status; see {}{tail}", log.display())]
    HostDied {
        /// The directory with the logs.
        log: PathBuf,
        /// The end of its console or of QEMU's messages, on lines of its own.
        tail: String,
    },
    /// Time is up.
    #[error("timeout: {what} did not end within {} s; the lab's host was stopped, see {}", limit.as_secs(), log.display())]
    Timeout {
        /// What took too long.
        what: String,
        /// The limit.
        limit: Duration,
        /// The directory with the logs.
        log: PathBuf,
    },
    /// A CPU of the machine spins for ever.
    #[error("{what}: an emulated CPU spins with interrupts off (docs/lab.md), see registers and console in {}", log.display())]
    Hung {
        /// What was run.
        what: String,
        /// The directory with the logs.
        log: PathBuf,
    },
    /// A trace of ioctls cannot be counted.
    #[error("the trace in {}: {problem}", directory.display())]
    Trace {
        /// Where it is.
        directory: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A run of `cargo lab bench` came to nothing.
    #[error("{cell}: {problem}; see {}", log.display())]
    Measurement {
        /// What was measured.
        cell: String,
        /// What went wrong.
        problem: String,
        /// The directory with the logs.
        log: PathBuf,
    },
    /// A file does not have what it should.
    #[error("{}: {problem}", path.display())]
    Content {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// `cargo lab demo` or `cargo lab test` found something wrong; the details have been printed.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// For `map_err` on a file operation.
    pub fn file<'a>(
        action: &'static str,
        path: &'a Path,
    ) -> impl Fn(std::io::Error) -> Error + use<'a> {
        move |source| Error::File {
            action,
            path: path.to_path_buf(),
            source,
        }
    }

    /// For `map_err` on a channel operation.
    pub fn channel<E: Into<std::io::Error>>(action: &'static str) -> impl Fn(E) -> Error {
        move |source| Error::Channel {
            action,
            source: source.into(),
        }
    }

    /// The exit status of the lab: 124 for a timeout and 125 for a failure of the lab, as `timeout` and `docker` have it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Timeout { .. } => 124,
            Error::Failed(_) => 1,
            Error::Option { .. } | Error::Usage(_) | Error::UnknownKernel { .. } => 2,
            _ => 125,
        }
    }
}

/// The error and its causes, each once.
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
