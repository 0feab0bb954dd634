//! mini-vmm: starts a Linux guest with PCI devices of the host assigned to it.
//!
//! [`config`] reads the command line, [`machine`] builds and runs the machine, and this file turns
//! the result into a message and an exit code.

// They panic when their end of a pipe is closed; see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod config;
mod console;
mod device_events;
mod error;
mod events;
mod kvm;
mod limits;
mod log;
mod machine;
mod memory;
mod memory_check;
mod options;
mod output;
mod pauses;
mod profile;
mod ram_mapping;
mod ram_progress;
mod run;
mod signals;
mod stop;
mod terminal;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use config::Command;
use error::{Error, chain};
use profile::Profile;
use stop::Outcome;

fn main() -> ExitCode {
    let profile = Arc::new(Profile::start());
    terminal::install_panic_hook();
    log::install();
    limits::raise_open_files();
    let parsed = {
        let _span = profile.span("read options");
        config::parse(std::env::args_os())
    };
    let config = match parsed {
        Ok(Command::Run(config)) => config,
        Ok(Command::Print(text)) => {
            // Whoever closed our output does not want to read it.
            let _ = std::io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => return report(&Outcome::Failed(error.into())),
    };
    if let Some(wanted) = config.boot_profile {
        profile.request(wanted);
    }
    let outcome = match machine::run(&config, &profile) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(error),
    };
    profile.finish();
    report(&outcome)
}

/// Says what has to be said, and returns the exit code.
fn report(outcome: &Outcome) -> ExitCode {
    match outcome {
        Outcome::Failed(error) => say(error),
        Outcome::Crashed(how) => output::message(&format!("mini-vmm: the guest crashed: {how}\n")),
        Outcome::PoweredOff | Outcome::Reset | Outcome::Quit | Outcome::Signal(_) => {}
    }
    ExitCode::from(outcome.code())
}

fn say(error: &Error) {
    output::message(&format!("mini-vmm: {}\n", chain(error)));
}
