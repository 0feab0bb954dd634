//! The counts in words.

use std::collections::BTreeMap;
use std::fmt;

use super::{Calls, IoctlCounts};

const MIB: u64 = 1 << 20;

impl fmt::Display for IoctlCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from_exec = |time: u64| milliseconds(time.saturating_sub(self.exec_ns));
        match self.power_off_ns {
            Some(power_off) => {
                let off = from_exec(power_off);
                writeln!(f, "ioctls until the guest was off, {off:.3} ms after exec")?;
                half(f, &self.before)?;
                let end = from_exec(self.end_ns);
                writeln!(f, "ioctls after that, until the end at {end:.3} ms")?;
                half(f, &self.after)?;
            }
            None => {
                let end = from_exec(self.end_ns);
                writeln!(
                    f,
                    "ioctls until the end, {end:.3} ms after exec; no guest ran"
                )?;
                half(f, &self.before)?;
            }
        }
        let (map, unmap) = (self.iommu_map, self.iommu_unmap);
        writeln!(
            f,
            "IOMMU: {} MiB mapped in {} pieces, {} as entries of 2 MiB or more, {} as entries of 1 GiB",
            map.bytes / MIB,
            map.events,
            share(map.bytes_2m, map.bytes),
            share(map.bytes_1g, map.bytes)
        )?;
        writeln!(
            f,
            "IOMMU: {} MiB unmapped in {} pieces",
            unmap.bytes / MIB,
            unmap.events
        )
    }
}

/// The dearest class first.
fn half(f: &mut fmt::Formatter<'_>, calls: &BTreeMap<String, Calls>) -> fmt::Result {
    let mut rows: Vec<_> = calls.iter().collect();
    rows.sort_by_key(|(_, calls)| std::cmp::Reverse(calls.ns));
    writeln!(f, "  calls   total ms  longest ms")?;
    for (name, calls) in rows {
        let (total, longest) = (milliseconds(calls.ns), milliseconds(calls.max_ns));
        writeln!(f, "{:7}  {total:9.3}   {longest:9.3}  {name}", calls.calls)?;
    }
    Ok(())
}

fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

fn share(part: u64, all: u64) -> String {
    if all == 0 {
        return "0 %".to_owned();
    }
    format!("{:.1} %", part as f64 * 100.0 / all as f64)
}
