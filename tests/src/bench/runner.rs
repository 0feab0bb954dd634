//! Boots L1 once for each run of a cell.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cell::{Cell, Iommu, Vmm};
use super::metric::Metric;
use super::results::{Measured, Versions};
use super::sample::Sample;
use super::statistics;
use crate::cli::MachineArgs;
use crate::command;
use crate::error::Error;
use crate::machine::{Boot, Sink, Source, job};
use crate::paths;
use crate::setup::{self, Bootable, IOMMUFD_KERNEL, tools};

/// What must not differ between runs; what else is measured happens before.
const REPEATED: [Metric; 2] = [Metric::InUseMs, Metric::ExitMs];

/// What mini-vmm is built of.
const PRODUCT: [&str; 5] = ["Cargo.toml", "Cargo.lock", "arch", "devices", "vmm"];
/// So often a run that hung each time that the lab tried it is tried anew: hours of measuring are not lost to it.
const HANGS: u32 = 3;

/// Measures a cell: so many runs, and one more where they differ too much. `note` is told of each run.
pub fn measure(
    cell: &Cell,
    runs: u32,
    timeout: Option<u64>,
    note: &mut dyn FnMut(u32, &Sample),
) -> Result<Measured, Error> {
    check(cell)?;
    let guest = cell.scenario.setting().guest;
    let kernels = setup::ensure(&[setup::DEFAULT_KERNEL, &cell.host_kernel, guest])?;
    let find = |name: &str| {
        let found = kernels.iter().find(|kernel| kernel.name == name);
        found.ok_or_else(|| Error::Failed(format!("kernel {name} is not set up")))
    };
    let (host, guest) = (find(&cell.host_kernel)?, find(guest)?);
    let program = Program::of(cell)?;
    let mut samples = Vec::new();
    let mut version = String::new();
    let mut wanted = runs;
    while (samples.len() as u32) < wanted {
        let log = run(cell, &program, guest, &kernels, timeout)?;
        let sample = Sample::read(&log, cell)?;
        note(samples.len() as u32 + 1, &sample);
        samples.push(sample);
        version = first_line(&log.join("bench/version"))?;
        if samples.len() as u32 == runs && runs > 1 && differ(&samples) {
            wanted = runs + 1;
        }
    }
    let versions = Versions {
        // The sources need not come from a repository.
        commit: commit().unwrap_or_else(|_| "an unknown commit".to_owned()),
        host_kernel: host.release.clone(),
        guest_kernel: guest.release.clone(),
        vmm: version,
    };
    Ok(Measured::new(cell.clone(), versions, samples))
}

/// Refuses what cannot be.
fn check(cell: &Cell) -> Result<(), Error> {
    if cell.iommu == Iommu::Iommufd && cell.host_kernel != IOMMUFD_KERNEL {
        return Err(Error::Option {
            option: "--iommu",
            value: cell.iommu.to_string(),
            problem: format!(
                "kernel {} has no iommufd; --host-kernel {IOMMUFD_KERNEL} has",
                cell.host_kernel
            ),
        });
    }
    Ok(())
}

/// The VMM's program, in L1.
struct Program {
    /// The directory tree that it belongs to, with its libraries.
    tree: PathBuf,
    /// Its path in there, as words of a shell.
    path: String,
}

impl Program {
    /// The one of a cell, which is set up where the lab has it.
    fn of(cell: &Cell) -> Result<Self, Error> {
        let (tree, path) = match cell.vmm {
            Vmm::MiniVmm => (PathBuf::from("/"), "$LAB_VMM".to_owned()),
            Vmm::Qemu if cell.host_kernel == IOMMUFD_KERNEL => {
                (setup::qemu11()?, setup::QEMU11_PROGRAM.to_owned())
            }
            Vmm::Qemu => (PathBuf::from("/"), format!("$(command -v {})", tools::QEMU)),
        };
        Ok(Self { tree, path })
    }
}

fn differ(samples: &[Sample]) -> bool {
    REPEATED.iter().any(|metric| {
        let values: Vec<f64> = samples.iter().map(|sample| metric.of(sample)).collect();
        statistics::spread(&values) > statistics::TOLERANCE
    })
}

/// Boots L1 for one run, and returns the directory with what came of it.
fn run(
    cell: &Cell,
    program: &Program,
    guest: &Bootable,
    kernels: &[Bootable],
    timeout: Option<u64>,
) -> Result<PathBuf, Error> {
    let boot = Boot {
        machine: &machine(cell, timeout),
        kernels,
        body: &body(cell, program, guest),
        what: &format!("the run of {cell}"),
        interactive: false,
    };
    let mut log = Log(PathBuf::new());
    let mut hangs = 0;
    let status = loop {
        match boot.run(&mut log) {
            // The lab itself has tried several times by then.
            Err(error @ Error::Hung { .. }) if hangs < HANGS => {
                hangs += 1;
                eprintln!("lab: {error}; and again ({hangs} of {HANGS})");
            }
            result => break result?,
        }
    };
    if status != 0 {
        return Err(Error::Measurement {
            cell: cell.to_string(),
            problem: "the run failed, for the reason above".to_owned(),
            log: log.0,
        });
    }
    Ok(log.0)
}

fn machine(cell: &Cell, timeout: Option<u64>) -> MachineArgs {
    let setting = cell.scenario.setting();
    MachineArgs {
        host_kernel: cell.host_kernel.clone(),
        gpus: setting.gpus,
        bar_size: setting.bar_size.to_owned(),
        // Programs and their libraries lie where they lay before; and what KVM has to say of a guest's registers is not sent
        // over a serial port meanwhile, character by character.
        host_append: vec!["norandmaps loglevel=3".to_owned()],
        timeout: timeout.unwrap_or(setting.limit),
        deterministic: true,
        ..MachineArgs::default()
    }
}

fn body(cell: &Cell, program: &Program, guest: &Bootable) -> String {
    let path = |path: &Path| job::quote(&path.display().to_string());
    let kernel = match cell.scenario.setting().unpacked {
        true => &guest.elf,
        false => &guest.image,
    };
    format!(
        "export BENCH_PROGRAM=\"{}\" BENCH_TREE={} \\\n    \
             BENCH_KERNEL={} BENCH_INITRD={} BENCH_RAM={}M BENCH_IOMMU={} BENCH_BUSYBOX={}\n\
         exec resources/lab/bench.sh {}",
        program.path,
        path(&program.tree),
        path(kernel),
        path(&guest.guest_initrd),
        cell.ram_mib,
        cell.iommu,
        tools::BUSYBOX,
        cell.vmm
    )
}

/// Remembers the directory of the last boot; what the run has to complain about goes to standard error.
struct Log(PathBuf);

impl Sink for Log {
    fn started(&mut self, log: &Path) {
        self.0 = log.to_path_buf();
    }

    fn bytes(&mut self, _source: Source, bytes: &[u8]) {
        eprint!("{}", String::from_utf8_lossy(bytes));
    }
}

fn first_line(path: &Path) -> Result<String, Error> {
    let text = fs::read_to_string(path).map_err(Error::file("read", path))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// The last commit that changed what mini-vmm is built of, with `+` where files of that differ from it.
fn commit() -> Result<String, Error> {
    let git = |arguments: &[&str]| {
        command::output(
            Command::new("git")
                .current_dir(paths::repository())
                .args(arguments)
                .arg("--")
                .args(PRODUCT),
        )
    };
    let commit = git(&["log", "-1", "--format=%h", "--abbrev=10"])?;
    let changed = git(&["status", "--porcelain"])?;
    let mark = if changed.trim().is_empty() { "" } else { "+" };
    Ok(format!("{}{mark}", commit.trim()))
}

#[cfg(test)]
mod tests {
    use super::super::cell::Scenario;
    use super::super::sample::tests::sample;
    use super::*;

    fn cell(vmm: Vmm) -> Cell {
        Cell {
            scenario: Scenario::C,
            host_kernel: "6.12".to_owned(),
            iommu: Iommu::Type1,
            ram_mib: 512,
            vmm,
        }
    }

    #[test]
    fn a_third_run_is_made_where_two_differ() {
        assert!(!differ(&[sample(1000), sample(1019)]));
        assert!(differ(&[sample(1000), sample(1021)]));
    }

    fn kernel() -> Bootable {
        Bootable {
            name: "7.3",
            release: "7.3.4".to_owned(),
            image: "/k e".into(),
            elf: "/elf".into(),
            host_initrd: "/h".into(),
            guest_initrd: "/g".into(),
        }
    }

    fn program() -> Program {
        Program {
            tree: "/tree".into(),
            path: "/usr/bin/qemu".to_owned(),
        }
    }

    #[test]
    fn the_body_is_shell_and_names_all() {
        let text = body(&cell(Vmm::Qemu), &program(), &kernel());
        assert!(text.contains("BENCH_PROGRAM=\"/usr/bin/qemu\" BENCH_TREE='/tree'"));
        assert!(
            text.contains("BENCH_KERNEL='/k e' BENCH_INITRD='/g' BENCH_RAM=512M BENCH_IOMMU=type1")
        );
        assert!(text.ends_with("exec resources/lab/bench.sh qemu"), "{text}");
        assert!(command::run(Command::new("bash").args(["-n", "-c", &text])).is_ok());
    }

    #[test]
    fn the_kernel_is_as_the_scenario_has_it() {
        let of = |scenario| Cell {
            scenario,
            ..cell(Vmm::MiniVmm)
        };
        let body = |scenario| body(&of(scenario), &program(), &kernel());
        assert!(body(Scenario::A).contains("BENCH_KERNEL='/k e'"));
        assert!(body(Scenario::E).contains("BENCH_KERNEL='/elf'"));
    }

    #[test]
    fn the_machine_is_the_cells() {
        let machine = machine(&cell(Vmm::MiniVmm), None);
        assert_eq!((machine.gpus, machine.bar_size.as_str()), (8, "64G"));
        assert_eq!(machine.host_kernel, "6.12");
        assert!(machine.deterministic);
    }

    #[test]
    fn iommufd_needs_its_kernel() {
        let cell = Cell {
            iommu: Iommu::Iommufd,
            ..cell(Vmm::MiniVmm)
        };
        assert_eq!(check(&cell).unwrap_err().exit_code(), 2);
    }
}
