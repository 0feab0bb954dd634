//! A half-open range of 64-bit addresses, used for guest-physical, IO-virtual and BAR-relative
//! addresses alike.
//!
//! Invariant: `start + len` does not exceed 2^64 - 1, so that [`Range::end`] always exists.

use std::fmt;

/// Addresses from `start` up to, not including, `start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Range {
    start: u64,
    len: u64,
}

impl Range {
    /// A range of `len` bytes at `start`; `None` when it would reach past the last address.
    pub const fn new(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(_) => Some(Self { start, len }),
            None => None,
        }
    }

    /// The range from `start` up to, not including, `end`; empty when `end` is not above `start`.
    pub const fn from_bounds(start: u64, end: u64) -> Self {
        Self {
            start,
            len: end.saturating_sub(start),
        }
    }

    /// First address.
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// First address behind the range.
    pub const fn end(&self) -> u64 {
        self.start + self.len
    }

    /// Bytes.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range holds no address.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `address` lies inside.
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.len
    }

    /// Whether all of `other` lies inside.
    pub const fn covers(&self, other: &Range) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }

    /// Whether the two share an address.
    pub const fn overlaps(&self, other: &Range) -> bool {
        self.start < other.end() && other.start < self.end() && self.len != 0 && other.len != 0
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            write!(f, "nothing at {:#x}", self.start)
        } else {
            write!(f, "{:#x}-{:#x}", self.start, self.end() - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_past_the_last_address_does_not_exist() {
        assert!(Range::new(u64::MAX, 1).is_none());
        assert!(Range::new(u64::MAX - 1, 1).is_some());
    }

    #[test]
    fn touching_ranges_do_not_overlap() {
        let a = Range::from_bounds(0x1000, 0x2000);
        let b = Range::from_bounds(0x2000, 0x3000);
        assert!(!a.overlaps(&b) && !b.overlaps(&a));
        assert!(a.overlaps(&Range::from_bounds(0x1fff, 0x2001)));
        assert!(!a.overlaps(&Range::from_bounds(0x1800, 0x1800)));
    }
}
