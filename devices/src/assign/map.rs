//! Step 4: mapping. Every area of every BAR into the VMM, so that the host's page tables, the
//! guest's second-level ones and the IOMMU's can all use 1 GiB or 2 MiB entries; and guest RAM
//! into the IOMMU.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

use super::error::AssignError;
use super::ports::{CallError, IommuBackend, MapRequest, Region};
use super::size::{SizedBar, SizedDevice, msix_ranges};
use super::windows::mappable_areas;
use crate::range::Range;
use crate::sys::{Alignment, DmaFile, HostRange};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A DMA mapping of guest RAM is at most this long: the kernel holds the container's lock while it
/// pins one.
const RAM_CHUNK: u64 = GIB;

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

/// Maps guest RAM (guest-physical address and mapping of each block) for DMA, in chunks; several
/// at a time where the backend can. When one fails, those that were mapped are unmapped.
pub fn map_ram(iommu: &dyn IommuBackend, ram: &[(u64, HostRange)]) -> Result<(), AssignError> {
    let chunks: Vec<_> = ram.iter().flat_map(|(gpa, b)| chunks(*gpa, b)).collect();
    let threads = match iommu.nature().parallel_maps {
        true => thread::available_parallelism().map_or(1, usize::from),
        false => 1,
    };
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let work = || -> Result<(), AssignError> {
        while let Some((iova, memory)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (iova, memory) = (*iova, memory.clone());
            let range = Range::from_bounds(iova, iova.saturating_add(memory.len()));
            if let Err(source) = iommu.map(&MapRequest { iova, memory }) {
                // The others need not go on.
                next.store(chunks.len(), Ordering::Relaxed);
                return Err(AssignError::Ram { range, source });
            }
            done.lock().push(range);
        }
        Ok(())
    };
    let helpers = threads.min(chunks.len());
    let result = thread::scope(|scope| {
        let helpers: Vec<_> = (1..helpers).map(|_| scope.spawn(work)).collect();
        let mine = work();
        let theirs = helpers.into_iter().map(|helper| {
            let died = |panic| std::panic::resume_unwind(panic);
            helper.join().unwrap_or_else(died)
        });
        theirs.fold(mine, Result::and)
    });
    if result.is_err() {
        unmap_all(iommu, &done.into_inner());
    }
    result
}

fn unmap_all(iommu: &dyn IommuBackend, ranges: &[Range]) {
    for range in ranges.iter().rev() {
        if let Err(error) = iommu.unmap(*range) {
            tracing::error!("{range} stays mapped for DMA: {error}: {}", error.source);
        }
    }
}

/// Pieces that start and end at multiples of the chunk size where they can, so that none splits a
/// huge page.
fn chunks(gpa: u64, block: &HostRange) -> Vec<(u64, HostRange)> {
    let end = gpa.saturating_add(block.len());
    let mut pieces = Vec::new();
    let mut at = gpa;
    while at < end {
        let next = (at / RAM_CHUNK + 1).saturating_mul(RAM_CHUNK).min(end);
        let Some(piece) = block.part(at - gpa, next - at) else {
            break;
        };
        pieces.push((at, piece));
        at = next;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Event, FakeKernel};
    use crate::sys::HostMap;

    fn block(len: u64) -> HostRange {
        HostRange::whole(Arc::new(HostMap::anonymous(len, Alignment::PAGE).unwrap()))
    }

    #[test]
    fn ram_is_mapped_in_chunks_that_end_at_multiples_of_a_gibibyte() {
        let kernel = FakeKernel::new(Vec::new());
        map_ram(&kernel, &[(GIB / 2, block(2 * GIB))]).unwrap();
        let ranges: Vec<Range> = kernel.mappings().iter().map(|(r, _)| *r).collect();
        assert_eq!(
            ranges,
            [
                Range::from_bounds(GIB / 2, GIB),
                Range::from_bounds(GIB, 2 * GIB),
                Range::from_bounds(2 * GIB, 2 * GIB + GIB / 2),
            ]
        );
    }

    #[test]
    fn a_failed_chunk_unmaps_those_before_it_and_names_its_range() {
        let kernel = FakeKernel::new(Vec::new());
        kernel.fail_after(2, libc::ENOMEM);
        let error = map_ram(&kernel, &[(0, block(3 * GIB))]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("0x80000000-0xbfffffff"), "{text}");
        assert!(text.contains("ulimit -l"), "{text}");
        assert!(kernel.mappings().is_empty());
        let unmaps = kernel.take_log();
        let unmaps = unmaps.iter().filter(|e| matches!(e, Event::Unmap(_)));
        assert_eq!(unmaps.count(), 2);
    }

    #[test]
    fn big_bars_are_congruent_modulo_a_gibibyte_also_behind_a_hole() {
        let area = Range::from_bounds(5 * GIB + 0x3000, 16 * GIB);
        assert_eq!(congruent(16 * GIB, area).modulus, GIB);
        assert_eq!(congruent(16 * GIB, area).phase % GIB, 0x3000);
        assert_eq!(congruent(16 * MIB, area).modulus, 2 * MIB);
    }
}
