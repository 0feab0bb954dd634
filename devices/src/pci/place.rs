//! Gives every BAR of every assigned device its guest-physical address, once, before the VM runs.
//!
//! Pure and deterministic: the same devices in the same order get the same addresses.
//!
//! Where a BAR goes:
//! * I/O BARs into the I/O window;
//! * 32-bit ones into the window below 4 GiB;
//! * 64-bit prefetchable ones into the 64-bit window above RAM and above 4 GiB, of whatever size:
//!   a Linux guest keeps them only there;
//! * 64-bit ones that are not prefetchable below 4 GiB as far as they are small
//!   ([`SMALL_BAR`]) and room is left, because that is where firmware puts them and every guest
//!   accepts them; else into the 64-bit window. Linux refuses a claim of such a BAR in a window
//!   that is described as prefetchable (`pci_find_parent_resource`), so **`_CRS` must describe the
//!   64-bit window as not prefetchable**; prefetchable BARs may lie in it all the same.
//!
//! Invariants of a [`Placement`]:
//! * every address is a multiple of the BAR's size, hence congruent to the BAR's own offsets
//!   modulo 1 GiB when the BAR is that big;
//! * BARs do not overlap, nor RAM, reserved ranges, unusable IO-virtual addresses, AMD's
//!   HyperTransport hole, or anything at or above the limit;
//! * no page holds BARs of two devices: what one device's driver maps is that device's only;
//! * the 64-bit window is one range that avoids all of the above too, so the guest may move BARs
//!   about in it; it is at least twice as big as what it holds unless
//!   [`Placement::roomy`] is false.

use super::bar::BarInfo;
use super::place_error::{Limit, Obstacle, PlaceError};
use super::place_item::{Item, take_all};
use super::place_window::Demand;
use super::space::Space;
use crate::range::Range;

/// No two devices share a page of this size.
pub const PAGE: u64 = 4096;
/// The most that a 64-bit BAR which is not prefetchable may have to be placed below 4 GiB. The
/// window there is 1 GiB or so for all devices, and NVMe, network and USB controllers stay below.
pub const SMALL_BAR: u64 = 64 << 20;
/// AMD's HyperTransport addresses: never memory on AMD hosts (AMD IOMMU specification, 2.1.2).
/// Avoided everywhere, so that a VM is laid out alike on all hosts.
pub const HT_HOLE: Range = Range::from_bounds(0xfd_0000_0000, 0x100_0000_0000);
const FOUR_GIB: u64 = 1 << 32;

/// One BAR to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceRequest {
    /// Which device, as the caller counts them.
    pub device: usize,
    /// The BAR.
    pub bar: BarInfo,
    /// The user wants it exactly there.
    pub fixed: Option<u64>,
}

/// The address space that there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Guest-physical addresses below 4 GiB for BARs.
    pub mmio32: Range,
    /// I/O ports for BARs.
    pub io: Range,
    /// Guest RAM.
    pub ram: Vec<Range>,
    /// What the IOMMU can map; `None` when no BAR is mapped there (no peer-to-peer).
    pub usable_iova: Option<Vec<Range>>,
    /// First guest-physical address that does not exist: 2 to the power of the lower of the
    /// host's MAXPHYADDR and what KVM gives its guests.
    pub address_limit: u64,
    /// More addresses to keep clear of.
    pub reserved: Vec<Range>,
    /// Bytes of the 64-bit window, when the user chose.
    pub mmio64_size: Option<u64>,
}

/// Where everything goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Device, BAR index and address, in the order of the requests.
    pub addresses: Vec<(usize, u8, u64)>,
    /// The window below 4 GiB, as given.
    pub mmio32: Range,
    /// The window above; `None` when nothing is in it.
    pub mmio64: Option<Range>,
    /// The 64-bit window is at least twice as big as what it holds. False: it works, but a guest
    /// that moves BARs about may find no room; worth a warning.
    pub roomy: bool,
}

impl Placement {
    /// The address of one BAR.
    pub fn address(&self, device: usize, index: u8) -> Option<u64> {
        let found = self
            .addresses
            .iter()
            .find(|a| (a.0, a.1) == (device, index));
        found.map(|a| a.2)
    }
}

/// Places all `requests`, or says which one cannot be and why.
pub fn place(requests: &[PlaceRequest], windows: &Windows) -> Result<Placement, PlaceError> {
    match Placer::new(requests, windows).run() {
        Err(error) => Err(blame(error, requests, windows)),
        done => done,
    }
}

/// Names the IOMMU as the obstacle when all would fit without it.
fn blame(error: PlaceError, requests: &[PlaceRequest], windows: &Windows) -> PlaceError {
    let (PlaceError::NoRoom64 { .. } | PlaceError::WindowDoesNotFit { .. }, Some(usable)) =
        (&error, &windows.usable_iova)
    else {
        return error;
    };
    let without = Windows {
        usable_iova: None,
        ..windows.clone()
    };
    if Placer::new(requests, &without).run().is_err() {
        return error;
    }
    let end = usable.iter().map(Range::end).max().unwrap_or(0);
    error.with_limit(Limit::Iommu(end.min(windows.address_limit)))
}

struct Placer<'a> {
    windows: &'a Windows,
    io: Space,
    low: Space,
    /// Above RAM and 4 GiB; never changed: each try at a window starts from it.
    high: Space,
    /// All requests, biggest first.
    items: Vec<Item>,
    requests: &'a [PlaceRequest],
    addresses: Vec<Option<u64>>,
    /// User-chosen places: who has which pages.
    fixed: Vec<(Item, Range)>,
}

impl<'a> Placer<'a> {
    fn new(requests: &'a [PlaceRequest], windows: &'a Windows) -> Self {
        let mut blocked = vec![HT_HOLE];
        blocked.extend(windows.ram.iter().chain(&windows.reserved));
        let mut unusable = Space::new(Range::from_bounds(0, u64::MAX), &[]);
        if let Some(usable) = &windows.usable_iova {
            usable.iter().for_each(|range| unusable.cut(range));
            blocked.extend(unusable.ranges());
        }
        let ram_end = windows.ram.iter().map(Range::end).max().unwrap_or(0);
        let high = Range::from_bounds(ram_end.max(FOUR_GIB), windows.address_limit);
        let mut items: Vec<Item> = (requests.iter().enumerate())
            .map(|(at, r)| Item {
                at,
                device: r.device,
                bar: r.bar,
            })
            .collect();
        items.sort_by_key(|i| (std::cmp::Reverse(i.bar.size), i.at));
        Self {
            windows,
            io: Space::new(windows.io, &[]),
            low: Space::new(windows.mmio32, &blocked),
            high: Space::new(high, &blocked),
            items,
            requests,
            addresses: vec![None; requests.len()],
            fixed: Vec::new(),
        }
    }

    fn run(mut self) -> Result<Placement, PlaceError> {
        self.pin()?;
        let open = |s: &Self, want: fn(&BarInfo) -> bool| -> Vec<Item> {
            let pending = |i: &&Item| s.addresses.get(i.at) == Some(&None) && want(&i.bar);
            s.items.iter().filter(pending).copied().collect()
        };
        let io = open(&self, BarInfo::is_io);
        let placed = take_all(&mut self.io, &io).map_err(|i| PlaceError::NoPorts {
            bar: i.name(),
            window: self.windows.io,
        })?;
        self.note(placed);

        let low = open(&self, |b| !b.is_io() && !b.is_64bit());
        let placed = take_all(&mut self.low, &low).map_err(|i| PlaceError::NoRoom32 {
            bar: i.name(),
            window: self.windows.mmio32,
        })?;
        self.note(placed);

        let small = open(&self, |b| {
            b.is_64bit() && !b.prefetchable() && b.size <= SMALL_BAR
        });
        for item in small {
            let placed = take_all(&mut self.low, &[item]).unwrap_or_default();
            self.note(placed);
        }
        let wide = open(&self, BarInfo::is_64bit);
        let demand = Demand {
            items: &wide,
            pinned: &self.pinned_high(),
            size: self.windows.mmio64_size,
            limit: Limit::Processor(self.windows.address_limit),
        };
        let chosen = demand.choose(self.high.ranges())?;
        self.note(chosen.placed);
        Ok(Placement {
            addresses: self.result(),
            mmio32: self.windows.mmio32,
            mmio64: chosen.window,
            roomy: chosen.roomy,
        })
    }

    fn note(&mut self, placed: Vec<(usize, u64)>) {
        for (at, address) in placed {
            if let Some(slot) = self.addresses.get_mut(at) {
                *slot = Some(address);
            }
        }
    }

    fn result(&self) -> Vec<(usize, u8, u64)> {
        let pairs = self.requests.iter().zip(&self.addresses);
        let done = |(r, a): (&PlaceRequest, &Option<u64>)| Some((r.device, r.bar.index, (*a)?));
        pairs.filter_map(done).collect()
    }

    /// Settles the BARs whose place the user chose, in the order of the requests.
    fn pin(&mut self) -> Result<(), PlaceError> {
        for (at, request) in self.requests.iter().enumerate() {
            let Some(address) = request.fixed else {
                continue;
            };
            let item = Item {
                at,
                device: request.device,
                bar: request.bar,
            };
            let range = self
                .check_fixed(&item, address)
                .map_err(|obstacle| PlaceError::Fixed {
                    bar: item.name(),
                    address,
                    obstacle,
                })?;
            self.fixed.push((item, range));
            self.note(vec![(at, address)]);
        }
        for (item, range) in &self.fixed {
            let space = if item.bar.is_io() {
                &mut self.io
            } else {
                &mut self.low
            };
            space.cut(range);
        }
        Ok(())
    }

    /// The pages (or ports) that `item` takes at `address`, if it can be there.
    fn check_fixed(&self, item: &Item, address: u64) -> Result<Range, Obstacle> {
        let bar = &item.bar;
        if address == 0 || !address.is_multiple_of(bar.alignment().max(1)) {
            return Err(Obstacle::Misaligned);
        }
        let exact = Range::new(address, bar.size).filter(|r| r.end() <= bar.limit());
        let exact = exact.ok_or(Obstacle::TooHigh { limit: bar.limit() })?;
        let pages = item.range(address);
        if bar.is_io() {
            if !self.io.covers(&exact) {
                return Err(Obstacle::OutsideWindow {
                    window: self.windows.io,
                });
            }
        } else if !(self.low.covers(&pages) || bar.is_64bit() && self.high.covers(&pages)) {
            return Err(self.why_not(&pages));
        }
        match self.clash(item, &exact, &pages) {
            Some(other) => Err(Obstacle::Bar(other.name())),
            None => Ok(pages),
        }
    }

    /// The BAR placed by the user that is in the way of `item` at `exact`, in `pages`. Two BARs
    /// of one device may share a page, as they may on the host.
    fn clash(&self, item: &Item, exact: &Range, pages: &Range) -> Option<Item> {
        let hit = |(other, taken): &&(Item, Range)| {
            if other.bar.is_io() != item.bar.is_io() {
                return false;
            }
            if other.device != item.device {
                return taken.overlaps(pages);
            }
            let address = self.addresses.get(other.at).copied().flatten();
            let there = address.and_then(|a| Range::new(a, other.bar.size));
            there.is_some_and(|r| r.overlaps(exact))
        };
        self.fixed.iter().find(hit).map(|f| f.0)
    }

    /// Why a memory BAR cannot be at `pages`.
    fn why_not(&self, pages: &Range) -> Obstacle {
        let w = self.windows;
        let hit = |list: &[Range]| list.iter().find(|r| r.overlaps(pages)).copied();
        if let Some(ram) = hit(&w.ram) {
            Obstacle::Ram(ram)
        } else if let Some(reserved) = hit(&w.reserved).or_else(|| hit(&[HT_HOLE])) {
            Obstacle::Reserved(reserved)
        } else if pages.end() > w.address_limit {
            Obstacle::TooHigh {
                limit: w.address_limit,
            }
        } else if w
            .usable_iova
            .as_ref()
            .is_some_and(|u| !u.iter().any(|r| r.covers(pages)))
        {
            Obstacle::Iommu
        } else {
            Obstacle::OutsideWindow { window: w.mmio32 }
        }
    }

    /// The BARs above RAM whose place the user chose.
    fn pinned_high(&self) -> Vec<(Item, Range)> {
        let high = |f: &&(Item, Range)| !f.0.bar.is_io() && self.high.covers(&f.1);
        self.fixed.iter().filter(high).copied().collect()
    }
}

#[cfg(test)]
#[path = "place_tests.rs"]
mod tests;
