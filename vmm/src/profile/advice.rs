//! What would make the start faster on this host, drawn from what was recorded.

use std::time::Duration;

use devices::iommu::FAST_BAR_MAPS;

use super::report::milliseconds;
use super::{FIRST_CONFIG_ACCESS, FIRST_INSTRUCTION, Record, Subject};

const GIB: u64 = 1 << 30;
/// Less of the time to the first instruction is not worth a word.
const WORTH_A_WORD: f64 = 0.2;
/// Guests of this size gain from reserved huge pages.
const LARGE_RAM: u64 = 16 * GIB;

/// What is known of the host and the guest beyond phases and calls.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Version of the host's kernel.
    pub kernel: Option<(u32, u32)>,
    /// The IOMMU backend.
    pub iommu: Option<&'static str>,
    /// Bytes of BARs that are mapped for other devices to reach.
    pub bar_bytes: u64,
    /// Bytes of guest RAM.
    pub ram_bytes: u64,
    /// Guest RAM is of reserved huge pages.
    pub reserved_pages: bool,
    /// The kernel gives guest RAM no huge pages.
    pub small_pages: bool,
    /// The guest's kernel is one that unpacks itself.
    pub packed_kernel: bool,
}

/// Sentences, the most worthwhile first; none when nothing is known that would help.
pub fn advice(record: &Record) -> Vec<String> {
    let rules = [bars, unpacking, bars_at_exit, pages, devices, kernel];
    rules.iter().filter_map(|rule| rule(record)).collect()
}

fn bars(record: &Record) -> Option<String> {
    let facts = &record.facts;
    if facts.bar_bytes == 0 || facts.kernel? >= FAST_BAR_MAPS || facts.iommu != Some("type1") {
        return None;
    }
    let is_bar = |subject: &Subject| matches!(subject, Subject::Bar(..));
    Some(format!(
        "Mapping {} of BARs for other devices took {}: a host with Linux {}.{} or newer maps them by huge \
         pages, in microseconds. Where devices need not reach each other, p2p=off on each --vfio does \
         without.",
        gib(facts.bar_bytes),
        time(spent(record, "map DMA", is_bar)),
        FAST_BAR_MAPS.0,
        FAST_BAR_MAPS.1,
    ))
}

fn unpacking(record: &Record) -> Option<String> {
    let first = record.moment(FIRST_INSTRUCTION)?;
    let unpacked = record.moment(FIRST_CONFIG_ACCESS)?;
    record.facts.packed_kernel.then(|| {
        format!(
            "The guest unpacked its kernel (a bzImage), in up to {}. The same kernel unpacked (vmlinux, which \
             scripts/extract-vmlinux of the kernel's sources makes of it) starts without, at a fixed address \
             (no KASLR).",
            time(unpacked.saturating_sub(first))
        )
    })
}

fn bars_at_exit(record: &Record) -> Option<String> {
    let facts = &record.facts;
    (facts.bar_bytes >= GIB && facts.iommu == Some("type1")).then(|| {
        format!(
            "When the process ends, the kernel unmaps {} of BARs page by page (type1), which counts in a \
             restart: iommufd with dma-bufs (Linux 6.19 or newer, --iommu iommufd) unmaps them at once. Where \
             devices need not reach each other, p2p=off on each --vfio does without.",
            gib(facts.bar_bytes)
        )
    })
}

fn pages(record: &Record) -> Option<String> {
    let facts = &record.facts;
    let populate = time(spent(record, "populate", |subject| {
        *subject == Subject::Ram
    }));
    if facts.small_pages {
        return Some(format!(
            "Guest RAM is of 4 KiB pages; populating it took {populate} (of all threads together). Let the host \
             give huge pages (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled), or reserve them and add \
             hugepages=2M to --memory."
        ));
    }
    (facts.ram_bytes >= LARGE_RAM && !facts.reserved_pages).then(|| {
        format!(
            "Populating {} of RAM took {populate} (of all threads together). Reserved pages of 1 GiB (hugepagesz=1G \
             hugepages=N on the host's kernel command line, hugepages=1G in --memory) are mapped with fewer entries.",
            gib(facts.ram_bytes)
        )
    })
}

fn devices(record: &Record) -> Option<String> {
    share(record, "wait for devices")?;
    let opened = record.events.iter().filter(|e| e.name == "open and reset");
    let slowest = opened.max_by_key(|event| event.length)?;
    let bdf = slowest.subject.device()?;
    Some(format!(
        "The start waited for devices to be opened, which resets them; the slowest was {bdf} with {}. Its reset \
         methods are in /sys/bus/pci/devices/{bdf}/reset_method: flr is the fastest.",
        time(slowest.length?)
    ))
}

fn kernel(record: &Record) -> Option<String> {
    let took = share(record, "load kernel")?;
    Some(format!(
        "Loading kernel and initrd took {}: a smaller initrd, on a file system that is in memory, loads faster.",
        time(took)
    ))
}

/// The length of a phase that is a large part of the time to the first instruction.
fn share(record: &Record, phase: &str) -> Option<Duration> {
    let all = record.moment(FIRST_INSTRUCTION)?;
    let event = record.events.iter().find(|event| event.name == phase)?;
    let took = event.length?;
    (took.as_secs_f64() >= WORTH_A_WORD * all.as_secs_f64()).then_some(took)
}

fn spent(record: &Record, class: &str, about: impl Fn(&Subject) -> bool) -> Duration {
    let tallies = record.tallies.iter();
    tallies
        .filter(|((name, subject), _)| *name == class && about(subject))
        .map(|(_, tally)| tally.total)
        .sum()
}

fn time(duration: Duration) -> String {
    format!("{:.1} ms", milliseconds(duration))
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / GIB as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    fn recorded(facts: Facts) -> Record {
        let profile = Profile::start();
        let bdf = "0000:41:00.0".parse().unwrap();
        profile.call("map DMA", Subject::Bar(bdf, 2), || ());
        let mut record = profile.snapshot();
        record.facts = facts;
        record
    }

    fn type1(kernel: (u32, u32)) -> Facts {
        Facts {
            kernel: Some(kernel),
            iommu: Some("type1"),
            bar_bytes: 16 * GIB,
            ..Facts::default()
        }
    }

    #[test]
    fn an_old_kernel_that_maps_bars_is_told_of() {
        let old = advice(&recorded(type1((6, 12))));
        assert!(old[0].contains("16.0 GiB") && old[0].contains("6.15"));
        assert!(old[1].contains("iommufd"));
        let new = advice(&recorded(type1((6, 15))));
        assert_eq!(new.len(), 1);
        assert!(new[0].contains("iommufd"));
    }

    #[test]
    fn nothing_is_said_of_bars_that_cost_nothing() {
        let iommufd = Facts {
            iommu: Some("iommufd"),
            ..type1((6, 19))
        };
        assert_eq!(advice(&recorded(iommufd)), [""; 0]);
        let alone = Facts {
            bar_bytes: 0,
            ..type1((6, 1))
        };
        assert_eq!(advice(&recorded(alone)), [""; 0]);
    }

    #[test]
    fn small_pages_are_told_of_and_reserved_ones_are_not() {
        let small = Facts {
            small_pages: true,
            ..Facts::default()
        };
        assert!(advice(&recorded(small))[0].contains("4 KiB"));
        let mut large = Facts {
            ram_bytes: 64 * GIB,
            ..Facts::default()
        };
        assert!(advice(&recorded(large.clone()))[0].contains("hugepages=1G"));
        large.reserved_pages = true;
        assert_eq!(advice(&recorded(large)), [""; 0]);
    }

    #[test]
    fn a_kernel_that_unpacks_itself_is_told_of() {
        let profile = Profile::start();
        profile.mark(FIRST_INSTRUCTION);
        let mut record = profile.snapshot();
        record.facts.packed_kernel = true;
        assert_eq!(advice(&record), [""; 0], "it is not known how long it took");
        profile.mark(FIRST_CONFIG_ACCESS);
        let mut record = profile.snapshot();
        assert_eq!(advice(&record), [""; 0]);
        record.facts.packed_kernel = true;
        assert!(advice(&record)[0].contains("vmlinux"));
    }
}
