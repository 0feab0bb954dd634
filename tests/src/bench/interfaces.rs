//! The table that compares the kernel's interfaces to the IOMMU, on each host kernel.

use std::collections::BTreeMap;

use super::cell::{Iommu, Scenario, Vmm};
use super::metric::Metric;
use super::results::{Measured, Results};
use super::sample::Sample;
use super::statistics;
use super::table::{Table, number};
use crate::outside::Calls;

/// What is compared has as much memory.
const RAM_MIB: u64 = 512;

/// A row for each host and interface that a scenario was measured with, where there are several or iommufd is among them; of each
/// the mappings that were made and taken away until the guest was off, and what the end of the process took.
pub fn table(results: &Results) -> Table {
    let headings = [
        "scenario",
        "VMM",
        "host",
        "IOMMU",
        "BAR maps",
        "ms",
        "BAR unmaps",
        "ms",
        "RAM maps",
        "ms",
        "in use 0x42",
        "exit",
        "of that after the guest",
    ];
    let mut table = Table::new(&headings, 4);
    for rows in groups(results).values().filter(|rows| tells(rows)) {
        table.rows.extend(rows.iter().map(|row| words(row)));
    }
    table
}

fn tells(rows: &[&Measured]) -> bool {
    rows.len() > 1 || rows.iter().any(|row| row.cell.iommu == Iommu::Iommufd)
}

fn groups(results: &Results) -> BTreeMap<(Scenario, Vmm), Vec<&Measured>> {
    let mut groups: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for row in results.cells() {
        let cell = &row.cell;
        if cell.ram_mib == RAM_MIB {
            groups
                .entry((cell.scenario, cell.vmm))
                .or_default()
                .push(row);
        }
    }
    groups
}

fn words(row: &Measured) -> Vec<String> {
    let cell = &row.cell;
    let mut words = vec![
        cell.scenario.to_string(),
        cell.vmm.to_string(),
        cell.host_kernel.clone(),
        cell.iommu.to_string(),
    ];
    let kinds: [fn(&Sample) -> Calls; 3] = [
        |sample| sample.dma.bar_map,
        |sample| sample.dma.bar_unmap,
        |sample| sample.dma.ram_map,
    ];
    for kind in kinds {
        let calls = median(row, |sample| kind(sample).calls as f64);
        let ms = median(row, |sample| kind(sample).ns as f64 / 1e6);
        words.push(format!("{calls}"));
        words.push(match calls > 0.0 {
            true => format!("{ms:.3}"),
            false => String::new(),
        });
    }
    for metric in [Metric::InUseMs, Metric::ExitMs] {
        words.push(number(metric, row.median(metric)));
    }
    let end = median(row, |sample| {
        Metric::ExitMs.of(sample) - Metric::PowerOffMs.of(sample)
    });
    words.push(number(Metric::ExitMs, end));
    words
}

fn median(row: &Measured, value: impl Fn(&Sample) -> f64) -> f64 {
    let values: Vec<f64> = row.runs.iter().map(value).collect();
    statistics::median(&values)
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::measured;
    use super::*;

    #[test]
    fn what_was_measured_on_one_host_with_type1_only_is_not_compared() {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 1000));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, 5000));
        assert!(table(&results).is_empty());
        let mut other = measured(Scenario::A, Vmm::MiniVmm, 512, 900);
        other.cell.host_kernel = "iommufd".to_owned();
        other.cell.iommu = Iommu::Iommufd;
        results.put(other);
        let text = table(&results).markdown();
        let rows: Vec<_> = text.lines().skip(2).collect();
        let expected = [
            "| A | mini-vmm | 7.3 | type1 | 8 | 0.250 | 0 |  | 0 |  | 1000.0 | 2000.0 | 990.0 |",
            "| A | mini-vmm | iommufd | iommufd | 8 | 0.250 | 0 |  | 0 |  | 900.0 | 1800.0 | 890.0 |",
        ];
        assert_eq!(rows, expected);
    }
}
