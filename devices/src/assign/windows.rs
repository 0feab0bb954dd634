//! Which parts of a BAR are mapped into the guest, and which trap.
//!
//! Invariant: an area is page-aligned, inside the BAR, and shares no page with the MSI-X table or
//! PBA: a guest that could write those would route the host's interrupts past the VMM.

use super::ports::RegionInfo;
use crate::range::Range;

/// Host page size on x86-64, the grain of mmap and of memslots.
pub const PAGE: u64 = 4096;

/// The areas of a BAR of `size` bytes to mmap, ascending: those that the kernel lists (exactly as
/// given, or all of it where it lists none) minus the pages that `trapped` touches.
///
/// A BAR below a page always traps: behind it in the page lie another device's registers.
pub fn mappable_areas(size: u64, info: &RegionInfo, trapped: &[Range]) -> Vec<Range> {
    if !info.mappable || size < PAGE {
        return Vec::new();
    }
    let whole = vec![Range::from_bounds(0, size)];
    let mut areas = info.sparse.clone().unwrap_or(whole);
    areas.retain_mut(|area| {
        // Offsets that leave no whole page in the BAR, or the address space, leave nothing.
        let start = area.start().checked_next_multiple_of(PAGE);
        let end = area.end().min(size) / PAGE * PAGE;
        *area = Range::from_bounds(start.unwrap_or(end), end);
        !area.is_empty()
    });
    merge_overlapping(&mut areas);
    for hole in trapped {
        areas = areas.into_iter().flat_map(|a| without(a, hole)).collect();
    }
    areas
}

/// Sorts `areas` and joins those that share an address: two slots may not show the same page.
fn merge_overlapping(areas: &mut Vec<Range>) {
    areas.sort_unstable();
    let mut merged: Vec<Range> = Vec::with_capacity(areas.len());
    for area in areas.drain(..) {
        match merged.last_mut() {
            Some(last) if last.overlaps(&area) => {
                *last = Range::from_bounds(last.start(), last.end().max(area.end()));
            }
            _ => merged.push(area),
        }
    }
    *areas = merged;
}

/// `area` minus every page that `hole` touches.
fn without(area: Range, hole: &Range) -> impl Iterator<Item = Range> {
    let start = hole.start() / PAGE * PAGE;
    let end = hole
        .end()
        .checked_next_multiple_of(PAGE)
        .unwrap_or(u64::MAX);
    let hole = Range::from_bounds(start, end);
    let parts = if area.overlaps(&hole) {
        [
            Range::from_bounds(area.start(), hole.start()),
            Range::from_bounds(hole.end(), area.end()),
        ]
    } else {
        [area, Range::from_bounds(0, 0)]
    };
    parts.into_iter().filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappable(sparse: Option<Vec<Range>>) -> RegionInfo {
        RegionInfo {
            mappable: true,
            sparse,
            ..RegionInfo::default()
        }
    }

    fn r(start: u64, end: u64) -> Range {
        Range::from_bounds(start, end)
    }

    #[test]
    fn only_the_pages_of_table_and_pba_trap() {
        // 129 vectors at 0x5200 (2064 bytes), PBA at 0xd600.
        let trapped = [r(0x5200, 0x5200 + 129 * 16), r(0xd600, 0xd618)];
        assert_eq!(
            mappable_areas(0x10000, &mappable(None), &trapped),
            [r(0, 0x5000), r(0x6000, 0xd000), r(0xe000, 0x10000)]
        );
    }

    #[test]
    fn sparse_areas_are_taken_exactly_as_given() {
        // 513 vectors at 0x4000 reach into 0x6000; PBA at 0x3000.
        let sparse = vec![r(0, 0x3000), r(0x7000, 0x8000)];
        let trapped = [r(0x4000, 0x4000 + 513 * 16), r(0x3000, 0x3048)];
        let areas = mappable_areas(0x8000, &mappable(Some(sparse.clone())), &trapped);
        assert_eq!(areas, sparse);
    }

    #[test]
    fn a_table_and_pba_in_one_page_make_one_hole() {
        let trapped = [r(0x1000, 0x1800), r(0x1800, 0x1810)];
        assert_eq!(
            mappable_areas(0x4000, &mappable(None), &trapped),
            [r(0, 0x1000), r(0x2000, 0x4000)]
        );
    }

    #[test]
    fn a_table_in_the_last_page_leaves_the_rest() {
        let areas = mappable_areas(0x4000, &mappable(None), &[r(0x3ff0, 0x4000)]);
        assert_eq!(areas, [r(0, 0x3000)]);
    }

    #[test]
    fn a_bar_of_only_the_table_traps_whole() {
        assert!(mappable_areas(0x1000, &mappable(None), &[r(0, 0x800)]).is_empty());
    }

    #[test]
    fn sub_page_and_unmappable_bars_trap() {
        assert!(mappable_areas(0x100, &mappable(None), &[]).is_empty());
        assert!(mappable_areas(0x4000, &RegionInfo::default(), &[]).is_empty());
    }

    #[test]
    fn overlapping_areas_are_joined_and_impossible_ones_ignored() {
        let sparse = vec![
            r(0x3000, 0x6000),
            r(0x1000, 0x4000),
            r(0x6000, 0x7000),
            r(u64::MAX - 10, u64::MAX - 1),
        ];
        assert_eq!(
            mappable_areas(0x8000, &mappable(Some(sparse)), &[]),
            [r(0x1000, 0x6000), r(0x6000, 0x7000)]
        );
    }

    #[test]
    fn sparse_areas_outside_the_bar_are_cut() {
        let areas = mappable_areas(0x2000, &mappable(Some(vec![r(0x1000, 0x9000)])), &[]);
        assert_eq!(areas, [r(0x1000, 0x2000)]);
    }
}
