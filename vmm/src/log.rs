//! Warnings and errors that do not end the VM: one line each on standard error, in the form of the
//! messages that do.

use std::fmt;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

use crate::output::Messages;

/// Shows warnings and errors from now on.
pub fn install() {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(Level::WARN)
        .with_writer(|| Messages)
        // They would be printed to the same place, with a panic when that fails.
        .log_internal_errors(false)
        .event_format(Line)
        .finish();
    // Fails when one is installed already: then that one stays.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// `mini-vmm: warning: …`
struct Line;

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
            _ => "note",
        };
        write!(writer, "mini-vmm: {level}: ")?;
        context.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
