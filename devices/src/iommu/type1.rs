//! VFIO container with the type1 IOMMU driver (drivers/vfio/vfio_iommu_type1.c).
//!
//! Invariants: every group is in the container before the first mapping (a later one would replay
//! all mappings page by page); a mapping's memory stays alive until it is unmapped.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use vfio_bindings::bindings::vfio::{VFIO_API_VERSION, VFIO_TYPE1v2_IOMMU};

use crate::assign::ports::{
    CallError, IommuBackend, IommuNature, MapRequest, OpenError, VfioDevice,
};
use crate::host::Sysfs;
use crate::pci::address::Bdf;
use crate::range::Range;
use crate::remedy::Remedy;
use crate::sys::vfio as abi;
use crate::sys::{Groups, HostRange, VfioPciDevice};

/// Why the container could not be set up. Every message names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Type1Error {
    /// /dev/vfio/vfio cannot be opened.
    #[error("cannot open /dev/vfio/vfio ({})", container_remedy(.0))]
    OpenContainer(#[source] io::Error),
    /// The kernel's VFIO has no type1v2.
    #[error("this kernel's VFIO has no type1 IOMMU driver (run `modprobe vfio_iommu_type1`)")]
    NoType1,
    /// A call on the container itself failed.
    #[error("the VFIO container cannot be set up")]
    Container(#[source] CallError),
    /// /dev/vfio/GROUP cannot be opened.
    #[error("{bdf}: cannot open IOMMU group {group}: {}", open_remedy(*group, source))]
    OpenGroup {
        /// A device of the group.
        bdf: Bdf,
        /// Group number.
        group: u32,
        /// The kernel's reason.
        source: io::Error,
    },
    /// A member of the group is bound to a host driver.
    #[error(
        "{bdf}: IOMMU group {group} is not viable: a member is bound to a host driver (list them with `ls /sys/kernel/iommu_groups/{group}/devices`, bind each to vfio-pci)"
    )]
    NotViable {
        /// A device of the group.
        bdf: Bdf,
        /// Group number.
        group: u32,
    },
    /// The group does not go into the container.
    #[error(
        "{bdf}: IOMMU group {group} cannot be attached{}",
        attach_remedy(source)
    )]
    Attach {
        /// A device of the group.
        bdf: Bdf,
        /// Group number.
        group: u32,
        /// The kernel's reason.
        source: CallError,
    },
}

impl Type1Error {
    /// The device that it is about, if it is about one.
    pub fn device(&self) -> Option<Bdf> {
        match self {
            Self::OpenGroup { bdf, .. }
            | Self::NotViable { bdf, .. }
            | Self::Attach { bdf, .. } => Some(*bdf),
            Self::OpenContainer(_) | Self::NoType1 | Self::Container(_) => None,
        }
    }

    /// What mends it. The message holds it as well, before the kernel's reason.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::OpenContainer(source) => container_remedy(source),
            Self::NoType1 => Remedy::run(LOAD_TYPE1),
            Self::Container(_) => Remedy::advice("see `dmesg`"),
            Self::OpenGroup { group, source, .. } => match source.raw_os_error() {
                Some(libc::EACCES) => Remedy::Run(take_group(*group)),
                Some(libc::EBUSY) => Remedy::advice(format!(
                    "end the process that `fuser -v /dev/vfio/{group}` shows"
                )),
                _ => Remedy::advice(format!(
                    "bind all of `ls /sys/kernel/iommu_groups/{group}/devices` to vfio-pci"
                )),
            },
            Self::NotViable { group, .. } => Remedy::advice(format!(
                "bind all of `ls /sys/kernel/iommu_groups/{group}/devices` to vfio-pci"
            )),
            Self::Attach { source, .. } => match source.errno() {
                Some(libc::EPERM) => Remedy::advice(
                    "turn on interrupt remapping (VT-d or AMD-Vi, x2APIC) in the firmware",
                ),
                Some(libc::EBUSY) => Remedy::advice("end the process that uses it"),
                _ => Remedy::advice("see `dmesg`"),
            },
        }
    }
}

fn container_remedy(source: &io::Error) -> Remedy {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            Remedy::Run(format!("chown {} /dev/vfio/vfio", Sysfs::own_user()))
        }
        _ => Remedy::run("modprobe vfio-pci"),
    }
}

const LOAD_TYPE1: &str = "modprobe vfio_iommu_type1";

/// Gives the file of `group` to the user who runs this.
fn take_group(group: u32) -> String {
    format!("chown {} /dev/vfio/{group}", Sysfs::own_user())
}

fn open_remedy(group: u32, source: &io::Error) -> String {
    match source.raw_os_error() {
        Some(libc::EBUSY) => {
            format!("it is in use by another process (find it with `fuser -v /dev/vfio/{group}`)")
        }
        Some(libc::EACCES) => {
            format!("you may not use it ({})", Remedy::Run(take_group(group)))
        }
        Some(libc::EPERM) => format!(
            "it is not viable (list its members with `ls /sys/kernel/iommu_groups/{group}/devices`, bind each to vfio-pci)"
        ),
        _ => format!("is a device of the group bound to vfio-pci, and /dev/vfio/{group} there?"),
    }
}

fn attach_remedy(source: &CallError) -> &'static str {
    match source.errno() {
        Some(libc::EPERM) => {
            ": the host cannot isolate its interrupts or it is not viable (see `dmesg`; interrupt remapping is a firmware setting)"
        }
        Some(libc::EBUSY) => ": it is in use by another process or container",
        Some(libc::EINVAL) => ": its IOMMU is not compatible with that of the other devices",
        _ => "",
    }
}

/// One container with the groups of all assigned devices.
pub struct Type1 {
    container: File,
    groups: Groups,
    group_of: BTreeMap<Bdf, u32>,
    mappings: Mutex<BTreeMap<u64, HostRange>>,
}

impl Type1 {
    /// Opens a container and puts the IOMMU groups of all `devices` (each with its group number)
    /// into it. Devices are not opened yet.
    pub fn new(devices: &[(Bdf, u32)]) -> Result<Self, Type1Error> {
        let container = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/vfio/vfio")
            .map_err(Type1Error::OpenContainer)?;
        let version = abi::api_version(container.as_fd()).map_err(Type1Error::Container)?;
        let type1 = abi::has_extension(container.as_fd(), VFIO_TYPE1v2_IOMMU);
        if version != VFIO_API_VERSION as i32 || !type1.map_err(Type1Error::Container)? {
            return Err(Type1Error::NoType1);
        }
        let mut groups = BTreeMap::new();
        for &(bdf, group) in devices {
            attach(&container, &mut groups, bdf, group)?;
        }
        Ok(Self {
            container,
            groups: Arc::new(groups),
            group_of: devices.iter().copied().collect(),
            mappings: Mutex::new(BTreeMap::new()),
        })
    }
}

/// Puts `group` of the device `bdf` into the container, unless it is in `groups` already.
fn attach(
    container: &File,
    groups: &mut BTreeMap<u32, File>,
    bdf: Bdf,
    group: u32,
) -> Result<(), Type1Error> {
    if groups.contains_key(&group) {
        return Ok(());
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/dev/vfio/{group}"))
        .map_err(|source| Type1Error::OpenGroup { bdf, group, source })?;
    let attach = |source| Type1Error::Attach { bdf, group, source };
    if !abi::group_is_viable(file.as_fd()).map_err(attach)? {
        return Err(Type1Error::NotViable { bdf, group });
    }
    abi::group_set_container(file.as_fd(), container.as_fd()).map_err(attach)?;
    if groups.is_empty() {
        abi::set_iommu(container.as_fd(), VFIO_TYPE1v2_IOMMU).map_err(attach)?;
    }
    groups.insert(group, file);
    Ok(())
}

/// What keeps `devices`, each with its group, from being attached: every obstacle, where
/// [`Type1::new`] stops at the first. Nothing is attached, no device opened.
pub fn problems(sysfs: &Sysfs, devices: &[(Bdf, u32)]) -> Vec<Type1Error> {
    let open = |path: &str| {
        let path = sysfs.path(path);
        OpenOptions::new().read(true).write(true).open(path)
    };
    if let Err(error) = open("dev/vfio/vfio") {
        return vec![Type1Error::OpenContainer(error)];
    }
    let mut seen = Vec::new();
    let mut problems = Vec::new();
    for &(bdf, group) in devices {
        if seen.contains(&group) {
            continue;
        }
        seen.push(group);
        if let Err(source) = open(&format!("dev/vfio/{group}")) {
            problems.push(Type1Error::OpenGroup { bdf, group, source });
        }
    }
    problems
}

impl IommuBackend for Type1 {
    fn name(&self) -> &'static str {
        "type1"
    }

    fn nature(&self) -> IommuNature {
        IommuNature::default()
    }

    fn open(&self, bdf: Bdf) -> Result<Box<dyn VfioDevice>, OpenError> {
        let group = self.group_of.get(&bdf).and_then(|g| self.groups.get(g));
        let group = group.ok_or_else(|| CallError {
            call: "VFIO_GROUP_GET_DEVICE_FD",
            source: io::ErrorKind::NotFound.into(),
        })?;
        let fd = abi::group_device(group.as_fd(), &bdf.to_string())?;
        Ok(Box::new(VfioPciDevice::new(fd)?.with_groups(&self.groups)))
    }

    fn map(&self, request: &MapRequest) -> Result<(), CallError> {
        let memory = &request.memory;
        // Held across the call: the kernel serialises them anyway (one mutex a container).
        let mut mappings = self.mappings.lock();
        abi::map_dma(
            self.container.as_fd(),
            request.iova,
            memory.address(),
            memory.len(),
        )?;
        mappings.insert(request.iova, memory.clone());
        Ok(())
    }

    fn unmap(&self, range: Range) -> Result<(), CallError> {
        let mut mappings = self.mappings.lock();
        abi::unmap_dma(self.container.as_fd(), range)?;
        mappings.retain(|iova, _| !range.contains(*iova));
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<Range>, CallError> {
        let ranges = abi::iova_ranges(self.container.as_fd())?;
        Ok(ranges.unwrap_or_else(|| vec![Range::from_bounds(0, u64::MAX)]))
    }

    fn kvm_files(&self) -> Vec<RawFd> {
        self.groups.values().map(AsRawFd::as_raw_fd).collect()
    }
}
