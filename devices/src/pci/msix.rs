//! MSI-X: the table, the pending bits and message control as the guest sees them.
//!
//! Pure: it says which vectors the guest *wants* delivered and where to; arming eventfds and
//! routes to match is the assignment's part. Every write returns the vectors whose wanted state
//! changed, so that enabling gives all unmasked vectors in one batch and a write that changes
//! nothing gives none.
//!
//! Invariants:
//! * a vector is wanted exactly when MSI-X is enabled, the function is not masked and the vector
//!   is not masked;
//! * entries read back what was written less reserved bits; after a reset all are masked;
//! * the cost of a write to the table does not depend on its size, that of message control is
//!   linear in it.
//!
//! Source: PCIe 6.0, 6.1.4 and 7.7.2.

use super::caps::MsixCap;
use super::spec::{MsixControl, msix};
use crate::assign::ports::MsiMessage;
use crate::range::Range;

/// Vectors whose wanted state changed, ascending, each once.
pub type Changes = Vec<u16>;

/// Bits of each dword of an entry that can be written. The low two bits of the address are zero.
const WRITABLE: [u32; 4] = [!3, !0, !0, msix::ENTRY_MASKED];

/// One entry: address, upper address, data, vector control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry([u32; 4]);

impl Entry {
    const RESET: Self = Self([0, 0, 0, msix::ENTRY_MASKED]);

    /// The message, unless the vector is masked.
    fn message(&self) -> Option<MsiMessage> {
        let [low, high, data, control] = self.0;
        (control & msix::ENTRY_MASKED == 0).then_some(MsiMessage {
            address: u64::from(low) | u64::from(high) << 32,
            data,
        })
    }

    /// Byte `at` (below 16).
    fn byte(&self, at: usize) -> u8 {
        let dword = self.0.get(at / 4).copied().unwrap_or(u32::MAX);
        (dword >> (8 * (at % 4))) as u8
    }

    fn set_byte(&mut self, at: usize, value: u8) {
        if let (Some(dword), Some(writable)) = (self.0.get_mut(at / 4), WRITABLE.get(at / 4)) {
            let shift = 8 * (at % 4);
            let mask = writable & (0xff << shift);
            *dword = (*dword & !mask) | (u32::from(value) << shift & mask);
        }
    }
}

/// The MSI-X state of one device.
#[derive(Clone, Debug)]
pub struct Msix {
    cap: MsixCap,
    entries: Vec<Entry>,
    control: MsixControl,
}

impl Msix {
    /// All vectors masked, MSI-X off. The count of `cap` is kept between 1 and 2048.
    pub fn new(cap: &MsixCap) -> Self {
        let mut cap = *cap;
        cap.vectors = cap.vectors.clamp(1, MsixControl::TABLE_SIZE.bits() + 1);
        Self {
            entries: vec![Entry::RESET; cap.vectors.into()],
            control: MsixControl::empty(),
            cap,
        }
    }

    /// Which capability this is.
    pub fn cap(&self) -> &MsixCap {
        &self.cap
    }

    /// Vectors: 1 to 2048.
    pub fn vectors(&self) -> u16 {
        self.cap.vectors
    }

    /// The table, relative to its BAR.
    pub fn table_range(&self) -> Range {
        let start = u64::from(self.cap.table.offset);
        Range::from_bounds(start, start + u64::from(self.vectors()) * msix::ENTRY_LEN)
    }

    /// The pending bits, relative to their BAR: whole qwords.
    pub fn pba_range(&self) -> Range {
        let start = u64::from(self.cap.pba.offset);
        Range::from_bounds(start, start + u64::from(self.vectors().div_ceil(64)) * 8)
    }

    /// Message control as the guest reads it.
    pub fn control(&self) -> u16 {
        (self.vectors() - 1) | self.control.bits()
    }

    /// The guest writes message control: only enable and function mask can be written. For a
    /// byte write the caller merges with [`Msix::control`]. [`Msix::enabled`] may change without
    /// any vector changing: look at it too.
    pub fn write_control(&mut self, value: u16) -> Changes {
        let before = self.delivers();
        let writable = MsixControl::ENABLE | MsixControl::FUNCTION_MASK;
        self.control = MsixControl::from_bits_truncate(value) & writable;
        if before == self.delivers() {
            return Changes::new();
        }
        self.unmasked()
    }

    /// Whether MSI-X is on: INTx and MSI are then not used, even if all vectors are masked.
    pub fn enabled(&self) -> bool {
        self.control.contains(MsixControl::ENABLE)
    }

    /// The message that the guest wants for `vector`; `None` when it wants none, or for a vector
    /// that does not exist.
    pub fn wanted(&self, vector: u16) -> Option<MsiMessage> {
        if !self.delivers() {
            return None;
        }
        self.entries.get(usize::from(vector))?.message()
    }

    /// Fills `data` from `offset` of the table; bytes behind it are ones.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..=u64::MAX).zip(data) {
            let entry = self.entry_at(at).and_then(|n| self.entries.get(n));
            *byte = entry.map_or(0xff, |e| e.byte(byte_in_entry(at)));
        }
    }

    /// Writes `data` at `offset` of the table; bytes behind it are lost. Any size and alignment.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> Changes {
        let mut changes = Changes::new();
        let mut bytes = (offset..=u64::MAX).zip(data).peekable();
        while let Some(&(at, _)) = bytes.peek() {
            let index = self.entry_at(at);
            let delivers = self.delivers();
            let Some((n, entry)) = index.and_then(|n| Some((n, self.entries.get_mut(n)?))) else {
                break;
            };
            let before = entry.message();
            let first = at / msix::ENTRY_LEN;
            while let Some((at, value)) = bytes.next_if(|b| b.0 / msix::ENTRY_LEN == first) {
                entry.set_byte(byte_in_entry(at), *value);
            }
            if delivers && entry.message() != before {
                changes.push(n as u16);
            }
        }
        changes
    }

    /// Fills `data` from `offset` of the pending bits. `pending` says whether a vector has an
    /// interrupt that waits for its unmasking; asked only for vectors that are read.
    pub fn read_pba(&self, offset: u64, data: &mut [u8], pending: &dyn Fn(u16) -> bool) {
        let len = self.pba_range().len();
        for (at, byte) in (offset..=u64::MAX).zip(data) {
            if at >= len {
                *byte = 0xff;
                continue;
            }
            // Below 256 bytes of pending bits, so it fits.
            let first = at as u16 * 8;
            let bit = |n: u16| first + n < self.vectors() && pending(first + n);
            *byte = (0..8).fold(0, |byte, n| byte | u8::from(bit(n)) << n);
        }
    }

    /// Back to the state after a reset. Returns the vectors that were wanted.
    pub fn reset(&mut self) -> Changes {
        let changes = if self.delivers() {
            self.unmasked()
        } else {
            Changes::new()
        };
        self.control = MsixControl::empty();
        self.entries.fill(Entry::RESET);
        changes
    }

    fn delivers(&self) -> bool {
        self.enabled() && !self.control.contains(MsixControl::FUNCTION_MASK)
    }

    /// The vectors that are not masked by their own entry.
    fn unmasked(&self) -> Changes {
        let entries = (0u16..).zip(&self.entries);
        let open = entries.filter(|(_, e)| e.message().is_some());
        open.map(|(n, _)| n).collect()
    }

    /// The entry that byte `at` of the table belongs to.
    fn entry_at(&self, at: u64) -> Option<usize> {
        let n = usize::try_from(at / msix::ENTRY_LEN).ok()?;
        (n < self.entries.len()).then_some(n)
    }
}

fn byte_in_entry(at: u64) -> usize {
    (at % msix::ENTRY_LEN) as usize
}

#[cfg(test)]
#[path = "msix_tests.rs"]
mod tests;
