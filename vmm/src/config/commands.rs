//! The commands beside the main job. Their names are looked for before the options are parsed, so
//! that a boot pays nothing for them.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Command as Clap, CommandFactory, Error, FromArgMatches};

use super::{CheckCommand, Command, Config};
use crate::options::VfioOption;

const JSON: &str = "json";
const DEVICES: &str = "devices";

/// What `mini-vmm check --help` ends with.
const CHECK_END: &str = "\
Each line is a fact: OK, WARN (the guest starts all the same) or FAIL. Below the last two stands what
mends them: \"fix:\" is a command for a shell of root, \"do:\" is for you. No device is opened.

Exit status: 0 a guest can be started, 2 wrong usage, 3 something is in the way.";

/// What `mini-vmm devices --help` ends with.
const DEVICES_END: &str = "\
The word behind the address:
  ready      it can be assigned now
  in-use     a driver of the host has it
  unbound    no driver has it: it must be given to vfio-pci
  group      another device of its IOMMU group is not given to vfio-pci
  no-iommu   the IOMMU is off, or does not reach it
  bridge     it stays with the host: what is behind it can be assigned
mini-vmm check BDF prints the commands that make it ready.";

fn json() -> Arg {
    let help = "Prints one JSON object instead of lines";
    Arg::new(JSON)
        .long(JSON)
        .action(ArgAction::SetTrue)
        .help(help)
}

/// `mini-vmm check BDF… [options of a boot] [--json]`. `arguments` begin with the program's name
/// and the command's.
pub fn check(arguments: &[OsString]) -> Result<Command, Error> {
    let devices = Arg::new(DEVICES)
        .value_name("BDF[,OPTION=VALUE]…")
        .action(ArgAction::Append)
        .num_args(0..)
        .value_parser(clap::value_parser!(VfioOption))
        .help("Devices, as --vfio takes them");
    let kernel = |arg: Arg| {
        arg.required(false)
            .default_value("(none)")
            .hide_default_value(true)
    };
    let command = Config::command()
        .name("mini-vmm check")
        .bin_name("mini-vmm check")
        .about("Says whether a guest can be started with these devices and options, and what mends what is in the way")
        .override_usage("mini-vmm check BDF… [OPTIONS] [--json]")
        .after_help(CHECK_END)
        .mut_arg("kernel", kernel)
        .mut_arg("dry_run", |arg| arg.hide(true))
        .arg(devices)
        .arg(json());
    let matches = command.try_get_matches_from(arguments.iter().skip(1))?;
    let mut config = Config::from_arg_matches(&matches)?;
    let named = matches.get_many::<VfioOption>(DEVICES);
    let mut vfio: Vec<VfioOption> = named.into_iter().flatten().cloned().collect();
    vfio.append(&mut config.vfio);
    config.vfio = vfio;
    Ok(Command::Check(Box::new(CheckCommand {
        has_kernel: matches.value_source("kernel") == Some(ValueSource::CommandLine),
        json: matches.get_flag(JSON),
        config,
    })))
}

/// `mini-vmm devices [--json]`.
pub fn devices(arguments: &[OsString]) -> Result<Command, Error> {
    let command = Clap::new("mini-vmm devices")
        .bin_name("mini-vmm devices")
        .about("Lists the PCI devices of this host and whether each can be assigned now")
        .after_help(DEVICES_END)
        .arg(json());
    let matches = command.try_get_matches_from(arguments.iter().skip(1))?;
    Ok(Command::Devices {
        json: matches.get_flag(JSON),
    })
}
