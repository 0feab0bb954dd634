//! The process as a shell or a supervisor sees it.

use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

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

#[test]
fn a_list_that_cannot_be_written_is_not_taken_for_whole() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full");
    let mut command = mini_vmm();
    let ended = command
        .arg("--help")
        .stdout(full.unwrap())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("cannot write to standard output"), "{said}");
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let status = mini_vmm().arg("--help").stdout(writer).status();
    assert_eq!(status.unwrap().code(), Some(0));
}

#[test]
fn why_it_failed_is_on_standard_error_and_in_the_log() {
    let log = std::env::temp_dir().join(format!("mini-vmm-test-{}.log", std::process::id()));
    let fails = |options: &[&str]| {
        let mut command = mini_vmm();
        command.args(["--kernel", "/dev/null"]).args(options);
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let why = "is a pipe or a device";
    let said = fails(&["--log-file", log.to_str().unwrap()]);
    let logged = std::fs::read_to_string(&log).unwrap();
    let _ = std::fs::remove_file(&log);
    assert!(
        said.starts_with("mini-vmm: /dev/null: ") && said.contains(why),
        "{said}"
    );
    assert!(
        logged.contains("mini-vmm: error: /dev/null: ") && logged.contains(why),
        "{logged}"
    );
    let said = fails(&["--log-format", "json"]);
    assert!(
        said.starts_with('{') && said.matches(why).count() == 1,
        "{said}"
    );
    assert_eq!(fails(&[]).matches(why).count(), 1);
}

/// Whether the process has blocked SIGTERM: from then on only reading it ends the process.
fn blocks_sigterm(child: &Child) -> bool {
    const BLOCKED: &str = "SigBlk:";
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
    let status = status.unwrap_or_default();
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix(BLOCKED));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or(0) & 1 << (Signal::SIGTERM as u64 - 1) != 0
}

/// The exit code of `child`, which must come soon.
fn ends(child: &mut Child) -> Option<i32> {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(30) {
        if let Ok(Some(status)) = child.try_wait() {
            return status.code();
        }
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

/// A FIFO that is removed at the end. Opening it for reading waits for a writer: a start that
/// takes for ever.
struct Fifo(PathBuf);

impl Drop for Fifo {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_signal_ends_a_start_that_takes_long() {
    let name = format!("mini-vmm-test-{}", std::process::id());
    let fifo = Fifo(std::env::temp_dir().join(name));
    mkfifo(&fifo.0, Mode::S_IRWXU).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut child = mini_vmm().arg("--kernel").arg(&fifo.0).spawn().unwrap();
        let begin = Instant::now();
        while !blocks_sigterm(&child) && begin.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(5));
        }
        kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(ends(&mut child), Some(128 + signal as i32), "{signal}");
    }
}
