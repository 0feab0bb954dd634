//! Whether devices can be assigned at all, from sysfs alone: no PCI device is opened, so nothing is
//! reset (a disk that stays in the way is, to see whether something holds it). A boot stops at the
//! first obstacle, a preflight shows all of them; each comes with the command that mends it.

use std::fmt;

use crate::host::iommu::INTEL_OFF;
use crate::host::uses::{HostUses, Usage};
use crate::host::{HostDevice, Sysfs};
use crate::pci::address::Bdf;
use crate::remedy::Remedy;

/// The driver that keeps a device from all others.
const PCI_STUB: &str = "pci-stub";

/// Why a device cannot be assigned. Each message ends with its [`PreflightError::remedy`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreflightError {
    /// The host has no such function.
    #[error("{0}: no such PCI device on this host: {LIST}")]
    Absent(Bdf),
    /// Named twice.
    #[error("{0}: the device is named twice: {ONCE}")]
    Duplicate(Bdf),
    /// A bridge or other device that is no endpoint.
    #[error(
        "{bdf}: only endpoints can be assigned, this is a bridge (header type {header}): {BEHIND}"
    )]
    NotEndpoint {
        /// The device.
        bdf: Bdf,
        /// Its header layout.
        header: u8,
    },
    /// The firmware tells the kernel of no IOMMU.
    #[error("{0}: the host has no IOMMU enabled: {FIRMWARE}")]
    IommuOff(Bdf),
    /// The firmware offers an IOMMU, and the kernel does not use it.
    #[error(
        "{bdf}: the host's IOMMU is there and the kernel does not use it until it is booted with `{option}` (reboot the host when nothing runs on it): run `{}` as root",
        iommu_command(option)
    )]
    IommuUnused {
        /// The device.
        bdf: Bdf,
        /// The kernel parameter that turns it on.
        option: &'static str,
    },
    /// The kernel was told to do without its IOMMU.
    #[error(
        "{bdf}: the host's kernel was booted with `{parameter}`, which turns its IOMMU off: {}",
        take_out(parameter)
    )]
    IommuDisabled {
        /// The device.
        bdf: Bdf,
        /// What stands in the kernel's command line.
        parameter: &'static str,
    },
    /// The IOMMU is on and does not cover the device.
    #[error(
        "{0}: no IOMMU of the host covers this device, and without it cannot be assigned safely: {ANOTHER}"
    )]
    NoGroup(Bdf),
    /// Bound to a host driver.
    #[error(
        "{bdf}: it is bound to the host driver {driver}, not to vfio-pci{uses}: {}",
        take(*bdf, uses)
    )]
    HostDriver {
        /// The device.
        bdf: Bdf,
        /// Its driver.
        driver: String,
        /// What the host uses it for.
        uses: HostUses,
    },
    /// Bound to nothing.
    #[error("{bdf}: it is not bound to vfio-pci: run `{}` as root", bind_command(*bdf))]
    NoDriver {
        /// The device.
        bdf: Bdf,
    },
    /// Another member of its group is bound to a host driver.
    #[error(
        "{bdf}: IOMMU group {group} is not viable: its member {member} is bound to the host driver {driver}{uses}: {}",
        take(*member, uses)
    )]
    GroupMember {
        /// The device.
        bdf: Bdf,
        /// Its group.
        group: u32,
        /// The other member.
        member: Bdf,
        /// The other member's driver.
        driver: String,
        /// What the host uses it for.
        uses: HostUses,
    },
}

const LIST: &str = "list those there are with `mini-vmm devices`";
const ONCE: &str = "name it once";
const BEHIND: &str = "assign what is behind it";
const FIRMWARE: &str = "turn on VT-d or AMD-Vi in the firmware; on Intel boot the host with `intel_iommu=on`, on AMD without `amd_iommu=off`";
const ANOTHER: &str = "assign another one, or put it into another slot";

impl PreflightError {
    /// What mends it; the message ends with it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Absent(_) => Remedy::advice(LIST),
            Self::Duplicate(_) => Remedy::advice(ONCE),
            Self::NotEndpoint { .. } => Remedy::advice(BEHIND),
            Self::IommuOff(_) => Remedy::advice(FIRMWARE),
            Self::IommuUnused { option, .. } => Remedy::Run(iommu_command(option)),
            Self::IommuDisabled { parameter, .. } => Remedy::Do(take_out(parameter)),
            Self::NoGroup(_) => Remedy::advice(ANOTHER),
            Self::NoDriver { bdf } => Remedy::Run(bind_command(*bdf)),
            Self::HostDriver { bdf, uses, .. } => take(*bdf, uses),
            Self::GroupMember { member, uses, .. } => take(*member, uses),
        }
    }
}

/// How the parameter that turns the IOMMU off leaves the host kernel's command line.
fn take_out(parameter: &str) -> String {
    let instead = match parameter {
        INTEL_OFF => "; put `intel_iommu=on` in its place",
        _ => "",
    };
    format!(
        "take it out of the boot loader's settings (/etc/default/grub, then `update-grub`){instead}; then reboot the host"
    )
}

/// A shell command that has the host booted with `option` the next time, on distributions with GRUB's usual file.
fn iommu_command(option: &str) -> String {
    format!(
        r#"echo 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {option}"' >> /etc/default/grub && update-grub"#
    )
}

/// A member of an assigned device's group that is not assigned itself. The kernel allows it; who
/// assigns a GPU and forgets its audio function learns it here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The assigned device.
    pub bdf: Bdf,
    /// Their group.
    pub group: u32,
    /// The member.
    pub member: Bdf,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bdf, group, member } = self;
        write!(
            f,
            "{member} is not assigned though it shares IOMMU group {group} with {bdf}, so that nobody else can use it meanwhile"
        )
    }
}

impl LeftOut {
    /// What mends it.
    pub fn remedy(&self) -> Remedy {
        Remedy::advice(format!(
            "`--vfio {}` gives it to the guest as well",
            self.member
        ))
    }
}

/// Gives `bdf` to vfio-pci; what the host does with it is to be ended first, by a person who knows
/// what that costs.
fn take(bdf: Bdf, uses: &HostUses) -> Remedy {
    let command = bind_command(bdf);
    match uses.advice(&command) {
        Some(advice) => Remedy::Do(advice),
        None => Remedy::Run(command),
    }
}

/// A shell command that gives `bdf` to vfio-pci, whatever has it now.
fn bind_command(bdf: Bdf) -> String {
    let device = format!("/sys/bus/pci/devices/{bdf}");
    format!(
        "[ -e /sys/bus/pci/drivers/vfio-pci ] || modprobe vfio-pci; echo vfio-pci > {device}/driver_override; [ ! -e {device}/driver ] || echo {bdf} > {device}/driver/unbind; echo {bdf} > /sys/bus/pci/drivers_probe"
    )
}

/// The IOMMU group of each of `devices`, in order, once all are found fit.
pub fn check(sysfs: &Sysfs, devices: &[Bdf]) -> Result<Vec<(Bdf, u32)>, PreflightError> {
    let usage = Usage::new(sysfs);
    let mut checked = Vec::with_capacity(devices.len());
    for bdf in devices {
        if checked.iter().any(|(other, _)| other == bdf) {
            return Err(PreflightError::Duplicate(*bdf));
        }
        checked.push((*bdf, check_one(&usage, *bdf)?));
    }
    Ok(checked)
}

/// The endpoints that are left out of the groups of the `checked` devices, each once. One that was
/// given to pci-stub was left out on purpose.
pub fn left_out(sysfs: &Sysfs, checked: &[(Bdf, u32)]) -> Vec<LeftOut> {
    let mut found: Vec<LeftOut> = Vec::new();
    for &(bdf, group) in checked {
        if found.iter().any(|left_out| left_out.group == group) {
            continue;
        }
        for member in sysfs.group_members(group).unwrap_or_default() {
            let driver = sysfs.device(member).and_then(|device| device.driver);
            let assigned = checked.iter().any(|(other, _)| *other == member);
            let stub = driver.as_deref() == Some(PCI_STUB);
            if !assigned && !stub && !sysfs.is_bridge(member) {
                found.push(LeftOut { bdf, group, member });
            }
        }
    }
    found
}

fn check_one(usage: &Usage<'_>, bdf: Bdf) -> Result<u32, PreflightError> {
    match problems(usage, bdf) {
        (Some(group), problems) if problems.is_empty() => Ok(group),
        (_, problems) => Err(problems
            .into_iter()
            .next()
            .unwrap_or(PreflightError::NoGroup(bdf))),
    }
}

/// The device's IOMMU group, and all that is in the way of assigning it. Of a bridge nothing else
/// counts: no driver would make it fit, and the host needs the one that it has.
pub fn problems(usage: &Usage<'_>, bdf: Bdf) -> (Option<u32>, Vec<PreflightError>) {
    let sysfs = usage.sysfs();
    let Some(device) = sysfs.device(bdf) else {
        return (None, vec![PreflightError::Absent(bdf)]);
    };
    // VFIO takes no bridge (drivers/vfio/pci/vfio_pci_core.c), so that a boot has nothing to read.
    let header = || sysfs.header_layout(bdf).filter(|header| *header != 0);
    if let Some(header) = (!device.has_vfio()).then(header).flatten() {
        return (None, vec![PreflightError::NotEndpoint { bdf, header }]);
    }
    if !sysfs.has_iommu() {
        return (None, vec![iommu_off(sysfs, bdf)]);
    }
    let Some(group) = device.group else {
        return (None, vec![PreflightError::NoGroup(bdf)]);
    };
    let mut problems: Vec<PreflightError> = driver_problem(usage, &device).into_iter().collect();
    for member in sysfs.group_members(group).unwrap_or_default() {
        if member == bdf {
            continue;
        }
        let Some(other) = sysfs.device(member) else {
            continue;
        };
        let has_vfio = other.has_vfio();
        let Some(driver) = other.driver else { continue };
        let harmless = has_vfio || driver == PCI_STUB || sysfs.is_bridge(member);
        if !harmless {
            problems.push(PreflightError::GroupMember {
                bdf,
                group,
                member,
                driver,
                uses: usage.of(member),
            });
        }
    }
    (Some(group), problems)
}

/// Why the device's driver, or the lack of one, is in the way.
pub fn driver_problem(usage: &Usage<'_>, device: &HostDevice) -> Option<PreflightError> {
    let bdf = device.bdf;
    match &device.driver {
        None => Some(PreflightError::NoDriver { bdf }),
        Some(driver) if !device.has_vfio() => Some(PreflightError::HostDriver {
            bdf,
            driver: driver.clone(),
            uses: usage.of(bdf),
        }),
        Some(_) => None,
    }
}

/// What is in the way: a parameter of the kernel, the lack of one, or a setting of the firmware.
fn iommu_off(sysfs: &Sysfs, bdf: Bdf) -> PreflightError {
    if let Some(parameter) = sysfs.iommu_disabled_by() {
        return PreflightError::IommuDisabled { bdf, parameter };
    }
    // The ACPI table by which firmware describes Intel's IOMMUs. AMD's are on by default.
    match sysfs.path("sys/firmware/acpi/tables/DMAR").exists() {
        true => PreflightError::IommuUnused {
            bdf,
            option: "intel_iommu=on",
        },
        false => PreflightError::IommuOff(bdf),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    /// A sysfs tree: BDF, driver ("" for none), group, class.
    fn tree(root: &Path, devices: &[(&str, &str, Option<u32>, &str)]) -> Sysfs {
        fs::create_dir_all(root.join("sys/kernel/iommu_groups")).unwrap();
        for (bdf, driver, group, class) in devices {
            let dir = root.join("sys/bus/pci/devices").join(bdf);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("class"), class).unwrap();
            if !driver.is_empty() {
                symlink(format!("../../drivers/{driver}"), dir.join("driver")).unwrap();
            }
            if let Some(group) = group {
                let path = format!("sys/kernel/iommu_groups/{group}");
                fs::create_dir_all(root.join(&path).join("devices").join(bdf)).unwrap();
                symlink(format!("../../../{path}"), dir.join("iommu_group")).unwrap();
            }
        }
        Sysfs::below(root)
    }

    fn message(devices: &[(&str, &str, Option<u32>, &str)], wanted: &[&str]) -> String {
        let root = tempfile::tempdir().unwrap();
        let sysfs = tree(root.path(), devices);
        let wanted: Vec<Bdf> = wanted.iter().map(|bdf| bdf.parse().unwrap()).collect();
        match check(&sysfs, &wanted) {
            Ok(groups) => match left_out(&sysfs, &groups).as_slice() {
                [] => format!("{groups:?}"),
                left_out => left_out.iter().map(LeftOut::to_string).collect(),
            },
            Err(error) => error.to_string(),
        }
    }

    const GPU: &str = "0x030200";

    #[test]
    fn a_device_on_its_host_driver_is_named_with_driver_and_command() {
        let text = message(&[("0000:41:00.0", "nvidia", Some(3), GPU)], &["41:00.0"]);
        assert!(text.starts_with("0000:41:00.0:"), "{text}");
        assert!(text.contains("host driver nvidia"), "{text}");
        assert!(text.contains("driver_override"), "{text}");
    }

    #[test]
    fn a_bound_group_member_is_named_and_a_bridge_or_stub_is_not() {
        let mut devices = vec![
            ("0000:41:00.0", "vfio-pci", Some(3), GPU),
            ("0000:41:00.1", "snd_hda_intel", Some(3), "0x040300"),
            ("0000:40:00.0", "pcieport", Some(3), "0x060400"),
        ];
        let text = message(&devices, &["41:00.0"]);
        assert!(text.contains("group 3"), "{text}");
        assert!(text.contains("0000:41:00.1"), "{text}");
        assert!(text.contains("snd_hda_intel"), "{text}");
        devices[1].1 = "pci-stub";
        assert!(message(&devices, &["41:00.0"]).starts_with('['));
        for driver in ["", "vfio-pci"] {
            devices[1].1 = driver;
            let text = message(&devices, &["41:00.0"]);
            assert!(text.starts_with("0000:41:00.1 is not assigned"), "{text}");
            assert!(
                text.contains("group 3 with 0000:41:00.0") && !text.contains("40:00"),
                "{text}"
            );
        }
        devices[1].1 = "vfio-pci";
        for order in [["41:00.0", "41:00.1"], ["41:00.1", "41:00.0"]] {
            assert!(message(&devices, &order).starts_with('['));
        }
    }

    #[test]
    fn absent_unbound_repeated_and_untranslated_devices_each_have_their_message() {
        let gpu = [("0000:41:00.0", "vfio-pci", Some(3), GPU)];
        assert!(message(&gpu, &["42:00.0"]).contains("no such PCI device"));
        assert!(message(&gpu, &["41:00.0", "0000:41:00.0"]).contains("named twice"));
        let off = [("0000:41:00.0", "vfio-pci", None, GPU)];
        assert!(message(&off, &["41:00.0"]).contains("intel_iommu=on"));
        let root = tempfile::tempdir().unwrap();
        let sysfs = tree(root.path(), &off);
        fs::create_dir_all(root.path().join("sys/firmware/acpi/tables/DMAR")).unwrap();
        let error = check(&sysfs, &["41:00.0".parse().unwrap()]).unwrap_err();
        assert!(
            error.to_string().contains("kernel does not use it"),
            "{error}"
        );
        assert!(!error.to_string().contains("reboot`"), "{error}");
        for (cmdline, parameter) in [
            (
                "quiet intel_iommu=on,sm_on intel_iommu=off",
                Some("`intel_iommu=off`"),
            ),
            ("intel_iommu=off intel_iommu=on", None),
            ("iommu=pt,off intel_iommu=on", Some("`iommu=off`")),
            ("amd_iommu=off", Some("`amd_iommu=off`")),
            ("xintel_iommu=off iommu=pt", None),
        ] {
            fs::create_dir_all(root.path().join("proc")).unwrap();
            fs::write(root.path().join("proc/cmdline"), cmdline).unwrap();
            let error = check(&sysfs, &["41:00.0".parse().unwrap()]).unwrap_err();
            let text = error.to_string();
            match parameter {
                Some(parameter) => assert!(text.contains(parameter), "{text}"),
                None => assert!(text.contains("does not use it"), "{text}"),
            }
        }
        let two = [gpu[0], ("0000:42:00.0", "vfio-pci", None, GPU)];
        assert!(message(&two, &["42:00.0"]).contains("no IOMMU of the host covers"));
        let unbound = [("0000:41:00.0", "", Some(3), GPU)];
        assert!(message(&unbound, &["41:00.0"]).contains("not bound to vfio-pci"));
    }

    #[test]
    fn variant_drivers_count_as_vfio() {
        for driver in ["vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci"] {
            assert!(
                message(&[("0000:41:00.0", driver, Some(3), GPU)], &["41:00.0"]).starts_with('[')
            );
        }
    }
}
