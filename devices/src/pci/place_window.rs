//! Where the 64-bit window lies, and what lies where in it.
//!
//! Invariants of what [`Demand::choose`] returns: the window is part of one gap, holds all items
//! and all pinned places, and nothing overlaps. A window of the wanted size is preferred to a low
//! one; among equals the lowest is taken.

use super::place::PAGE;
use super::place_error::{Limit, PlaceError};
use super::place_item::{Item, take_all};
use super::space::Space;
use crate::range::Range;

/// The window begins at a multiple of this and is at least as big where there is room, so that it
/// shares no huge page of the second-level tables with anything else.
const GIB: u64 = 1 << 30;

/// What has to be in the window.
pub(super) struct Demand<'a> {
    /// BARs without a place, biggest first.
    pub(super) items: &'a [Item],
    /// BARs whose place the user chose.
    pub(super) pinned: &'a [(Item, Range)],
    /// Bytes of the window, if the user chose.
    pub(super) size: Option<u64>,
    /// What bounds the gaps, for errors.
    pub(super) limit: Limit,
}

/// The window and the addresses of the items, by their position among the requests.
#[derive(Default)]
pub(super) struct Chosen {
    /// `None` when nothing is in it.
    pub(super) window: Option<Range>,
    /// It is at least twice as big as what it holds.
    pub(super) roomy: bool,
    /// Position and address.
    pub(super) placed: Vec<(usize, u64)>,
}

impl Demand<'_> {
    /// Tries a window of the wanted size in each of `gaps`, then (unless the user chose the size)
    /// whatever holds all.
    pub(super) fn choose(&self, gaps: &[Range]) -> Result<Chosen, PlaceError> {
        if self.held() == 0 && self.size.is_none() {
            return Ok(Chosen {
                roomy: true,
                ..Chosen::default()
            });
        }
        let wanted = self.wanted_size()?;
        if let Some(chosen) = gaps.iter().find_map(|g| self.in_full(g, wanted)) {
            return Ok(chosen);
        }
        let too_big = PlaceError::WindowDoesNotFit {
            size: wanted,
            limit: self.limit,
        };
        if self.size.is_some() {
            return Err(too_big);
        }
        // Blame the biggest BAR if there is not even a gap.
        let mut failed = self
            .items
            .first()
            .or(self.pinned.last().map(|p| &p.0))
            .copied();
        for gap in gaps {
            match self.squeezed(gap, wanted) {
                Ok(chosen) => return Ok(chosen),
                Err(item) => failed = item.or(failed),
            }
        }
        Err(failed.map_or(too_big, |item| PlaceError::NoRoom64 {
            bar: item.name(),
            needed: self.held(),
            limit: self.limit,
        }))
    }

    /// Bytes of all that the window is to hold.
    fn held(&self) -> u64 {
        let spans = self.items.iter().chain(self.pinned.iter().map(|p| &p.0));
        spans.fold(0, |sum, i| i.span().saturating_add(sum))
    }

    /// Twice what it holds, rounded up to a power of two, unless the user chose.
    fn wanted_size(&self) -> Result<u64, PlaceError> {
        let held = self.held();
        match self.size {
            Some(size) if size < held || size == 0 => {
                Err(PlaceError::WindowTooSmall { size, needed: held })
            }
            Some(size) => Ok(size.checked_next_multiple_of(PAGE).unwrap_or(size)),
            None => {
                let twice = held.saturating_mul(2).max(GIB);
                Ok(twice.checked_next_power_of_two().unwrap_or(u64::MAX))
            }
        }
    }

    /// The smallest range around the pinned places.
    fn hull(&self) -> Option<Range> {
        self.pinned.iter().map(|p| p.1).reduce(hull)
    }

    /// A window of `wanted` bytes, or more if the pinned places take more, in `gap`.
    fn in_full(&self, gap: &Range, wanted: u64) -> Option<Chosen> {
        let align = self.items.first().map_or(GIB, Item::span).max(GIB);
        let lowest = gap.start().checked_next_multiple_of(align)?;
        let window = match self.hull() {
            // Begin as near below the pinned places as alignment and gap allow, unless the
            // lowest window covers them anyway.
            Some(hull) if !Range::new(lowest, wanted)?.covers(&hull) => {
                let highest = hull.start().min(gap.end().saturating_sub(wanted));
                let start = (highest - highest % align).max(gap.start());
                let end = start.checked_add(wanted)?.max(hull.end());
                Some(Range::from_bounds(start, end)).filter(|w| w.covers(&hull))?
            }
            _ => Range::new(lowest, wanted)?,
        };
        if !gap.covers(&window) {
            return None;
        }
        let placed = self.fill(window).ok()?;
        Some(self.chosen(window, placed))
    }

    /// As much of `gap` as there is: the BAR that found no room (if it was one) otherwise.
    fn squeezed(&self, gap: &Range, wanted: u64) -> Result<Chosen, Option<Item>> {
        let pinned = self.hull();
        if pinned.is_some_and(|hull| !gap.covers(&hull)) {
            return Err(None);
        }
        let placed = self.fill(*gap)?;
        let ranges = placed.iter().zip(self.items).map(|(&(_, a), i)| i.range(a));
        let all = ranges.chain(pinned).reduce(hull).ok_or(None)?;
        let end = all.start().saturating_add(wanted).min(gap.end());
        let window = Range::from_bounds(all.start(), end.max(all.end()));
        Ok(self.chosen(window, placed))
    }

    /// Places the items in `window` around the pinned places.
    fn fill(&self, window: Range) -> Result<Vec<(usize, u64)>, Item> {
        let pinned: Vec<Range> = self.pinned.iter().map(|p| p.1).collect();
        take_all(&mut Space::new(window, &pinned), self.items)
    }

    fn chosen(&self, window: Range, placed: Vec<(usize, u64)>) -> Chosen {
        Chosen {
            window: Some(window),
            roomy: window.len() / 2 >= self.held(),
            placed,
        }
    }
}

/// The smallest range around both.
fn hull(a: Range, b: Range) -> Range {
    Range::from_bounds(a.start().min(b.start()), a.end().max(b.end()))
}
