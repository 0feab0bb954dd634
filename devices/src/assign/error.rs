//! Why devices cannot be assigned. Each message names the device and, where there is one, the
//! command that mends it.

use super::commit::CommitError;
use super::ports::{CallError, Region};
use super::preflight::PreflightError;
use crate::iommu::iommufd_error::IommufdError;
use crate::pci::address::Bdf;
use crate::pci::bar::BarError;
use crate::range::Range;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum AssignError {
    /// The kernel does not hand out the device.
    #[error("{bdf}: cannot open the device{}", open_remedy(source))]
    Open {
        /// The device.
        bdf: Bdf,
        /// The kernel's reason.
        source: CallError,
    },
    /// It cannot be had through iommufd.
    #[error(transparent)]
    Iommufd(IommufdError),
    /// A region or an interrupt kind cannot be queried, read or written.
    #[error("{bdf}: {what} is not accessible")]
    Query {
        /// The device.
        bdf: Bdf,
        /// Which part of it.
        what: String,
        /// The kernel's reason.
        source: CallError,
    },
    /// Configuration space reads as all ones.
    #[error(
        "{bdf}: the device does not answer (its configuration space reads as all ones): it has fallen off the bus or is powered down; try `echo 1 > /sys/bus/pci/devices/{bdf}/remove; echo 1 > /sys/bus/pci/rescan`"
    )]
    Gone {
        /// The device.
        bdf: Bdf,
    },
    /// It is not what sysfs said: a bridge.
    #[error(transparent)]
    Unfit(#[from] PreflightError),
    /// A ROM was asked for and there is none.
    #[error("{bdf}: rom=on: the device has no expansion ROM that can be read (rom=FILE shows one)")]
    NoRom {
        /// The device.
        bdf: Bdf,
    },
    /// A clique was asked for on a device of another vendor.
    #[error("{bdf}: gpudirect-clique is for NVIDIA GPUs, which this device is not: leave it out")]
    NotNvidia {
        /// The device.
        bdf: Bdf,
    },
    /// Configuration space is full.
    #[error(
        "{bdf}: gpudirect-clique: the device's configuration space has no free place for the capability: leave it out"
    )]
    NoRoomForClique {
        /// The device.
        bdf: Bdf,
    },
    /// An option names a BAR that does not exist.
    #[error(
        "{bdf}: an option names BAR {bar}, and the device has none of that number (it has {})",
        list(present)
    )]
    NoSuchBar {
        /// The device.
        bdf: Bdf,
        /// The number.
        bar: u8,
        /// The BARs that it has.
        present: Vec<u8>,
    },
    /// BAR registers and region sizes contradict each other.
    #[error("{bdf}: its BARs cannot be used")]
    Bars {
        /// The device.
        bdf: Bdf,
        /// Which and why.
        source: BarError,
    },
    /// An area of a BAR cannot be mapped.
    #[error("{bdf}: BAR {bar}, {area}: cannot be mapped into the VMM")]
    Mmap {
        /// The device.
        bdf: Bdf,
        /// BAR index.
        bar: u8,
        /// BAR-relative.
        area: Range,
        /// The kernel's reason.
        source: CallError,
    },
    /// Its BARs cannot be handed to the IOMMU for other devices to reach.
    #[error(
        "{bdf}: its BARs cannot be exported as dma-buf (peer-to-peer through iommufd needs Linux 6.19 with PCI_P2PDMA on the host; --iommu type1 or p2p=off does without)"
    )]
    Export {
        /// The device.
        bdf: Bdf,
        /// The kernel's reason.
        source: CallError,
    },
    /// There is not enough memory behind guest RAM.
    #[error(
        "memory for guest RAM at {range} cannot be allocated{}",
        populate_remedy(source)
    )]
    Populate {
        /// Guest-physical.
        range: Range,
        /// The kernel's reason.
        source: std::io::Error,
    },
    /// Guest RAM cannot be mapped for DMA.
    #[error("guest RAM at {range} cannot be mapped for DMA{}", ram_remedy(source))]
    Ram {
        /// Guest-physical.
        range: Range,
        /// The kernel's reason.
        source: CallError,
    },
    /// A memslot or an IOMMU mapping of a BAR.
    #[error(transparent)]
    Install(#[from] CommitError),
}

impl AssignError {
    /// Whether the device or the host was not ready, as opposed to a call that failed on the way.
    pub fn is_preflight(&self) -> bool {
        match self {
            Self::Open { .. }
            | Self::Iommufd(_)
            | Self::Gone { .. }
            | Self::Unfit(_)
            | Self::Bars { .. }
            | Self::NoSuchBar { .. }
            | Self::NoRom { .. }
            | Self::NotNvidia { .. }
            | Self::NoRoomForClique { .. }
            | Self::Export { .. }
            | Self::Ram { .. } => true,
            Self::Query { .. } | Self::Mmap { .. } | Self::Populate { .. } | Self::Install(_) => {
                false
            }
        }
    }

    pub(super) fn query(bdf: Bdf, region: Region) -> impl Fn(CallError) -> Self {
        move |source| Self::Query {
            bdf,
            what: match region {
                Region::Bar(n) => format!("BAR {n}"),
                Region::Rom => "its ROM".to_owned(),
                Region::Config => "its configuration space".to_owned(),
            },
            source,
        }
    }
}

fn list(bars: &[u8]) -> String {
    let numbers: Vec<String> = bars.iter().map(u8::to_string).collect();
    numbers.join(", ")
}

fn open_remedy(source: &CallError) -> &'static str {
    match source.errno() {
        Some(libc::ENODEV) => {
            " (is it bound to vfio-pci? `driverctl set-override BDF vfio-pci` or driver_override binds it)"
        }
        Some(libc::EBUSY) => " (another process uses it)",
        Some(libc::EACCES | libc::EPERM) => {
            " (you may not use it, or it is a VF whose PF wants a token)"
        }
        _ => "",
    }
}

fn populate_remedy(source: &std::io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOMEM) => " (the host has too little memory free: give the guest less)",
        // A page that cannot be had would be SIGBUS on access (madvise(2), MADV_POPULATE_WRITE).
        Some(libc::EFAULT) => {
            " (the pool of huge pages or the limit of shared memory is used up: see /proc/meminfo)"
        }
        Some(libc::EHWPOISON) => " (the host's memory is faulty: see `dmesg`)",
        _ => "",
    }
}

fn ram_remedy(source: &CallError) -> &'static str {
    match source.errno() {
        Some(libc::ENOMEM) => {
            " (the locked-memory limit is too low: raise it with `ulimit -l unlimited` as root, or in /etc/security/limits.conf)"
        }
        Some(libc::EINVAL) => " (outside what the IOMMU can address)",
        _ => "",
    }
}

/// `error` with all its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
