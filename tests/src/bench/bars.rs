//! What the numbers must not exceed: resources/bench-bars.toml.

use std::fs;
use std::path::PathBuf;

use serde::Deserialize;

use super::cell::{Cell, Iommu, Scenario, Vmm};
use super::metric::Metric;
use super::results::Results;
use crate::error::Error;
use crate::paths;
use crate::setup;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    bar: Vec<Bar>,
}

/// One limit.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bar {
    /// Where.
    scenario: Scenario,
    /// Of what.
    metric: Metric,
    /// What is limited.
    of: Place,
    /// What it is compared with; without, the number itself is limited, in the metric's unit.
    to: Option<Place>,
    /// The limit.
    at_most: f64,
    /// Of a goal that is not reached: what `cargo lab test` lets it not exceed until it is.
    until_then: Option<f64>,
}

/// A cell, by what differs from the usual.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    /// Where it is not the bar's own.
    scenario: Option<Scenario>,
    vmm: Vmm,
    #[serde(default = "usual_ram")]
    ram_mib: u64,
    #[serde(default = "usual_host")]
    host_kernel: String,
    #[serde(default)]
    iommu: Iommu,
}

/// The guest's memory where a bar does not say, in MiB.
pub fn usual_ram() -> u64 {
    512
}

fn usual_host() -> String {
    setup::DEFAULT_KERNEL.to_owned()
}

/// How a bar was met.
#[derive(Debug, PartialEq)]
pub enum Outcome {
    /// In words.
    Met(String),
    /// In words.
    Missed(String),
    /// A cell that it needs was not measured.
    Unmeasured(String),
}

/// Reads the repository's bars.
pub fn load() -> Result<Vec<Bar>, Error> {
    let path = path();
    let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    parse(&text).map_err(|problem| Error::Content { path, problem })
}

fn path() -> PathBuf {
    paths::repository().join("resources/bench-bars.toml")
}

/// Reads bars from TOML; the error says what is wrong.
pub fn parse(text: &str) -> Result<Vec<Bar>, String> {
    let file: Result<File, _> = toml::from_str(text);
    file.map(|file| file.bar)
        .map_err(|error| error.to_string().trim_end().to_owned())
}

impl Bar {
    /// Where it applies.
    pub fn scenario(&self) -> Scenario {
        self.scenario
    }

    /// The cells that it compares.
    pub fn cells(&self) -> Vec<Cell> {
        let places = [Some(&self.of), self.to.as_ref()];
        places
            .into_iter()
            .flatten()
            .map(|place| self.cell(place))
            .collect()
    }

    /// Whether it limits a time by itself: a test may fail on the ratio of two times only.
    pub fn limits_one_time(&self) -> bool {
        self.to.is_none() && self.metric.is_time()
    }

    /// Compares.
    pub fn check(&self, results: &Results) -> Outcome {
        match self.value(results) {
            Ok((value, words)) if value <= self.at_most => Outcome::Met(format!("{self}: {words}")),
            Ok((_, words)) => Outcome::Missed(format!("{self}: {words}")),
            Err(words) => Outcome::Unmeasured(format!("{self}: {words}")),
        }
    }

    /// Whether the second limit of a goal is met, and that limit; `None` without one, or without results.
    pub fn is_within_until_then(&self, results: &Results) -> Option<(bool, f64)> {
        let (value, _) = self.value(results).ok()?;
        self.until_then.map(|limit| (value <= limit, limit))
    }

    /// What is limited, also in words; the error says what was not measured.
    fn value(&self, results: &Results) -> Result<(f64, String), String> {
        let median = |place: &Place| {
            let cell = self.cell(place);
            let measured = results.get(&cell);
            let measured = measured.ok_or_else(|| format!("not measured: {cell}"))?;
            Ok::<_, String>(measured.median(self.metric))
        };
        let of = median(&self.of)?;
        let Some(to) = &self.to else {
            return Ok((of, self.metric.show(of)));
        };
        let to = median(to)?;
        // A ratio to nothing is met by nothing only.
        if to == 0.0 && of == 0.0 {
            return Ok((0.0, "both are 0".to_owned()));
        }
        let (value, of, to) = (of / to, self.metric.show(of), self.metric.show(to));
        Ok((value, format!("{} ({of} / {to})", ratio(value))))
    }

    fn cell(&self, place: &Place) -> Cell {
        Cell {
            scenario: place.scenario.unwrap_or(self.scenario),
            host_kernel: place.host_kernel.clone(),
            iommu: place.iommu,
            ram_mib: place.ram_mib,
            vmm: place.vmm,
        }
    }
}

/// A ratio with three digits that mean something.
pub fn ratio(value: f64) -> String {
    if value < 0.1 {
        format!("{value:.5}")
    } else {
        format!("{value:.3}")
    }
}

impl std::fmt::Display for Bar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ", self.metric)?;
        match &self.to {
            Some(to) => {
                let (of, to) = (self.cell(&self.of), self.cell(to));
                write!(f, "in {of}, at most {} of {to}", self.at_most)
            }
            None => write!(
                f,
                "in {}, at most {}",
                self.cell(&self.of),
                self.metric.show(self.at_most)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::measured;
    use super::*;

    fn results(mini: u64, qemu: u64) -> Results {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, mini));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, qemu));
        results
    }

    fn ratio_bar() -> Bar {
        let text = r#"
            [[bar]]
            scenario = "A"
            metric = "in_use_ms"
            of = { vmm = "mini-vmm" }
            to = { vmm = "qemu" }
            at_most = 0.20
        "#;
        parse(text).unwrap().remove(0)
    }

    #[test]
    fn a_ratio_is_met_up_to_its_limit() {
        let bar = ratio_bar();
        assert!(matches!(bar.check(&results(200, 1000)), Outcome::Met(_)));
        let Outcome::Missed(line) = bar.check(&results(201, 1000)) else {
            panic!("missed");
        };
        assert!(line.contains("0.201") && line.contains("qemu"), "{line}");
        assert!(!line.contains('\n'));
    }

    #[test]
    fn scenarios_can_be_compared() {
        let text = r#"
            [[bar]]
            scenario = "A"
            metric = "exit_ms"
            of = { vmm = "mini-vmm" }
            to = { vmm = "mini-vmm", scenario = "B" }
            at_most = 1.02
        "#;
        let bar = parse(text).unwrap().remove(0);
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 1020));
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 1000));
        assert!(matches!(bar.check(&results), Outcome::Met(_)));
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 990));
        assert!(matches!(bar.check(&results), Outcome::Missed(_)));
    }

    #[test]
    fn a_bar_needs_its_cells() {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 100));
        let Outcome::Unmeasured(line) = ratio_bar().check(&results) else {
            panic!("unmeasured");
        };
        assert!(
            line.ends_with("A, qemu, host 7.3, type1, 512 MiB"),
            "{line}"
        );
    }

    #[test]
    fn without_a_second_cell_the_number_itself_is_limited() {
        let text = r#"
            [[bar]]
            scenario = "A"
            metric = "bar_map_ms"
            of = { vmm = "mini-vmm", ram_mib = 512 }
            at_most = 0.25
        "#;
        let bar = parse(text).unwrap().remove(0);
        assert!(matches!(bar.check(&results(1000, 1000)), Outcome::Met(_)));
        let strict = Bar {
            at_most: 0.24,
            ..bar
        };
        assert!(matches!(
            strict.check(&results(1000, 1000)),
            Outcome::Missed(_)
        ));
    }

    #[test]
    fn the_repositorys_bars_are_understood() {
        assert!(!load().unwrap().is_empty());
    }

    #[test]
    fn a_misspelt_field_is_told() {
        let text = "[[bar]]\nscenario = \"A\"\nmetric = \"in_use\"\n";
        assert!(parse(text).unwrap_err().contains("in_use"));
    }
}
