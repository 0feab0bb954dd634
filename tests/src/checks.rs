//! The checks that need no machine: formatting, clippy and unit tests.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use crate::e2e::Tally;
use crate::error::Error;
use crate::paths;

/// Runs them all and counts: one for formatting, one for clippy, and the unit tests.
pub fn run(filter: Option<&str>) -> Result<Tally, Error> {
    let mut tally = Tally::default();
    if filter.is_none() {
        tally.add(step("fmt", &["fmt", "--all", "--check"])?);
        let clippy = [
            "clippy",
            "--quiet",
            "--workspace",
            "--all-targets",
            "--all-features",
            "--",
            "-D",
            "warnings",
        ];
        tally.add(step("clippy", &clippy)?);
    }
    let mut arguments = vec!["test", "--workspace", "--all-features", "--no-fail-fast"];
    arguments.extend(filter);
    tally.add(unit_tests(&arguments)?);
    Ok(tally)
}

/// Builds the program under test.
pub fn build() -> Result<(), Error> {
    if paths::other_vmm().is_some() {
        return Ok(());
    }
    crate::command::run_visible(&mut cargo(&[
        "build",
        "--quiet",
        "--release",
        "--package",
        "mini-vmm",
    ]))
}

fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(paths::repository()).args(arguments);
    command
}

fn step(name: &str, arguments: &[&str]) -> Result<Tally, Error> {
    let passed = match crate::command::run_visible(&mut cargo(arguments)) {
        Ok(()) => true,
        Err(Error::Program { .. }) => false,
        Err(error) => return Err(error),
    };
    println!("test {name} ... {}", if passed { "ok" } else { "FAILED" });
    Ok(Tally {
        passed: passed.into(),
        failed: (!passed).into(),
        skipped: 0,
    })
}

/// Passes the output of `cargo test` on and adds up its results.
fn unit_tests(arguments: &[&str]) -> Result<Tally, Error> {
    let start = |source| Error::Start {
        program: "cargo test".to_owned(),
        source,
    };
    let mut child = cargo(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(start)?;
    let mut tally = Tally::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).lines() {
            let line = line.map_err(Error::channel("read the output of cargo test"))?;
            // Somebody who stops reading does not stop the tests.
            let _ = writeln!(std::io::stdout(), "{line}");
            tally.add(results(&line));
        }
    }
    let status = child.wait().map_err(start)?;
    if !status.success() && tally.failed == 0 {
        // Something did not compile.
        tally.failed = 1;
    }
    Ok(tally)
}

/// Reads `test result: ok. 3 passed; 0 failed; 1 ignored; …`.
fn results(line: &str) -> Tally {
    let Some((_, counts)) = line.split_once("test result: ") else {
        return Tally::default();
    };
    let count = |what: &str| {
        counts
            .split([';', '.'])
            .find_map(|part| part.trim().strip_suffix(what)?.trim().parse().ok())
            .unwrap_or(0)
    };
    Tally {
        passed: count("passed"),
        failed: count("failed"),
        skipped: count("ignored"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_test() {
        let line = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(
            results(line),
            Tally {
                passed: 12,
                failed: 1,
                skipped: 2
            }
        );
        assert_eq!(results("test a ... ok"), Tally::default());
    }
}
