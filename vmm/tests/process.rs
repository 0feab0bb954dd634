//! The process as a shell or a supervisor sees it.

use std::io;
use std::process::{Command, Stdio};

/// The program, with no input.
fn mini_vmm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_mini-vmm"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

#[test]
fn the_exit_code_is_right_when_nobody_reads_the_message() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let status = mini_vmm().arg("--nonsense").stderr(writer).status();
    assert_eq!(status.unwrap().code(), Some(2));
}
