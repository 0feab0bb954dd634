//! Step 1: opening devices, all at once. The kernel resets each while it is opened (a function
//! level reset sleeps 100 ms, a bus reset longer), and devices behind different ports do not wait
//! for each other.

use std::sync::Arc;

use super::error::AssignError;
use super::ports::{IommuBackend, OpenError};
use super::size::{SizedDevice, size};
use crate::pci::address::Bdf;
use crate::threads::on_each;

/// Opens `devices` through `iommu` and reads what each is made of, in the order given. The first
/// error in that order is reported, and what was opened is closed again.
pub fn open_all(
    iommu: &dyn IommuBackend,
    devices: &[Bdf],
) -> Result<Vec<SizedDevice>, AssignError> {
    let opened = on_each(
        devices,
        |bdf| format!("open {bdf}"),
        |bdf| open(iommu, *bdf),
    );
    opened.into_iter().collect()
}

fn open(iommu: &dyn IommuBackend, bdf: Bdf) -> Result<SizedDevice, AssignError> {
    let device = iommu.open(bdf).map_err(|error| match error {
        OpenError::Call(source) => AssignError::Open { bdf, source },
        OpenError::Iommufd(error) => AssignError::Iommufd(error),
    })?;
    size(bdf, Arc::from(device))
}
