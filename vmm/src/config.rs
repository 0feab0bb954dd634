//! The command line.

mod commands;

use std::io;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, ValueEnum};
use devices::remedy::Remedy;

use crate::options::{BootProfile, Cpus, LogFormat, LogLevel, MemoryOption, Size, VfioOption};

/// A command line, or a file named by it, that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// An option or its value is wrong.
    #[error("{0}; mini-vmm --help lists the options")]
    Options(String),
    /// A file cannot be opened or read.
    #[error("cannot {what} {} ({remedy})", path.display())]
    File {
        /// What was being done with it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What mends it.
        remedy: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The size of a file says that it is no expansion ROM.
    #[error("{}: {much} no expansion ROM; name a file of 1 byte to 16 MiB", path.display())]
    NoRom {
        /// The file.
        path: PathBuf,
        /// How much is in it.
        much: &'static str,
    },
}

impl UsageError {
    /// A file to be written cannot be opened; for use with `map_err`.
    pub fn output(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            what,
            path: path.to_owned(),
            remedy: "name a file that can be written, in a directory that is there",
            source,
        }
    }

    /// What mends it; the message holds it.
    pub fn remedy(&self) -> Remedy {
        Remedy::advice(match self {
            Self::Options(_) => "mini-vmm --help lists the options",
            Self::File { remedy, .. } => remedy,
            Self::NoRom { .. } => "name a file of 1 byte to 16 MiB",
        })
    }
}

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

/// How the command is called, in all its forms.
const USAGE: &str = "\
mini-vmm --kernel FILE [--vfio BDF]… [OPTIONS]
       mini-vmm check BDF… [OPTIONS] [--json]
       mini-vmm devices [--json]";

/// What `--help` ends with.
const EXAMPLES: &str = "\
A device is given to vfio-pci first: mini-vmm check prints the commands, docs/user-guide.md explains them. The guest's root
file system is in the initrd or on an assigned disk.

Examples:
  mini-vmm devices                                   which devices there are, and which can be assigned
  mini-vmm check 41:00.0 --memory 64G                whether a guest could be started, and what to do about it
  mini-vmm --kernel bzImage --initrd initrd.img --memory 64G --cpus 8 --vfio 41:00.0 --vfio 61:00.0
  mini-vmm --kernel bzImage --memory 64G,hugepages=1G,node=auto --vfio 41:00.0 --dry-run

Exit status: 0 the guest switched itself off or was quit with Ctrl-A x, 1 runtime error,
2 wrong usage or unusable file, 3 the host or a device is not ready,
32 the guest asked for a reset, 33 the guest crashed, 128+N ended by signal N.";

/// Headings of the options in `--help`.
mod group {
    pub const GUEST: &str = "Guest";
    pub const DEVICES: &str = "Devices";
    pub const MEMORY: &str = "How guest RAM is prepared";
    pub const RUN: &str = "The run";
}

/// Starts a Linux guest with PCI devices of this machine assigned to it.
#[derive(Clone, Debug, Parser)]
#[command(name = "mini-vmm", version, override_usage = USAGE, after_help = EXAMPLES)]
pub struct Config {
    /// Kernel to boot: a bzImage, or an ELF kernel with a PVH entry
    #[arg(help_heading = group::GUEST, long, value_name = "FILE")]
    pub kernel: PathBuf,

    /// Initial RAM file system
    #[arg(help_heading = group::GUEST, long, visible_alias = "initramfs", value_name = "FILE")]
    pub initrd: Option<PathBuf>,

    /// Kernel command line
    #[arg(help_heading = group::GUEST,
        long,
        visible_alias = "append",
        value_name = "TEXT",
        default_value = "console=ttyS0 panic=-1",
        allow_hyphen_values = true
    )]
    pub cmdline: String,

    /// Guest RAM, as in 64G; with hugepages=2M or 1G from the host's reserved huge pages, with
    /// node=N from that NUMA node (auto: the first device's, if it has memory free)
    #[arg(help_heading = group::GUEST,
        long,
        value_name = "SIZE[,hugepages=2M|1G][,node=N|auto]",
        default_value = "1G"
    )]
    pub memory: MemoryOption,

    /// Virtual CPUs, 255 at most
    #[arg(help_heading = group::GUEST, long, value_name = "N", default_value = "1")]
    pub cpus: Cpus,

    /// Assigns a PCI device that is bound to vfio-pci; may be given several times. The device is
    /// named as in 41:00.0, 0000:41:00.0 or by its path under /sys
    #[arg(help_heading = group::DEVICES,
        long,
        value_name = "BDF[,OPTION=VALUE]…",
        long_help = VFIO_HELP
    )]
    pub vfio: Vec<VfioOption>,

    /// The kernel's interface to the IOMMU; auto takes iommufd where the host offers it for all
    /// devices and it does all that type1 does
    #[arg(help_heading = group::DEVICES, long, value_name = "auto|type1|iommufd", default_value = "auto")]
    pub iommu: Iommu,

    /// When guest RAM is mapped for devices: deferred, while the guest runs already (the first
    /// device that masters the bus waits for it), or eager, before its first instruction
    #[arg(help_heading = group::MEMORY, long, value_name = "deferred|eager", default_value = "deferred")]
    pub dma_map: DmaMap,

    /// Allocates all guest RAM before the first instruction, also without devices
    #[arg(help_heading = group::MEMORY, long, value_name = "on|off", default_value = "off")]
    pub prefault: Switch,

    /// Keeps the gate before bus mastering closed for so many seconds after a device came to it:
    /// for tests of what the guest notices of a wait (docs/lab.md)
    #[arg(long, value_name = "SECONDS", hide = true, default_value = "0")]
    pub test_hold_dma_gate: u64,

    /// Guests end each interrupt with an exit: for hosts whose emulated CPU delivers an interrupt
    /// a second time otherwise (docs/lab.md)
    #[arg(long, hide = true)]
    pub test_no_pv_eoi: bool,

    /// Size of the 64-bit MMIO window instead of what the devices need
    #[arg(help_heading = group::DEVICES, long, value_name = "SIZE")]
    pub mmio64_size: Option<Size>,

    /// Prints where RAM and BARs would lie, and ends; exit status 3 and all that is in the way where
    /// the guest could not be started
    #[arg(help_heading = group::RUN, long)]
    pub dry_run: bool,

    /// Accepted for the habit: a guest's reset always ends mini-vmm, with status 32
    #[arg(help_heading = group::RUN, long)]
    pub no_reboot: bool,

    /// Reports where the time went, at the end or when the guest writes mark 0x41 or 0x42 to I/O
    /// port 0x80: a table or JSON on standard error, a trace (for Perfetto) or a page (for a
    /// browser) in a file; may be given several times
    #[arg(help_heading = group::RUN, long, value_name = "table|json|trace=FILE|html=FILE[,at=41|42|exit]")]
    pub boot_profile: Vec<BootProfile>,

    /// The least that is logged: error, warn, info (moments and decisions), debug (phases) or trace
    /// (system calls)
    #[arg(help_heading = group::RUN, long, value_name = "LEVEL", default_value = "warn")]
    pub log_level: LogLevel,

    /// Appends the log to a file, with times, instead of writing it to standard error; why mini-vmm
    /// ends is told in both
    #[arg(help_heading = group::RUN, long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// One line of text or one JSON object for each event
    #[arg(help_heading = group::RUN, long, value_name = "text|json", default_value = "text")]
    pub log_format: LogFormat,
}

/// `mini-vmm check`.
pub struct CheckCommand {
    /// What a boot would be given.
    pub config: Config,
    /// A kernel was named.
    pub has_kernel: bool,
    /// Print JSON.
    pub json: bool,
}

/// What the command line asks for.
pub enum Command {
    /// Run a guest.
    Run(Box<Config>),
    /// Say whether a guest could be run.
    Check(Box<CheckCommand>),
    /// List devices, as JSON or for people.
    Devices {
        /// As JSON.
        json: bool,
    },
    /// Print this (help or version) and exit with 0.
    Print(String),
}

/// Parses the arguments, the first of which is the program's name.
pub fn parse<I, T>(arguments: I) -> Result<Command, UsageError>
where
    I: IntoIterator<Item = T>,
    T: Into<std::ffi::OsString> + Clone,
{
    let arguments: Vec<std::ffi::OsString> = arguments.into_iter().map(Into::into).collect();
    let command = arguments.get(1).and_then(|word| word.to_str());
    let parsed = match command {
        Some("check") => commands::check(&arguments),
        Some("devices") => commands::devices(&arguments),
        _ => Config::try_parse_from(&arguments).map(|config| Command::Run(Box::new(config))),
    };
    match parsed {
        Ok(command) => Ok(command),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            Ok(Command::Print(error.to_string()))
        }
        Err(error) => Err(UsageError::Options(
            stray_word(command, &error).unwrap_or_else(|| one_line(&error)),
        )),
    }
}

/// A word that belongs to no option, where there is none but options: what it was meant to be.
fn stray_word(command: Option<&str>, error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_stray = error.kind() == ErrorKind::UnknownArgument && !word.starts_with('-');
    is_stray.then(|| match word.as_str() {
        _ if command == Some("devices") => match word.parse::<VfioOption>() {
            Ok(_) => format!("devices lists all of them; mini-vmm check {word} looks at one"),
            Err(_) => format!("\"{word}\" belongs to no option; devices takes --json alone"),
        },
        "check" | "devices" => format!("the command comes first, as in mini-vmm {word}"),
        _ if word.parse::<VfioOption>().is_ok() => {
            format!("devices are given with --vfio, as in --vfio {word}")
        }
        _ => format!(
            "\"{word}\" belongs to no option, and the commands are check and devices; \
             devices are given with --vfio, a value with spaces in quotes"
        ),
    })
}

/// clap's message without its prefix and usage, with the option that may have been meant.
fn one_line(error: &clap::Error) -> String {
    let message = error.to_string();
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    let lines: Vec<_> = message
        .lines()
        .take_while(|line| !line.trim().is_empty())
        .map(str::trim)
        .collect();
    let text = lines.join(" ");
    match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(meant)) => format!("{text} (did you mean {meant}?)"),
        _ => text,
    }
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
            _ => panic!("{arguments:?} is not a boot"),
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
        assert!(error(&["--kernel", "k", "check"]).contains("comes first"));
        let of_devices = |word| {
            parse(["mini-vmm", "devices", word])
                .err()
                .unwrap()
                .to_string()
        };
        assert!(of_devices("41:00.0").contains("mini-vmm check 41:00.0"));
        assert!(of_devices("check").contains("--json alone"));
        assert!(error(&["--kernel", "k", "--cpus", "256"]).contains("more than 255"));
    }

    #[test]
    fn a_slip_is_told_what_was_meant() {
        let device = error(&["--kernel", "k", "0000:00:03.0"]);
        assert!(device.contains("--vfio 0000:00:03.0"), "{device}");
        assert!(error(&["chekc", "41:00.0"]).contains("the commands are check and devices"));
        let option = error(&["--kernel", "k", "--memroy", "1G"]);
        assert!(
            option.contains("'--memroy' found (did you mean --memory?)"),
            "{option}"
        );
        assert!(error(&["check", "--memroy", "1G"]).contains("did you mean --memory?"));
    }

    #[test]
    fn only_options_are_referred_to_the_help() {
        let source = || io::Error::from_raw_os_error(2);
        let log = UsageError::output("open the log", Path::new("/nodir/l"))(source());
        assert!(
            log.to_string().ends_with("in a directory that is there)"),
            "{log}"
        );
        assert!(error(&["--foo"]).ends_with("mini-vmm --help lists the options"));
    }

    #[test]
    fn a_check_takes_devices_and_the_options_of_a_boot() {
        let check = |arguments: &[&str]| match parse([&["mini-vmm", "check"], arguments].concat())
            .unwrap()
        {
            Command::Check(command) => *command,
            _ => panic!("{arguments:?} is not a check"),
        };
        let devices = ["41:00.0,p2p=off", "42:00.0", "--memory", "8G", "--json"];
        let command = check(&devices);
        assert!(command.json && !command.has_kernel);
        assert_eq!(command.config.memory.size.0, 8 << 30);
        let bdfs = command
            .config
            .vfio
            .iter()
            .map(|option| option.bdf.to_string());
        assert_eq!(bdfs.collect::<Vec<_>>(), ["0000:41:00.0", "0000:42:00.0"]);
        assert_eq!(command.config.vfio[0].p2p, P2p::Off);
        // The line of a boot with the word before it.
        let command = check(&["--kernel", "k", "--vfio", "41:00.0"]);
        assert!(command.has_kernel);
        assert_eq!(command.config.vfio.len(), 1);
        assert!(error(&["check", "nonsense"]).contains("nonsense"));
        assert!(error(&["check", "--foo"]).contains("--foo"));
        assert!(error(&["devices", "41:00.0"]).contains("41:00.0"));
        let list = parse(["mini-vmm", "devices", "--json"]).unwrap();
        assert!(matches!(list, Command::Devices { json: true }));
    }

    #[test]
    fn help_shows_every_option_under_a_heading_and_examples() {
        let Ok(Command::Print(text)) = parse(["mini-vmm", "--help"]) else {
            panic!();
        };
        for heading in [
            group::GUEST,
            group::DEVICES,
            group::MEMORY,
            group::RUN,
            "Examples",
        ] {
            assert!(
                text.contains(&format!("\n{heading}:\n")),
                "{heading}: {text}"
            );
        }
        let command = <Config as clap::CommandFactory>::command();
        let alone = |arg: &&clap::Arg| !arg.is_hide_set() && arg.get_help_heading().is_none();
        assert_eq!(command.get_arguments().filter(alone).count(), 0);
        assert!(text.contains("mini-vmm check BDF"), "{text}");
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
