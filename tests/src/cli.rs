//! The command line.

use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::bench::cell::{Iommu, Scenario, Vmm};

/// Boots a nested KVM + VFIO + IOMMU machine and runs things in it.
///
/// The machine ("L1") is emulated by QEMU, so it works where there is no /dev/kvm, no IOMMU and no spare PCI device.
#[derive(Parser)]
#[command(name = "cargo lab", bin_name = "cargo lab", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the lab can do.
#[derive(Subcommand)]
pub enum Command {
    /// Fetch QEMU and kernels, build the images; does nothing when all is there.
    Setup {
        /// Kernels to set up (7.3, 6.12, 6.1, iommufd), separated by commas.
        ///
        /// iommufd is built from the distribution's source, which takes 10 minutes or more, once.
        #[arg(
            long,
            visible_alias = "host-kernel",
            value_delimiter = ',',
            default_value = "7.3"
        )]
        kernels: Vec<String>,
        /// Set up QEMU 11 as well, in a directory tree of its own: it maps BARs through iommufd.
        #[arg(long)]
        qemu11: bool,
    },
    /// Run a command in L1, with the repository as working directory.
    Run(Box<RunArgs>),
    /// Show the main job: a guest with two fake GPUs and an NVMe disk assigned by mini-vmm.
    Demo {
        /// Show the output of the guest as it comes.
        #[arg(long)]
        verbose: bool,
    },
    /// Measure how fast mini-vmm starts a guest with GPUs, and QEMU beside it; times repeat.
    ///
    /// A run takes a minute or more, in which one virtual nanosecond is one instruction. Results are kept in
    /// target/lab/bench.json; docs/performance.md tells what they mean.
    Bench(BenchArgs),
    /// Run formatting, clippy, unit and end-to-end tests.
    Test(TestArgs),
    /// Run a command to which the kernel refuses an ioctl (ENOTTY); for tests.
    #[command(hide = true)]
    WithoutIoctl {
        /// The ioctl's number, as in 0x3b75.
        #[arg(value_parser = hexadecimal)]
        request: u32,
        /// The command and its arguments.
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<String>,
    },
    /// Keep a virtual machine in the kernel until the end; for tests.
    #[command(hide = true)]
    HoldVm,
}

/// Arguments of `cargo lab run`.
#[derive(Args)]
pub struct RunArgs {
    /// The machine.
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Count and time the command's VFIO, iommufd and KVM ioctls, and what the IOMMU is told.
    ///
    /// A table follows the command's output, on standard error; ioctls.json in the run's directory has the same.
    #[arg(long)]
    pub count_ioctls: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

/// What machine to build.
#[derive(Args, Clone, Debug, PartialEq, Eq)]
pub struct MachineArgs {
    /// L1's kernel: 7.3, 6.12, 6.1, or iommufd (built once, 10 minutes or more).
    #[arg(long, value_name = "NAME", default_value = "7.3")]
    pub host_kernel: String,
    /// Fake GPUs (pci-testdev) to assign.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub gpus: u32,
    /// Size of each fake GPU's 64-bit prefetchable BAR.
    #[arg(long, value_name = "SIZE", default_value = "16G")]
    pub bar_size: String,
    /// A QEMU device, bound to vfio-pci in L1; may be given several times.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub device: Vec<String>,
    /// A QEMU device that is left to L1's drivers; may be given several times.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub host_device: Vec<String>,
    /// An argument for QEMU, put before the devices; an option with its value may be given in one, as '-drive if=none,…'.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub qemu_arg: Vec<String>,
    /// More for L1's kernel command line.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub host_append: Vec<String>,
    /// L1's CPUs.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub cpus: u32,
    /// L1's memory [default: 6G, or 2G where the IOMMU has fewer than 41 bits].
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Physical address bits of L1's CPUs.
    #[arg(long, value_name = "BITS", default_value_t = 46)]
    pub phys_bits: u32,
    /// Address bits of L1's IOMMU (39 or 48).
    #[arg(long, value_name = "BITS", default_value_t = 48)]
    pub iommu_bits: u32,
    /// Stop L1 after so many seconds and exit with 124.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
    /// One instruction takes one virtual nanosecond: one CPU, repeatable times; retried at most twice when it hangs.
    #[arg(long)]
    pub deterministic: bool,
    /// Show L1's kernel messages, on standard error.
    #[arg(long)]
    pub verbose: bool,
}

/// Arguments of `cargo lab bench`. Every combination of scenario, RAM and VMM is measured.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Devices and guest, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "A")]
    pub scenario: Vec<Scenario>,
    /// VMMs, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "mini-vmm,qemu")]
    pub vmm: Vec<Vmm>,
    /// The host's kernel: 7.3, 6.12, 6.1 or iommufd.
    #[arg(long, value_name = "NAME", default_value = crate::setup::DEFAULT_KERNEL)]
    pub host_kernel: String,
    /// The interface for IOMMU mappings; iommufd needs --host-kernel iommufd.
    #[arg(long, default_value = "type1")]
    pub iommu: Iommu,
    /// The guest's memory; several separated by commas.
    #[arg(
        long,
        value_name = "SIZE",
        value_delimiter = ',',
        default_value = "512M"
    )]
    pub ram: Vec<String>,
    /// Runs of each; one more is made where they differ by over 2 %.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub runs: u32,
    /// Real seconds that a run may take [default: by scenario, long enough for a busy machine].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: Option<u64>,
    /// Measure nothing: show, compare and write what was measured before.
    #[arg(long)]
    pub saved: bool,
    /// Compare with resources/bench-bars.toml, as far as the scenarios go; exits with 1 when a bar is missed.
    #[arg(long)]
    pub check: bool,
    /// Put the tables of all results into docs/performance.md, and their picture into docs/pictures.
    #[arg(long)]
    pub write_docs: bool,
}

/// Arguments of `cargo lab test`.
#[derive(Args)]
pub struct TestArgs {
    /// Run only the tests whose name contains this.
    pub filter: Option<String>,
    /// Run only formatting, clippy and unit tests.
    #[arg(long, conflicts_with = "e2e")]
    pub unit: bool,
    /// Run only end-to-end tests.
    #[arg(long)]
    pub e2e: bool,
    /// L1's kernel for the end-to-end tests that do not ask for one themselves: 7.3, 6.12, 6.1, or iommufd.
    #[arg(long, value_name = "NAME", default_value = "7.3")]
    pub host_kernel: String,
    /// The interface to the IOMMU that mini-vmm is told to use, by the tests that do not choose one themselves: auto, type1
    /// or iommufd (which takes --host-kernel iommufd) [default: mini-vmm's own].
    #[arg(long, value_name = "NAME")]
    pub iommu: Option<Interface>,
    /// Run the end-to-end tests so many times.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: u32,
    /// Show what the end-to-end tests print as it comes.
    #[arg(long)]
    pub verbose: bool,
    /// List the end-to-end tests and end.
    #[arg(long)]
    pub list: bool,
}

/// What mini-vmm's `--iommu` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Interface {
    /// What the host offers.
    Auto,
    /// VFIO container and groups.
    Type1,
    /// /dev/iommu and the devices' own files.
    Iommufd,
}

fn hexadecimal(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    u32::from_str_radix(digits, 16).map_err(|_| format!("`{text}` is not like 0x3b75"))
}

impl MachineArgs {
    /// The limit for one boot of L1 with its command.
    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

#[cfg(test)]
impl Default for BenchArgs {
    /// What `cargo lab bench` has when no option is given.
    fn default() -> Self {
        match Cli::try_parse_from(["lab", "bench"]) {
            Ok(Cli {
                command: Command::Bench(arguments),
            }) => arguments,
            _ => unreachable!("the defaults are good"),
        }
    }
}

impl Default for MachineArgs {
    /// What `cargo lab run` has when no option is given.
    fn default() -> Self {
        Self {
            host_kernel: crate::setup::DEFAULT_KERNEL.to_owned(),
            gpus: 0,
            bar_size: "16G".to_owned(),
            device: Vec::new(),
            host_device: Vec::new(),
            qemu_arg: Vec::new(),
            host_append: Vec::new(),
            cpus: 2,
            memory: None,
            phys_bits: 46,
            iommu_bits: 48,
            timeout: 300,
            deterministic: false,
            verbose: false,
        }
    }
}
