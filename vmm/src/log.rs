//! The log: by default warnings and errors that do not end the VM, one line each on standard error
//! in the form of the messages that do; on request more, in a file, with times, or as JSON.
//!
//! Whoever logs what a guest can cause does so through [`devices::rate`].

use std::fmt;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::registry::LookupSpan;

use crate::config::UsageError;
use crate::options::{LogFormat, LogLevel};
use crate::output::{self, Messages};

/// Where the log goes, once it does.
static PLACE: OnceLock<Place> = OnceLock::new();

enum Place {
    /// Standard error, among the messages.
    Messages,
    /// Standard error, as JSON.
    JsonMessages,
    /// A file.
    File,
}

/// Says why mini-vmm ends: on standard error, and in the log where that is a file. Where standard error has the log as JSON, it
/// has this as JSON too, and not twice.
pub fn end(why: &str) {
    let place = PLACE.get().unwrap_or(&Place::Messages);
    if let Place::JsonMessages | Place::File = place {
        tracing::error!("{why}");
    }
    if let Place::Messages | Place::File = place {
        output::message(&format!("mini-vmm: {why}\n"));
    }
}

/// Logs from now on what is of `level` or worse; to the end of `file` if there is one.
pub fn install(level: LogLevel, format: LogFormat, file: Option<&Path>) -> Result<(), UsageError> {
    let writer = match file {
        Some(path) => BoxMakeWriter::new(Arc::new(append(path)?)),
        None => BoxMakeWriter::new(|| Messages),
    };
    let level = match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Trace => Level::TRACE,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(writer)
        // They would be printed to the same place, with a panic when that fails.
        .log_internal_errors(false);
    let place = match (file, format) {
        (Some(_), _) => Place::File,
        (None, LogFormat::Json) => Place::JsonMessages,
        (None, LogFormat::Text) => Place::Messages,
    };
    // Fails when one is installed already: then that one stays.
    let installed = match format {
        LogFormat::Json => tracing::subscriber::set_global_default(subscriber.json().finish()),
        LogFormat::Text => {
            let line = Line {
                timed: file.is_some(),
            };
            tracing::subscriber::set_global_default(subscriber.event_format(line).finish())
        }
    };
    if installed.is_ok() {
        let _ = PLACE.set(place);
    }
    Ok(())
}

fn append(path: &Path) -> Result<File, UsageError> {
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(UsageError::output("open the log", path))
}

/// `mini-vmm: warning: …`, in a file behind the time.
struct Line {
    timed: bool,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "note",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        if self.timed {
            SystemTime.format_time(&mut writer)?;
            writer.write_char(' ')?;
        }
        write!(writer, "mini-vmm: {level}: ")?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
