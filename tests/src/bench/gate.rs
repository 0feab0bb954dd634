//! What `cargo lab test` checks of the bench: scenario A, run once with each VMM, against the bars that these two runs can be
//! compared with. Bars of times alone are left to `cargo lab bench --check`.
//!
//! A bar that is a goal and not reached yet has a second limit, `until_then`: the test fails beyond that one, and says each time
//! that the goal is missed. `cargo lab bench --check` knows goals only.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::bars::{self, Bar, Outcome};
use super::cell::{Cell, Iommu, Scenario, Vmm};
use super::results::Results;
use super::runner;
use crate::e2e::Tally;
use crate::error::{self, Error};
use crate::setup;

/// Of the test, in the form of the end-to-end tests'.
pub const NAME: &str = "bench::scenario_a_is_within_its_bars";

/// The runs and what came of them. They are made one by one, at the same time as other tests.
pub struct Gate {
    begin: Instant,
    results: Mutex<Results>,
    problems: Mutex<Vec<String>>,
}

impl Gate {
    /// Nothing has been run.
    pub fn new() -> Self {
        Self {
            begin: Instant::now(),
            results: Mutex::default(),
            problems: Mutex::default(),
        }
    }

    /// What is to be run.
    pub fn cells() -> [Cell; 2] {
        // The longer one first.
        [Vmm::Qemu, Vmm::MiniVmm].map(|vmm| Cell {
            scenario: Scenario::A,
            host_kernel: setup::DEFAULT_KERNEL.to_owned(),
            iommu: Iommu::Type1,
            ram_mib: bars::usual_ram(),
            vmm,
        })
    }

    /// Runs one of them.
    pub fn measure(&self, cell: &Cell) {
        match runner::measure(cell, 1, None, &mut |_, _| ()) {
            Ok(measured) => lock(&self.results).put(measured),
            Err(error) => lock(&self.problems).push(error::chain(&error)),
        }
    }

    /// Compares, and prints how the test ended.
    pub fn show(&self) -> Result<Tally, Error> {
        let mut problems = lock(&self.problems).clone();
        let mut lines = Vec::new();
        if problems.is_empty() {
            let bars = bars::load()?;
            (lines, problems) = judge(&bars, &lock(&self.results));
        }
        let passed = problems.is_empty();
        let seconds = self.begin.elapsed().as_secs_f32();
        let end = if passed { "ok" } else { "FAILED" };
        let all: String = lines
            .iter()
            .chain(&problems)
            .map(|line| format!("    {line}\n"))
            .collect();
        // At once: see the runner of the end-to-end tests.
        print!("test {NAME} ... {end} ({seconds:.1} s)\n{all}");
        Ok(Tally {
            passed: passed.into(),
            failed: (!passed).into(),
            skipped: 0,
        })
    }
}

/// The bars that were met or nearly so, and those that were not, in words.
fn judge(bars: &[Bar], results: &Results) -> (Vec<String>, Vec<String>) {
    let cells = Gate::cells();
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let compared =
        |bar: &&Bar| !bar.limits_one_time() && bar.cells().iter().all(|cell| cells.contains(cell));
    for bar in bars.iter().filter(compared) {
        match bar.check(results) {
            Outcome::Met(line) => good.push(format!("ok: {line}")),
            Outcome::Missed(line) => match bar.is_within_until_then(results) {
                Some((true, limit)) => good.push(format!(
                    "GOAL MISSED: {line}; passes, for it is not beyond {limit}, which it must not exceed until then"
                )),
                Some((false, limit)) => bad.push(format!("{line}, and at most {limit} until then")),
                None => bad.push(line),
            },
            Outcome::Unmeasured(line) => bad.push(line),
        }
    }
    if good.is_empty() && bad.is_empty() {
        bad.push("no bar compares these runs".to_owned());
    }
    (good, bad)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::measured;
    use super::*;

    fn results(mini: u64) -> Results {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, mini));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, 1000));
        results
    }

    fn bars(until_then: &str) -> Vec<Bar> {
        let text = format!(
            "[[bar]]\nscenario = \"A\"\nmetric = \"in_use_ms\"\nof = {{ vmm = \"mini-vmm\" }}\nto = {{ vmm = \"qemu\" }}\n\
             at_most = 0.2\n{until_then}\n\
             [[bar]]\nscenario = \"B\"\nmetric = \"unmap_calls\"\nof = {{ vmm = \"mini-vmm\" }}\nat_most = 0\n"
        );
        bars::parse(&text).unwrap()
    }

    #[test]
    fn a_missed_bar_fails_the_test() {
        assert_eq!(judge(&bars(""), &results(200)).1, Vec::<String>::new());
        let (good, bad) = judge(&bars(""), &results(250));
        assert!(good.is_empty() && bad[0].contains("0.250"), "{bad:?}");
    }

    #[test]
    fn a_missed_goal_is_told_and_fails_beyond_its_second_limit() {
        let bars = bars("until_then = 0.28");
        let (good, bad) = judge(&bars, &results(280));
        assert!(bad.is_empty());
        assert!(
            good[0].starts_with("GOAL MISSED") && good[0].contains("at most 0.2 "),
            "{good:?}"
        );
        let (good, bad) = judge(&bars, &results(281));
        assert!(good.is_empty() && bad[0].contains("0.28 until then"));
        assert!(judge(&bars, &results(200)).0[0].starts_with("ok"));
    }

    #[test]
    fn a_run_that_is_missing_fails_the_test() {
        let mut one = Results::default();
        one.put(measured(Scenario::A, Vmm::MiniVmm, 512, 100));
        assert_eq!(judge(&bars(""), &one).1.len(), 1);
        assert_eq!(judge(&[], &one).1.len(), 1);
    }

    #[test]
    fn the_repositorys_bars_limit_start_mappings_and_unmappings() {
        let (good, bad) = judge(&bars::load().unwrap(), &Results::default());
        assert!(good.is_empty());
        assert_eq!(bad.len(), 3, "{bad:?}");
        for metric in ["GPUs in use", "mapped and unmapped", "unmappings"] {
            assert!(bad.iter().any(|line| line.contains(metric)), "{bad:?}");
        }
    }
}
