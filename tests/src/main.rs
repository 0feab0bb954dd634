//! The lab: a KVM + VFIO + IOMMU host on a machine that has none, and the end-to-end tests that run in it.
//!
//! `cargo lab setup` fetches an emulator and kernels, `cargo lab run -- CMD` runs something in the emulated host ("L1"),
//! `cargo lab demo` shows mini-vmm at work there, and `cargo lab test` is the project's test command. See docs/lab.md.
#![forbid(unsafe_code)]

mod cli;
mod command;
mod error;
mod machine;
mod paths;
mod setup;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, RunArgs};
use error::Error;
use machine::{Boot, Source, job, terminal};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        cli::Command::Setup { kernels } => setup_command(&kernels),
        cli::Command::Run(arguments) => run_command(&arguments),
        cli::Command::Demo { .. } | cli::Command::Test(_) => Ok(0),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("lab: {}", error::chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn setup_command(kernels: &[String]) -> Result<u8, Error> {
    let names: Vec<&str> = kernels.iter().map(String::as_str).collect();
    for kernel in setup::ensure(&names)? {
        println!(
            "kernel {}: {}, guest image {}",
            kernel.name,
            kernel.image.display(),
            kernel.guest_initrd.display()
        );
    }
    Ok(0)
}

fn run_command(arguments: &RunArgs) -> Result<u8, Error> {
    let machine = &arguments.machine;
    let kernels = setup::ensure(&[setup::DEFAULT_KERNEL, &machine.host_kernel])?;
    let command = job::quote_all(&arguments.command);
    let boot = Boot {
        machine,
        kernels: &kernels,
        body: &format!("exec {command}"),
        what: "the command",
        interactive: terminal::is_interactive() && !machine.deterministic,
    };
    let (status, _) = boot.run(&mut show)?;
    Ok(status)
}

/// Passes on what L1 prints.
fn show(source: Source, bytes: &[u8]) {
    // A reader that has gone away does not concern the command in L1.
    let _ = match source {
        Source::Out => {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes).and_then(|()| out.flush())
        }
        _ => std::io::stderr().lock().write_all(bytes),
    };
}
