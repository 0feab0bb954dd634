//! `mini-vmm devices`: the host's PCI devices, and whether each can be assigned now.

use std::fmt::Write as _;

use devices::assign::preflight::{self, PreflightError};
use devices::host::Sysfs;
use devices::host::names::PciNames;
use devices::host::uses::{HostUse, Usage};
use devices::pci::address::Bdf;
use devices::pci::place_error::Bytes;
use serde::Serialize;

use crate::check::{json_line, kind_name};

/// Base class of bridges: they stay with the host.
const BRIDGE: u32 = 0x06;

/// One device.
#[derive(Clone, Debug, Serialize)]
struct Listed {
    bdf: String,
    /// `ready`, or what is in the way: see [`state`].
    state: &'static str,
    vendor: String,
    device: String,
    name: String,
    class: String,
    driver: Option<String>,
    group: Option<u32>,
    /// What the host uses it for.
    host_uses: Vec<String>,
    /// The others in its group, each with its driver.
    group_members: Vec<String>,
    numa_node: Option<u32>,
    bars: Vec<Bar>,
    reset_methods: Vec<String>,
    link: Option<String>,
    msix_vectors: Option<u16>,
    msi_vectors: Option<u16>,
    virtual_functions: Option<String>,
    physical_function: Option<String>,
    /// The name of its file below /dev/vfio/devices, where there is one.
    cdev: Option<String>,
    /// Those of the files that a user needs for it which are there: its group's (type1), its own
    /// (iommufd).
    files: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct Bar {
    index: u8,
    size: u64,
    kind: &'static str,
}

/// The text to print.
pub fn run(json: bool) -> String {
    list(&Sysfs::default(), json)
}

/// The same of any host.
pub fn list(sysfs: &Sysfs, json: bool) -> String {
    let names = PciNames::load(sysfs);
    let usage = Usage::new(sysfs);
    let functions = sysfs.functions().into_iter();
    let listed: Vec<Listed> = functions
        .filter_map(|bdf| one(&usage, &names, bdf))
        .collect();
    match json {
        true => json_line(&listed),
        false if listed.is_empty() => {
            "This host has no PCI device that could be assigned.\n".to_owned()
        }
        false => listed.iter().map(Listed::text).collect(),
    }
}

/// `None` for bridges.
fn one(usage: &Usage<'_>, names: &PciNames, bdf: Bdf) -> Option<Listed> {
    let sysfs = usage.sysfs();
    let ids = sysfs.ids(bdf)?;
    if ids.class >> 16 == BRIDGE {
        return None;
    }
    let host = sysfs.device(bdf)?;
    let interrupts = sysfs.interrupts(bdf).unwrap_or_default();
    let bars = sysfs.bars(bdf).unwrap_or_default();
    Some(Listed {
        bdf: bdf.to_string(),
        state: state(usage, bdf),
        vendor: format!("{:04x}", ids.vendor),
        device: format!("{:04x}", ids.device),
        name: names.device(&ids),
        class: names.class(&ids),
        driver: host.driver,
        group: host.group,
        host_uses: usage.of(bdf).0.iter().map(HostUse::to_string).collect(),
        group_members: host
            .group
            .map_or_else(Vec::new, |group| members(sysfs, bdf, group)),
        numa_node: sysfs.numa_node(bdf),
        bars: bars
            .iter()
            .map(|bar| Bar {
                index: bar.index,
                size: bar.size,
                kind: kind_name(bar.kind),
            })
            .collect(),
        reset_methods: sysfs.reset_methods(bdf),
        link: sysfs
            .link(bdf)
            .map(|link| match link.width == link.max_width {
                true => format!("{} x{}", link.max_speed, link.width),
                false => format!("{} x{} of x{}", link.max_speed, link.width, link.max_width),
            }),
        msix_vectors: interrupts.msix.map(|cap| cap.vectors),
        msi_vectors: interrupts.msi.map(|cap| cap.max_vectors),
        virtual_functions: sysfs
            .virtual_functions(bdf)
            .map(|vfs| format!("{} of {}", vfs.enabled, vfs.total)),
        physical_function: sysfs.physical_function(bdf).map(|bdf| bdf.to_string()),
        cdev: sysfs
            .vfio_name(bdf)
            .filter(|name| sysfs.path("dev/vfio/devices").join(name).exists()),
        files: files(sysfs, bdf, host.group),
    })
}

/// sysfs has a name of a device's file on kernels that do not make the file.
fn files(sysfs: &Sysfs, bdf: Bdf, group: Option<u32>) -> Vec<String> {
    let of_group = group.map(|group| format!("dev/vfio/{group}"));
    let own = sysfs.vfio_name(bdf);
    let own = own.map(|name| format!("dev/vfio/devices/{name}"));
    let files = of_group.into_iter().chain(own);
    let present = files.filter(|file| sysfs.path(file).exists());
    present.map(|file| format!("/{file}")).collect()
}

/// In one word, whether it can be assigned now.
fn state(usage: &Usage<'_>, bdf: Bdf) -> &'static str {
    match preflight::problems(usage, bdf).1.first() {
        None => "ready",
        Some(PreflightError::NotEndpoint { .. }) => "bridge",
        Some(PreflightError::HostDriver { .. }) => "in-use",
        Some(PreflightError::NoDriver { .. }) => "unbound",
        Some(PreflightError::GroupMember { .. }) => "group",
        Some(
            PreflightError::IommuOff(_)
            | PreflightError::IommuUnused { .. }
            | PreflightError::IommuDisabled { .. }
            | PreflightError::NoGroup(_),
        ) => "no-iommu",
        Some(PreflightError::Absent(_) | PreflightError::Duplicate(_)) => "absent",
    }
}

fn members(sysfs: &Sysfs, bdf: Bdf, group: u32) -> Vec<String> {
    let members = sysfs.group_members(group).unwrap_or_default().into_iter();
    let others = members.filter(|member| *member != bdf);
    let named = others.map(|member| {
        let driver = sysfs.device(member).and_then(|device| device.driver);
        format!("{member} ({})", driver.as_deref().unwrap_or("no driver"))
    });
    named.collect()
}

impl Listed {
    /// For people: the device in a line, details below.
    fn text(&self) -> String {
        let mut text = format!(
            "{} {:<8} {}: {}\n",
            self.bdf, self.state, self.class, self.name
        );
        for details in [self.place(), self.bars(), self.features()] {
            if !details.is_empty() {
                // Writing to a String does not fail.
                let _ = writeln!(text, "    {}", details.join(", "));
            }
        }
        text
    }

    fn place(&self) -> Vec<String> {
        let mut parts = vec![match &self.driver {
            Some(driver) => format!("driver {driver}"),
            None => "no driver".to_owned(),
        }];
        parts.extend(self.host_uses.iter().cloned());
        parts.extend(self.group.map(|group| match self.group_members.as_slice() {
            [] => format!("IOMMU group {group}"),
            others => format!("IOMMU group {group} with {}", others.join(" and ")),
        }));
        parts.extend(self.numa_node.map(|node| format!("NUMA node {node}")));
        parts.extend(
            self.physical_function
                .as_ref()
                .map(|pf| format!("virtual function of {pf}")),
        );
        parts.extend(self.files.iter().cloned());
        parts
    }

    fn bars(&self) -> Vec<String> {
        let bars = self.bars.iter();
        bars.map(|bar| format!("BAR {} {} {}", bar.index, Bytes(bar.size), bar.kind))
            .collect()
    }

    fn features(&self) -> Vec<String> {
        let mut parts = vec![match self.reset_methods.as_slice() {
            [] => "no reset".to_owned(),
            methods => format!("reset {}", methods.join("+")),
        }];
        parts.extend(self.link.as_ref().map(|link| format!("link {link}")));
        match (self.msix_vectors, self.msi_vectors) {
            (Some(vectors), _) => parts.push(format!("MSI-X {vectors}")),
            (None, Some(vectors)) => parts.push(format!("MSI {vectors}")),
            (None, None) => {}
        }
        let vfs = self.virtual_functions.as_ref();
        parts.extend(vfs.map(|vfs| format!("virtual functions {vfs}")));
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::host::tree;
    use std::path::Path;

    fn list_of(name: &str, json: bool) -> String {
        let trees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/sysfs-trees");
        let root = tempfile::tempdir().unwrap();
        let text = tree::read(&trees, name).unwrap();
        list(&tree::expand(&text, root.path()).unwrap(), json)
    }

    #[test]
    fn a_device_is_listed_with_all_that_is_known_of_it() {
        let text = list_of("gpu-with-audio", false);
        let expected = "\
0000:41:00.0 group    class 0300: 10de:2684
    driver vfio-pci, IOMMU group 31 with 0000:41:00.1 (snd_hda_intel), NUMA node 1, /dev/vfio/31
    BAR 0 16 MiB 32-bit, BAR 1 32 GiB 64-bit prefetchable, BAR 3 32 MiB 64-bit prefetchable, BAR 5 128 bytes I/O ports
    reset flr+bus, link 16.0 GT/s PCIe x8 of x16, MSI-X 6
0000:41:00.1 in-use   class 0403: 10de:22ba
    driver snd_hda_intel, IOMMU group 31 with 0000:41:00.0 (vfio-pci), NUMA node 1, /dev/vfio/31
    BAR 0 16 KiB 32-bit
    reset bus, MSI 1
";
        assert_eq!(text, expected);
    }

    #[test]
    fn virtual_functions_are_told_apart_and_bridges_left_out() {
        let json: serde_json::Value =
            serde_json::from_str(&list_of("virtual-functions", true)).unwrap();
        let field = |name: &str| -> Vec<String> {
            let devices = json.as_array().unwrap().iter();
            devices.map(|device| device[name].to_string()).collect()
        };
        assert_eq!(field("bdf").len(), 2, "{json}");
        assert_eq!(json[0]["virtual_functions"], "2 of 7");
        assert_eq!(json[1]["physical_function"], "0000:01:00.0");
        assert_eq!(json[1]["cdev"], "vfio0");
        let files = ["/dev/vfio/5", "/dev/vfio/devices/vfio0"];
        assert_eq!(json[1]["files"], serde_json::json!(files));
        assert_eq!(field("state"), ["\"in-use\"", "\"ready\""]);
    }

    #[test]
    fn without_an_iommu_nothing_is_ready() {
        let text = list_of("no-iommu", false);
        assert_eq!(text.matches(" no-iommu ").count(), 2, "{text}");
    }
}
