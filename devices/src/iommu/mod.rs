//! The IOMMU backends behind [`crate::assign::ports::IommuBackend`].
