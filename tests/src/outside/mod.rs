//! The outside view of a VMM: how often it called which ioctl of VFIO, iommufd and KVM, how long that took, and what the
//! IOMMU was told. L1's kernel counts, so that it works for any VMM alike.
//!
//! A script in L1 (resources/lab/count-ioctls.sh) traces a command; the trace is read here, on the outer machine, from the
//! run's directory. `ring` takes the kernel's buffers apart, `format` says what is in them, `trace` reads a directory of
//! them, `summary` counts, `names` has the names, `table` prints.
//!
//! For other parts of the lab:
//!
//! * [`command`] is the shell text that runs a command under counting; its trace is left in a directory that L1's shell
//!   names, below `$LAB_OUT`;
//! * [`read`] makes [`IoctlCounts`] of such a directory, found in the run's directory afterwards;
//! * [`run`] does both: it boots L1 for a body that runs one [`command`] with [`DIRECTORY`], and writes [`JSON`].
//!
//! What is true of every [`IoctlCounts`]:
//!
//! * A call belongs to the half in which it began. The guest is off when the last KVM_RUN of any vCPU has returned: then
//!   all vCPUs have left the guest for good, which is so for any VMM, whatever the guest did to be turned off.
//! * Lost records are an error, never a lower count.

mod format;
mod names;
mod ring;
mod summary;
mod table;
mod trace;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::machine::{Boot, Sink, Source, job};

pub use format::Format;
pub use trace::{first_run, read, records};

/// Where [`run`] expects the trace, below the run's directory.
pub const DIRECTORY: &str = "ioctls";
/// The counts, in the run's directory.
pub const JSON: &str = "ioctls.json";
/// What the script in L1 exits with when it cannot trace.
const SCRIPT_FAILED: u8 = 125;

/// What one command did. Times are in nanoseconds of L1's CLOCK_MONOTONIC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoctlCounts {
    /// Grows when the meaning of a field changes.
    pub version: u32,
    /// When the program that ran the guest was started: the first to call KVM_RUN; without one, the first to make any
    /// ioctl that is counted; without that, the command.
    pub exec_ns: u64,
    /// When the guest was off; none if none ran.
    pub power_off_ns: Option<u64>,
    /// When the command had ended, with all that the kernel did at its exit.
    pub end_ns: u64,
    /// Ioctls by name (or number, if it has no known one) that began until the guest was off; all of them if none ran.
    pub before: BTreeMap<String, Calls>,
    /// Those that began later.
    pub after: BTreeMap<String, Calls>,
    /// Mappings made in the IOMMU, of the whole run.
    pub iommu_map: Mapped,
    /// Mappings taken away again, the exit of the command included.
    pub iommu_unmap: Unmapped,
}

/// The ioctls of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// How many.
    pub calls: u64,
    /// How long they took together: for KVM_RUN the time in the guest, halts included.
    pub ns: u64,
    /// How long the longest took.
    pub max_ns: u64,
}

/// The kernel's `iommu:map` events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapped {
    /// Ranges, each contiguous as devices and as memory see it.
    pub events: u64,
    /// In them.
    pub bytes: u64,
    /// Of these, what lies so that entries of 2 MiB or more can hold it.
    pub bytes_2m: u64,
    /// Of these, what lies so that entries of 1 GiB can hold it.
    pub bytes_1g: u64,
}

/// The kernel's `iommu:unmap` events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unmapped {
    /// Ranges.
    pub events: u64,
    /// In them.
    pub bytes: u64,
}

impl IoctlCounts {
    /// Of the meaning of the fields.
    pub const VERSION: u32 = 1;
}

/// A counted run.
pub struct Run {
    /// The exit status of the body.
    pub status: u8,
    /// The run's directory.
    pub log: PathBuf,
    /// What was counted; none where the lab's script in L1 failed, which has said why on standard error.
    pub counts: IoctlCounts,
}

/// Shell text that runs `words`, which are shell text themselves, under counting; the trace goes to `$LAB_OUT/directory`.
pub fn command(directory: &str, words: &str) -> String {
    let directory = job::quote(directory);
    format!("\"$LAB_REPO/resources/lab/count-ioctls.sh\" \"$LAB_OUT\"/{directory} {words}")
}

/// Boots L1, whose body has to run one [`command`] with [`DIRECTORY`], counts, and leaves [`JSON`] in the run's directory.
pub fn run(boot: &Boot, sink: &mut dyn Sink) -> Result<Run, Error> {
    let mut watched = Watched {
        log: PathBuf::new(),
        sink,
    };
    let status = boot.run(&mut watched)?;
    let log = watched.log;
    let directory = log.join(DIRECTORY);
    if status == SCRIPT_FAILED && !directory.exists() {
        return Err(Error::Trace {
            directory,
            problem: "there is none; the reason stands above".to_owned(),
        });
    }
    let counts = read(&directory)?;
    write(&log.join(JSON), &counts)?;
    Ok(Run {
        status,
        log,
        counts,
    })
}

fn write(path: &Path, counts: &IoctlCounts) -> Result<(), Error> {
    // Strings and numbers only: it cannot fail.
    let text = serde_json::to_string_pretty(counts).unwrap_or_default();
    fs::write(path, text + "\n").map_err(Error::file("write", path))
}

/// Passes everything on, and remembers where the last boot's logs are.
struct Watched<'a> {
    log: PathBuf,
    sink: &'a mut dyn Sink,
}

impl Sink for Watched<'_> {
    fn started(&mut self, log: &Path) {
        self.log = log.to_path_buf();
        self.sink.started(log);
    }

    fn bytes(&mut self, source: Source, bytes: &[u8]) {
        self.sink.bytes(source, bytes);
    }
}
