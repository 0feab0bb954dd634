//! Facts about the host as a whole: kernel, KVM, kernel image, memory, limits.

use std::path::Path;

use devices::host::Sysfs;
use devices::iommu::FAST_BAR_MAPS;
use devices::pci::place_error::Bytes;
use devices::remedy::Remedy;

use super::process::Process;
use super::report::Report;
use crate::config::{Config, Iommu};
use crate::error::Error;
use crate::limits::FewFiles;
use crate::memory_check as memory;
use crate::options::Node;
use crate::plan;

/// The first kernel that was tried.
const TRIED: (u32, u32) = (6, 1);
/// From here on a BAR is mapped into processes with entries of 1 GiB (drivers/vfio/pci).
const HUGE_FAULTS: (u32, u32) = (6, 12);

/// The host kernel, and what its age costs.
pub fn kernel(report: &mut Report, sysfs: &Sysfs, config: &Config) {
    const TOPIC: &str = "kernel";
    let Some(version) = sysfs.kernel_version() else {
        return;
    };
    let (major, minor) = version;
    let name = format!("Linux {major}.{minor}");
    if version < TRIED {
        let text = format!("{name} is older than 6.1, the oldest kernel that was tried");
        report.warn(TOPIC, text, Remedy::advice("boot a newer kernel"));
    } else if version < HUGE_FAULTS {
        report.ok(
            TOPIC,
            format!(
                "{name}: the guest reaches BARs through pages of 4 KiB (1 GiB since Linux 6.12)"
            ),
        );
    } else {
        report.ok(
            TOPIC,
            format!("{name}: BARs are mapped with pages of up to 1 GiB"),
        );
    }
    if version < FAST_BAR_MAPS && plan::has_peers(config) && config.iommu != Iommu::Iommufd {
        let text = format!(
            "{name} maps each 4 KiB page of a BAR on its own for other devices to reach: seconds for each 16 GiB"
        );
        let remedy = "p2p=off on each --vfio does without; Linux 6.15 maps them in one go";
        report.warn(TOPIC, text, Remedy::advice(remedy));
    }
}

/// KVM.
pub fn kvm(report: &mut Report, process: &Process) {
    match &process.kvm {
        Ok(kvm) => {
            let (physical, guest) = (kvm.phys_bits, kvm.guest_phys_bits);
            let bits = match physical == guest {
                true => format!("{physical} physical address bits"),
                false => format!("{physical} physical address bits, {guest} for guests"),
            };
            report.ok("kvm", format!("/dev/kvm can be used: {bits}"));
        }
        Err(error) => report.fail("kvm", None, error),
    }
}

/// Guest RAM: huge pages, memory that is free, memory that may be locked.
pub fn memory(report: &mut Report, sysfs: &Sysfs, config: &Config, process: &Process) {
    let root = sysfs.path("");
    let size = config.memory.size.0;
    let node = match memory::node_policy(config, &root) {
        Ok((policy, note)) => {
            note.into_iter().for_each(|note| report.ok("numa", note));
            policy
        }
        Err(error) => {
            report.fail("numa", None, &error.into());
            None
        }
    };
    if let Some(pages) = config.memory.huge_pages {
        let strict = node
            .filter(|policy| policy.strict)
            .map(|policy| policy.node);
        match memory::check_huge_pages(&root, size, pages, strict) {
            Ok(()) => {
                let count = size.div_ceil(pages.bytes());
                let text = format!("{count} huge pages of {} are free", Bytes(pages.bytes()));
                report.ok("hugepages", text);
                near_pages(report, sysfs, config, &root);
            }
            Err(error) => report.fail("hugepages", None, &error.into()),
        }
    }
    if config.vfio.is_empty() {
        return;
    }
    if config.memory.huge_pages.is_none() {
        match memory::check_host_memory(&root, size) {
            Ok(None) => report.ok(
                "memory",
                format!("the host has {} for the guest", Bytes(size)),
            ),
            Ok(Some(available)) => report.warn(
                "memory",
                memory::little_memory(size, available),
                Remedy::advice("ask for less with --memory"),
            ),
            Err(error) => report.fail("memory", None, &error.into()),
        }
    }
    match (memory::check_locked(size, process.locked), process.locked) {
        (Ok(()), None) => report.ok("memlock", "this process may lock any amount of memory"),
        (Ok(()), Some(limit)) => {
            report.ok("memlock", format!("this process may lock {}", Bytes(limit)));
        }
        (Err(error), _) => report.fail("memlock", None, &error.into()),
    }
}

/// Huge pages that lie on another node than the first device.
fn near_pages(report: &mut Report, sysfs: &Sysfs, config: &Config, root: &Path) {
    let first = config.vfio.first().map(|option| option.bdf);
    let node = first.and_then(|bdf| sysfs.numa_node(bdf));
    let (Some(node), None | Some(Node::Auto), Some(pages)) =
        (node, config.memory.node, config.memory.huge_pages)
    else {
        return;
    };
    let size = config.memory.size.0;
    if let Err(error) = memory::check_huge_pages(root, size, pages, Some(node)) {
        let error = Error::from(error);
        let (message, remedy) = (error.to_string(), error.remedy());
        let text = format!(
            "{}: some will come from another node than the first device's",
            remedy.cut_from(&message)
        );
        report.warn("hugepages", text, remedy);
    }
}

/// Where guest RAM comes from and where the devices are.
pub fn numa(report: &mut Report, sysfs: &Sysfs, config: &Config) {
    let mut far = Vec::new();
    for option in &config.vfio {
        let Some(node) = sysfs.numa_node(option.bdf) else {
            continue;
        };
        let near = match config.memory.node {
            Some(Node::Number(chosen)) => chosen == node,
            Some(Node::Auto) => {
                let first = config.vfio.first().map(|option| option.bdf);
                first.and_then(|bdf| sysfs.numa_node(bdf)) == Some(node)
            }
            None => sysfs.nodes().len() < 2,
        };
        if !near {
            far.push((option.bdf, node));
        }
    }
    for (bdf, node) in far {
        let text = match config.memory.node {
            None => format!("it is at NUMA node {node}, and guest RAM comes from any node"),
            Some(_) => format!("it is at NUMA node {node}, and guest RAM comes from another one"),
        };
        let advice = match config.memory.node {
            None => "add node=auto to --memory, as in --memory 64G,node=auto",
            Some(_) => "choose devices and guest RAM of one node, where speed matters",
        };
        report.device_warn("numa", bdf, &text, Remedy::advice(advice));
    }
}

/// Open files against the interrupt vectors of all devices, each of which takes an eventfd.
pub fn files(report: &mut Report, process: &Process, vectors: Option<u64>) {
    const TOPIC: &str = "files";
    let Some(limit) = process.files else {
        return;
    };
    let Some(vectors) = vectors else {
        let text = format!(
            "this process may open {limit} files; how many interrupt vectors the devices have is known at boot"
        );
        report.ok(TOPIC, text);
        return;
    };
    match FewFiles::check(vectors, limit) {
        Err(few) => report.warn(TOPIC, few.to_string(), few.remedy()),
        Ok(()) => report.ok(
            TOPIC,
            format!(
                "this process may open {limit} files, the devices have {vectors} interrupt vectors"
            ),
        ),
    }
}
