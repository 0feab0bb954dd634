//! The IOMMU backends behind [`crate::assign::ports::IommuBackend`].
//!
//! Both map IOVA = guest-physical address, for all assigned devices at once.

pub mod choose;
pub mod iommufd;
pub mod iommufd_error;
pub mod type1;
