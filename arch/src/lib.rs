//! The guest's architecture: everything that is a pure function of the configuration.
//!
//! * [`layout`] says what lies where in guest-physical memory,
//! * [`boot`] checks and loads a kernel and tells it where things are,
//! * [`acpi`] describes the machine to the guest,
//! * [`cpuid`] and [`regs`] give each vCPU its identity and its first state.
//!
//! Nothing here makes a KVM call or knows a device; structures of `kvm-bindings` are only filled.
#![forbid(unsafe_code)]

pub mod acpi;
pub mod boot;
pub mod cpuid;
pub mod layout;
pub mod regs;
