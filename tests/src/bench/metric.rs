//! The numbers that tables show and bars limit.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::sample::Sample;
use super::statistics;
use crate::outside::Calls;

/// One number of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// From exec to the first KVM_RUN.
    FirstInstructionMs,
    /// From exec to mark 0x41.
    InitMs,
    /// From exec to mark 0x42.
    InUseMs,
    /// From exec to the last return of KVM_RUN.
    PowerOffMs,
    /// From exec to the end of the process.
    ExitMs,
    /// In ioctls that map BARs in the IOMMU, before the guest is off.
    BarMapMs,
    /// In ioctls that map or unmap BARs in the IOMMU, before the guest is off.
    BarIommuMs,
    /// In all ioctls of VFIO and iommufd, before the guest is off.
    DeviceIoctlsMs,
    /// Ioctls that unmap in the IOMMU, before the guest is off.
    UnmapCalls,
    /// Ioctls that set memory slots, before the guest is off.
    MemslotCalls,
}

impl Metric {
    /// All of them.
    pub const ALL: [Metric; 10] = [
        Self::FirstInstructionMs,
        Self::InitMs,
        Self::InUseMs,
        Self::PowerOffMs,
        Self::ExitMs,
        Self::BarMapMs,
        Self::BarIommuMs,
        Self::DeviceIoctlsMs,
        Self::UnmapCalls,
        Self::MemslotCalls,
    ];

    /// Its value in one run.
    pub fn of(self, sample: &Sample) -> f64 {
        match self {
            Self::FirstInstructionMs => milliseconds(sample.first_instruction_ns),
            Self::InitMs => milliseconds(sample.init_ns),
            Self::InUseMs => milliseconds(sample.in_use_ns),
            Self::PowerOffMs => milliseconds(sample.power_off_ns),
            Self::ExitMs => milliseconds(sample.exit_ns),
            Self::BarMapMs => milliseconds(sample.dma.bar_map.ns),
            Self::BarIommuMs => milliseconds(sample.dma.bar_map.ns + sample.dma.bar_unmap.ns),
            Self::DeviceIoctlsMs => milliseconds(
                named(sample, &["VFIO_", "IOMMU_"])
                    .map(|calls| calls.ns)
                    .sum(),
            ),
            Self::UnmapCalls => count(named(sample, &["VFIO_IOMMU_UNMAP_DMA", "IOMMU_IOAS_UNMAP"])),
            Self::MemslotCalls => count(named(sample, &["KVM_SET_USER_MEMORY_REGION"])),
        }
    }

    /// Whether it is a time, in milliseconds; otherwise a count.
    pub fn is_time(self) -> bool {
        !matches!(self, Self::UnmapCalls | Self::MemslotCalls)
    }

    /// The value in words.
    pub fn show(self, value: f64) -> String {
        match self.is_time() {
            // Below a tenth of a second the microseconds matter.
            true if value < 100.0 => format!("{value:.3} ms"),
            true => format!("{value:.1} ms"),
            false => format!("{value}"),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FirstInstructionMs => "exec to first guest instruction",
            Self::InitMs => "exec to init (0x41)",
            Self::InUseMs => "exec to GPUs in use (0x42)",
            Self::PowerOffMs => "exec to guest off",
            Self::ExitMs => "exec to exit",
            Self::BarMapMs => "BARs mapped in the IOMMU",
            Self::BarIommuMs => "BARs mapped and unmapped in the IOMMU",
            Self::DeviceIoctlsMs => "ioctls of VFIO and iommufd",
            Self::UnmapCalls => "unmappings",
            Self::MemslotCalls => "memory slots set",
        })
    }
}

/// The runs' median of a metric, and how far they are apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The greatest less the least, as a share of the median.
    pub spread: f64,
}

/// What the runs have in common.
pub fn summarize(samples: &[Sample]) -> BTreeMap<Metric, Summary> {
    Metric::ALL
        .into_iter()
        .map(|metric| {
            let values: Vec<f64> = samples.iter().map(|sample| metric.of(sample)).collect();
            let summary = Summary {
                median: statistics::median(&values),
                spread: statistics::spread(&values),
            };
            (metric, summary)
        })
        .collect()
}

fn named<'a>(
    sample: &'a Sample,
    prefixes: &'a [&str],
) -> impl Iterator<Item = &'a Calls> + use<'a> {
    sample
        .ioctls_before
        .iter()
        .filter(|(name, _)| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        .map(|(_, calls)| calls)
}

fn count<'a>(calls: impl Iterator<Item = &'a Calls>) -> f64 {
    calls.map(|calls| calls.calls).sum::<u64>() as f64
}

fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::super::sample::tests::sample;
    use super::*;

    #[test]
    fn metrics_are_taken_before_the_guest_is_off() {
        let mut sample = sample(1000);
        let calls = Calls {
            calls: 4,
            ns: 9_000_000,
            max_ns: 3_000_000,
        };
        let name = |name: &str| name.to_owned();
        sample
            .ioctls_after
            .insert(name("VFIO_IOMMU_UNMAP_DMA"), calls);
        assert_eq!(Metric::UnmapCalls.of(&sample), 0.0);
        sample
            .ioctls_before
            .insert(name("VFIO_IOMMU_UNMAP_DMA"), calls);
        assert_eq!(Metric::UnmapCalls.of(&sample), 4.0);
        assert_eq!(Metric::DeviceIoctlsMs.of(&sample), 45.0);
        assert_eq!(Metric::BarIommuMs.of(&sample), 0.25);
        assert_eq!(Metric::InUseMs.of(&sample), 1000.0);
    }

    #[test]
    fn the_summary_has_every_metric() {
        let summary = summarize(&[sample(1000), sample(1020), sample(980)]);
        assert_eq!(summary.len(), Metric::ALL.len());
        assert_eq!(summary[&Metric::InUseMs].median, 1000.0);
        assert_eq!(summary[&Metric::InUseMs].spread, 0.04);
    }
}
