//! PCI as the guest sees it: pure state machines, no system calls.

pub mod address;
pub mod bar;
mod cap_ids;
pub mod caps;
pub mod ecam;
pub(crate) mod ext_caps;
pub mod host_bridge;
pub mod image;
pub mod msi;
pub mod msix;
pub mod place;
pub mod place_error;
mod place_item;
mod place_window;
pub mod rom;
mod space;
pub mod spec;
