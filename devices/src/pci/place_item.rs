//! One BAR on its way through the placement.

use super::bar::BarInfo;
use super::place::PAGE;
use super::place_error::Bar;
use super::space::Space;
use crate::range::Range;

/// A request on its way.
#[derive(Clone, Copy)]
pub(super) struct Item {
    /// Position among the requests.
    pub(super) at: usize,
    /// Which device.
    pub(super) device: usize,
    /// The BAR.
    pub(super) bar: BarInfo,
}

impl Item {
    /// Bytes to set aside: sub-page memory BARs get a page each.
    pub(super) fn span(&self) -> u64 {
        if self.bar.is_io() {
            self.bar.size.max(1)
        } else {
            self.bar.size.max(PAGE)
        }
    }

    /// For errors.
    pub(super) fn name(&self) -> Bar {
        Bar {
            device: self.device,
            bar: self.bar.index,
            size: self.bar.size,
        }
    }

    /// The pages (or ports) that it takes at `address`.
    pub(super) fn range(&self, address: u64) -> Range {
        let start = if self.bar.is_io() {
            address
        } else {
            address & !(PAGE - 1)
        };
        Range::from_bounds(start, start.saturating_add(self.span()))
    }
}

/// Takes room for `items` in their order (biggest first, so that nothing is lost to alignment):
/// the position and address of each, or the first that found no room.
pub(super) fn take_all(space: &mut Space, items: &[Item]) -> Result<Vec<(usize, u64)>, Item> {
    let take = |i: &Item| {
        let address = space.take(i.span(), i.span()).ok_or(*i)?;
        Ok((i.at, address))
    };
    items.iter().map(take).collect()
}
