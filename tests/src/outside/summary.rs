//! From what happened, in order of time, to the counts.

use std::collections::HashMap;

use super::names::{self, KVM_RUN, Target};
use super::{Calls, IoctlCounts, Mapped, Unmapped};

/// Sizes of the page table entries that are worth having, in bytes.
const LARGE: u64 = 2 << 20;
const HUGE: u64 = 1 << 30;
/// Threads between a thread and the program that it belongs to, at most.
const DEPTH: usize = 64;

/// Something that L1's kernel traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traced {
    /// A thread enters an ioctl other than KVM_RUN.
    Call {
        /// The thread.
        thread: u64,
        /// Its descriptor.
        fd: u64,
        /// Its number.
        cmd: u32,
    },
    /// A thread comes back from an ioctl.
    Return {
        /// The thread.
        thread: u64,
    },
    /// A thread makes another, or a process.
    Fork {
        /// The maker.
        parent: u64,
        /// The new one.
        child: u64,
    },
    /// A process becomes another program.
    Exec {
        /// The process.
        process: u64,
    },
    /// A range is mapped in an IOMMU's page table.
    Map {
        /// Where devices see it.
        iova: u64,
        /// Where it is.
        physical: u64,
        /// In bytes.
        size: u64,
    },
    /// A range is unmapped.
    Unmap {
        /// In bytes.
        size: u64,
    },
    /// The command has ended, with all that its exit did.
    End,
}

/// An ioctl that returned.
struct Call {
    thread: u64,
    begin: u64,
    end: u64,
    cmd: u32,
    target: Option<Target>,
}

/// Counts; `traced` is in order of time, in nanoseconds.
pub fn count(traced: &[(u64, Traced)]) -> IoctlCounts {
    let family = Family::of(traced);
    let calls = calls(traced, &family);
    let runs = || calls.iter().filter(|call| call.cmd == KVM_RUN);
    // Without a guest the process that came to these interfaces first is as good.
    let first = runs().next().or(calls.first());
    let power_off = runs().map(|call| call.end).max();
    let last = traced.last().map_or(0, |(time, _)| *time);
    let end = traced
        .iter()
        .rfind(|(_, what)| *what == Traced::End)
        .map_or(last, |(time, _)| *time);
    let mut counts = IoctlCounts {
        version: IoctlCounts::VERSION,
        exec_ns: family.started(first).unwrap_or(end),
        power_off_ns: power_off,
        end_ns: end,
        ..IoctlCounts::default()
    };
    for call in &calls {
        let half = match power_off {
            Some(power_off) if call.begin > power_off => &mut counts.after,
            _ => &mut counts.before,
        };
        let name = names::name(call.cmd, call.target).into_owned();
        half.entry(name).or_default().add(call.end - call.begin);
    }
    for (_, what) in traced {
        match *what {
            Traced::Map {
                iova,
                physical,
                size,
            } => counts.iommu_map.add(iova, physical, size),
            Traced::Unmap { size } => counts.iommu_unmap.add(size),
            _ => {}
        }
    }
    counts
}

/// The ioctls that are counted, in the order of their returns.
fn calls(traced: &[(u64, Traced)], family: &Family) -> Vec<Call> {
    let mut calls = Vec::new();
    let mut pending: HashMap<u64, (u64, u32, Option<Target>)> = HashMap::new();
    let mut targets: HashMap<(u64, u64), Target> = HashMap::new();
    for &(time, what) in traced {
        match what {
            Traced::Call { thread, fd, cmd } => {
                let descriptor = (family.program(thread), fd);
                if let Some(target) = names::target(cmd) {
                    targets.insert(descriptor, target);
                }
                let target = targets.get(&descriptor).copied();
                pending.insert(thread, (time, cmd, target));
            }
            Traced::Return { thread } => {
                // Entries into KVM_RUN are not traced.
                let call = pending.remove(&thread).unwrap_or((time, KVM_RUN, None));
                let (begin, cmd, target) = call;
                if names::is_counted(cmd) {
                    calls.push(Call {
                        thread,
                        begin,
                        end: time,
                        cmd,
                        target,
                    });
                }
            }
            _ => {}
        }
    }
    calls
}

/// Who made whom, and when each became a program of its own.
#[derive(Default)]
struct Family {
    parents: HashMap<u64, u64>,
    execs: HashMap<u64, Vec<u64>>,
}

impl Family {
    fn of(traced: &[(u64, Traced)]) -> Self {
        let mut family = Self::default();
        for &(time, what) in traced {
            match what {
                Traced::Fork { parent, child } => {
                    family.parents.insert(child, parent);
                }
                Traced::Exec { process } => family.execs.entry(process).or_default().push(time),
                _ => {}
            }
        }
        family
    }

    /// The process whose program a thread runs.
    fn program(&self, thread: u64) -> u64 {
        let mut at = thread;
        for _ in 0..DEPTH {
            match self.parents.get(&at) {
                Some(parent) if !self.execs.contains_key(&at) => at = *parent,
                _ => break,
            }
        }
        at
    }

    /// When the program that made a call was started; without a call, when the command was.
    fn started(&self, call: Option<&Call>) -> Option<u64> {
        let Some(call) = call else {
            return self.execs.values().flatten().copied().min();
        };
        let execs = self.execs.get(&self.program(call.thread))?;
        execs.iter().copied().filter(|&at| at <= call.begin).max()
    }
}

impl Calls {
    fn add(&mut self, took: u64) {
        self.calls += 1;
        self.ns += took;
        self.max_ns = self.max_ns.max(took);
    }
}

impl Mapped {
    fn add(&mut self, iova: u64, physical: u64, size: u64) {
        self.events += 1;
        self.bytes += size;
        self.bytes_2m += whole_entries(iova, physical, size, LARGE);
        self.bytes_1g += whole_entries(iova, physical, size, HUGE);
    }
}

impl Unmapped {
    fn add(&mut self, size: u64) {
        self.events += 1;
        self.bytes += size;
    }
}

/// The bytes of a mapping that page table entries of one size can hold.
fn whole_entries(iova: u64, physical: u64, size: u64, entry: u64) -> u64 {
    if iova % entry != physical % entry {
        return 0;
    }
    let first = iova.next_multiple_of(entry);
    let end = iova.saturating_add(size);
    end.saturating_sub(first) / entry * entry
}
