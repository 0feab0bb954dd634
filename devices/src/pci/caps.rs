//! Capabilities: which ones of a device's the guest sees, and where.
//!
//! The policy is "only what works". A capability is shown when the guest can use it through what
//! is emulated or forwarded, and hidden when it would make the guest program something that does
//! not exist for it, or that belongs to the host:
//!
//! | shown | why |
//! |---|---|
//! | power management, MSI, MSI-X, PCI Express | emulated |
//! | vendor-specific (both lists), serial number, DVSEC but CXL's, PCI-X, SATA | registers without effect on the host; drivers look for them |
//! | vital product data | the host's kernel carries each access out and waits for the device (`vfio_vpd_config_write`); both its registers must be forwarded |
//!
//! | hidden | why |
//! |---|---|
//! | SR-IOV, resizable BAR | the guest would program BARs that do not exist |
//! | ATS, PRI, PASID, ACS, ARI, TPH | need the host's IOMMU, or name bus numbers and processors of the host |
//! | AER, DPC, virtual channels, LTR, L1 substates, PTM, link-level ones | belong to the link, which the host owns; error messages do not reach the guest |
//! | AF | its reset would reach the device behind the emulated COMMAND; PCI Express' own is intercepted |
//! | DOE, enhanced allocation, whatever is unknown | not emulated |
//!
//! Invariants after [`filter`]:
//! * both lists end, visit exactly [`Capabilities::kept`], and no two kept capabilities overlap,
//! * the bytes of hidden capabilities are zero, other bytes are as they were,
//! * the work is bounded by the size of the image, whatever its contents (loops, pointers into
//!   the header or into another capability, all-ones).
//!
//! Sources: PCIe 6.0, 7.5.1.1.11 and 7.6; Linux `drivers/vfio/pci/vfio_pci_config.c`.

use std::fmt;

use super::ext_caps;
use super::image::{read_u8, read_u16, read_u32, write, write_u8, write_u16};
use super::spec::{
    BAR_COUNT, CONFIG_SIZE, CapId, DevCap, ExtCapId, FIRST_CAP, LEGACY_CONFIG_SIZE, MsiControl,
    MsixControl, PcieFlags, PortType, Reg, Status, msix, pcie, pm,
};

/// A capability of either list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AnyCapId {
    /// Of the list at 0x34.
    Standard(CapId),
    /// Of the list at 0x100.
    Extended(ExtCapId),
}

impl fmt::Display for AnyCapId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Standard(id) => write!(f, "{id}"),
            Self::Extended(id) => write!(f, "{id} (extended)"),
        }
    }
}

/// Where a capability is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CapPlace {
    /// Which one.
    pub id: AnyCapId,
    /// Offset in configuration space, a multiple of 4.
    pub offset: u16,
    /// Bytes, cut short where another capability begins.
    pub len: u16,
}

impl CapPlace {
    /// First byte behind it.
    pub const fn end(&self) -> u16 {
        self.offset + self.len
    }

    /// Whether the byte at `offset` is part of it.
    pub const fn contains(&self, offset: u16) -> bool {
        offset >= self.offset && offset < self.end()
    }
}

/// The power management capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmCap {
    /// Offset in configuration space.
    pub offset: u16,
}

/// The MSI capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsiCap {
    /// Offset in configuration space.
    pub offset: u16,
    /// The address register is 64 bits wide.
    pub is_64: bool,
    /// Mask and pending registers exist.
    pub maskable: bool,
    /// Vectors: 1, 2, 4, 8, 16 or 32.
    pub max_vectors: u16,
}

impl MsiCap {
    /// Bytes of the capability: 10, 14, 20 or 24.
    pub const fn bytes(&self) -> u16 {
        match (self.is_64, self.maskable) {
            (false, false) => 10,
            (true, false) => 14,
            (false, true) => 20,
            (true, true) => 24,
        }
    }
}

/// A place in a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// BAR number, 0 to 5. Whether that BAR exists is for the caller to check.
    pub bar: u8,
    /// Offset in the BAR, a multiple of 8.
    pub offset: u32,
}

/// The MSI-X capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MsixCap {
    /// Offset in configuration space.
    pub offset: u16,
    /// Where the table is.
    pub table: Location,
    /// Where the pending bits are.
    pub pba: Location,
    /// Entries of the table: 1 to 2048.
    pub vectors: u16,
}

/// The PCI Express capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcieCap {
    /// Offset in configuration space.
    pub offset: u16,
    /// Bytes that are there: the shortest version's 12 at least.
    pub len: u16,
    /// The function can reset itself through device control.
    pub flr: bool,
    /// What kind of function it is.
    pub port_type: PortType,
}

/// What [`filter`] found and left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Power management.
    pub pm: Option<PmCap>,
    /// MSI.
    pub msi: Option<MsiCap>,
    /// MSI-X.
    pub msix: Option<MsixCap>,
    /// PCI Express; without it there is no extended list.
    pub pcie: Option<PcieCap>,
    /// Vital product data: its offset. Address and data registers are to be forwarded.
    pub vpd: Option<u16>,
    /// What the guest sees, in the order of the lists.
    pub kept: Vec<CapPlace>,
    /// What it does not see; these bytes are zero and writes to them must be dropped. One that
    /// [`Capabilities::insert`] put something of ours into is shown nevertheless: `kept` wins.
    pub hidden: Vec<CapPlace>,
}

/// Applies the policy to `image`, a copy of a device's configuration space (256 or 4096 bytes),
/// in place. An image shorter than 256 bytes is left alone and has no capabilities.
pub fn filter(image: &mut [u8]) -> Capabilities {
    let mut caps = Capabilities::default();
    if image.len() < LEGACY_CONFIG_SIZE {
        return caps;
    }
    let list = walk(image);
    for &(id, offset) in &list {
        let room = room_behind(offset, list.iter().map(|c| c.1), LEGACY_CONFIG_SIZE as u16);
        caps.sort(image, id, offset, room);
    }
    caps.blank_hidden(image);
    relink(image, &caps.kept);
    if image.len() >= CONFIG_SIZE {
        ext_caps::filter(image, &mut caps);
    }
    caps
}

/// The standard list as it stands: each id and offset once, in order.
fn walk(image: &[u8]) -> Vec<(CapId, u16)> {
    let mut list = Vec::new();
    if !Status::from_bits_retain(read_u16(image, Reg::STATUS.offset())).contains(Status::CAP_LIST) {
        return list;
    }
    let mut pointer = Reg::CAPABILITIES.offset();
    loop {
        // The low two bits are reserved and to be masked (PCI 3.0, 6.7).
        let offset = u16::from(read_u8(image, pointer) & !3);
        let id = read_u8(image, offset);
        if offset < FIRST_CAP || id == u8::MAX || list.iter().any(|&(_, o)| o == offset) {
            return list;
        }
        list.push((CapId(id), offset));
        pointer = offset + 1;
    }
}

/// Bytes from `offset` to the nearest of `starts` above it, or to `end`.
pub(super) fn room_behind(offset: u16, starts: impl Iterator<Item = u16>, end: u16) -> u16 {
    starts.filter(|&s| s > offset).fold(end, u16::min) - offset
}

/// Bytes of the capability at `offset` if it is one that can be shown: what must be there for it
/// to work, and all of it.
fn shown_len(image: &[u8], id: CapId, offset: u16) -> Option<(u16, u16)> {
    let flags = read_u16(image, offset + 2);
    let exact = |len| Some((len, len));
    match id {
        CapId::PM => exact(pm::LEN),
        CapId::VPD => exact(8),
        CapId::MSI => exact(msi_cap(image, offset).bytes()),
        CapId::MSIX => exact(msix::LEN),
        CapId::VENDOR => match flags as u8 {
            // Its own length byte must at least cover itself.
            len @ 3.. => Some((3, len.into())),
            _ => None,
        },
        CapId::PCI_X => exact(if flags >> 12 & 3 == 0 { 8 } else { 24 }),
        // Registers in the capability itself (location 0xf) make it longer.
        CapId::SATA => exact(if read_u8(image, offset + 4) & 0xf == 0xf {
            16
        } else {
            8
        }),
        CapId::PCIE => Some((pcie::LEN_V1_INTEGRATED, pcie_len(PcieFlags(flags)))),
        _ => None,
    }
}

fn pcie_len(flags: PcieFlags) -> u16 {
    let integrated = flags.port_type() == PortType::INTEGRATED_ENDPOINT;
    match (flags.version() >= 2, integrated) {
        (false, true) => pcie::LEN_V1_INTEGRATED,
        (false, false) => pcie::LEN_V1,
        (true, true) => pcie::LEN_V2_INTEGRATED,
        (true, false) => pcie::LEN_V2,
    }
}

/// Bytes of a capability that is always hidden, for those whose length is known.
fn hidden_len(id: CapId) -> Option<u16> {
    match id {
        CapId::NULL => Some(2),
        CapId::SLOT_ID | CapId::HOT_SWAP | CapId::DEBUG_PORT => Some(4),
        CapId::AF => Some(6),
        CapId::SSVID => Some(8),
        _ => None,
    }
}

fn msi_cap(image: &[u8], offset: u16) -> MsiCap {
    let control = MsiControl::from_bits_retain(read_u16(image, offset + 2));
    MsiCap {
        offset,
        is_64: control.contains(MsiControl::ADDRESS_64),
        maskable: control.contains(MsiControl::MASKABLE),
        max_vectors: control.max_vectors(),
    }
}

fn msix_cap(image: &[u8], offset: u16) -> Option<MsixCap> {
    let control = MsixControl::from_bits_retain(read_u16(image, offset + msix::CONTROL));
    Some(MsixCap {
        offset,
        table: location(read_u32(image, offset + msix::TABLE))?,
        pba: location(read_u32(image, offset + msix::PBA))?,
        vectors: control.vectors(),
    })
}

fn location(raw: u32) -> Option<Location> {
    let bar = (raw & 7) as u8;
    (usize::from(bar) < BAR_COUNT).then_some(Location {
        bar,
        offset: raw & !7,
    })
}

impl Capabilities {
    /// Puts the capability at `offset`, which has `room` bytes, into `kept` or `hidden`.
    fn sort(&mut self, image: &[u8], id: CapId, offset: u16, room: u16) {
        let shown = shown_len(image, id, offset)
            .filter(|&(least, _)| least <= room)
            .map(|(_, all)| all.min(room));
        let any = AnyCapId::Standard(id);
        match shown {
            Some(len) if self.take(image, id, offset, len) => self.kept.push(CapPlace {
                id: any,
                offset,
                len,
            }),
            _ => self.hidden.push(CapPlace {
                id: any,
                offset,
                len: hidden_len(id).unwrap_or(room).min(room),
            }),
        }
    }

    /// Notes what the capability says; false when it cannot work or is there already.
    fn take(&mut self, image: &[u8], id: CapId, offset: u16, len: u16) -> bool {
        fn once<T>(slot: &mut Option<T>, new: Option<T>) -> bool {
            let fits = slot.is_none() && new.is_some();
            if fits {
                *slot = new;
            }
            fits
        }
        match id {
            CapId::PM => once(&mut self.pm, Some(PmCap { offset })),
            CapId::MSI => once(&mut self.msi, Some(msi_cap(image, offset))),
            CapId::MSIX => once(&mut self.msix, msix_cap(image, offset)),
            CapId::VPD => once(&mut self.vpd, Some(offset)),
            CapId::PCIE => {
                let devcap = read_u32(image, offset + pcie::DEVCAP);
                let cap = PcieCap {
                    offset,
                    len,
                    flr: DevCap::from_bits_retain(devcap).contains(DevCap::FLR),
                    port_type: PcieFlags(read_u16(image, offset + pcie::FLAGS)).port_type(),
                };
                once(&mut self.pcie, Some(cap))
            }
            _ => true,
        }
    }

    /// Zeroes the bytes of hidden capabilities.
    pub(super) fn blank_hidden(&self, image: &mut [u8]) {
        for cap in &self.hidden {
            let range = usize::from(cap.offset)..usize::from(cap.end());
            if let Some(bytes) = image.get_mut(range) {
                bytes.fill(0);
            }
        }
    }

    /// Puts a standard capability of ours into free space of a filtered `image`, at the head of
    /// the list: `body` is what follows its id and next pointer. Returns its offset, or `None`
    /// when there is no room.
    pub fn insert(&mut self, image: &mut [u8], id: CapId, body: &[u8]) -> Option<u8> {
        let len = u8::try_from(body.len() + 2).ok()?;
        let at = free_space(image, &self.kept, len)?;
        let offset = u16::from(at);
        write_u8(image, offset, id.0);
        write(image, offset + 2, body);
        let place = CapPlace {
            id: AnyCapId::Standard(id),
            offset,
            len: len.into(),
        };
        self.kept.insert(0, place);
        relink(image, &self.kept);
        Some(at)
    }
}

/// Links the standard capabilities of `kept` in their order, or says that there are none.
fn relink(image: &mut [u8], kept: &[CapPlace]) {
    let mut pointer = Reg::CAPABILITIES.offset();
    let standard = |c: &&CapPlace| matches!(c.id, AnyCapId::Standard(_));
    for cap in kept.iter().filter(standard) {
        write_u8(image, pointer, cap.offset as u8);
        pointer = cap.offset + 1;
    }
    write_u8(image, pointer, 0);
    let mut status = Status::from_bits_retain(read_u16(image, Reg::STATUS.offset()));
    status.set(Status::CAP_LIST, kept.iter().any(|c| standard(&c)));
    write_u16(image, Reg::STATUS.offset(), status.bits());
}

/// The lowest place for `len` bytes behind the header that no capability of `kept` takes and
/// where `image` holds zeros only: devices have registers outside of capabilities too.
pub fn free_space(image: &[u8], kept: &[CapPlace], len: u8) -> Option<u8> {
    let len = usize::from(len);
    let free = |start: &u16| {
        let start = usize::from(*start);
        let clear = image.get(start..start + len);
        let apart =
            |c: &CapPlace| usize::from(c.end()) <= start || start + len <= usize::from(c.offset);
        start + len <= LEGACY_CONFIG_SIZE
            && clear.is_some_and(|b| b.iter().all(|&b| b == 0))
            && kept.iter().all(apart)
    };
    let place = (FIRST_CAP..LEGACY_CONFIG_SIZE as u16).step_by(4).find(free);
    place.and_then(|p| u8::try_from(p).ok())
}

#[cfg(test)]
#[path = "caps_tests.rs"]
mod tests;
