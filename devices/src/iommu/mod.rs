//! The IOMMU backends behind [`crate::assign::ports::IommuBackend`].
//!
//! Both map IOVA = guest-physical address, for all assigned devices at once.

pub mod choose;
pub mod iommufd;
pub mod iommufd_error;
pub mod type1;

/// type1 maps a BAR by steps of up to 1 GiB since this version of Linux, of 4 KiB before
/// (drivers/vfio/vfio_iommu_type1.c, vaddr_get_pfns).
pub const FAST_BAR_MAPS: (u32, u32) = (6, 15);
