//! Facts about each device: bound, group, header, interrupts, reset.

use devices::assign::preflight::{self, PreflightError};
use devices::assign::rom::{check_clique, rom_bar};
use devices::assign::{AssignError, DeviceOptions};
use devices::host::function::HostInterrupts;
use devices::host::uses::Usage;
use devices::host::{HostDevice, Sysfs};
use devices::pci::address::Bdf;
use devices::pci::bar::BarInfo;
use devices::remedy::Remedy;

use super::report::Report;
use crate::config::Config;
use crate::error::{Error, HostError};
use crate::machine::slots::guest_addresses;
use crate::options::RomOption;
use crate::plan;

/// A device that the host has.
pub struct Device {
    /// Its address.
    pub bdf: Bdf,
    /// Its IOMMU group, where nothing is in the way of assigning it.
    pub group: Option<u32>,
    /// What the options say of it.
    pub options: DeviceOptions,
    /// Its BARs, with the expansion ROM where one is shown.
    pub bars: Vec<BarInfo>,
    /// Interrupt vectors; `None` where only root may know.
    pub vectors: Option<u64>,
}

/// Looks at all devices; returns those that the host has.
pub fn all(report: &mut Report, sysfs: &Sysfs, config: &Config) -> Vec<Device> {
    let bdfs: Vec<Bdf> = config.vfio.iter().map(|option| option.bdf).collect();
    if guest_addresses(&bdfs).is_none() {
        let count = bdfs.len();
        report.fail("devices", None, &HostError::Slots { count }.into());
    }
    let usage = Usage::new(sysfs);
    let mut devices: Vec<Device> = Vec::new();
    for (number, bdf) in bdfs.iter().enumerate() {
        if bdfs.iter().take(number).any(|other| other == bdf) {
            report.fail(
                "devices",
                Some(*bdf),
                &PreflightError::Duplicate(*bdf).into(),
            );
        } else {
            devices.extend(one(report, &usage, config, number, *bdf));
        }
    }
    let fit = devices.iter().filter_map(|d| Some((d.bdf, d.group?)));
    for left_out in preflight::left_out(sysfs, &fit.collect::<Vec<_>>()) {
        report.warn("group", left_out.to_string(), left_out.remedy());
    }
    devices
}

fn one(
    report: &mut Report,
    usage: &Usage<'_>,
    config: &Config,
    number: usize,
    bdf: Bdf,
) -> Option<Device> {
    let sysfs = usage.sysfs();
    let (group, problems) = preflight::problems(usage, bdf);
    for problem in &problems {
        let topic = match problem {
            PreflightError::GroupMember { .. } => "group",
            PreflightError::HostDriver { .. } | PreflightError::NoDriver { .. } => "driver",
            PreflightError::Absent(_)
            | PreflightError::Duplicate(_)
            | PreflightError::NotEndpoint { .. } => "devices",
            _ => "iommu",
        };
        report.fail(topic, Some(bdf), &problem.clone().into());
    }
    if let [PreflightError::NotEndpoint { .. }] = problems.as_slice() {
        return None;
    }
    let host = sysfs.device(bdf)?;
    if !sysfs.has_iommu() {
        driver_to_come(report, usage, &host);
    }
    if problems.is_empty() {
        let driver = host.driver.unwrap_or_default();
        report.device_ok("driver", bdf, &format!("bound to {driver}"));
        group_members(report, sysfs, bdf, group?);
    }
    let group = group.filter(|_| problems.is_empty());
    answers(report, sysfs, bdf)?;
    reset(report, sysfs, bdf);
    let vectors = interrupts(report, sysfs.interrupts(bdf), bdf);
    let (options, bars) = bars(report, sysfs, config, number, bdf)?;
    Some(Device {
        bdf,
        group,
        options,
        bars,
        vectors,
    })
}

/// Without an IOMMU vfio-pci takes no device: the command that binds it would leave it without any
/// driver now.
fn driver_to_come(report: &mut Report, usage: &Usage<'_>, host: &HostDevice) {
    if let Some(problem) = preflight::driver_problem(usage, host) {
        let text = match problem {
            PreflightError::HostDriver { driver, uses, .. } => {
                format!("it is bound to the host driver {driver}, not to vfio-pci{uses}")
            }
            _ => "it is not bound to vfio-pci".to_owned(),
        };
        let remedy = "that comes after the IOMMU: ask `mini-vmm check` again then";
        report.device_warn("driver", host.bdf, &text, Remedy::advice(remedy));
    }
}

fn group_members(report: &mut Report, sysfs: &Sysfs, bdf: Bdf, group: u32) {
    let members = sysfs.group_members(group).unwrap_or_default();
    let others = members.into_iter().filter(|member| *member != bdf);
    let others: Vec<String> = others
        .map(|member| {
            let driver = sysfs.device(member).and_then(|device| device.driver);
            format!("{member} ({})", driver.as_deref().unwrap_or("no driver"))
        })
        .collect();
    let text = match others.as_slice() {
        [] => format!("alone in IOMMU group {group}"),
        others => format!("in IOMMU group {group} with {}", others.join(", ")),
    };
    report.device_ok("group", bdf, &text);
}

/// Only devices that answer can be assigned.
fn answers(report: &mut Report, sysfs: &Sysfs, bdf: Bdf) -> Option<()> {
    if sysfs.header_layout(bdf).is_none() {
        report.fail("devices", Some(bdf), &AssignError::Gone { bdf }.into());
        return None;
    }
    Some(())
}

fn reset(report: &mut Report, sysfs: &Sysfs, bdf: Bdf) {
    let methods = sysfs.reset_methods(bdf);
    if methods.is_empty() {
        let text = "the host cannot reset this function alone: what one guest leaves in it the next one finds";
        let remedy = "end guests by shutting them down; a power cycle of the host resets it";
        report.device_warn("reset", bdf, text, Remedy::advice(remedy));
    } else {
        report.device_ok(
            "reset",
            bdf,
            &format!("the host can reset it: {}", methods.join(", ")),
        );
    }
}

/// Returns the number of vectors that the device can ask for.
fn interrupts(report: &mut Report, interrupts: Option<HostInterrupts>, bdf: Bdf) -> Option<u64> {
    let Some(interrupts) = interrupts else {
        report.device_ok(
            "vectors",
            bdf,
            "its interrupts are known at boot (only root may read its capabilities)",
        );
        return None;
    };
    let (msix, msi) = (interrupts.msix, interrupts.msi);
    let (text, count) = match (msix, msi, interrupts.intx) {
        (Some(msix), _, _) => (format!("MSI-X, vectors: {}", msix.vectors), msix.vectors),
        (None, Some(msi), _) => (
            format!("MSI, vectors: {}", msi.max_vectors),
            msi.max_vectors,
        ),
        (None, None, true) => ("INTx".to_owned(), 1),
        (None, None, false) => ("it has no interrupts".to_owned(), 0),
    };
    report.device_ok("vectors", bdf, &text);
    Some(count.into())
}

/// What the options say of the BARs, and those that there are.
fn bars(
    report: &mut Report,
    sysfs: &Sysfs,
    config: &Config,
    number: usize,
    bdf: Bdf,
) -> Option<(DeviceOptions, Vec<BarInfo>)> {
    let option = config.vfio.get(number)?;
    let unassigned = sysfs.unassigned_bars(bdf);
    if !unassigned.is_empty() {
        let names: Vec<String> = unassigned.iter().map(u8::to_string).collect();
        let text = format!(
            "the host gave BAR {} no address, and does not enable the device then",
            names.join(", ")
        );
        let remedy =
            "turn on \"Above 4G Decoding\" in the firmware, or boot the host with `pci=realloc`";
        report.device_warn("bar", bdf, &text, Remedy::advice(remedy));
    }
    if option.clique.is_some()
        && let Some(ids) = sysfs.ids(bdf)
        && let Err(error) = check_clique(bdf, ids.vendor)
    {
        report.fail("p2p", Some(bdf), &error.into());
    }
    if let Err(error) = plan::rom_source(&option.rom) {
        report.fail("rom", Some(bdf), &error.into());
    }
    let found = sysfs
        .bars(bdf)
        .map_err(|source| Error::from(AssignError::Bars { bdf, source }))
        .and_then(|bars| {
            let options = plan::device_options(sysfs, option)?;
            options.check_bars(bdf, bars.iter().map(|bar| bar.index).collect())?;
            Ok((options, bars))
        });
    match found {
        Ok((options, mut bars)) => {
            bars.extend(rom(sysfs, bdf, &option.rom));
            Some((options, bars))
        }
        Err(error) => {
            report.fail("bar", Some(bdf), &error);
            None
        }
    }
}

/// The expansion ROM as a BAR. Its size is the host's; that of what is read from it is known at
/// boot, and not bigger.
fn rom(sysfs: &Sysfs, bdf: Bdf, option: &RomOption) -> Option<BarInfo> {
    use devices::host::function::HostResource;
    let len = match option {
        RomOption::Off => return None,
        RomOption::On => sysfs.resources(bdf).get(HostResource::ROM)?.size,
        RomOption::File(path) => std::fs::metadata(path).ok()?.len(),
    };
    (len != 0).then(|| rom_bar(len))
}
