//! What must change in memslots and IOMMU mappings when a guest has written COMMAND or a BAR.
//! Pure: [`answers`] says which BAR is decoded where, [`plan`] the least ordered set of operations
//! that gets there. `commit.rs` carries them out.
//!
//! The rules, and what they avoid:
//! * Decode off keeps slot and IOVA: turning it on again costs nothing. (`strict`: the slot goes.)
//! * Decoded at a new legal address: the slot moves, the new IOVA is mapped, the old one stays:
//!   unmapping is what a guest would wait for (45 ms/GiB on type1).
//! * Decoded at an illegal address: the slot goes, so that the BAR answers nowhere.
//! * Where unmapping is cheap (dma-buf), a decoded BAR keeps no IOVA but that where it answers.
//! * Where a decoded BAR answers, no stale install of another BAR may: it is evicted first.
//! * Of two decoded BARs that overlap the earlier stays and the later answers nowhere.

use crate::range::Range;

/// Stale IOMMU mappings beyond this many are unmapped, oldest first (type1 allows 65535 in all).
pub const MAX_STALE_IOVAS: usize = 1024;

/// A part of a BAR that is mmapped and can be put into a memslot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AreaState<S> {
    /// BAR-relative.
    pub range: Range,
    /// The memslot that shows it, and at which guest-physical address.
    pub slot: Option<(S, u64)>,
    /// IO-virtual addresses that map it.
    pub iovas: Vec<Iova>,
}

/// An IOMMU mapping of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iova {
    /// IO-virtual address of the area's first byte.
    pub address: u64,
    /// Grows with every mapping that is made.
    pub age: u64,
}

/// A memory BAR with what the guest programmed and what is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BarState<S> {
    /// Bytes, a power of two.
    pub size: u64,
    /// The address in the guest's BAR register, masked by size.
    pub programmed: u64,
    /// The guest has memory decode on.
    pub decode: bool,
    /// When it came to be decoded at `programmed`; orders overlapping BARs.
    pub since: u64,
    /// Decode off takes the slot away.
    pub strict: bool,
    /// Other devices may reach it: it is mapped in the IOMMU where it answers.
    pub peer_to_peer: bool,
    /// The mmapped parts, ascending.
    pub areas: Vec<AreaState<S>>,
}

impl<S> BarState<S> {
    /// Where the BAR lies by its register.
    fn decoded_range(&self) -> Option<Range> {
        Range::new(self.programmed, self.size)
    }
}

/// Names an area: index of the BAR in the list, index of the area in the BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AreaId {
    /// Index into the list of BARs.
    pub bar: usize,
    /// Index into [`BarState::areas`].
    pub area: usize,
}

/// One step towards the new state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Remove the area's slot.
    ClearSlot(AreaId),
    /// Move the area's slot to a guest-physical address.
    MoveSlot(AreaId, u64),
    /// Make a slot for the area at a guest-physical address.
    SetSlot(AreaId, u64),
    /// Unmap the area at an IO-virtual address.
    Unmap(AreaId, u64),
    /// Map the area at an IO-virtual address.
    Map(AreaId, u64),
}

impl Op {
    /// Whether it changes a mapping of the IOMMU.
    pub fn is_iommu(&self) -> bool {
        matches!(self, Self::Unmap(..) | Self::Map(..))
    }
}

/// For each BAR the guest-physical address at which it answers, if any. A BAR answers when its
/// decode is on, it lies whole inside one of the `windows` (which exclude RAM, ECAM and the
/// interrupt pages), and no BAR that was there before overlaps it.
pub fn answers<S>(bars: &[BarState<S>], windows: &[Range]) -> Vec<Option<u64>> {
    let mut order: Vec<usize> = (0..bars.len()).collect();
    order.sort_by_key(|&i| bars.get(i).map(|bar| bar.since));
    let mut taken: Vec<Range> = Vec::new();
    let mut result = vec![None; bars.len()];
    for i in order {
        let (Some(bar), Some(slot)) = (bars.get(i), result.get_mut(i)) else {
            continue;
        };
        let Some(range) = bar.decoded_range().filter(|_| bar.decode) else {
            continue;
        };
        let legal = windows.iter().any(|w| w.covers(&range));
        if legal && !taken.iter().any(|t| t.overlaps(&range)) {
            taken.push(range);
            *slot = Some(range.start());
        }
    }
    result
}

/// The operations that turn what is installed into what `answers` demands, in order: slots that
/// must go, slots that move or come, IO-virtual addresses whose range is needed, new mappings.
pub fn plan<S>(bars: &[BarState<S>], answers: &[Option<u64>], cheap_unmap: bool) -> Vec<Op> {
    let mut planner = Planner::new(bars, answers);
    planner.clear_slots();
    planner.place_slots();
    planner.map_iovas(cheap_unmap);
    planner.ops
}

fn areas<S>(bars: &[BarState<S>]) -> impl Iterator<Item = (AreaId, &BarState<S>, &AreaState<S>)> {
    bars.iter().enumerate().flat_map(|(b, bar)| {
        let numbered = bar.areas.iter().enumerate();
        numbered.map(move |(a, area)| (AreaId { bar: b, area: a }, bar, area))
    })
}

fn at(start: u64, area: &Range) -> Range {
    Range::new(start, area.len()).unwrap_or(Range::from_bounds(0, 0))
}

struct Planner<'a, S> {
    bars: &'a [BarState<S>],
    answers: &'a [Option<u64>],
    /// Where BARs will answer, whole BARs: nothing else may be installed there.
    decoded: Vec<(usize, Range)>,
    /// Installed slots as the operations so far leave them.
    slots: Vec<(AreaId, Range)>,
    ops: Vec<Op>,
}

impl<'a, S> Planner<'a, S> {
    fn new(bars: &'a [BarState<S>], answers: &'a [Option<u64>]) -> Self {
        let decoded = answers.iter().enumerate().filter_map(|(i, answer)| {
            let range = Range::new((*answer)?, bars.get(i)?.size)?;
            Some((i, range))
        });
        let slots = areas(bars).filter_map(|(id, _, area)| {
            let gpa = area.slot.as_ref()?.1;
            Some((id, at(gpa, &area.range)))
        });
        Self {
            bars,
            answers,
            decoded: decoded.collect(),
            slots: slots.collect(),
            ops: Vec::new(),
        }
    }

    fn answer(&self, bar: usize) -> Option<u64> {
        self.answers.get(bar).copied().flatten()
    }

    /// Slots of BARs that answer nowhere now, and stale ones where another BAR answers.
    fn clear_slots(&mut self) {
        for (id, range) in self.slots.clone() {
            let Some(bar) = self.bars.get(id.bar) else {
                continue;
            };
            if self.answer(id.bar).is_some() {
                continue;
            }
            let hidden = bar.decode || bar.strict;
            if hidden || self.decoded.iter().any(|(_, d)| d.overlaps(&range)) {
                self.clear(id);
            }
        }
    }

    fn clear(&mut self, id: AreaId) {
        self.slots.retain(|(other, _)| *other != id);
        self.ops.push(Op::ClearSlot(id));
    }

    fn installed(&self, id: AreaId) -> Option<Range> {
        let slot = self.slots.iter().find(|(other, _)| *other == id);
        slot.map(|(_, range)| *range)
    }

    /// Slots of BARs that answer: where they are not yet there, moved or made. A slot in the way
    /// belongs to a BAR that will move as well (a swap): it goes first and comes back at its turn.
    fn place_slots(&mut self) {
        for (id, _, area) in areas(self.bars) {
            let Some(answer) = self.answer(id.bar) else {
                continue;
            };
            let wanted = at(answer + area.range.start(), &area.range);
            if self.installed(id) == Some(wanted) {
                continue;
            }
            let blocking: Vec<AreaId> = self
                .slots
                .iter()
                .filter(|(other, range)| *other != id && range.overlaps(&wanted))
                .map(|(other, _)| *other)
                .collect();
            for other in blocking {
                self.clear(other);
            }
            let op = match self.installed(id) {
                Some(_) => Op::MoveSlot(id, wanted.start()),
                None => Op::SetSlot(id, wanted.start()),
            };
            self.slots.retain(|(other, _)| *other != id);
            self.slots.push((id, wanted));
            self.ops.push(op);
        }
    }

    /// Unmaps stale IO-virtual addresses where another BAR answers now (or all that a decoded BAR
    /// has left, where that is cheap), then the oldest beyond the limit; maps what answers and is
    /// not mapped there.
    fn map_iovas(&mut self, cheap_unmap: bool) {
        let mut stale = Vec::new();
        let mut maps = Vec::new();
        for (id, bar, area) in areas(self.bars) {
            let here = self.answer(id.bar).map(|a| a + area.range.start());
            let here = here.filter(|_| bar.peer_to_peer);
            let mapped = area.iovas.iter().any(|iova| Some(iova.address) == here);
            maps.extend(here.filter(|_| !mapped).map(|iova| Op::Map(id, iova)));
            let others = area.iovas.iter().filter(|iova| Some(iova.address) != here);
            stale.extend(others.map(|iova| (iova.age, id, at(iova.address, &area.range))));
        }
        let (evicted, mut kept): (Vec<_>, Vec<_>) =
            stale.into_iter().partition(|(_, id, range)| {
                let moved = self.bars.get(id.bar).is_some_and(|bar| bar.decode);
                (cheap_unmap && moved) || self.answers_for_another(id.bar, range)
            });
        kept.sort_unstable_by_key(|(age, ..)| *age);
        kept.truncate(kept.len().saturating_sub(MAX_STALE_IOVAS));
        let unmaps = evicted.into_iter().chain(kept);
        let unmaps = unmaps.map(|(_, id, range)| Op::Unmap(id, range.start()));
        self.ops.extend(unmaps.chain(maps));
    }

    /// Whether a BAR other than `bar` answers inside `range`. (One BAR never overlaps an earlier
    /// place of its own: both are multiples of its size.)
    fn answers_for_another(&self, bar: usize, range: &Range) -> bool {
        let mut others = self.decoded.iter().filter(|(other, _)| *other != bar);
        others.any(|(_, decoded)| decoded.overlaps(range))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const WINDOW: Range = Range::from_bounds(64 * GIB, 128 * GIB);

    fn bar(programmed: u64, decode: bool, since: u64, installed: Option<u64>) -> BarState<u32> {
        let area = AreaState {
            range: Range::from_bounds(0, GIB),
            slot: installed.map(|gpa| (since as u32, gpa)),
            iovas: installed
                .map(|address| Iova { address, age: 0 })
                .into_iter()
                .collect(),
        };
        BarState {
            size: GIB,
            programmed,
            decode,
            since,
            strict: false,
            peer_to_peer: true,
            areas: vec![area],
        }
    }

    fn id(bar: usize) -> AreaId {
        AreaId { bar, area: 0 }
    }

    fn ops(bars: &[BarState<u32>]) -> Vec<Op> {
        plan(bars, &answers(bars, &[WINDOW]), false)
    }

    /// What there is to do where unmapping is cheap.
    fn cheap_ops(bars: &[BarState<u32>]) -> Vec<Op> {
        plan(bars, &answers(bars, &[WINDOW]), true)
    }

    #[test]
    fn decode_on_where_installed_costs_nothing_and_so_does_off() {
        for decode in [false, true] {
            assert!(ops(&[bar(64 * GIB, decode, 1, Some(64 * GIB))]).is_empty());
        }
    }

    #[test]
    fn strict_decode_off_takes_the_slot_and_keeps_the_iova() {
        let mut b = bar(64 * GIB, false, 1, Some(64 * GIB));
        b.strict = true;
        assert_eq!(ops(&[b]), [Op::ClearSlot(id(0))]);
    }

    #[test]
    fn a_move_moves_the_slot_maps_the_new_iova_and_keeps_the_old() {
        let b = bar(70 * GIB, true, 1, Some(64 * GIB));
        assert_eq!(
            ops(&[b]),
            [Op::MoveSlot(id(0), 70 * GIB), Op::Map(id(0), 70 * GIB)]
        );
    }

    #[test]
    fn where_unmapping_is_cheap_a_decoded_bar_leaves_nothing_behind() {
        let moved = bar(70 * GIB, true, 1, Some(64 * GIB));
        assert_eq!(
            cheap_ops(&[moved]),
            [
                Op::MoveSlot(id(0), 70 * GIB),
                Op::Unmap(id(0), 64 * GIB),
                Op::Map(id(0), 70 * GIB)
            ]
        );
        let nowhere = bar(0, true, 1, Some(64 * GIB));
        assert_eq!(
            cheap_ops(&[nowhere]),
            [Op::ClearSlot(id(0)), Op::Unmap(id(0), 64 * GIB)]
        );
        let asleep = bar(0, false, 1, Some(64 * GIB));
        assert!(cheap_ops(&[asleep]).is_empty());
    }

    #[test]
    fn illegal_addresses_answer_nowhere_and_unmap_nothing() {
        for address in [0, GIB, 128 * GIB, 0xffff_ffff_c000_0000] {
            let b = bar(address, true, 1, Some(64 * GIB));
            assert_eq!(answers(std::slice::from_ref(&b), &[WINDOW]), [None]);
            assert_eq!(ops(&[b]), [Op::ClearSlot(id(0))], "{address:#x}");
        }
    }

    #[test]
    fn a_decoded_bar_evicts_the_stale_install_of_another() {
        let stale = bar(0, false, 1, Some(64 * GIB));
        let new = bar(64 * GIB, true, 2, Some(80 * GIB));
        assert_eq!(
            ops(&[stale, new]),
            [
                Op::ClearSlot(id(0)),
                Op::MoveSlot(id(1), 64 * GIB),
                Op::Unmap(id(0), 64 * GIB),
                Op::Map(id(1), 64 * GIB),
            ]
        );
    }

    #[test]
    fn of_two_overlapping_bars_the_earlier_stays_and_the_later_answers_nowhere() {
        let first = bar(64 * GIB, true, 1, Some(64 * GIB));
        let second = bar(64 * GIB, true, 2, Some(65 * GIB));
        assert_eq!(
            answers(&[first.clone(), second.clone()], &[WINDOW]),
            [Some(64 * GIB), None]
        );
        assert_eq!(ops(&[first, second]), [Op::ClearSlot(id(1))]);
    }

    #[test]
    fn a_swap_evicts_before_it_installs() {
        let a = bar(65 * GIB, true, 1, Some(64 * GIB));
        let b = bar(64 * GIB, true, 2, Some(65 * GIB));
        assert_eq!(
            ops(&[a, b]),
            [
                Op::ClearSlot(id(1)),
                Op::MoveSlot(id(0), 65 * GIB),
                Op::SetSlot(id(1), 64 * GIB),
                Op::Unmap(id(0), 64 * GIB),
                Op::Unmap(id(1), 65 * GIB),
                Op::Map(id(0), 65 * GIB),
                Op::Map(id(1), 64 * GIB),
            ]
        );
    }

    #[test]
    fn without_peer_to_peer_nothing_is_mapped() {
        let mut b = bar(70 * GIB, true, 1, None);
        b.peer_to_peer = false;
        assert_eq!(ops(&[b]), [Op::SetSlot(id(0), 70 * GIB)]);
    }

    #[test]
    fn stale_iovas_beyond_the_limit_go_oldest_first() {
        let mut b = bar(64 * GIB, true, 1, Some(64 * GIB));
        let stale = (1..=MAX_STALE_IOVAS as u64 + 2).rev();
        b.areas[0].iovas.extend(stale.map(|age| Iova {
            address: (200 + age) * GIB,
            age,
        }));
        assert_eq!(
            ops(&[b]),
            [Op::Unmap(id(0), 201 * GIB), Op::Unmap(id(0), 202 * GIB)]
        );
    }
}
