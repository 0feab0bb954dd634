//! Running other programs.

use std::process::{Command, Output, Stdio};

use crate::error::Error;

/// How much of a failed program's output an error repeats.
const REPEATED_LINES: usize = 15;

/// Runs a program to its end and returns what it printed on standard output.
pub fn output(command: &mut Command) -> Result<String, Error> {
    let output = run_captured(command)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a program to its end and returns the bytes that it printed on standard output.
pub fn bytes(command: &mut Command) -> Result<Vec<u8>, Error> {
    run_captured(command).map(|output| output.stdout)
}

/// Runs a program to its end; what it prints is shown only when it fails.
pub fn run(command: &mut Command) -> Result<(), Error> {
    run_captured(command).map(drop)
}

/// Runs a program to its end with its output going where the lab's goes.
pub fn run_visible(command: &mut Command) -> Result<(), Error> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(|source| start_error(command, source))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::Program {
        program: describe(command),
        status,
        output: String::new(),
    })
}

fn run_captured(command: &mut Command) -> Result<Output, Error> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| start_error(command, source))?;
    if output.status.success() {
        return Ok(output);
    }
    let mut text = String::from_utf8_lossy(&output.stderr).into_owned();
    if text.trim().is_empty() {
        text = String::from_utf8_lossy(&output.stdout).into_owned();
    }
    Err(Error::Program {
        program: describe(command),
        status: output.status,
        output: tail(&text, REPEATED_LINES),
    })
}

/// The last lines of a text, each indented on a line of its own; empty for an empty text.
pub fn tail(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.trim_end().lines().collect();
    let first = lines.len().saturating_sub(count);
    lines
        .iter()
        .skip(first)
        .map(|line| format!("\n    {line}"))
        .collect()
}

fn start_error(command: &Command, source: std::io::Error) -> Error {
    Error::Start {
        program: command.get_program().to_string_lossy().into_owned(),
        source,
    }
}

fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args().take(6) {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_is_quoted_at_its_end() {
        let error = output(Command::new("sh").args(["-c", "echo out; echo reason >&2; exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(error.ends_with("\n    reason"), "{error}");
    }

    #[test]
    fn tail_keeps_the_last_lines() {
        assert_eq!(tail("a\nb\nc\n", 2), "\n    b\n    c");
        assert_eq!(tail("", 2), "");
    }
}
