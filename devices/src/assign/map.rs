//! Step 4: mapping. Every area of every BAR into the VMM, so that the host's page tables, the
//! guest's second-level ones and the IOMMU's can all use 1 GiB or 2 MiB entries.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::error::AssignError;
use super::ports::{CallError, Region};
use super::size::{SizedBar, SizedDevice, msix_ranges};
use super::windows::mappable_areas;
use crate::range::Range;
use crate::sys::{Alignment, DmaFile, HostRange};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A dma-buf of each area of a BAR, in order.
pub fn export_bar(device: &SizedDevice, bar: &SizedBar) -> Result<Vec<OwnedFd>, CallError> {
    let region = Region::Bar(bar.info.index);
    let areas = areas(device, bar).into_iter();
    let files = areas.map(|area| device.device.export_dmabuf(region, area));
    files.collect()
}

fn areas(device: &SizedDevice, bar: &SizedBar) -> Vec<Range> {
    let caps = device.caps.msix.iter();
    let trapped: Vec<Range> = caps
        .flat_map(|cap| msix_ranges(cap, bar.info.index))
        .collect();
    mappable_areas(bar.info.size, &bar.region, &trapped)
}

/// Maps the areas of one BAR: BAR-relative range and the mapping of it, which takes over the
/// area's dma-buf if there is one.
pub fn map_bar(
    device: &SizedDevice,
    bar: &SizedBar,
    dmabufs: Vec<OwnedFd>,
) -> Result<Vec<(Range, HostRange)>, AssignError> {
    let index = bar.info.index;
    let mut dmabufs = dmabufs.into_iter();
    let map = |area: Range| {
        let at = congruent(bar.info.size, area);
        let map = device.device.mmap(Region::Bar(index), area, at);
        let map = map.map_err(|source| AssignError::Mmap {
            bdf: device.bdf,
            bar: index,
            area,
            source,
        })?;
        let map = match dmabufs.next() {
            Some(file) => map.with_dma_file(DmaFile::Device(file)),
            None => map,
        };
        Ok((area, HostRange::whole(Arc::new(map))))
    };
    areas(device, bar).into_iter().map(map).collect()
}

/// Host-virtual address congruent to the offset in the BAR. A BAR lies at a multiple of its size in
/// host- and guest-physical addresses alike, so all three agree.
fn congruent(bar_size: u64, area: Range) -> Alignment {
    Alignment {
        modulus: if bar_size >= GIB { GIB } else { 2 * MIB },
        phase: area.start(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn big_bars_are_congruent_modulo_a_gibibyte_also_behind_a_hole() {
        let area = Range::from_bounds(5 * GIB + 0x3000, 16 * GIB);
        assert_eq!(congruent(16 * GIB, area).modulus, GIB);
        assert_eq!(congruent(16 * GIB, area).phase % GIB, 0x3000);
        assert_eq!(congruent(16 * MIB, area).modulus, 2 * MIB);
    }
}
