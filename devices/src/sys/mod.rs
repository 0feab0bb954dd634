//! The kernel ABI: ioctls that no crate offers, and ownership of mappings. The only place of this
//! crate where `unsafe` is allowed; every item exported from here is safe to use.
#![allow(unsafe_code)]

mod host_map;
pub(crate) mod iommufd;
mod poll;
mod struct_call;
pub(crate) mod vfio;
mod vfio_device;

pub use host_map::{Alignment, DmaFile, HostMap, HostRange};
pub use poll::is_signalled;
pub use vfio_device::{Groups, VfioPciDevice};
