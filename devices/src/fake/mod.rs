//! A fake kernel and fake devices behind the ports of [`crate::assign::ports`], for tests of
//! order, rollback and faults without /dev/kvm or /dev/vfio.
//!
//! Every call goes into one ordered log, may be made to fail by its number, and is held to the
//! kernel's rules: slots may not overlap, mappings may not overlap, leave the usable ranges, be
//! unmapped in part or exceed their number, BARs are mapped by dma-buf where the backend demands it,
//! a reset revokes those, and interrupts are armed as vfio-pci allows it.

mod build;
mod device;
mod kernel;

pub use device::{FakeDevice, FakeDeviceSpec};
pub use kernel::{Event, FakeKernel, Tally};
