//! What one run showed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cell::{Cell, Vmm};
use super::console::Moments;
use super::dma::{Dma, Trace};
use super::inside::Inside;
use crate::error::Error;
use crate::outside::{self, Calls, IoctlCounts, Mapped, Unmapped};

/// By how much the two views of the first guest instruction may differ: the way from the monitor's clock to the system
/// call.
const FIRST_INSTRUCTION_NS: u64 = 1_000_000;
/// By how much the line beside a mark may come after the mark: its way over the serial port.
const LINE_NS: u64 = 20_000_000;

/// One run. Times are in nanoseconds since the VMM's exec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// The first KVM_RUN.
    pub first_instruction_ns: u64,
    /// The guest's init had said so.
    pub init_ns: u64,
    /// The guest had said that its GPUs are in use.
    pub in_use_ns: u64,
    /// The last KVM_RUN had returned.
    pub power_off_ns: u64,
    /// The process was gone.
    pub exit_ns: u64,
    /// Mappings before the guest was off, by what they are of.
    pub dma: Dma,
    /// Ioctls by class until the guest was off.
    pub ioctls_before: BTreeMap<String, Calls>,
    /// Ioctls by class after that.
    pub ioctls_after: BTreeMap<String, Calls>,
    /// What the IOMMU was told to map.
    pub iommu_map: Mapped,
    /// What it was told to unmap, at the process's exit as well.
    pub iommu_unmap: Unmapped,
    /// mini-vmm's own view.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
}

impl Sample {
    /// Reads what a run of resources/lab/bench.sh left in its directory.
    pub fn read(log: &Path, cell: &Cell) -> Result<Self, Error> {
        let problem = |problem: String| Error::Measurement {
            cell: cell.to_string(),
            problem,
            log: log.to_path_buf(),
        };
        let directory = log.join("bench");
        let text = |name: &str| {
            let path = directory.join(name);
            fs::read(&path)
                .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
                .map_err(Error::file("read", &path))
        };
        let counts = outside::read(&log.join(outside::DIRECTORY))?;
        let trace = Trace::read(&directory.join("dma"))?;
        let first = outside::first_run(&log.join(outside::DIRECTORY))?;
        let first = first.ok_or_else(|| problem("no vCPU was run".to_owned()))?;
        let moments = Moments::parse(&text("console")?).map_err(problem)?;
        let inside = match cell.vmm {
            Vmm::MiniVmm => {
                Some(Inside::parse(&text("messages")?, counts.exec_ns).map_err(problem)?)
            }
            Vmm::Qemu => None,
        };
        let sample = Self::of(counts, first, &trace, moments, inside, cell.ram_mib << 20);
        let sample = sample.map_err(problem)?;
        sample.agree().map_err(problem)?;
        Ok(sample)
    }

    fn of(
        counts: IoctlCounts,
        first: u64,
        trace: &Trace,
        moments: Moments,
        inside: Option<Inside>,
        ram: u64,
    ) -> Result<Self, String> {
        let off = counts.power_off_ns.ok_or("no vCPU was run")?;
        let since = |time: u64| time.saturating_sub(counts.exec_ns);
        Ok(Self {
            first_instruction_ns: since(first),
            init_ns: since(moments.init),
            in_use_ns: since(moments.in_use),
            power_off_ns: since(off),
            exit_ns: since(counts.end_ns),
            dma: trace.until(off, ram),
            ioctls_before: counts.before,
            ioctls_after: counts.after,
            iommu_map: counts.iommu_map,
            iommu_unmap: counts.iommu_unmap,
            inside,
        })
    }

    /// The views from inside and outside agree; otherwise one of them is wrong.
    fn agree(&self) -> Result<(), String> {
        let Some(inside) = self.inside else {
            return Ok(());
        };
        let pairs = [
            (
                "the first guest instruction",
                self.first_instruction_ns,
                inside.first_instruction_ns,
                FIRST_INSTRUCTION_NS,
            ),
            ("mark 0x41", self.init_ns, inside.init_ns, LINE_NS),
            ("mark 0x42", self.in_use_ns, inside.in_use_ns, LINE_NS),
        ];
        for (what, outside, inside, tolerance) in pairs {
            if outside < inside || outside - inside > tolerance {
                return Err(format!(
                    "{what} was seen {outside} ns after exec from outside and {inside} ns after it by mini-vmm itself"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A run in which everything took so many milliseconds.
    pub fn sample(in_use_ms: u64) -> Sample {
        let ms = 1_000_000;
        let calls = |calls, ns| Calls {
            calls,
            ns,
            max_ns: ns,
        };
        Sample {
            first_instruction_ns: 20 * ms,
            init_ns: (in_use_ms - 10) * ms,
            in_use_ns: in_use_ms * ms,
            power_off_ns: (in_use_ms + 10) * ms,
            exit_ns: 2 * in_use_ms * ms,
            dma: Dma {
                bar_map: calls(8, ms / 4),
                ..Dma::default()
            },
            ioctls_before: BTreeMap::from([
                ("KVM_RUN".to_owned(), calls(1000, 900 * ms)),
                ("VFIO_IOMMU_MAP_DMA".to_owned(), calls(9, 36 * ms)),
            ]),
            ioctls_after: BTreeMap::new(),
            iommu_map: Mapped::default(),
            iommu_unmap: Unmapped::default(),
            inside: None,
        }
    }

    #[test]
    fn views_that_differ_are_no_measurement() {
        let mut sample = sample(1000);
        assert!(sample.agree().is_ok());
        let inside = Inside {
            first_instruction_ns: sample.first_instruction_ns - 1000,
            init_ns: sample.init_ns - 1_000_000,
            in_use_ns: sample.in_use_ns - 1_000_000,
            bar_iommu_ns: 0,
        };
        sample.inside = Some(inside);
        assert!(sample.agree().is_ok());
        sample.in_use_ns = inside.in_use_ns - 1;
        assert!(sample.agree().unwrap_err().contains("0x42"));
        sample.in_use_ns = inside.in_use_ns + LINE_NS + 1;
        assert!(sample.agree().is_err());
    }
}
