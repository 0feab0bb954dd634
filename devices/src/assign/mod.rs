//! A host PCI device in the guest, from open to interrupt.

pub mod ports;
