//! `cargo lab bench`: how long mini-vmm takes to give a guest its GPUs, and another VMM beside it.
//!
//! Each run is a boot of a deterministic L1, in which resources/lab/bench.sh starts the VMM once; what it leaves in the run's
//! directory is read here. `cell` says what is measured, `runner` runs it, `sample` makes numbers of a run (`console`, `dma`
//! and `inside` read its parts), `metric` and `statistics` of several; `results` keeps them, `table`, `interfaces`, `chart` and
//! `docs` show them, `bars` limits them and `gate` those of them that `cargo lab test` runs. What the numbers mean is told in
//! docs/performance.md.

mod bars;
pub mod cell;
mod chart;
mod console;
mod dma;
mod docs;
pub mod gate;
mod inside;
mod interfaces;
mod metric;
mod results;
mod runner;
mod sample;
mod statistics;
mod table;

use crate::checks;
use crate::cli::BenchArgs;
use crate::error::Error;
use crate::machine::size;
use cell::{Cell, Scenario};
use metric::Metric;
use results::{Measured, Results};
use sample::Sample;

const MIB: u64 = 1 << 20;

/// Measures, shows and compares what was asked for; false where a bar is missed.
pub fn run(arguments: &BenchArgs) -> Result<bool, Error> {
    let cells = cells(arguments)?;
    let path = Results::path();
    let mut results = Results::load(&path)?;
    if !arguments.saved {
        checks::build()?;
        for cell in &cells {
            eprintln!("lab: measuring {cell}");
            let measured = runner::measure(cell, arguments.runs, arguments.timeout, &mut progress)?;
            // The file may have been written by another bench meanwhile.
            results = Results::load(&path)?;
            results.put(measured);
            results.store(&path)?;
        }
    }
    let chosen: Vec<&Measured> = cells.iter().filter_map(|cell| results.get(cell)).collect();
    show(&results, &chosen);
    println!("All results: {}", path.display());
    println!(
        "As a picture: {}",
        chart::write(&chosen, chart::path())?.display()
    );
    if arguments.write_docs {
        println!("Written: {}", docs::write(&results)?.display());
        let all: Vec<&Measured> = results.cells().iter().collect();
        let picture = chart::write(&all, chart::docs_path())?;
        println!("Written: {}", picture.display());
    }
    if arguments.check {
        return check(&results, &arguments.scenario);
    }
    Ok(true)
}

fn cells(arguments: &BenchArgs) -> Result<Vec<Cell>, Error> {
    let mut cells = Vec::new();
    for &scenario in &arguments.scenario {
        for ram in &arguments.ram {
            for &vmm in &arguments.vmm {
                cells.push(Cell {
                    scenario,
                    host_kernel: arguments.host_kernel.clone(),
                    iommu: arguments.iommu,
                    ram_mib: mib(ram)?,
                    vmm,
                });
            }
        }
    }
    Ok(cells)
}

fn mib(ram: &str) -> Result<u64, Error> {
    let bytes = size::parse("--ram", ram)?;
    if bytes == 0 || bytes % MIB != 0 {
        return Err(Error::Option {
            option: "--ram",
            value: ram.to_owned(),
            problem: "not a number of MiB".to_owned(),
        });
    }
    Ok(bytes / MIB)
}

fn progress(run: u32, sample: &Sample) {
    let shown = [Metric::FirstInstructionMs, Metric::InUseMs, Metric::ExitMs];
    let words = shown.map(|metric| format!("{metric} {}", metric.show(metric.of(sample))));
    eprintln!("lab: run {run}: {}", words.join(", "));
}

fn show(results: &Results, chosen: &[&Measured]) {
    println!("Milliseconds of virtual time (instructions / 10^6), from exec; medians.\n");
    print!("{}", table::cells(chosen).plain());
    let ratios = table::ratios(results, chosen);
    if !ratios.is_empty() {
        print!("\nmini-vmm's share of another's time\n{}", ratios.plain());
    }
    for row in chosen {
        println!("\nIoctls, {}", row.cell);
        print!("{}", table::ioctls(row).plain());
        let apart = [
            Metric::FirstInstructionMs,
            Metric::InUseMs,
            Metric::ExitMs,
            Metric::BarIommuMs,
            Metric::DeviceIoctlsMs,
        ];
        if row.runs.len() > 1 {
            for metric in apart {
                println!(
                    "{metric}: {} runs within {:.2} %",
                    row.runs.len(),
                    row.spread(metric) * 100.0
                );
            }
        }
    }
    println!();
}

/// Prints how each bar of the scenarios was met; false where one was not.
fn check(results: &Results, scenarios: &[Scenario]) -> Result<bool, Error> {
    let bars = bars::load()?;
    let mut good = true;
    for bar in bars
        .iter()
        .filter(|bar| scenarios.contains(&bar.scenario()))
    {
        match bar.check(results) {
            bars::Outcome::Met(line) => println!("ok     {line}"),
            bars::Outcome::Missed(line) => {
                println!("MISSED {line}");
                good = false;
            }
            bars::Outcome::Unmeasured(line) => {
                println!("MISSED {line}");
                good = false;
            }
        }
    }
    Ok(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cell::Vmm;

    #[test]
    fn memory_is_a_number_of_mib() {
        assert_eq!(mib("4G").unwrap(), 4096);
        for bad in ["0", "4097", "lots"] {
            assert_eq!(mib(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }

    #[test]
    fn every_combination_is_a_cell() {
        let arguments = BenchArgs {
            scenario: vec![Scenario::A, Scenario::B],
            vmm: vec![Vmm::MiniVmm, Vmm::Qemu],
            ram: vec!["512M".to_owned(), "4G".to_owned()],
            ..BenchArgs::default()
        };
        assert_eq!(cells(&arguments).unwrap().len(), 8);
    }
}
