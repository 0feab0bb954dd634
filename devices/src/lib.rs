//! PCI device assignment, and the few devices that mini-vmm emulates itself.
//!
//! A device on its way from the host to a driver in the guest, in order:
//!
//! 1. [`assign`] opens all devices in parallel through an [`iommu`] backend,
//! 2. reads the size of every BAR and which parts of it can be mapped,
//! 3. [`pci::place`] gives every BAR a guest-physical address,
//! 4. each mappable area is mmapped, put into a memslot and mapped in the IOMMU,
//! 5. the guest reads and writes configuration space ([`pci::ecam`] decodes, the device answers
//!    from a shadow) and BAR registers (what is decoded where is planned, then committed),
//! 6. and enables MSI-X, MSI or INTx, which connects the device's eventfds with the VM's routes.
//!
//! Nothing here knows KVM: the hypervisor is behind the traits of [`assign::ports`].

pub mod assign;
pub mod bus;
pub mod debug_port;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
pub mod host;
pub mod iommu;
pub mod pci;
pub mod power;
pub mod range;
pub mod rate;
pub mod remedy;
pub mod serial;
pub mod sys;
mod threads;
