//! Whose limits the next start of mini-vmm inherits, and how they are raised.

use std::fs;
use std::path::Path;

use devices::remedy::Remedy;

/// Programs that people start others from, and that outlive these. What stands between them and mini-vmm (sudo, timeout, a
/// script's interpreter) may be gone when a limit is to be raised.
const SHELLS: [&str; 9] = [
    "bash", "sh", "dash", "zsh", "fish", "ksh", "ash", "tcsh", "busybox",
];
/// So many ancestors are looked at.
const GENERATIONS: usize = 16;

/// A limit of a process (getrlimit(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bytes of locked memory.
    Memlock,
    /// Open files.
    OpenFiles,
}

impl Limit {
    /// As prlimit(1) calls it.
    fn option(self) -> &'static str {
        match self {
            Self::Memlock => "memlock",
            Self::OpenFiles => "nofile",
        }
    }

    /// As a unit of systemd calls it (systemd.exec(5)).
    fn directive(self) -> &'static str {
        match self {
            Self::Memlock => "LimitMEMLOCK",
            Self::OpenFiles => "LimitNOFILE",
        }
    }

    /// What raises it to `value`, soft and hard, for the next start: a command where a shell, or another process that is there to
    /// stay, started us; a service manager reads its configuration.
    pub fn raise(self, value: u64) -> Remedy {
        match starter() {
            Some(pid) => Remedy::Run(format!("prlimit --pid {pid} --{}={value}", self.option())),
            None => Remedy::Do(format!(
                "set {}={value} in the service's unit, or that limit of the container",
                self.directive()
            )),
        }
    }
}

/// The nearest ancestor that is a shell, else the process that started us; `None` where that is the first process, a service
/// manager's.
pub fn starter() -> Option<i32> {
    let parent = rustix::process::getppid()?.as_raw_nonzero().get();
    starter_in(Path::new("/proc"), parent)
}

fn starter_in(proc: &Path, parent: i32) -> Option<i32> {
    let mut pid = parent;
    for _ in 0..GENERATIONS {
        let Some((name, above)) = process(proc, pid) else {
            break;
        };
        if SHELLS.contains(&name.as_str()) {
            return Some(pid);
        }
        pid = above;
    }
    (parent > 1).then_some(parent)
}

/// Name and parent of a process, from its status (proc_pid_status(5)).
fn process(proc: &Path, pid: i32) -> Option<(String, i32)> {
    let status = fs::read_to_string(proc.join(format!("{pid}/status"))).ok()?;
    let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
    let name = value("Name:")?.trim().to_owned();
    Some((name, value("PPid:")?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Processes with their names and parents.
    fn proc(processes: &[(i32, &str, i32)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (pid, name, parent) in processes {
            let directory = root.path().join(pid.to_string());
            fs::create_dir(&directory).unwrap();
            let status = format!("Name:\t{name}\nUmask:\t0022\nPPid:\t{parent}\n");
            fs::write(directory.join("status"), status).unwrap();
        }
        root
    }

    #[test]
    fn the_shell_behind_wrappers_is_named_for_they_end_with_us() {
        let root = proc(&[
            (1, "systemd", 0),
            (50, "bash", 1),
            (60, "sudo", 50),
            (61, "timeout", 60),
        ]);
        assert_eq!(starter_in(root.path(), 61), Some(50));
    }

    #[test]
    fn a_program_that_starts_guests_is_named_where_there_is_no_shell() {
        let root = proc(&[(1, "systemd", 0), (70, "python3", 1)]);
        assert_eq!(starter_in(root.path(), 70), Some(70));
        // Its status may be hidden.
        assert_eq!(starter_in(root.path(), 71), Some(71));
    }

    #[test]
    fn a_service_managers_own_limits_are_left_alone() {
        let root = proc(&[(1, "systemd", 0)]);
        assert_eq!(starter_in(root.path(), 1), None);
        // In a container the first process may be a shell.
        let root = proc(&[(1, "bash", 0)]);
        assert_eq!(starter_in(root.path(), 1), Some(1));
    }
}
