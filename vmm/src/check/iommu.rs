//! Facts about the IOMMU: which backend, whether its files may be used, which addresses it maps,
//! whether devices reach each other.

use devices::assign::PeerToPeer;
use devices::assign::ports::IommuBackend;
use devices::host::Sysfs;
use devices::iommu::choose::{DMABUF_SINCE, Decision, IommuError, decide, without_type1};
use devices::iommu::iommufd;
use devices::iommu::iommufd_error::IommufdError;
use devices::iommu::type1::{self, Type1, Type1Error};
use devices::pci::address::Bdf;
use devices::range::Range;
use devices::remedy::Remedy;

use super::device::Device;
use super::report::Report;
use crate::config::Config;
use crate::error::Error;
use crate::plan;

/// Who says which addresses the IOMMU maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// Nobody before the boot, but for reserved regions.
    #[default]
    Boot,
    /// The IOMMU's registers.
    Registers,
    /// The kernel.
    Kernel,
}

/// The IOMMU that the devices will have.
#[derive(Default)]
pub struct Iommu {
    /// `type1` or `iommufd`, and why.
    pub backend: Option<String>,
    /// The addresses that it maps, as far as is known; `None` where nothing is.
    pub usable: Option<Vec<Range>>,
    /// Who says so.
    pub source: Source,
}

/// Looks at everything; with `attach` groups are attached to a container for a moment, which opens
/// and resets no device.
pub fn all(
    report: &mut Report,
    sysfs: &Sysfs,
    config: &Config,
    devices: &[Device],
    attach: bool,
) -> Iommu {
    let mut iommu = Iommu::default();
    if devices.is_empty() {
        return iommu;
    }
    interrupts(report, sysfs);
    // The others have failed; what is said of these must not wait for that.
    let fit = devices
        .iter()
        .filter_map(|device| Some((device.bdf, device.group?)));
    let fit: Vec<(Bdf, u32)> = fit.collect();
    if fit.is_empty() {
        return iommu;
    }
    let attach = attach && fit.len() == config.vfio.len();
    let bdfs: Vec<Bdf> = fit.iter().map(|(bdf, _)| *bdf).collect();
    // On iommufd a boot lays RAM out by these.
    iommu.usable = Some(sysfs.usable_iova(&fit));
    if sysfs.iommu_reach(bdfs.iter().copied()).is_some() {
        iommu.source = Source::Registers;
    }
    for (bdf, group) in &fit {
        firmware_memory(report, sysfs, *bdf, *group);
    }
    match decide(plan::wanted(config), sysfs, &bdfs, plan::has_peers(config)) {
        Err(_) => {
            for problem in iommufd::problems(sysfs, &bdfs) {
                let device = problem.device();
                report.fail("access", device, &IommuError::from(problem).into());
            }
        }
        Ok(Decision::Iommufd { why, .. }) => {
            let backend = format!("iommufd, {why}");
            report.ok("backend", format!("{backend}: its files may be used"));
            iommu.backend = Some(backend);
        }
        Ok(Decision::Type1 { why, mut lack }) => {
            let backend = format!("type1, {why}");
            let problems = type1::problems(sysfs, &fit);
            if problems.is_empty() {
                let open = attach.then_some(|| Type1::new(&fit));
                if let Some(usable) = container(report, &backend, lack.take(), open) {
                    iommu.usable = Some(usable);
                    iommu.source = Source::Kernel;
                }
            }
            for problem in problems {
                let device = problem.device();
                let error = without_type1(lack.take(), problem);
                report.fail("access", device, &error.into());
            }
            iommu.backend = Some(backend);
        }
    }
    iommu
}

/// Without isolated interrupts a device could raise any interrupt of the host: the kernel refuses.
fn interrupts(report: &mut Report, sysfs: &Sysfs) {
    const TOPIC: &str = "iommu";
    if !sysfs.has_iommu() {
        // Each device says so.
        return;
    }
    if sysfs.remaps_interrupts() {
        report.ok(TOPIC, "the IOMMU is on, and remaps interrupts");
    } else if sysfs.allows_unsafe_interrupts() {
        let text = "the IOMMU is on and does not remap interrupts: a guest can raise any interrupt of the host (allow_unsafe_interrupts)";
        let remedy = "turn on interrupt remapping (VT-d or AMD-Vi, x2APIC) in the firmware";
        report.warn(TOPIC, text, Remedy::advice(remedy));
    } else {
        let text = "the IOMMU is on and does not seem to remap interrupts: the kernel may refuse to attach devices";
        let remedy = "turn on interrupt remapping (VT-d or AMD-Vi, x2APIC) in the firmware";
        report.warn(TOPIC, text, Remedy::advice(remedy));
    }
}

/// Memory that firmware shares with a device by itself (Intel's RMRR): kernels refuse to attach
/// such devices (drivers/iommu/iommu.c, `require_direct`).
fn firmware_memory(report: &mut Report, sysfs: &Sysfs, bdf: Bdf, group: u32) {
    let regions = sysfs.reserved_regions(group);
    if let Some(region) = regions.iter().find(|region| region.kind == "direct") {
        let text = format!(
            "the firmware shares memory with it at {} (RMRR): the kernel may refuse to attach it",
            region.range
        );
        let remedy = "turn off in the firmware what needs it (shared memory of the management processor, legacy USB), or move the card";
        report.device_warn("iommu", bdf, &text, Remedy::advice(remedy));
    }
}

/// Whether type1 takes the groups, whose files may be used, and what it then says of its addresses.
/// `lack`: what iommufd lacked; `open` attaches the groups, where that may be done.
fn container(
    report: &mut Report,
    backend: &str,
    lack: Option<IommufdError>,
    open: Option<impl FnOnce() -> Result<Type1, Type1Error>>,
) -> Option<Vec<Range>> {
    let Some(open) = open else {
        report.ok("backend", format!("{backend}: its files may be used"));
        return None;
    };
    let asked = open()
        .map_err(|error| Error::from(without_type1(lack, error)))
        .and_then(|attached| Ok(attached.iova_ranges()?));
    match asked {
        Ok(usable) => {
            report.ok("backend", format!("{backend}: all devices can be attached"));
            Some(usable)
        }
        Err(error) => {
            report.fail("backend", None, &error);
            None
        }
    }
}

/// Whether devices will reach each other's BARs by DMA, and on which way.
pub fn peers(
    report: &mut Report,
    sysfs: &Sysfs,
    config: &Config,
    devices: &[Device],
    iommu: &Iommu,
) {
    const TOPIC: &str = "p2p";
    if !plan::has_peers(config) || devices.len() < 2 {
        return;
    }
    let Some(backend) = &iommu.backend else {
        return;
    };
    let iommufd = backend.starts_with("iommufd");
    if iommufd && sysfs.is_older_than(DMABUF_SINCE) {
        let text = "iommufd maps no BARs before Linux 6.19: devices will not reach each other";
        report.warn(
            TOPIC,
            text,
            Remedy::advice("--iommu type1, or a newer kernel"),
        );
        return;
    }
    let how = match iommufd {
        true => "by dma-buf (whether each device exports one is known at boot)",
        false => "by type1",
    };
    let reachable = devices
        .iter()
        .filter(|device| device.options.peer_to_peer != PeerToPeer::Off);
    let reachable: Vec<Bdf> = reachable.map(|device| device.bdf).collect();
    report.ok(
        TOPIC,
        format!(
            "BARs of {} devices are mapped for the others {how}",
            reachable.len()
        ),
    );
    for (number, first) in reachable.iter().enumerate() {
        for second in reachable.iter().skip(number + 1) {
            path(report, sysfs, *first, *second);
        }
    }
}

/// The way between two devices below one switch: through it, or up to the root complex and back.
fn path(report: &mut Report, sysfs: &Sysfs, first: Bdf, second: Bdf) {
    let (above_first, above_second) = (sysfs.upstream(first), sysfs.upstream(second));
    let shared = above_first
        .iter()
        .find(|bridge| above_second.contains(bridge));
    let Some(shared) = shared else {
        return;
    };
    let below = above_first.iter().take_while(|bridge| *bridge != shared);
    let redirecting = below
        .copied()
        .find(|bridge| sysfs.redirects_peers(*bridge) == Some(true));
    if let Some(port) = redirecting {
        let text = format!(
            "it shares the switch below {shared} with {second}, and {port} sends what they say to each other up to the root complex (ACS): correct, and slower than through the switch"
        );
        report.device_ok("p2p", first, &text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_neither_backend_is_told_so_as_by_the_boot() {
        let bdf: Bdf = "41:00.0".parse().unwrap();
        for neither in [false, true] {
            let lack = || neither.then_some(IommufdError::NoCdev { bdf });
            let mut report = Report::default();
            let open = Some(|| Err(Type1Error::NoType1));
            assert!(container(&mut report, "type1", lack(), open).is_none());
            let text = &report.findings[0].text;
            assert_eq!(text.contains("nor can type1"), neither, "{text}");
            let mut boot = Report::default();
            let error = without_type1(lack(), Type1Error::NoType1);
            boot.fail("backend", None, &error.into());
            assert_eq!(report.findings, boot.findings);
        }
    }
}
