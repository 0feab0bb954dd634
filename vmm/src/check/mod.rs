//! `mini-vmm check` and `--dry-run`: what a boot would do, and what would stop it, without booting.
//!
//! Every verdict is the boot's own: the same functions decide, and a failure has the boot's text.
//! Facts come from sysfs, procfs and the files that a boot opens first, and nothing is created;
//! groups are attached to a container for a moment, to learn the addresses that the IOMMU maps. No
//! device is opened: that would reset it. What only an opened device tells (which parts of a BAR can
//! be mapped, whether it exports dma-bufs) is known at boot.

mod device;
mod host;
mod iommu;
mod layout;
mod named_files;
mod process;
mod report;

use std::fmt::Write as _;

use devices::host::Sysfs;
use devices::remedy::Remedy;
use serde::Serialize;

use crate::config::{CheckCommand, Config};
use crate::error::Class;
use layout::Plan;
pub use layout::kind_name;
use process::Process;
use report::{Finding, Report};

/// Where the facts come from.
struct Host {
    sysfs: Sysfs,
    process: Process,
    /// Groups may be attached to a container.
    attach: bool,
}

impl Host {
    fn this(config: &Config) -> Self {
        Self {
            sysfs: Sysfs::default(),
            process: Process::ask(config),
            attach: true,
        }
    }
}

/// All that was found, and the plan if there is one.
struct Examination {
    report: Report,
    plan: Option<Plan>,
}

impl Examination {
    /// The exit code: of a boot that stops at something else than the host, an unusable file for
    /// example, it would be another.
    fn code(&self) -> u8 {
        match self.report.fails() {
            true => Class::Preflight.code(),
            false => 0,
        }
    }

    /// What a dry run prints.
    fn dry_run(&self, config: &Config) -> String {
        match &self.plan {
            Some(plan) if !self.report.fails() => {
                format!("{}{}", show(plan, config), self.report.warnings())
            }
            _ => self.report.text(),
        }
    }

    /// One JSON object.
    fn json(&self) -> String {
        #[derive(Serialize)]
        struct Json<'a> {
            ready: bool,
            findings: &'a [Finding],
            #[serde(skip_serializing_if = "Option::is_none")]
            plan: Option<&'a Plan>,
        }
        let json = Json {
            ready: !self.report.fails(),
            findings: &self.report.findings,
            plan: self.plan.as_ref(),
        };
        json_line(&json)
    }
}

/// `value` on a line of its own.
pub fn json_line<T: Serialize>(value: &T) -> String {
    // Strings, numbers and lists of them: it does not fail.
    let text = serde_json::to_string(value).unwrap_or_default();
    format!("{text}\n")
}

/// What `check` prints, and its exit code.
pub fn run(command: &CheckCommand) -> (String, u8) {
    let examined = check_on(command, &Host::this(&command.config));
    let text = match command.json {
        true => examined.json(),
        false => examined.report.text(),
    };
    (text, examined.code())
}

fn check_on(command: &CheckCommand, host: &Host) -> Examination {
    let config = &command.config;
    let mut examined = examine(config, command.has_kernel, host);
    if config.vfio.is_empty() {
        let text = "no device is named, so that none was looked at";
        let remedy = "name devices as `mini-vmm devices` lists them, as in mini-vmm check 41:00.0";
        examined
            .report
            .warn("devices", text, Remedy::advice(remedy));
    }
    examined
}

/// What `--dry-run` prints, and its exit code: the plan and the warnings. Where a boot would stop, all that it would stop at
/// instead of a plan.
pub fn dry_run(config: &Config) -> (String, u8) {
    dry_run_on(config, &Host::this(config))
}

fn dry_run_on(config: &Config, host: &Host) -> (String, u8) {
    let examined = examine(config, true, host);
    (examined.dry_run(config), examined.code())
}

/// The plan for people.
fn show(plan: &Plan, config: &Config) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name:<10} {value}");
    };
    line("kernel", &config.kernel.display().to_string());
    if let Some(initrd) = &config.initrd {
        line("initrd", &initrd.display().to_string());
    }
    line("cmdline", &config.cmdline);
    line("vCPUs", &config.cpus.0.to_string());
    for range in &plan.ram {
        line("RAM", range);
    }
    line("", &plan.backing);
    line("32-bit", &format!("{} for BARs", plan.mmio32));
    if let Some(window) = &plan.mmio64 {
        line("64-bit", &format!("{window} for BARs"));
    }
    if let Some(iommu) = &plan.iommu {
        line("IOMMU", iommu);
    }
    for bar in &plan.bars {
        line(&bar.device, &bar.text());
    }
    text
}

fn examine(config: &Config, has_kernel: bool, host: &Host) -> Examination {
    let Host {
        sysfs,
        process,
        attach,
    } = host;
    let mut report = Report::default();
    host::kernel(&mut report, sysfs, config);
    named_files::all(&mut report, config, has_kernel);
    host::kvm(&mut report, process);
    host::memory(&mut report, sysfs, config, process);
    let devices = device::all(&mut report, sysfs, config);
    let complete = devices.len() == config.vfio.len();
    let iommu = iommu::all(&mut report, sysfs, config, &devices, *attach);
    if !devices.is_empty() {
        let vectors: Option<u64> = devices.iter().map(|device| device.vectors).sum();
        host::files(&mut report, process, vectors);
        host::numa(&mut report, sysfs, config);
        iommu::peers(&mut report, sysfs, config, &devices, &iommu);
    }
    // A plan without a device that is asked for would be another one.
    let plan = complete
        .then(|| layout::all(&mut report, sysfs, config, process, &devices, &iommu))
        .flatten();
    Examination { report, plan }
}

#[cfg(test)]
mod command_tests;
#[cfg(test)]
mod damage_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod uses_tests;
