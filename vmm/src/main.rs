//! mini-vmm: starts a Linux guest with PCI devices of the host assigned to it.
//!
//! [`config`] reads the command line, [`machine`] builds and runs the machine, and this file turns
//! the result into a message and an exit code.

// They panic when their end of a pipe is closed; see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(test)]
mod catalogue;
mod check;
mod config;
mod console;
mod device_events;
mod devices_list;
mod error;
mod events;
mod host_ram;
mod kvm;
mod limits;
mod log;
mod machine;
mod memory;
mod memory_check;
mod options;
mod output;
mod pauses;
mod plan;
mod profile;
mod ram_mapping;
mod ram_progress;
mod run;
mod signals;
mod starter;
mod stop;
mod terminal;

use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::sync::Arc;

use config::{Command, Config, UsageError};
use error::{Error, chain};
use profile::Profile;
use stop::Outcome;

fn main() -> ExitCode {
    let profile = Arc::new(Profile::start());
    terminal::install_panic_hook();
    match execute(&profile) {
        Ok(code) => code,
        Err(error) => report(&Outcome::Failed(error)),
    }
}

fn execute(profile: &Arc<Profile>) -> Result<ExitCode, Error> {
    let parsed = {
        let _span = profile.span("read options");
        config::parse(std::env::args_os())?
    };
    let config = match parsed {
        Command::Run(config) => config,
        Command::Check(command) => {
            prepare(&command.config)?;
            return told(check::run(&command));
        }
        Command::Devices { json } => return told((devices_list::run(json), 0)),
        Command::Print(text) => return told((text, 0)),
    };
    prepare(&config)?;
    if config.dry_run {
        return told(check::dry_run(&config));
    }
    profile.request(&config.boot_profile)?;
    let outcome = machine::run(&config, profile).unwrap_or_else(Outcome::Failed);
    profile.finish();
    Ok(report(&outcome))
}

/// What comes before everything else: the log, and limits.
fn prepare(config: &Config) -> Result<(), UsageError> {
    log::install(
        config.log_level,
        config.log_format,
        config.log_file.as_deref(),
    )?;
    limits::raise_open_files();
    Ok(())
}

/// Prints a text; returns the exit code that comes with it.
fn told((text, code): (String, u8)) -> Result<ExitCode, Error> {
    let mut output = std::io::stdout();
    let written = output.write_all(text.as_bytes());
    match written.and_then(|()| output.flush()) {
        // Whoever closed our output does not want to read it.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::system("write to standard output")(error))
        }
        _ => Ok(ExitCode::from(code)),
    }
}

/// Says what has to be said, and returns the exit code.
fn report(outcome: &Outcome) -> ExitCode {
    match outcome {
        Outcome::Failed(error) => say(error),
        Outcome::Crashed(how) => log::end(&format!("the guest crashed: {how}")),
        Outcome::PoweredOff | Outcome::Reset | Outcome::Quit | Outcome::Signal(_) => {}
    }
    ExitCode::from(outcome.code())
}

fn say(error: &Error) {
    log::end(&chain(error));
}
