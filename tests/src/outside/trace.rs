//! A directory with the trace of a command, as resources/lab/count-ioctls.sh leaves it.

use std::fs;
use std::path::Path;

use super::format::{Format, Formats, Page};
use super::summary::{self, Traced};
use super::{IoctlCounts, ring};
use crate::error::Error;

/// The kernel's two buffers: of the command's processes, and of the IOMMU.
const BUFFERS: [&str; 2] = ["ioctls", "iommu"];
/// Lines of a CPU's statistics that count records which the trace does not have.
const LOSSES: [&str; 3] = ["overrun", "commit overrun", "dropped events"];

/// Counts what a trace holds.
pub fn read(directory: &Path) -> Result<IoctlCounts, Error> {
    let mut traced = Vec::new();
    for name in BUFFERS {
        traced.extend(records(&directory.join(name), decode)?);
    }
    // Each CPU's are in order; of records of the same time those of one CPU stay so.
    traced.sort_by_key(|(time, _)| *time);
    Ok(summary::count(&traced))
}

/// The records of all CPUs of one buffer with their times, each CPU's in order; `decode` finds out what one says.
pub fn records<T>(
    directory: &Path,
    decode: fn(&Format, &[u8]) -> Option<T>,
) -> Result<Vec<(u64, T)>, Error> {
    let mut traced = Vec::new();
    let problem = |problem: String| Error::Trace {
        directory: directory.to_path_buf(),
        problem,
    };
    let page = text(&directory.join("header_page"))?;
    let page = Page::parse(&page).ok_or_else(|| problem("header_page is not known".to_owned()))?;
    let formats = text(&directory.join("formats"))?;
    let formats =
        Formats::parse(&formats).ok_or_else(|| problem("formats are not known".to_owned()))?;
    for cpu in (0..).map(|number| format!("cpu{number}")) {
        let statistics = directory.join(format!("{cpu}.stats"));
        if !statistics.exists() {
            return match cpu.as_str() {
                "cpu0" => Err(problem("it is empty".to_owned())),
                _ => Ok(traced),
            };
        }
        let path = directory.join(&cpu);
        let bytes = fs::read(&path).map_err(Error::file("read", &path))?;
        let found = one_cpu(&bytes, &text(&statistics)?, page, &formats, decode);
        traced.extend(found.map_err(|reason| problem(format!("{cpu}: {reason}")))?);
    }
    Ok(traced)
}

fn text(path: &Path) -> Result<String, Error> {
    fs::read_to_string(path).map_err(Error::file("read", path))
}

/// The records of one CPU; the error says what is wrong with them.
fn one_cpu<T>(
    buffer: &[u8],
    statistics: &str,
    page: Page,
    formats: &Formats,
    decode: fn(&Format, &[u8]) -> Option<T>,
) -> Result<Vec<(u64, T)>, String> {
    let number = |key: &str| -> Option<u64> {
        let mut lines = statistics.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
        value.trim().parse().ok()
    };
    for loss in LOSSES {
        match number(loss) {
            Some(0) => {}
            Some(lost) => {
                return Err(format!(
                    "the kernel had no room for {lost} records ({loss}); count a shorter command, or give \
                     resources/lab/count-ioctls.sh a bigger BUFFER_KB"
                ));
            }
            None => return Err(format!("its statistics do not tell `{loss}`")),
        }
    }
    let mut traced = Vec::new();
    let mut records = 0;
    let mut unknown = None;
    ring::records(buffer, page, |time, record| {
        records += 1;
        let format = formats.of(record);
        match format.and_then(|format| decode(format, record)) {
            Some(what) => traced.push((time, what)),
            None => unknown = Some(format.map_or("no known kind", |format| &format.name)),
        }
    })
    .map_err(|damage| damage.to_string())?;
    if let Some(name) = unknown {
        return Err(format!("there is a record that makes no sense, of {name}"));
    }
    match number("entries") {
        Some(entries) if entries == records => Ok(traced),
        entries => Err(format!(
            "it has {records} records, and should have {}",
            entries.unwrap_or_default()
        )),
    }
}

/// What a record says; none if it lacks a field or is of a kind that the script does not trace.
fn decode(format: &Format, record: &[u8]) -> Option<Traced> {
    let value = |name| format.value(record, name);
    Some(match format.name.as_str() {
        "sys_enter_ioctl" => Traced::Call {
            thread: value("common_pid")?,
            fd: value("fd")?,
            // The upper half of the register is not the kernel's concern.
            cmd: (value("cmd")? & u64::from(u32::MAX)) as u32,
        },
        "sys_exit_ioctl" => Traced::Return {
            thread: value("common_pid")?,
        },
        "sched_process_fork" => Traced::Fork {
            parent: value("parent_pid")?,
            child: value("child_pid")?,
        },
        "sched_process_exec" => Traced::Exec {
            process: value("common_pid")?,
        },
        "map" => Traced::Map {
            iova: value("iova")?,
            physical: value("paddr")?,
            size: value("size")?,
        },
        "unmap" => Traced::Unmap {
            size: value("unmapped_size")?,
        },
        "print" => Traced::End,
        _ => return None,
    })
}
