//! Free address space, handed out first-fit from the bottom.
//!
//! Invariant: the free ranges are ascending, disjoint and not empty; what was taken once is never
//! handed out again.

use crate::range::Range;

/// Address space with holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Space {
    free: Vec<Range>,
}

impl Space {
    /// All of `bounds` but `blocked`.
    pub(super) fn new(bounds: Range, blocked: &[Range]) -> Self {
        let mut space = Self {
            free: vec![bounds].into_iter().filter(|r| !r.is_empty()).collect(),
        };
        for hole in blocked {
            space.cut(hole);
        }
        space
    }

    /// The free ranges, ascending.
    pub(super) fn ranges(&self) -> &[Range] {
        &self.free
    }

    /// Whether all of `range` is free.
    pub(super) fn covers(&self, range: &Range) -> bool {
        self.free.iter().any(|f| f.covers(range))
    }

    /// Takes `range` out, whether it was free or not.
    pub(super) fn cut(&mut self, range: &Range) {
        if range.is_empty() {
            return;
        }
        let parts = |free: &Range| {
            if !free.overlaps(range) {
                return [Some(*free), None];
            }
            let below = Range::from_bounds(free.start(), range.start());
            let above = Range::from_bounds(range.end(), free.end());
            [below, above].map(|r| (!r.is_empty()).then_some(r))
        };
        self.free = self.free.iter().flat_map(parts).flatten().collect();
    }

    /// Takes `len` bytes at the lowest free multiple of `align`; neither may be 0.
    pub(super) fn take(&mut self, len: u64, align: u64) -> Option<u64> {
        let fit = |free: &Range| {
            let start = free.start().checked_next_multiple_of(align)?;
            let range = Range::new(start, len)?;
            free.covers(&range).then_some(range)
        };
        let range = self.free.iter().find_map(fit)?;
        self.cut(&range);
        Some(range.start())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, end: u64) -> Range {
        Range::from_bounds(start, end)
    }

    #[test]
    fn holes_split_what_is_free() {
        let mut space = Space::new(
            range(0x1000, 0x9000),
            &[range(0, 0x1800), range(0x4000, 0x5000)],
        );
        assert_eq!(
            space.ranges(),
            [range(0x1800, 0x4000), range(0x5000, 0x9000)]
        );
        assert_eq!(space.take(0x1000, 0x1000), Some(0x2000));
        assert_eq!(space.take(0x2000, 0x1000), Some(0x5000));
        assert_eq!(space.take(0x800, 0x800), Some(0x1800));
        assert!(space.covers(&range(0x3000, 0x4000)) && !space.covers(&range(0x6fff, 0x8000)));
        assert_eq!(space.take(0x8000, 0x1000), None);
    }

    #[test]
    fn the_top_of_the_address_space_does_not_overflow() {
        let mut space = Space::new(range(u64::MAX - 0xfff, u64::MAX), &[]);
        assert_eq!(space.take(0x1000, 0x1000), None);
        assert_eq!(space.take(1, 1 << 63), None);
        assert_eq!(Space::new(range(5, 5), &[]).ranges(), []);
    }
}
