//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Parser, ValueEnum};

use crate::options::{BootProfile, Cpus, LogFormat, LogLevel, MemoryOption, Size, VfioOption};

/// A command line that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{0}; mini-vmm --help lists the options")]
pub struct UsageError(pub String);

/// What `--help` says of `--vfio`.
const VFIO_HELP: &str = "\
Assigns a PCI device that is bound to vfio-pci; may be given several times. The device is named as \
in 41:00.0, 0000:41:00.0 or by its path under /sys. Options, separated by commas:
  p2p=auto|on|off        other assigned devices may reach its BARs by DMA (auto: when there are any)
  decode=sticky|strict   with memory decode off its BARs stay readable (sticky, costs nothing) or
                         read as all ones (strict)
  no-mmap[=N]            BAR N, or all, trap at every access: slow, for debugging
  barN=host|0xADDRESS    BAR N lies at its host address, or there, in the guest
  rom=off|on|FILE        the expansion ROM: not shown (off), the device's, or the contents of FILE
  gpudirect-clique=N     NVIDIA's driver may use peer-to-peer among GPUs of clique N, 0 to 15";

/// Starts a Linux guest with PCI devices of this machine assigned to it.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "mini-vmm",
    version,
    after_help = "Exit status: 0 the guest switched itself off or was quit with Ctrl-A x, 1 runtime error,\n\
                  2 wrong usage or unusable file, 3 the host or a device is not ready,\n\
                  32 the guest asked for a reset, 33 the guest crashed, 128+N ended by signal N."
)]
pub struct Config {
    /// Kernel to boot: a bzImage, or an ELF kernel with a PVH entry
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,

    /// Initial RAM file system
    #[arg(long, visible_alias = "initramfs", value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// Kernel command line
    #[arg(
        long,
        visible_alias = "append",
        value_name = "TEXT",
        default_value = "console=ttyS0 panic=-1",
        allow_hyphen_values = true
    )]
    pub cmdline: String,

    /// Guest RAM, as in 64G; with hugepages=2M or 1G from the host's reserved huge pages, with
    /// node=N from that NUMA node (auto: the first device's, if it has memory free)
    #[arg(
        long,
        value_name = "SIZE[,hugepages=2M|1G][,node=N|auto]",
        default_value = "1G"
    )]
    pub memory: MemoryOption,

    /// Virtual CPUs, 255 at most
    #[arg(long, value_name = "N", default_value = "1")]
    pub cpus: Cpus,

    /// Assigns a PCI device that is bound to vfio-pci; may be given several times. The device is
    /// named as in 41:00.0, 0000:41:00.0 or by its path under /sys
    #[arg(
        long,
        value_name = "BDF[,OPTION=VALUE]…",
        long_help = VFIO_HELP
    )]
    pub vfio: Vec<VfioOption>,

    /// The kernel's interface to the IOMMU; auto takes iommufd where the host offers it for all
    /// devices and it does all that type1 does
    #[arg(long, value_name = "auto|type1|iommufd", default_value = "auto")]
    pub iommu: Iommu,

    /// When guest RAM is mapped for devices: deferred, while the guest runs already (the first
    /// device that masters the bus waits for it), or eager, before its first instruction
    #[arg(long, value_name = "deferred|eager", default_value = "deferred")]
    pub dma_map: DmaMap,

    /// Allocates all guest RAM before the first instruction, also without devices
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub prefault: Switch,

    /// Keeps the gate before bus mastering closed for so many seconds after a device came to it:
    /// for tests of what the guest notices of a wait (docs/lab.md)
    #[arg(long, value_name = "SECONDS", hide = true, default_value = "0")]
    pub test_hold_dma_gate: u64,

    /// Size of the 64-bit MMIO window instead of what the devices need
    #[arg(long, value_name = "SIZE")]
    pub mmio64_size: Option<Size>,

    /// Accepted for the habit: a guest's reset always ends mini-vmm, with status 32
    #[arg(long)]
    pub no_reboot: bool,

    /// Reports where the time went, at the end or when the guest writes mark 0x41 or 0x42 to I/O
    /// port 0x80: a table or JSON on standard error, a trace (for Perfetto) or a page (for a
    /// browser) in a file; may be given several times
    #[arg(long, value_name = "table|json|trace=FILE|html=FILE[,at=41|42|exit]")]
    pub boot_profile: Vec<BootProfile>,

    /// The least that is logged: error, warn, info (moments and decisions), debug (phases) or trace
    /// (system calls)
    #[arg(long, value_name = "LEVEL", default_value = "warn")]
    pub log_level: LogLevel,

    /// Appends the log to a file, with times, instead of writing it to standard error
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// One line of text or one JSON object for each event
    #[arg(long, value_name = "text|json", default_value = "text")]
    pub log_format: LogFormat,
}

/// What the command line asks for.
pub enum Command {
    /// Run a guest.
    Run(Box<Config>),
    /// Print this (help or version) and exit with 0.
    Print(String),
}

/// Parses the arguments, the first of which is the program's name.
pub fn parse<I, T>(arguments: I) -> Result<Command, UsageError>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    match Config::try_parse_from(arguments) {
        Ok(config) => Ok(Command::Run(Box::new(config))),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            Ok(Command::Print(error.to_string()))
        }
        Err(error) => Err(UsageError(one_line(&error.to_string()))),
    }
}

/// clap's message without its prefix, usage and hints.
fn one_line(message: &str) -> String {
    let message = message.strip_prefix("error: ").unwrap_or(message);
    let lines: Vec<_> = message
        .lines()
        .take_while(|line| !line.trim().is_empty())
        .map(str::trim)
        .collect();
    lines.join(" ")
}

/// Which interface of the kernel maps memory for devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Iommu {
    /// What the host offers.
    #[default]
    Auto,
    /// VFIO container with the type1 driver.
    Type1,
    /// /dev/iommu and the devices' own files.
    Iommufd,
}

/// When guest RAM is mapped for devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DmaMap {
    /// While the guest runs; bus mastering waits for it.
    #[default]
    Deferred,
    /// Before the guest runs.
    Eager,
}

/// On or off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    #[default]
    Off,
}

/// How a peer-to-peer mapping is decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum P2p {
    /// When two or more devices could reach each other.
    #[default]
    Auto,
    /// Always, or fail.
    On,
    /// Never.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(arguments: &[&str]) -> Config {
        match parse([&["mini-vmm"], arguments].concat()).unwrap() {
            Command::Run(config) => *config,
            Command::Print(text) => panic!("{text}"),
        }
    }

    fn error(arguments: &[&str]) -> String {
        match parse([&["mini-vmm"], arguments].concat()) {
            Err(error) => {
                let text = error.to_string();
                assert!(!text.contains('\n'), "{text}");
                text
            }
            Ok(_) => panic!("accepted"),
        }
    }

    #[test]
    fn a_kernel_is_all_that_must_be_given() {
        let config = run(&["--kernel", "k"]);
        assert_eq!(config.cmdline, "console=ttyS0 panic=-1");
        assert_eq!(config.memory.size.0, 1 << 30);
        assert_eq!(config.cpus.0, 1);
        assert_eq!(config.iommu, Iommu::Auto);
        assert_eq!(config.dma_map, DmaMap::Deferred);
        assert_eq!(config.prefault, Switch::Off);
        assert!(config.vfio.is_empty() && config.boot_profile.is_empty());
        assert!(error(&[]).contains("--kernel"));
    }

    #[test]
    fn habits_of_other_vmms_are_honoured() {
        let config = run(&[
            "--kernel",
            "k",
            "--initramfs",
            "i",
            "--append",
            "-x quiet",
            "--no-reboot",
            "--vfio",
            "host=41:00.0",
            "--vfio",
            "path=/sys/bus/pci/devices/0000:42:00.0",
        ]);
        assert_eq!(config.initrd.unwrap().to_str(), Some("i"));
        assert_eq!(config.cmdline, "-x quiet");
        assert_eq!(config.vfio[0].bdf.to_string(), "0000:41:00.0");
        assert_eq!(config.vfio[1].bdf.to_string(), "0000:42:00.0");
    }

    #[test]
    fn bad_usage_is_one_line_that_names_the_argument() {
        assert!(error(&["--kernel", "k", "--foo"]).contains("--foo"));
        assert!(error(&["--kernel", "k", "--memory", "lots"]).contains("lots"));
        assert!(error(&["--kernel", "k", "--vfio", "nonsense"]).contains("nonsense"));
        assert!(error(&["--kernel", "k", "--iommu", "vt-d"]).contains("vt-d"));
        assert!(error(&["--kernel", "k", "--cpus", "0"]).contains("at least 1"));
        assert!(error(&["--kernel", "k", "check"]).contains("check"));
    }

    #[test]
    fn help_and_version_are_not_errors() {
        for argument in ["--help", "--version"] {
            assert!(matches!(
                parse(["mini-vmm", argument]),
                Ok(Command::Print(_))
            ));
        }
    }
}
