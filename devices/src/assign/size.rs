//! Step 2: what a device is made of: configuration space, BARs, interrupts. Each of the kernel's
//! answers is asked for once.

use std::sync::Arc;

use super::error::AssignError;
use super::ports::{IrqIndex, IrqInfo, Region, RegionInfo, VfioDevice};
use super::preflight::PreflightError;
use crate::pci::address::Bdf;
use crate::pci::bar::{BarInfo, discover};
use crate::pci::caps::{Capabilities, MsixCap, filter};
use crate::pci::image;
use crate::pci::spec::{BAR_COUNT, CONFIG_SIZE, HeaderType, LEGACY_CONFIG_SIZE, Reg, msix};
use crate::range::Range;

/// A BAR and what the kernel says of its region.
#[derive(Clone, Debug)]
pub struct SizedBar {
    /// Index, kind, size.
    pub info: BarInfo,
    /// Mappable or not, sparse areas.
    pub region: RegionInfo,
}

/// An opened device, everything known that the placement and the guest's view need.
pub struct SizedDevice {
    /// Host address.
    pub bdf: Bdf,
    /// The opened device.
    pub device: Arc<dyn VfioDevice>,
    /// Configuration space as the guest will see it: capability lists already filtered.
    pub config: Vec<u8>,
    /// What the filter kept and hid.
    pub caps: Capabilities,
    /// BARs that exist, ascending.
    pub bars: Vec<SizedBar>,
    /// Contents of the expansion ROM, where one is shown.
    pub rom: Option<Arc<[u8]>>,
    /// A capability that was added to `config`: offset and bytes.
    pub synthetic: Option<(u16, u16)>,
    /// Interrupts of each kind.
    pub intx: IrqInfo,
    /// MSI.
    pub msi: IrqInfo,
    /// MSI-X.
    pub msix: IrqInfo,
}

/// Queries an opened device.
pub fn size(bdf: Bdf, device: Arc<dyn VfioDevice>) -> Result<SizedDevice, AssignError> {
    let mut config = read_config(bdf, device.as_ref())?;
    let raw = raw_bars(&config);
    let mut regions = Vec::with_capacity(BAR_COUNT);
    for index in 0..BAR_COUNT as u8 {
        let region = Region::Bar(index);
        let info = device.region_info(region);
        regions.push(info.map_err(AssignError::query(bdf, region))?);
    }
    let mut sizes = [0; BAR_COUNT];
    for (size, region) in sizes.iter_mut().zip(&regions) {
        *size = region.size;
    }
    let infos = discover(&raw, &sizes).map_err(|source| AssignError::Bars { bdf, source })?;
    let bars = infos.into_iter().filter_map(|info| {
        let region = regions.get(usize::from(info.index))?.clone();
        Some(SizedBar { info, region })
    });
    let bars = bars.collect();
    let caps = filter(&mut config);
    let irq = |index, what: &str| {
        device.irq_info(index).map_err(|source| AssignError::Query {
            bdf,
            what: format!("its {what}"),
            source,
        })
    };
    Ok(SizedDevice {
        bdf,
        intx: irq(IrqIndex::Intx, "INTx")?,
        msi: irq(IrqIndex::Msi, "MSI")?,
        msix: irq(IrqIndex::Msix, "MSI-X")?,
        device,
        config,
        caps,
        bars,
        rom: None,
        synthetic: None,
    })
}

fn read_config(bdf: Bdf, device: &dyn VfioDevice) -> Result<Vec<u8>, AssignError> {
    let query = AssignError::query(bdf, Region::Config);
    let size = device.region_info(Region::Config).map_err(&query)?.size;
    let len = if size >= CONFIG_SIZE as u64 {
        CONFIG_SIZE
    } else {
        LEGACY_CONFIG_SIZE
    };
    let mut config = vec![0; len];
    device
        .read(Region::Config, 0, &mut config)
        .map_err(&query)?;
    if image::read_u16(&config, Reg::VENDOR_ID.offset()) == 0xffff {
        return Err(AssignError::Gone { bdf });
    }
    let header = HeaderType(image::read_u8(&config, Reg::HEADER_TYPE.offset())).layout();
    if header != 0 {
        return Err(PreflightError::NotEndpoint { bdf, header }.into());
    }
    Ok(config)
}

fn raw_bars(config: &[u8]) -> [u32; BAR_COUNT] {
    let mut raw = [0; BAR_COUNT];
    for (index, bar) in raw.iter_mut().enumerate() {
        *bar = image::read_u32(config, Reg::BAR0.offset() + 4 * index as u16);
    }
    raw
}

/// The BAR-relative bytes of MSI-X table and PBA that lie in `bar` (PCI 3.0, 6.8.2).
pub fn msix_ranges(cap: &MsixCap, bar: u8) -> impl Iterator<Item = Range> {
    let vectors = u64::from(cap.vectors);
    let parts = [
        (cap.table, vectors * msix::ENTRY_LEN),
        (cap.pba, vectors.div_ceil(64) * 8),
    ];
    parts
        .into_iter()
        .filter(move |(location, _)| location.bar == bar)
        .filter_map(|(location, len)| Range::new(location.offset.into(), len))
}
