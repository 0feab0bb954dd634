//! What can go wrong, and which exit code it has.
//!
//! A message is printed once: an error's own text does not repeat its source, and [`chain`] joins
//! the two with a colon.

use std::error::Error as StdError;
use std::fmt::Write as _;
use std::io;

use arch::acpi::AcpiTooLarge;
use arch::boot::{BootError, ImageError};
use arch::layout::{AddressRange, LayoutError};
use devices::assign::AssignError;
use devices::assign::ports::CallError;
use devices::assign::preflight::PreflightError;
use devices::bus::BusOverlap;
use devices::iommu::choose::IommuError;
use devices::pci::address::Bdf;
use devices::pci::ecam::DevfnTaken;
use devices::pci::place_error::PlaceError;
use devices::remedy::Remedy;

use crate::config::UsageError;
use crate::memory::MemoryError;
use crate::memory_check::MemoryCheckError;

/// Whose fault it is, as the exit code tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Something failed while the guest was being built or run: exit 1.
    Runtime,
    /// The command line or a file named by it cannot be used: exit 2.
    Usage,
    /// The host or a device is not ready for this: exit 3.
    Preflight,
}

impl Class {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Self::Runtime => 1,
            Self::Usage => 2,
            Self::Preflight => 3,
        }
    }
}

/// Any error that ends mini-vmm.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bad command line.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// Unusable kernel or initrd file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The kernel cannot be started with these options.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Guest RAM does not fit.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Guest RAM cannot be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host does not grant what guest RAM needs.
    #[error(transparent)]
    MemoryCheck(#[from] MemoryCheckError),
    /// Too many vCPUs to describe.
    #[error(transparent)]
    Acpi(#[from] AcpiTooLarge),
    /// KVM is not there, or not usable by us.
    #[error("cannot use /dev/kvm ({remedy}; {besides})")]
    Kvm {
        /// What mends it.
        remedy: Remedy,
        /// What else there is to know.
        besides: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The host's KVM lacks something.
    #[error("the host's KVM {lack}")]
    KvmLacks {
        /// What it lacks and what follows.
        lack: String,
    },
    /// An option cannot be satisfied on this host.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A KVM call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was being done.
        what: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// A device is not fit to be assigned.
    #[error(transparent)]
    Device(#[from] PreflightError),
    /// The devices' IOMMU cannot be used.
    #[error(transparent)]
    Iommu(#[from] IommuError),
    /// A device cannot be opened, mapped or installed.
    #[error(transparent)]
    Assign(#[from] AssignError),
    /// A BAR finds no place.
    #[error("{}cannot place its BARs", device.map(|bdf| format!("{bdf}: ")).unwrap_or_default())]
    Place {
        /// The device.
        device: Option<Bdf>,
        /// Which BAR and why.
        source: PlaceError,
    },
    /// The host takes a device away.
    #[error("{0}: the host asked for the device back (someone unbinds it): the guest was stopped")]
    DeviceRequested(Bdf),
    /// Two functions at one place of the PCI bus.
    #[error(transparent)]
    Slot(#[from] DevfnTaken),
    /// Two devices at one address.
    #[error(transparent)]
    Bus(#[from] BusOverlap),
    /// The guest cannot go on.
    #[error("vCPU {id} cannot go on")]
    Vcpu {
        /// Which vCPU.
        id: u32,
        /// Why.
        #[source]
        reason: Box<dyn StdError + Send + Sync>,
    },
}

/// An option that this host cannot satisfy. Each message ends with its [`HostError::remedy`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// More devices than the guest's bus has slots.
    #[error("{count} devices are more than the guest's PCI bus has slots for (31): assign fewer")]
    Slots {
        /// Devices asked for.
        count: usize,
    },
    /// A BAR is to lie where it lies on the host.
    #[error(
        "{bdf}: bar{bar}=host: the device has no BAR {bar}, or the host gave it no address: leave the option out"
    )]
    NoBarAddress {
        /// The device.
        bdf: Bdf,
        /// BAR index.
        bar: u8,
    },
    /// More vCPUs than KVM allows.
    #[error(
        "{cpus} vCPUs are more than the {most} that this host's KVM allows: ask for fewer with --cpus"
    )]
    KvmCpus {
        /// vCPUs asked for.
        cpus: u32,
        /// The most.
        most: u32,
    },
    /// iommufd tells what the IOMMU can map only when devices are open, and then RAM is laid out.
    #[error(
        "guest RAM at {range} is partly where the devices' IOMMU cannot map it, and the host's sysfs did not say so: use --iommu type1"
    )]
    RamUnmappable {
        /// The RAM.
        range: AddressRange,
    },
}

impl HostError {
    /// What mends it; the message ends with it.
    pub fn remedy(&self) -> Remedy {
        Remedy::advice(match self {
            Self::Slots { .. } => "assign fewer",
            Self::NoBarAddress { .. } => "leave the option out",
            Self::KvmCpus { .. } => "ask for fewer with --cpus",
            Self::RamUnmappable { .. } => "use --iommu type1",
        })
    }
}

impl Error {
    /// `what` failed with `source`; for use with `map_err`.
    pub fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            what,
            source: source.into(),
        }
    }

    /// What mends it. The message holds it as well, at its end where that is possible.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::MemoryCheck(error) => error.remedy(),
            Self::Host(error) => error.remedy(),
            Self::Device(error) => error.remedy(),
            Self::Iommu(error) => error.remedy(),
            Self::Place { source, .. } => source.remedy(),
            Self::Kvm { remedy, .. } => remedy.clone(),
            Self::Usage(error) => error.remedy(),
            Self::Image(error) => Remedy::advice(match error.problem.is_permission() {
                true => "let this user read it, or name another file",
                false => "name another file",
            }),
            Self::Layout(_) => Remedy::advice("ask for another amount with --memory"),
            Self::Assign(AssignError::Unfit(error)) => error.remedy(),
            Self::Assign(AssignError::NotNvidia { .. }) => Remedy::advice("leave it out"),
            Self::Assign(AssignError::NoSuchBar { .. }) => {
                Remedy::advice("name one of those, or leave the option out")
            }
            Self::Assign(AssignError::Gone { bdf }) => Remedy::Run(format!(
                "echo 1 > /sys/bus/pci/devices/{bdf}/remove; echo 1 > /sys/bus/pci/rescan"
            )),
            // What there is to do stands in the message, or is a matter of the host's log.
            _ => Remedy::advice("see `dmesg` of the host, and docs/troubleshooting.md"),
        }
    }

    /// Which exit code.
    pub fn class(&self) -> Class {
        match self {
            Self::Usage(_) | Self::Image(_) | Self::Boot(_) | Self::Acpi(_) => Class::Usage,
            Self::Layout(LayoutError::Granularity { .. }) => Class::Usage,
            Self::Layout(LayoutError::TooLarge { .. })
            | Self::Memory(MemoryError::PagesTaken { .. })
            | Self::Kvm { .. }
            | Self::KvmLacks { .. }
            | Self::MemoryCheck(_)
            | Self::Device(_)
            | Self::Iommu(_)
            | Self::Place { .. }
            | Self::Host(_) => Class::Preflight,
            Self::Assign(error) if error.is_preflight() => Class::Preflight,
            Self::Memory(_)
            | Self::Call(_)
            | Self::System { .. }
            | Self::Assign(_)
            | Self::DeviceRequested(_)
            | Self::Slot(_)
            | Self::Bus(_)
            | Self::Vcpu { .. } => Class::Runtime,
        }
    }
}

/// The error and its sources on one line, whatever the names of files hold.
pub fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        // Writing to a String does not fail.
        let _ = write!(text, ": {cause}");
        source = cause.source();
    }
    match text.contains(char::is_control) {
        true => escaped(&text),
        false => text,
    }
}

fn escaped(text: &str) -> String {
    let mut plain = String::new();
    for c in text.chars() {
        match c.is_control() {
            true => plain.extend(c.escape_default()),
            false => plain.push(c),
        }
    }
    plain
}

/// A `kvm-ioctls` error as an error of `call`.
pub fn kvm_call(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> CallError {
    move |error| CallError {
        call,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_whatever_a_file_is_called() {
        let error = Error::from(UsageError::Options("a\nb\u{1b}[2J é".to_owned()));
        let text = chain(&error);
        assert!(text.starts_with(r"a\nb\u{1b}[2J é"), "{text}");
    }

    #[test]
    fn a_source_is_printed_once_behind_its_error() {
        let error = Error::from(CallError {
            call: "KVM_CREATE_VM",
            source: io::Error::from_raw_os_error(libc::ENOMEM),
        });
        let text = chain(&error);
        assert!(text.starts_with("KVM_CREATE_VM failed: Cannot allocate memory"));
        assert_eq!(text.matches("Cannot allocate").count(), 1);
        assert_eq!(error.class().code(), 1);
    }
}
