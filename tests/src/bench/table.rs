//! The results as tables, of plain text and of Markdown.

use std::collections::BTreeMap;

use super::bars::ratio;
use super::cell::{Cell, Vmm};
use super::metric::Metric;
use super::results::{Measured, Results};
use super::sample::Sample;
use super::statistics;
use crate::machine::size;
use crate::outside::Calls;

/// Columns of the main table after those that name the cell.
const COLUMNS: [(&str, Metric); 6] = [
    ("first instr.", Metric::FirstInstructionMs),
    ("init 0x41", Metric::InitMs),
    ("in use 0x42", Metric::InUseMs),
    ("exit", Metric::ExitMs),
    ("BAR map/unmap", Metric::BarIommuMs),
    ("UNMAPs", Metric::UnmapCalls),
];
/// Ioctls that take less are not shown one by one.
const SMALL_NS: f64 = 100_000.0;
const GIB: f64 = (1u64 << 30) as f64;
/// Runs a vCPU.
const KVM_RUN: &str = "KVM_RUN";

/// A table of words: a row of headings and rows below.
pub struct Table {
    headings: Vec<String>,
    /// As many words each.
    pub rows: Vec<Vec<String>>,
    /// Columns from here on are numbers, and aligned to the right.
    numbers: usize,
}

impl Table {
    /// A table of which columns from `numbers` on are numbers.
    pub fn new(headings: &[&str], numbers: usize) -> Self {
        Self {
            headings: headings.iter().map(|&text| text.to_owned()).collect(),
            rows: Vec::new(),
            numbers,
        }
    }

    /// Whether there is nothing below the headings.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// In columns of equal width, for a terminal.
    pub fn plain(&self) -> String {
        let all = || std::iter::once(&self.headings).chain(&self.rows);
        let width = |column: usize| {
            let widths = all()
                .filter_map(|row| row.get(column))
                .map(|w| w.chars().count());
            widths.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        let mut text = String::new();
        for row in all() {
            let mut line = String::new();
            for (column, (word, width)) in row.iter().zip(&widths).enumerate() {
                line.push_str(&match column < self.numbers {
                    true => format!("{word:<width$}  "),
                    false => format!("{word:>width$}  "),
                });
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// As Markdown has it.
    pub fn markdown(&self) -> String {
        let row = |words: &[String]| format!("| {} |\n", words.join(" | "));
        let rule: Vec<String> = (0..self.headings.len())
            .map(|column| if column < self.numbers { "---" } else { "---:" }.to_owned())
            .collect();
        let mut text = row(&self.headings) + &row(&rule);
        self.rows
            .iter()
            .for_each(|words| text.push_str(&row(words)));
        text
    }
}

/// One row for each cell; times in milliseconds.
pub fn cells(measured: &[&Measured]) -> Table {
    let mut headings = vec!["scenario", "host", "IOMMU", "RAM", "VMM"];
    headings.extend(COLUMNS.map(|(heading, _)| heading));
    headings.push("spread");
    let mut table = Table::new(&headings, 5);
    for row in measured {
        let cell = &row.cell;
        let mut words = vec![
            format!("{}: {}", cell.scenario, cell.scenario.setting()),
            cell.host_kernel.clone(),
            cell.iommu.to_string(),
            format!("{} MiB", cell.ram_mib),
            cell.vmm.to_string(),
        ];
        words.extend(COLUMNS.map(|(_, metric)| number(metric, row.median(metric))));
        words.push(spread(row));
        table.rows.push(words);
    }
    table
}

/// mini-vmm against each other VMM in the same place.
pub fn ratios(results: &Results, measured: &[&Measured]) -> Table {
    let mut headings = vec!["scenario", "host", "IOMMU", "RAM", "mini-vmm /"];
    headings.extend(COLUMNS.map(|(heading, _)| heading));
    let mut table = Table::new(&headings, 5);
    for other in measured.iter().filter(|row| row.cell.vmm != Vmm::MiniVmm) {
        let cell = Cell {
            vmm: Vmm::MiniVmm,
            ..other.cell.clone()
        };
        let Some(ours) = results.get(&cell) else {
            continue;
        };
        let mut words = vec![
            cell.scenario.to_string(),
            cell.host_kernel,
            cell.iommu.to_string(),
            format!("{} MiB", cell.ram_mib),
            other.cell.vmm.to_string(),
        ];
        words.extend(COLUMNS.map(|(_, metric)| {
            let (ours, other) = (ours.median(metric), other.median(metric));
            match (metric.is_time(), other > 0.0) {
                (true, true) => ratio(ours / other),
                _ => String::new(),
            }
        }));
        table.rows.push(words);
    }
    table
}

/// What a GiB of BAR costs mini-vmm on each host, in milliseconds: to map it, which is done once, and at the end of the process. (The
/// time of RAM's mapping tells little: a thread of low priority makes it, beside the guest.)
pub fn mappings(measured: &[&Measured]) -> Table {
    let headings = [
        "scenario",
        "host",
        "IOMMU",
        "RAM",
        "mapped, a GiB",
        "off to exit, a GiB",
        "in use 0x42",
    ];
    let mut table = Table::new(&headings, 4);
    for row in measured.iter().filter(|row| row.cell.vmm == Vmm::MiniVmm) {
        let cell = &row.cell;
        let setting = cell.scenario.setting();
        let bars = size::parse("--bar-size", setting.bar_size).unwrap_or_default();
        let bars = (u64::from(setting.gpus) * bars) as f64 / GIB;
        let median = |nanoseconds: fn(&Sample) -> u64| {
            let values: Vec<f64> = row.runs.iter().map(|run| nanoseconds(run) as f64).collect();
            statistics::median(&values) / 1e6
        };
        table.rows.push(vec![
            cell.scenario.to_string(),
            cell.host_kernel.clone(),
            cell.iommu.to_string(),
            format!("{} MiB", cell.ram_mib),
            significant(median(|run| run.dma.bar_map.ns) / bars),
            significant(median(|run| run.exit_ns.saturating_sub(run.power_off_ns)) / bars),
            number(Metric::InUseMs, row.median(Metric::InUseMs)),
        ]);
    }
    table
}

/// A number of any size with three digits that mean something.
fn significant(value: f64) -> String {
    if value <= 0.0 {
        return "0".to_owned();
    }
    let digits = (2.0 - value.log10().floor()).max(0.0) as usize;
    format!("{value:.digits$}")
}

/// The ioctls of a cell by class: of each the number of calls, and milliseconds, until the guest is off and after.
pub fn ioctls(measured: &Measured) -> Table {
    let headings = ["ioctl", "calls", "ms", "calls after", "ms after"];
    let mut table = Table::new(&headings, 1);
    let mut rows: BTreeMap<&String, [f64; 4]> = BTreeMap::new();
    for run in &measured.runs {
        for name in run.ioctls_before.keys().chain(run.ioctls_after.keys()) {
            rows.entry(name).or_default();
        }
    }
    for (name, values) in &mut rows {
        let median = |value: &dyn Fn(Calls) -> u64, after: bool| {
            let values: Vec<f64> = measured
                .runs
                .iter()
                .map(|run| match after {
                    true => run.ioctls_after.get(*name),
                    false => run.ioctls_before.get(*name),
                })
                .map(|calls| value(calls.copied().unwrap_or_default()) as f64)
                .collect();
            statistics::median(&values)
        };
        *values = [
            median(&|calls| calls.calls, false),
            median(&|calls| calls.ns, false),
            median(&|calls| calls.calls, true),
            median(&|calls| calls.ns, true),
        ];
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    // The time in the guest is nothing that the VMM's ioctls cost.
    rows.sort_by(|(name, [_, a, _, x]), (other, [_, b, _, y])| {
        let is_run = |name: &str| name == KVM_RUN;
        let by_time = (b + y).total_cmp(&(a + x));
        is_run(name).cmp(&is_run(other)).then(by_time)
    });
    let mut others = (0, [0.0; 4]);
    for (name, values) in rows {
        let [_, before, _, after] = values;
        if before + after < SMALL_NS {
            others.0 += 1;
            others
                .1
                .iter_mut()
                .zip(values)
                .for_each(|(sum, v)| *sum += v);
        } else {
            table.rows.push(ioctl_row(name.clone(), values));
        }
    }
    if others.0 > 0 {
        let name = format!("{} others, each below 0.1 ms", others.0);
        table.rows.push(ioctl_row(name, others.1));
    }
    table
}

fn ioctl_row(name: String, [calls, ns, calls_after, ns_after]: [f64; 4]) -> Vec<String> {
    let time = |ns: f64, calls: f64| match calls > 0.0 {
        true => format!("{:.3}", ns / 1e6),
        false => String::new(),
    };
    let count = |calls: f64| match calls > 0.0 {
        true => format!("{calls}"),
        false => String::new(),
    };
    let (ns, ns_after) = (time(ns, calls), time(ns_after, calls_after));
    vec![name, count(calls), ns, count(calls_after), ns_after]
}

/// A metric's value without its unit.
pub fn number(metric: Metric, value: f64) -> String {
    metric.show(value).trim_end_matches(" ms").to_owned()
}

/// How far the runs are apart from exec to mark 0x42, and how many they are.
fn spread(row: &Measured) -> String {
    let share = row.spread(Metric::InUseMs) * 100.0;
    format!("{share:.2} % of {}", row.runs.len())
}

#[cfg(test)]
mod tests {
    use super::super::cell::Scenario;
    use super::super::results::tests::measured;
    use super::*;

    fn results() -> Results {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 1000));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, 5000));
        results
    }

    #[test]
    fn every_cell_has_a_row_in_both_forms() {
        let results = results();
        let table = cells(&results.cells().iter().collect::<Vec<_>>());
        let plain = table.plain();
        assert_eq!(plain.lines().count(), 3);
        assert!(plain.contains("A: 4 x 16 GiB, guest 7.3  7.3   type1  512 MiB  mini-vmm"));
        let markdown = table.markdown();
        assert_eq!(markdown.lines().count(), 4);
        assert!(
            markdown.lines().all(|line| line.matches('|').count() == 13),
            "{markdown}"
        );
    }

    #[test]
    fn a_ratio_needs_both() {
        let mut results = results();
        results.put(measured(Scenario::B, Vmm::Qemu, 512, 5000));
        let table = ratios(&results, &results.cells().iter().collect::<Vec<_>>());
        assert_eq!(table.rows.len(), 1);
        assert!(table.plain().contains("0.200"), "{}", table.plain());
    }

    #[test]
    fn bars_are_told_by_the_gib_and_of_mini_vmm_only() {
        let results = results();
        let table = mappings(&results.cells().iter().collect::<Vec<_>>());
        assert_eq!(table.rows.len(), 1);
        // 0.25 ms for 64 GiB of BARs; 990 ms from the guest's end to the process's.
        assert_eq!(table.rows[0][4..6], ["0.00391", "15.5"]);
        assert_eq!(significant(1234.5), "1234");
        assert_eq!(significant(0.0), "0");
    }

    #[test]
    fn ioctls_come_by_their_time() {
        let row = measured(Scenario::A, Vmm::MiniVmm, 512, 1000);
        let text = ioctls(&row).markdown();
        let lines: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "| VFIO_IOMMU_MAP_DMA | 9 | 36.000 |  |  |",
                "| KVM_RUN | 1000 | 900.000 |  |  |"
            ]
        );
    }
}
