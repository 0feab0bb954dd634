//! The list of extended capabilities: filtered by the policy of [`super::caps`].
//!
//! Invariant: the list always starts at 0x100. When what is there is hidden and something behind
//! it is not, a null capability (id 0, version 0) stands in its place, as Linux' vfio-pci does.

use super::caps::{AnyCapId, CapPlace, Capabilities, room_behind};
use super::image::{read_u16, read_u32, write_u32};
use super::spec::{CONFIG_SIZE, ExtCapId, ExtHeader, FIRST_EXT_CAP};

/// Vendor id of the CXL consortium: its DVSECs make Linux take the device for a CXL one.
const VENDOR_CXL: u16 = 0x1e98;

/// Filters the extended list of `image` (4096 bytes) in place, adding to `caps`. Without a PCI
/// Express capability the function has no extended space: it is zeroed.
pub(super) fn filter(image: &mut [u8], caps: &mut Capabilities) {
    if caps.pcie.is_none() {
        if let Some(space) = image.get_mut(usize::from(FIRST_EXT_CAP)..) {
            space.fill(0);
        }
        return;
    }
    let list = walk(image);
    if list.is_empty() {
        // Whatever is there is not a capability; all ones would confuse a careless guest.
        write_u32(image, FIRST_EXT_CAP, 0);
    }
    let mut kept = Vec::new();
    for &(header, offset) in &list {
        let room = room_behind(offset, list.iter().map(|c| c.1), CONFIG_SIZE as u16);
        let place = |len: u16| CapPlace {
            id: AnyCapId::Extended(header.id()),
            offset,
            len: len.min(room),
        };
        match shown_len(image, header.id(), offset) {
            Some((least, all)) if least <= room => kept.push((header, place(all))),
            _ => caps
                .hidden
                .push(place(hidden_len(header.id()).unwrap_or(room))),
        }
    }
    caps.blank_hidden(image);
    relink(image, &kept);
    caps.kept.extend(kept.iter().map(|&(_, place)| place));
}

/// Where capability `id` is in an image of 4096 bytes as the device has it.
pub(crate) fn find(image: &[u8], id: ExtCapId) -> Option<u16> {
    let list = walk(image);
    let found = list.iter().find(|(header, _)| header.id() == id);
    found.map(|(_, offset)| *offset)
}

/// The list as it stands: each header and offset once, in order.
fn walk(image: &[u8]) -> Vec<(ExtHeader, u16)> {
    let mut list = Vec::new();
    // One bit for each dword of the extended space: the list may be as long as 960 entries.
    let mut seen = [false; CONFIG_SIZE / 4];
    let mut offset = FIRST_EXT_CAP;
    while offset >= FIRST_EXT_CAP {
        let header = ExtHeader(read_u32(image, offset));
        match seen.get_mut(usize::from(offset / 4)) {
            Some(seen) if !*seen => *seen = true,
            _ => break,
        }
        if header.0 == 0 || header.0 == u32::MAX {
            break;
        }
        list.push((header, offset));
        offset = header.next();
    }
    list
}

/// Bytes of the capability if it can be shown: what must be there, and all of it.
fn shown_len(image: &[u8], id: ExtCapId, offset: u16) -> Option<(u16, u16)> {
    // Both vendor-specific kinds say their length in the top bits of the second dword.
    let own_len = (read_u32(image, offset + 4) >> 20) as u16;
    match id {
        ExtCapId::SERIAL => Some((12, 12)),
        ExtCapId::VENDOR if own_len >= 8 => Some((8, own_len)),
        ExtCapId::DVSEC if own_len >= 10 && read_u16(image, offset + 4) != VENDOR_CXL => {
            Some((10, own_len))
        }
        _ => None,
    }
}

/// Bytes of a capability that is always hidden, for those whose length is known and fixed.
fn hidden_len(id: ExtCapId) -> Option<u16> {
    match id {
        ExtCapId::NULL => Some(4),
        ExtCapId::AER => Some(0x48),
        ExtCapId::POWER_BUDGET | ExtCapId::PRI | ExtCapId::L1SS => Some(0x10),
        ExtCapId::ARI | ExtCapId::ATS | ExtCapId::LTR | ExtCapId::PASID => Some(8),
        ExtCapId::SRIOV => Some(0x40),
        ExtCapId::PTM | ExtCapId::DATA_LINK => Some(12),
        _ => None,
    }
}

fn relink(image: &mut [u8], kept: &[(ExtHeader, CapPlace)]) {
    let Some((_, first)) = kept.first() else {
        return;
    };
    if first.offset != FIRST_EXT_CAP {
        let null = ExtHeader::new(ExtCapId::NULL, 0, first.offset);
        write_u32(image, FIRST_EXT_CAP, null.0);
    }
    let nexts = kept.iter().skip(1).map(|(_, next)| next.offset).chain([0]);
    for ((header, place), next) in kept.iter().zip(nexts) {
        write_u32(image, place.offset, header.with_next(next).0);
    }
}
