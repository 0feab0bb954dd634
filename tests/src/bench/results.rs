//! The file with all results: each cell as it was measured last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::cell::Cell;
use super::metric::{Metric, Summary, summarize};
use super::sample::Sample;
use crate::error::Error;
use crate::paths;

/// Of the meaning of the fields.
const VERSION: u32 = 1;

/// What a cell was measured with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The last commit that changed mini-vmm's sources, with `+` when they differ from it.
    pub commit: String,
    /// `uname -r` of the host.
    pub host_kernel: String,
    /// `uname -r` of the guest.
    pub guest_kernel: String,
    /// What the VMM calls itself.
    pub vmm: String,
}

/// A cell with its runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Which.
    pub cell: Cell,
    /// With what.
    pub versions: Versions,
    /// Medians and spreads of the runs, for readers of the file: made of the runs.
    pub summary: BTreeMap<Metric, Summary>,
    /// The runs.
    pub runs: Vec<Sample>,
}

/// All of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    version: u32,
    /// In the order of the tables.
    cells: Vec<Measured>,
}

impl Default for Results {
    fn default() -> Self {
        Self {
            version: VERSION,
            cells: Vec::new(),
        }
    }
}

impl Measured {
    /// A cell's runs with their summary.
    pub fn new(cell: Cell, versions: Versions, runs: Vec<Sample>) -> Self {
        Self {
            cell,
            versions,
            summary: summarize(&runs),
            runs,
        }
    }

    /// The median of a metric.
    pub fn median(&self, metric: Metric) -> f64 {
        self.summary.get(&metric).map_or(0.0, |s| s.median)
    }

    /// How far the runs are apart, as a share of the median.
    pub fn spread(&self, metric: Metric) -> f64 {
        self.summary.get(&metric).map_or(0.0, |s| s.spread)
    }
}

impl Results {
    /// Where they are kept.
    pub fn path() -> PathBuf {
        paths::repository().join("target/lab/bench.json")
    }

    /// Reads the file; nothing where there is none.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(error) => return Err(Error::file("read", path)(error)),
        };
        let unusable = |problem: String| Error::Content {
            path: path.to_path_buf(),
            problem: format!("{problem}; remove the file to begin anew"),
        };
        let results: Self =
            serde_json::from_str(&text).map_err(|error| unusable(error.to_string()))?;
        match results.version {
            VERSION => Ok(results),
            version => Err(unusable(format!("version {version} is not known"))),
        }
    }

    /// Writes the file, whole or not at all.
    pub fn store(&self, path: &Path) -> Result<(), Error> {
        // Strings and numbers only: it cannot fail.
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let temporary = path.with_extension("partial");
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
        }
        fs::write(&temporary, text).map_err(Error::file("write", &temporary))?;
        fs::rename(&temporary, path).map_err(Error::file("rename into place", path))
    }

    /// Adds a cell, or replaces what it was before.
    pub fn put(&mut self, measured: Measured) {
        self.cells.retain(|old| old.cell != measured.cell);
        self.cells.push(measured);
        self.cells.sort_by(|a, b| a.cell.cmp(&b.cell));
    }

    /// A cell.
    pub fn get(&self, cell: &Cell) -> Option<&Measured> {
        self.cells.iter().find(|measured| measured.cell == *cell)
    }

    /// All cells, in the order of the tables.
    pub fn cells(&self) -> &[Measured] {
        &self.cells
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::cell::{Iommu, Scenario, Vmm};
    use super::super::sample::tests::sample;
    use super::*;

    /// A cell whose GPUs were in use after so many milliseconds.
    pub fn measured(scenario: Scenario, vmm: Vmm, ram_mib: u64, in_use_ms: u64) -> Measured {
        let cell = Cell {
            scenario,
            host_kernel: "7.3".to_owned(),
            iommu: Iommu::Type1,
            ram_mib,
            vmm,
        };
        let versions = Versions {
            commit: "abc1234".to_owned(),
            host_kernel: "7.3.4".to_owned(),
            guest_kernel: "7.3.4".to_owned(),
            vmm: format!("{vmm} 1"),
        };
        Measured::new(cell, versions, vec![sample(in_use_ms), sample(in_use_ms)])
    }

    #[test]
    fn a_cell_that_is_measured_again_takes_its_own_place_only() {
        let mut results = Results::default();
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 100));
        results.put(measured(Scenario::A, Vmm::Qemu, 512, 500));
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 100));
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 200));
        let rows: Vec<_> = results
            .cells()
            .iter()
            .map(|row| {
                let in_use = row.median(Metric::InUseMs);
                (row.cell.scenario, row.cell.vmm, in_use)
            })
            .collect();
        assert_eq!(
            rows,
            [
                (Scenario::A, Vmm::MiniVmm, 100.0),
                (Scenario::A, Vmm::Qemu, 500.0),
                (Scenario::B, Vmm::MiniVmm, 200.0),
            ]
        );
    }

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lab/bench.json");
        assert_eq!(Results::load(&path).unwrap(), Results::default());
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 100));
        results.store(&path).unwrap();
        assert_eq!(Results::load(&path).unwrap(), results);
        fs::write(&path, "{}").unwrap();
        let error = Results::load(&path).unwrap_err().to_string();
        assert!(error.contains("bench.json"), "{error}");
    }
}
