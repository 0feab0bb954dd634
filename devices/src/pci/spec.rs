//! Names for what the PCI specifications number: header registers, capability ids, register bits.
//!
//! Sources: PCI Local Bus 3.0 chapter 6, PCI Express Base 6.0 chapter 7, and Linux
//! `include/uapi/linux/pci_regs.h`, whose values these agree with.
//!
//! Invariants: nothing here has state; every offset is in bytes from the start of the structure
//! that its doc names, and all registers are little-endian.

use std::mem::{offset_of, size_of};

use bitflags::bitflags;

pub use super::cap_ids::{CapId, ExtCapId};

/// Bytes of configuration space that a conventional PCI function has.
pub const LEGACY_CONFIG_SIZE: usize = 256;
/// Bytes of configuration space that a PCI Express function has.
pub const CONFIG_SIZE: usize = 4096;
/// First byte that a standard capability may use.
pub const FIRST_CAP: u16 = 0x40;
/// Where the list of extended capabilities starts.
pub const FIRST_EXT_CAP: u16 = 0x100;
/// Number of BAR registers of a type 0 header.
pub const BAR_COUNT: usize = 6;

/// The type 0 configuration header (PCI 3.0, 6.1). It documents the layout and pins the
/// offsets of [`Reg`]; the shadow itself is kept as bytes.
#[repr(C)]
pub struct Type0Header {
    /// Manufacturer.
    pub vendor_id: u16,
    /// Model.
    pub device_id: u16,
    /// [`Command`].
    pub command: u16,
    /// [`Status`].
    pub status: u16,
    /// Revision.
    pub revision: u8,
    /// Programming interface, subclass, base class.
    pub class: [u8; 3],
    /// Units of 4 bytes.
    pub cache_line_size: u8,
    /// Meaningless on PCI Express.
    pub latency_timer: u8,
    /// [`HeaderType`].
    pub header_type: u8,
    /// Built-in self test.
    pub bist: u8,
    /// Base address registers.
    pub bars: [u32; BAR_COUNT],
    /// CardBus pointer.
    pub cardbus_cis: u32,
    /// Board manufacturer.
    pub subsystem_vendor_id: u16,
    /// Board.
    pub subsystem_id: u16,
    /// Expansion ROM base address.
    pub rom: u32,
    /// First capability.
    pub capabilities: u8,
    /// Reserved.
    pub reserved: [u8; 7],
    /// Scratch register of firmware: which line INTx was routed to.
    pub interrupt_line: u8,
    /// 0 none, 1 to 4 for INTA to INTD.
    pub interrupt_pin: u8,
    /// Conventional PCI only.
    pub min_gnt: u8,
    /// Conventional PCI only.
    pub max_lat: u8,
}

/// Offset of a register of the configuration header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reg(u16);

impl Reg {
    /// Vendor ID, 16 bits.
    pub const VENDOR_ID: Self = Self(0x00);
    /// Device ID, 16 bits.
    pub const DEVICE_ID: Self = Self(0x02);
    /// [`Command`], 16 bits.
    pub const COMMAND: Self = Self(0x04);
    /// [`Status`], 16 bits.
    pub const STATUS: Self = Self(0x06);
    /// Revision, 8 bits.
    pub const REVISION: Self = Self(0x08);
    /// Class code, 24 bits.
    pub const CLASS: Self = Self(0x09);
    /// Cache line size, 8 bits.
    pub const CACHE_LINE_SIZE: Self = Self(0x0c);
    /// Latency timer, 8 bits.
    pub const LATENCY_TIMER: Self = Self(0x0d);
    /// [`HeaderType`], 8 bits.
    pub const HEADER_TYPE: Self = Self(0x0e);
    /// Built-in self test, 8 bits.
    pub const BIST: Self = Self(0x0f);
    /// First of six BAR dwords.
    pub const BAR0: Self = Self(0x10);
    /// CardBus CIS pointer, 32 bits.
    pub const CARDBUS_CIS: Self = Self(0x28);
    /// Subsystem vendor ID, 16 bits.
    pub const SUBSYSTEM_VENDOR_ID: Self = Self(0x2c);
    /// Subsystem ID, 16 bits.
    pub const SUBSYSTEM_ID: Self = Self(0x2e);
    /// Expansion ROM BAR, 32 bits.
    pub const ROM: Self = Self(0x30);
    /// Pointer to the first capability, 8 bits.
    pub const CAPABILITIES: Self = Self(0x34);
    /// Interrupt line, 8 bits.
    pub const INTERRUPT_LINE: Self = Self(0x3c);
    /// Interrupt pin, 8 bits.
    pub const INTERRUPT_PIN: Self = Self(0x3d);

    /// Byte offset in configuration space.
    pub const fn offset(self) -> u16 {
        self.0
    }

    /// Byte offset in configuration space, to index with.
    pub const fn at(self) -> usize {
        self.0 as usize
    }

    /// The BAR dword `index`; `None` for 6 and above.
    pub const fn bar(index: u8) -> Option<Self> {
        if (index as usize) < BAR_COUNT {
            Some(Self(Self::BAR0.0 + 4 * index as u16))
        } else {
            None
        }
    }
}

const _: () = {
    assert!(size_of::<Type0Header>() == FIRST_CAP as usize);
    assert!(offset_of!(Type0Header, device_id) == Reg::DEVICE_ID.at());
    assert!(offset_of!(Type0Header, command) == Reg::COMMAND.at());
    assert!(offset_of!(Type0Header, status) == Reg::STATUS.at());
    assert!(offset_of!(Type0Header, revision) == Reg::REVISION.at());
    assert!(offset_of!(Type0Header, class) == Reg::CLASS.at());
    assert!(offset_of!(Type0Header, cache_line_size) == Reg::CACHE_LINE_SIZE.at());
    assert!(offset_of!(Type0Header, latency_timer) == Reg::LATENCY_TIMER.at());
    assert!(offset_of!(Type0Header, header_type) == Reg::HEADER_TYPE.at());
    assert!(offset_of!(Type0Header, bist) == Reg::BIST.at());
    assert!(offset_of!(Type0Header, bars) == Reg::BAR0.at());
    assert!(offset_of!(Type0Header, cardbus_cis) == Reg::CARDBUS_CIS.at());
    assert!(offset_of!(Type0Header, subsystem_vendor_id) == Reg::SUBSYSTEM_VENDOR_ID.at());
    assert!(offset_of!(Type0Header, subsystem_id) == Reg::SUBSYSTEM_ID.at());
    assert!(offset_of!(Type0Header, rom) == Reg::ROM.at());
    assert!(offset_of!(Type0Header, capabilities) == Reg::CAPABILITIES.at());
    assert!(offset_of!(Type0Header, interrupt_line) == Reg::INTERRUPT_LINE.at());
    assert!(offset_of!(Type0Header, interrupt_pin) == Reg::INTERRUPT_PIN.at());
};

bitflags! {
    /// The COMMAND register (PCIe 6.0, 7.5.1.1.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Command: u16 {
        /// I/O BARs are decoded.
        const IO = 1 << 0;
        /// Memory BARs are decoded.
        const MEMORY = 1 << 1;
        /// The function may issue DMA and message-signalled interrupts.
        const MASTER = 1 << 2;
        /// Conventional PCI only.
        const SPECIAL = 1 << 3;
        /// Conventional PCI only.
        const INVALIDATE = 1 << 4;
        /// Conventional PCI only.
        const VGA_PALETTE = 1 << 5;
        /// Parity error response.
        const PARITY = 1 << 6;
        /// Conventional PCI only.
        const WAIT = 1 << 7;
        /// SERR# reporting.
        const SERR = 1 << 8;
        /// Conventional PCI only.
        const FAST_BACK = 1 << 9;
        /// INTx is not asserted.
        const INTX_DISABLE = 1 << 10;
    }

    /// The STATUS register (PCIe 6.0, 7.5.1.1.4).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Status: u16 {
        /// An INTx interrupt is pending.
        const INTERRUPT = 1 << 3;
        /// There is a capability list.
        const CAP_LIST = 1 << 4;
        /// Master data parity error; write 1 to clear.
        const PARITY = 1 << 8;
        /// Signalled target abort; write 1 to clear.
        const SIG_TARGET_ABORT = 1 << 11;
        /// Received target abort; write 1 to clear.
        const REC_TARGET_ABORT = 1 << 12;
        /// Received master abort; write 1 to clear.
        const REC_MASTER_ABORT = 1 << 13;
        /// Signalled system error; write 1 to clear.
        const SIG_SYSTEM_ERROR = 1 << 14;
        /// Detected parity error; write 1 to clear.
        const DETECTED_PARITY = 1 << 15;
    }
}

/// The HEADER TYPE register (PCIe 6.0, 7.5.1.1.9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeaderType(pub u8);

impl HeaderType {
    /// "This slot has more functions than function 0."
    pub const MULTI_FUNCTION: u8 = 1 << 7;

    /// 0 for an endpoint, 1 for a bridge, 2 for CardBus.
    pub const fn layout(self) -> u8 {
        self.0 & !Self::MULTI_FUNCTION
    }

    /// Whether the multi-function bit is set.
    pub const fn multi_function(self) -> bool {
        self.0 & Self::MULTI_FUNCTION != 0
    }

    /// The same with the multi-function bit as given.
    pub const fn with_multi_function(self, on: bool) -> Self {
        Self(self.layout() | if on { Self::MULTI_FUNCTION } else { 0 })
    }
}

bitflags! {
    /// The read-only low bits of a BAR (PCIe 6.0, 7.5.1.2.1).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct BarBits: u32 {
        /// I/O space; the other bits below are memory's.
        const IO = 1 << 0;
        /// Memory below 1 MiB: obsolete; treated as 32-bit.
        const BELOW_1M = 1 << 1;
        /// 64 bits wide: the next dword holds the upper half.
        const MEM_64 = 1 << 2;
        /// Prefetchable.
        const PREFETCHABLE = 1 << 3;
    }
}

impl BarBits {
    /// The bits of a memory BAR that are not address.
    pub const MEM_MASK: u32 = 0xf;
    /// The bits of an I/O BAR that are not address (bit 1 is reserved).
    pub const IO_MASK: u32 = 0x3;
}

/// Header dword of an extended capability (PCIe 6.0, 7.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtHeader(pub u32);

impl ExtHeader {
    /// A header; the low two bits of `next` are dropped and `version` keeps four bits.
    pub const fn new(id: ExtCapId, version: u8, next: u16) -> Self {
        Self(id.0 as u32 | ((version as u32 & 0xf) << 16) | ((next as u32 & 0xffc) << 20))
    }

    /// Which capability.
    pub const fn id(self) -> ExtCapId {
        ExtCapId(self.0 as u16)
    }

    /// Version of the capability's layout.
    pub const fn version(self) -> u8 {
        (self.0 >> 16) as u8 & 0xf
    }

    /// Offset of the next capability, a multiple of 4; 0 at the end of the list.
    pub const fn next(self) -> u16 {
        (self.0 >> 20) as u16 & 0xffc
    }

    /// The same header pointing at `next`.
    pub const fn with_next(self, next: u16) -> Self {
        Self::new(self.id(), self.version(), next)
    }
}

bitflags! {
    /// Message control of the MSI capability (PCIe 6.0, 7.7.1.2), at offset 2.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MsiControl: u16 {
        /// MSI is on.
        const ENABLE = 1 << 0;
        /// Log2 of the vectors that the function has.
        const CAPABLE = 7 << 1;
        /// Log2 of the vectors that software gave it.
        const ENABLED = 7 << 4;
        /// The address is 64 bits wide.
        const ADDRESS_64 = 1 << 7;
        /// Mask and pending registers exist.
        const MASKABLE = 1 << 8;
        /// Extended message data exists.
        const EXT_DATA = 1 << 9;
        /// Extended message data is on.
        const EXT_DATA_ENABLE = 1 << 10;
    }

    /// Message control of the MSI-X capability (PCIe 6.0, 7.7.2.2), at offset 2.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct MsixControl: u16 {
        /// Entries of the table less one.
        const TABLE_SIZE = 0x7ff;
        /// All vectors are masked.
        const FUNCTION_MASK = 1 << 14;
        /// MSI-X is on.
        const ENABLE = 1 << 15;
    }
}

impl MsiControl {
    /// Vectors that the function has: 1 to 32 (reserved encodings count as 32).
    pub const fn max_vectors(self) -> u16 {
        1 << log2_vectors(self.bits() >> 1)
    }

    /// Vectors that software gave the function: 1 to 32, not clipped to [`Self::max_vectors`].
    pub const fn enabled_vectors(self) -> u16 {
        1 << log2_vectors(self.bits() >> 4)
    }
}

const fn log2_vectors(field: u16) -> u16 {
    let field = field & 7;
    if field > 5 { 5 } else { field }
}

impl MsixControl {
    /// Entries of the table: 1 to 2048.
    pub const fn vectors(self) -> u16 {
        (self.bits() & Self::TABLE_SIZE.bits()) + 1
    }
}

/// Offsets in the MSI-X capability (PCIe 6.0, 7.7.2).
pub mod msix {
    /// [`super::MsixControl`], 16 bits.
    pub const CONTROL: u16 = 2;
    /// BAR (bits 2:0) and offset of the table, 32 bits.
    pub const TABLE: u16 = 4;
    /// BAR (bits 2:0) and offset of the pending bits, 32 bits.
    pub const PBA: u16 = 8;
    /// Bytes of the capability.
    pub const LEN: u16 = 12;
    /// Bytes of a table entry: address, upper address, data, vector control.
    pub const ENTRY_LEN: u64 = 16;
    /// Vector control: this vector is masked. The rest is reserved (steering tags need TPH).
    pub const ENTRY_MASKED: u32 = 1;
}

/// Offsets in the power management capability (PCI PM 1.2, 3.2).
pub mod pm {
    /// Capabilities (PMC), 16 bits.
    pub const CAPABILITIES: u16 = 2;
    /// Control and status (PMCSR): [`super::PmControl`], 16 bits.
    pub const CONTROL: u16 = 4;
    /// Bytes of the capability.
    pub const LEN: u16 = 8;
}

bitflags! {
    /// The power management control and status register (PCI PM 1.2, 3.2.4).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PmControl: u16 {
        /// [`PowerState`].
        const STATE = 3;
        /// Going from D3hot to D0 does not reset the function.
        const NO_SOFT_RESET = 1 << 3;
        /// PME# is on.
        const PME_ENABLE = 1 << 8;
        /// PME# is asserted; write 1 to clear.
        const PME_STATUS = 1 << 15;
    }
}

bitflags! {
    /// The power management capabilities register (PCI PM 1.2, 3.2.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct PmCapabilities: u16 {
        /// The function has state D1.
        const D1 = 1 << 9;
        /// The function has state D2.
        const D2 = 1 << 10;
    }
}

impl PmCapabilities {
    /// Whether the function has that state; D0 and D3hot every function has.
    pub const fn has(self, state: PowerState) -> bool {
        match state {
            PowerState::D0 | PowerState::D3Hot => true,
            PowerState::D1 => self.contains(Self::D1),
            PowerState::D2 => self.contains(Self::D2),
        }
    }
}

/// Power state of a function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerState {
    /// Works.
    #[default]
    D0,
    /// Light sleep.
    D1,
    /// Deeper sleep.
    D2,
    /// Off but for configuration space; leaving it resets the function unless
    /// [`PmControl::NO_SOFT_RESET`].
    D3Hot,
}

impl PmControl {
    /// The state that the register names.
    pub const fn state(self) -> PowerState {
        match self.bits() & Self::STATE.bits() {
            0 => PowerState::D0,
            1 => PowerState::D1,
            2 => PowerState::D2,
            _ => PowerState::D3Hot,
        }
    }

    /// The same with another state.
    pub const fn with_state(self, state: PowerState) -> Self {
        Self::from_bits_retain((self.bits() & !Self::STATE.bits()) | state as u16)
    }
}

/// Offsets in the PCI Express capability (PCIe 6.0, 7.5.3).
pub mod pcie {
    /// [`super::PcieFlags`], 16 bits.
    pub const FLAGS: u16 = 0x02;
    /// [`super::DevCap`], 32 bits.
    pub const DEVCAP: u16 = 0x04;
    /// [`super::DevCtl`], 16 bits.
    pub const DEVCTL: u16 = 0x08;
    /// Device status, 16 bits.
    pub const DEVSTA: u16 = 0x0a;
    /// Link capabilities, 32 bits.
    pub const LNKCAP: u16 = 0x0c;
    /// Link control, 16 bits.
    pub const LNKCTL: u16 = 0x10;
    /// Link status, 16 bits.
    pub const LNKSTA: u16 = 0x12;
    /// Device capabilities 2, 32 bits.
    pub const DEVCAP2: u16 = 0x24;
    /// Device control 2, 16 bits.
    pub const DEVCTL2: u16 = 0x28;
    /// Link capabilities 2, 32 bits.
    pub const LNKCAP2: u16 = 0x2c;
    /// Link control 2, 16 bits.
    pub const LNKCTL2: u16 = 0x30;
    /// Bytes without link registers, version 1: what every function has.
    pub const LEN_V1_INTEGRATED: u16 = 0x0c;
    /// Bytes, version 1.
    pub const LEN_V1: u16 = 0x14;
    /// Bytes without link registers, version 2.
    pub const LEN_V2_INTEGRATED: u16 = 0x2c;
    /// Bytes, version 2.
    pub const LEN_V2: u16 = 0x3c;
}

/// The PCI Express capabilities register (PCIe 6.0, 7.5.3.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PcieFlags(pub u16);

impl PcieFlags {
    /// Version of the capability's layout.
    pub const fn version(self) -> u8 {
        self.0 as u8 & 0xf
    }

    /// What kind of function this is.
    pub const fn port_type(self) -> PortType {
        PortType((self.0 >> 4) as u8 & 0xf)
    }

    /// The same with another port type.
    pub const fn with_port_type(self, kind: PortType) -> Self {
        Self((self.0 & !0xf0) | ((kind.0 as u16 & 0xf) << 4))
    }
}

/// Device/port type of a PCI Express function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortType(pub u8);

impl PortType {
    /// Endpoint.
    pub const ENDPOINT: Self = Self(0);
    /// Endpoint that needs I/O space or 32-bit addresses.
    pub const LEGACY_ENDPOINT: Self = Self(1);
    /// Root port.
    pub const ROOT_PORT: Self = Self(4);
    /// Endpoint inside the root complex, without a link.
    pub const INTEGRATED_ENDPOINT: Self = Self(9);
    /// Root complex event collector.
    pub const EVENT_COLLECTOR: Self = Self(10);
}

bitflags! {
    /// Device capabilities (PCIe 6.0, 7.5.3.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DevCap: u32 {
        /// Log2 of the largest payload in units of 128 bytes.
        const PAYLOAD = 7;
        /// Extended tags.
        const EXT_TAG = 1 << 5;
        /// Role-based error reporting.
        const ROLE_BASED_ERRORS = 1 << 15;
        /// Function-level reset through [`DevCtl::FLR`].
        const FLR = 1 << 28;
    }

    /// Device control (PCIe 6.0, 7.5.3.4).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DevCtl: u16 {
        /// Report correctable errors.
        const CORRECTABLE = 1 << 0;
        /// Report non-fatal errors.
        const NON_FATAL = 1 << 1;
        /// Report fatal errors.
        const FATAL = 1 << 2;
        /// Report unsupported requests.
        const UNSUPPORTED = 1 << 3;
        /// Relaxed ordering.
        const RELAXED_ORDERING = 1 << 4;
        /// Log2 of the payload limit in units of 128 bytes.
        const PAYLOAD = 7 << 5;
        /// Extended tags.
        const EXT_TAG = 1 << 8;
        /// Phantom functions.
        const PHANTOM = 1 << 9;
        /// Auxiliary power.
        const AUX_POWER = 1 << 10;
        /// No-snoop.
        const NO_SNOOP = 1 << 11;
        /// Log2 of the read request limit in units of 128 bytes.
        const READ_REQUEST = 7 << 12;
        /// Writing 1 resets the function; reads as 0.
        const FLR = 1 << 15;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_a_register_below_six_only() {
        assert_eq!(Reg::bar(0), Some(Reg::BAR0));
        assert_eq!(Reg::bar(5).map(Reg::offset), Some(0x24));
        assert_eq!(Reg::bar(6), None);
    }

    #[test]
    fn an_extended_header_survives_a_round_trip() {
        let header = ExtHeader::new(ExtCapId::SRIOV, 1, 0x163);
        assert_eq!(header.0, 0x1601_0010);
        assert_eq!(
            (header.id(), header.version(), header.next()),
            (ExtCapId::SRIOV, 1, 0x160)
        );
        assert_eq!(header.with_next(0).next(), 0);
    }

    #[test]
    fn vector_counts_follow_the_encoding_and_never_exceed_the_maximum() {
        assert_eq!(MsixControl::from_bits_retain(0x7ff).vectors(), 2048);
        assert_eq!(MsixControl::from_bits_retain(0xc000).vectors(), 1);
        assert_eq!(MsiControl::from_bits_retain(5 << 1).max_vectors(), 32);
        assert_eq!(MsiControl::from_bits_retain(7 << 1).max_vectors(), 32);
        assert_eq!(MsiControl::from_bits_retain(2 << 4).enabled_vectors(), 4);
    }

    #[test]
    fn power_states_keep_the_other_bits() {
        let control = PmControl::NO_SOFT_RESET | PmControl::PME_ENABLE;
        let asleep = control.with_state(PowerState::D3Hot);
        assert_eq!(asleep.state(), PowerState::D3Hot);
        assert_eq!(asleep.with_state(PowerState::D0), control);
    }

    #[test]
    fn the_multi_function_bit_is_not_part_of_the_layout() {
        let header = HeaderType(0x81);
        assert_eq!(header.layout(), 1);
        assert!(!header.with_multi_function(false).multi_function());
        assert_eq!(header.with_multi_function(true), header);
    }
}
