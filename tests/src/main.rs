//! The lab: a KVM + VFIO + IOMMU host on a machine that has none, and the end-to-end tests that run in it.
//!
//! `cargo lab setup` fetches an emulator and kernels, `cargo lab run -- CMD` runs something in the emulated host ("L1"),
//! `cargo lab demo` shows mini-vmm at work there, and `cargo lab test` is the project's test command. See docs/lab.md.
#![forbid(unsafe_code)]

mod bench;
mod checks;
mod cli;
mod command;
mod e2e;
mod error;
mod hold;
mod machine;
mod outside;
mod paths;
mod refuse;
mod setup;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use bench::gate::{self, Gate};
use cli::{BenchArgs, Cli, RunArgs, TestArgs};
use e2e::{Job, Setting, Tally};
use error::Error;
use machine::{Boot, Source, job, terminal};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        cli::Command::Setup { kernels, qemu11 } => setup_command(&kernels, qemu11),
        cli::Command::Run(arguments) => run_command(&arguments),
        cli::Command::Demo { verbose } => demo_command(verbose),
        cli::Command::Bench(arguments) => bench_command(&arguments),
        cli::Command::Test(arguments) => test_command(&arguments),
        cli::Command::WithoutIoctl { request, command } => Err(refuse::run(request, &command)),
        cli::Command::HoldVm => hold::run().map(|never| match never {}),
    };
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("lab: {}", error::chain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn setup_command(kernels: &[String], qemu11: bool) -> Result<u8, Error> {
    let names: Vec<&str> = kernels.iter().map(String::as_str).collect();
    for kernel in setup::ensure(&names)? {
        println!(
            "kernel {}: {}, guest image {}",
            kernel.name,
            kernel.image.display(),
            kernel.guest_initrd.display()
        );
    }
    if qemu11 {
        println!("QEMU 11: {}", setup::qemu11()?.display());
    }
    Ok(0)
}

fn run_command(arguments: &RunArgs) -> Result<u8, Error> {
    let machine = &arguments.machine;
    let kernels = setup::ensure(&[setup::DEFAULT_KERNEL, &machine.host_kernel])?;
    let mut command = job::quote_all(&arguments.command);
    if arguments.count_ioctls {
        command = outside::command(outside::DIRECTORY, &command);
    }
    let boot = Boot {
        machine,
        kernels: &kernels,
        body: &format!("exec {command}"),
        what: "the command",
        interactive: terminal::is_interactive() && !machine.deterministic,
    };
    if !arguments.count_ioctls {
        return boot.run(&mut show);
    }
    let run = outside::run(&boot, &mut show)?;
    eprint!(
        "\n{}{}\n",
        run.counts,
        run.log.join(outside::JSON).display()
    );
    Ok(run.status)
}

fn demo_command(verbose: bool) -> Result<u8, Error> {
    setup::ensure(&[setup::DEFAULT_KERNEL])?;
    eprintln!("lab: building mini-vmm");
    checks::build()?;
    eprintln!("lab: booting the host, and in it a guest with two GPUs and a disk");
    let (outcome, log) = e2e::single(&e2e::demo::test(), &Setting::default(), verbose)?;
    match e2e::demo::Summary::of(&outcome) {
        Ok(summary) => {
            print!("{summary}");
            Ok(0)
        }
        Err(problem) => {
            print!("{}", outcome.output);
            Err(Error::Failed(format!(
                "the demo failed: {problem}; the host's logs are in {}",
                log.display()
            )))
        }
    }
}

fn bench_command(arguments: &BenchArgs) -> Result<u8, Error> {
    let good = bench::run(arguments)?;
    Ok(u8::from(!good))
}

fn test_command(arguments: &TestArgs) -> Result<u8, Error> {
    let mut tests = e2e::all();
    if let Some(filter) = &arguments.filter {
        tests.retain(|test| test.name.contains(filter.as_str()));
    }
    // Before anything is built.
    let setting = Setting::new(&arguments.host_kernel, arguments.iommu)?;
    let wants_bench = match &arguments.filter {
        Some(filter) => gate::NAME.contains(filter.as_str()),
        None => true,
    };
    if arguments.list {
        tests.iter().for_each(|test| println!("{}", test.name));
        if wants_bench {
            println!("{}", gate::NAME);
        }
        return Ok(0);
    }
    let mut tally = Tally::default();
    if !arguments.e2e {
        tally.add(checks::run(arguments.filter.as_deref())?);
    }
    if !arguments.unit && (wants_bench || !tests.is_empty()) {
        checks::build()?;
        let tests = setting.apply(tests, &mut tally);
        for _ in 0..arguments.repeat {
            let gate = wants_bench.then(Gate::new);
            let jobs = gate.iter().flat_map(bench_jobs).collect();
            tally.add(e2e::run(tests.clone(), jobs, &setting, arguments.verbose)?);
            if let Some(gate) = gate {
                tally.add(gate.show()?);
            }
        }
    }
    println!(
        "\n{} passed, {} failed, {} skipped",
        tally.passed, tally.failed, tally.skipped
    );
    Ok(u8::from(tally.failed > 0))
}

/// The runs of the bench's test, each in a machine of its own.
fn bench_jobs(gate: &Gate) -> Vec<Job<'_>> {
    let job = |cell| -> Job<'_> {
        Box::new(move || {
            gate.measure(&cell);
            Ok(Tally::default())
        })
    };
    Gate::cells().map(job).into()
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
