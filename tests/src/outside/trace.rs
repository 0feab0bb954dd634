//! A directory with the trace of a command, as resources/lab/count-ioctls.sh leaves it.

use std::fs;
use std::path::Path;

use super::format::{Format, Formats, Page};
use super::names::KVM_RUN;
use super::summary::{self, Traced};
use super::{IoctlCounts, ring};
use crate::error::Error;

/// The kernel's two buffers: of the command's processes, and of the IOMMU.
const BUFFERS: [&str; 2] = [CALLS, "iommu"];
const CALLS: &str = "ioctls";
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

/// When a vCPU was run for the first time.
pub fn first_run(directory: &Path) -> Result<Option<u64>, Error> {
    let traced = records(&directory.join(CALLS), decode)?;
    let is_run = |what: &Traced| matches!(what, Traced::Call { cmd: KVM_RUN, .. });
    let runs = traced.iter().filter(|(_, what)| is_run(what));
    Ok(runs.map(|(time, _)| *time).min())
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
                     resources/lab/trace.sh a bigger BUFFER_KB"
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outside::{Calls, Mapped, Unmapped};
    use crate::paths;

    /// Of mini-vmm with two GPUs of 16 GiB, started from a shell in a deterministic machine with kernel 7.3. The guest marked
    /// its start at port 0x80 and crashed at once.
    fn captured() -> std::path::PathBuf {
        paths::repository().join("tests/data/trace")
    }

    #[test]
    fn a_captured_trace_is_counted() {
        let counts = read(&captured()).unwrap();
        let first = first_run(&captured()).unwrap().unwrap();
        assert!(counts.exec_ns < first && Some(first) < counts.power_off_ns);
        assert_eq!(counts.before["KVM_RUN"].calls, 2);
        assert_eq!(counts.before["KVM_SET_USER_MEMORY_REGION"].calls, 5);
        assert_eq!(counts.before["VFIO_DEVICE_SET_IRQS"].calls, 4);
        let map_dma = Calls {
            calls: 4,
            ns: 132_956,
            max_ns: 51_411,
        };
        assert_eq!(counts.before["VFIO_IOMMU_MAP_DMA"], map_dma);
        // For the report of the crash.
        let after: Vec<&str> = counts.after.keys().map(String::as_str).collect();
        assert_eq!(after, ["KVM_GET_REGS", "KVM_GET_SREGS"]);
        let unknown = |name: &&String| name.starts_with("0x");
        assert_eq!(counts.before.keys().find(unknown), None);
        let bars = 2 * ((16 << 30) + 4096);
        let mapped = Mapped {
            events: 4,
            bytes: bars,
            bytes_2m: 32 << 30,
            bytes_1g: 32 << 30,
        };
        assert_eq!(counts.iommu_map, mapped);
        let unmapped = Unmapped {
            events: 4,
            bytes: bars,
        };
        assert_eq!(counts.iommu_unmap, unmapped);
        let power_off = counts.power_off_ns.unwrap();
        assert!(counts.exec_ns < power_off && power_off < counts.end_ns);
    }

    /// Reads a copy of the captured trace in which `path` was changed.
    fn changed(path: &str, change: impl Fn(Vec<u8>) -> Vec<u8>) -> Result<IoctlCounts, String> {
        let copy = tempfile::tempdir().unwrap();
        for buffer in BUFFERS {
            fs::create_dir(copy.path().join(buffer)).unwrap();
            for file in fs::read_dir(captured().join(buffer)).unwrap() {
                let to = copy
                    .path()
                    .join(buffer)
                    .join(file.as_ref().unwrap().file_name());
                fs::copy(file.unwrap().path(), to).unwrap();
            }
        }
        let path = copy.path().join(path);
        let content = fs::read(&path).unwrap();
        fs::write(&path, change(content)).unwrap();
        read(copy.path()).map_err(|error| error.to_string())
    }

    #[test]
    fn lost_records_are_an_error() {
        for loss in LOSSES {
            let lose = |text: Vec<u8>| {
                let text = String::from_utf8(text).unwrap();
                let (none, some) = (format!("\n{loss}: 0\n"), format!("\n{loss}: 7\n"));
                text.replacen(&none, &some, 1).into_bytes()
            };
            let problem = changed("iommu/cpu0.stats", lose).unwrap_err();
            assert!(problem.contains("no room for 7 records"), "{problem}");
        }
    }

    #[test]
    fn a_trace_that_is_not_whole_is_an_error() {
        let page = |content: Vec<u8>| content[..4096].to_vec();
        let problem = changed("ioctls/cpu0", page).unwrap_err();
        assert!(problem.contains("records, and should have"), "{problem}");
        let cut = |content: Vec<u8>| content[..4100].to_vec();
        let problem = changed("ioctls/cpu0", cut).unwrap_err();
        assert!(problem.contains("cut off"), "{problem}");
        let problem = changed("ioctls/formats", |_| Vec::new()).unwrap_err();
        assert!(problem.contains("no known kind"), "{problem}");
    }
}
