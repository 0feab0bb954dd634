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
    /// A thread enters an ioctl.
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
                let Some((begin, cmd, target)) = pending.remove(&thread) else {
                    continue;
                };
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

#[cfg(test)]
mod tests {
    use super::*;

    const MAP_DMA: u32 = 0x3b71;
    const DEVICE_GET_INFO: u32 = 0x3b6b;
    const SHELL: u64 = 10;
    const VMM: u64 = 20;

    fn call(thread: u64, cmd: u32) -> Traced {
        Traced::Call { thread, fd: 3, cmd }
    }

    fn back(thread: u64) -> Traced {
        Traced::Return { thread }
    }

    fn fork(parent: u64, child: u64) -> Traced {
        Traced::Fork { parent, child }
    }

    fn exec(process: u64) -> Traced {
        Traced::Exec { process }
    }

    fn tally(calls: u64, ns: u64, max_ns: u64) -> Calls {
        Calls { calls, ns, max_ns }
    }

    #[test]
    fn a_guest_is_off_when_the_last_vcpu_came_back() {
        let counts = count(&[
            (100, exec(SHELL)),
            (200, fork(SHELL, VMM)),
            (300, exec(VMM)),
            (310, fork(VMM, 21)),
            (320, fork(21, 22)),
            (400, call(21, KVM_RUN)),
            (410, call(22, KVM_RUN)),
            (420, call(VMM, MAP_DMA)),
            (450, back(21)),
            (455, back(VMM)),
            (500, back(22)),
            (510, call(21, MAP_DMA)),
            (512, back(21)),
            (700, Traced::End),
        ]);
        assert_eq!(counts.exec_ns, 300);
        assert_eq!(counts.power_off_ns, Some(500));
        assert_eq!(counts.end_ns, 700);
        assert_eq!(counts.before["KVM_RUN"], tally(2, 140, 90));
        assert_eq!(counts.before["VFIO_IOMMU_MAP_DMA"], tally(1, 35, 35));
        assert_eq!(counts.after["VFIO_IOMMU_MAP_DMA"], tally(1, 2, 2));
        assert_eq!(counts.after.len(), 1);
    }

    #[test]
    fn a_program_starts_when_its_process_became_it_last() {
        let started = |first: u32| {
            count(&[
                (1, exec(SHELL)),
                (2, call(SHELL, 0x5401)),
                (3, back(SHELL)),
                (4, exec(SHELL)),
                (5, fork(SHELL, 11)),
                (6, call(11, first)),
                (7, back(11)),
                (8, exec(SHELL)),
                (9, Traced::End),
            ])
            .exec_ns
        };
        assert_eq!(started(MAP_DMA), 4);
        // A terminal's ioctl is nobody's concern: the command, then.
        assert_eq!(started(0x5401), 1);
    }

    #[test]
    fn without_a_guest_all_is_before() {
        let counts = count(&[
            (1, exec(VMM)),
            (2, call(VMM, MAP_DMA)),
            (5, back(VMM)),
            (6, Traced::End),
        ]);
        assert_eq!(counts.power_off_ns, None);
        assert_eq!(counts.before["VFIO_IOMMU_MAP_DMA"], tally(1, 3, 3));
        assert!(counts.after.is_empty());
    }

    #[test]
    fn a_hot_reset_is_no_mapping() {
        let counts = count(&[
            (1, exec(VMM)),
            (2, fork(VMM, 21)),
            (3, call(VMM, DEVICE_GET_INFO)),
            (4, back(VMM)),
            // The same descriptor in another thread.
            (5, call(21, MAP_DMA)),
            (6, back(21)),
        ]);
        let names: Vec<&str> = counts.before.keys().map(String::as_str).collect();
        assert_eq!(names, ["VFIO_DEVICE_GET_INFO", "VFIO_DEVICE_PCI_HOT_RESET"]);
    }

    #[test]
    fn entries_need_congruent_addresses_and_lie_whole_in_the_mapping() {
        let gib = HUGE;
        assert_eq!(whole_entries(0, gib, 3 * gib, gib), 3 * gib);
        assert_eq!(whole_entries(gib - 4096, 2 * gib - 4096, gib, gib), 0);
        assert_eq!(whole_entries(LARGE, 0, gib, gib), 0);
        assert_eq!(whole_entries(LARGE, 0, gib, LARGE), gib);
        assert_eq!(whole_entries(4096, 4096, 2 * LARGE, LARGE), LARGE);
        assert_eq!(whole_entries(4096, 8192, 2 * LARGE, LARGE), 0);
        let map = Traced::Map {
            iova: 4096,
            physical: 4096,
            size: 2 * gib,
        };
        let counts = count(&[(1, map), (2, map), (3, Traced::Unmap { size: 5 })]);
        let expected = Mapped {
            events: 2,
            bytes: 4 * gib,
            bytes_2m: 2 * (2 * gib - LARGE),
            bytes_1g: 2 * gib,
        };
        assert_eq!(counts.iommu_map, expected);
        let unmapped = Unmapped {
            events: 1,
            bytes: 5,
        };
        assert_eq!(counts.iommu_unmap, unmapped);
    }
}
