//! MSI: the registers of its capability as the guest sees them, and what it wants delivered.
//!
//! Pure, like [`super::msix`]: writes return the vectors whose wanted state changed.
//!
//! Invariants:
//! * a vector is wanted exactly when MSI is enabled, the vector is below the number that the guest
//!   enabled and (where vectors can be masked) it is not masked;
//! * the number of enabled vectors never exceeds what the device has;
//! * only the vector's own low bits of the message data differ between vectors.
//!
//! Source: PCIe 6.0, 6.1.4 and 7.7.1.

use super::caps::MsiCap;
use super::image::{read_u8, read_u16, read_u32, write, write_u16, write_u32};
use super::msix::Changes;
use super::spec::MsiControl;
use crate::assign::ports::MsiMessage;

/// Bytes of the longest form of the capability.
const MAX_LEN: usize = 24;
/// Offset of message control.
const CONTROL: u16 = 2;
/// Offset of the address.
const ADDRESS: u16 = 4;

/// The MSI state of one device.
#[derive(Clone, Debug)]
pub struct Msi {
    cap: MsiCap,
    /// The capability's registers; id and next pointer stay 0.
    registers: [u8; MAX_LEN],
    /// Which of their bits can be written.
    writable: [u8; MAX_LEN],
}

impl Msi {
    /// MSI off. A count of `cap` that is no power of two up to 32 is rounded down to one.
    pub fn new(cap: &MsiCap) -> Self {
        let mut cap = *cap;
        cap.max_vectors = 1 << cap.max_vectors.clamp(1, 32).ilog2();
        let mut msi = Self {
            cap,
            registers: [0; MAX_LEN],
            writable: [0; MAX_LEN],
        };
        let control = MsiControl::ENABLE | MsiControl::ENABLED;
        write_u16(&mut msi.writable, CONTROL, control.bits());
        write_u32(&mut msi.writable, ADDRESS, !3);
        if cap.is_64 {
            write_u32(&mut msi.writable, ADDRESS + 4, !0);
        }
        let data_at = msi.data_at();
        write_u16(&mut msi.writable, data_at, !0);
        if let Some(mask) = msi.mask_at() {
            write_u32(&mut msi.writable, mask, u32::MAX >> (32 - cap.max_vectors));
        }
        msi.reset();
        msi
    }

    /// Which capability this is.
    pub fn cap(&self) -> &MsiCap {
        &self.cap
    }

    /// Vectors that the device has: 1 to 32.
    pub fn vectors(&self) -> u16 {
        self.cap.max_vectors
    }

    /// Vectors that the guest enabled: 0 while MSI is off.
    pub fn enabled_vectors(&self) -> u16 {
        if self.enabled() {
            self.control().enabled_vectors().min(self.vectors())
        } else {
            0
        }
    }

    /// Whether MSI is on: INTx is then not used.
    pub fn enabled(&self) -> bool {
        self.control().contains(MsiControl::ENABLE)
    }

    /// Message control as the guest reads it.
    pub fn control(&self) -> MsiControl {
        MsiControl::from_bits_retain(read_u16(&self.registers, CONTROL))
    }

    /// The message that the guest wants for `vector`; `None` when it wants none.
    pub fn wanted(&self, vector: u16) -> Option<MsiMessage> {
        let count = self.enabled_vectors();
        if vector >= count || self.masked(vector) {
            return None;
        }
        let high = if self.cap.is_64 {
            read_u32(&self.registers, ADDRESS + 4)
        } else {
            0
        };
        // The device replaces the low bits of the data by the vector's number.
        let data = (read_u16(&self.registers, self.data_at()) & !(count - 1)) | vector;
        Some(MsiMessage {
            address: u64::from(read_u32(&self.registers, ADDRESS)) | u64::from(high) << 32,
            data: data.into(),
        })
    }

    /// Fills `data` from `offset` of the capability. Id and next pointer (the first two bytes),
    /// and what lies behind the capability, are left as they are: they are the list's. `pending`
    /// says whether a vector has an interrupt that waits for its unmasking.
    pub fn read(&self, offset: u16, data: &mut [u8], pending: &dyn Fn(u16) -> bool) {
        for (at, byte) in (offset..self.cap.bytes()).zip(data) {
            match self.mask_at() {
                _ if at < CONTROL => {}
                Some(mask) if at >= mask + 4 => {
                    let first = 8 * (at - mask - 4);
                    let bit = |n: u16| first + n < self.vectors() && pending(first + n);
                    *byte = (0..8).fold(0, |byte, n| byte | u8::from(bit(n)) << n);
                }
                _ => *byte = read_u8(&self.registers, at),
            }
        }
    }

    /// Writes `data` at `offset` of the capability. Any size and alignment.
    pub fn write(&mut self, offset: u16, data: &[u8]) -> Changes {
        let before = self.all_wanted();
        for (at, value) in (offset..self.cap.bytes()).zip(data) {
            let mask = read_u8(&self.writable, at);
            let new = (read_u8(&self.registers, at) & !mask) | (value & mask);
            write(&mut self.registers, at, &[new]);
        }
        self.clip_count();
        self.changes_since(&before)
    }

    /// Back to the state after a reset. Returns the vectors that were wanted.
    pub fn reset(&mut self) -> Changes {
        let before = self.all_wanted();
        self.registers = [0; MAX_LEN];
        let mut control = MsiControl::from_bits_retain((self.vectors().ilog2() as u16) << 1);
        control.set(MsiControl::ADDRESS_64, self.cap.is_64);
        control.set(MsiControl::MASKABLE, self.cap.maskable);
        write_u16(&mut self.registers, CONTROL, control.bits());
        self.changes_since(&before)
    }

    /// Keeps the number of enabled vectors within what the device has.
    fn clip_count(&mut self) {
        let control = self.control();
        let count = control.enabled_vectors().min(self.vectors());
        let field = MsiControl::from_bits_retain((count.ilog2() as u16) << 4);
        let clipped = control.difference(MsiControl::ENABLED) | field;
        write_u16(&mut self.registers, CONTROL, clipped.bits());
    }

    fn masked(&self, vector: u16) -> bool {
        let bits = self.mask_at().map_or(0, |at| read_u32(&self.registers, at));
        bits >> vector & 1 != 0
    }

    fn all_wanted(&self) -> Vec<Option<MsiMessage>> {
        (0..self.vectors()).map(|n| self.wanted(n)).collect()
    }

    fn changes_since(&self, before: &[Option<MsiMessage>]) -> Changes {
        let pairs = (0u16..).zip(before);
        pairs
            .filter(|&(n, old)| self.wanted(n) != *old)
            .map(|(n, _)| n)
            .collect()
    }

    fn data_at(&self) -> u16 {
        if self.cap.is_64 { 12 } else { 8 }
    }

    /// Offset of the mask bits, if there are any; the pending bits follow.
    fn mask_at(&self) -> Option<u16> {
        self.cap.maskable.then_some(self.data_at() + 4)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn msi(is_64: bool, maskable: bool, max_vectors: u16) -> Msi {
        Msi::new(&MsiCap {
            offset: 0x50,
            is_64,
            maskable,
            max_vectors,
        })
    }

    fn read(msi: &Msi, offset: u16, len: usize) -> Vec<u8> {
        let mut data = vec![0xaa; len];
        msi.read(offset, &mut data, &|n| n % 2 == 1);
        data
    }

    #[test]
    fn one_vector_of_a_32_bit_device() {
        let mut m = msi(false, false, 1);
        assert_eq!(m.write(4, &0xfee0_1003u32.to_le_bytes()), []);
        assert_eq!(m.write(8, &[0x41, 0x00]), []);
        assert_eq!(m.write(2, &[1]), [0]);
        let want = MsiMessage {
            address: 0xfee0_1000,
            data: 0x41,
        };
        assert_eq!((m.wanted(0), m.wanted(1)), (Some(want), None));
        assert_eq!(m.write(2, &[1, 0]), [], "the same again");
        assert_eq!(m.write(8, &[0x42]), [0]);
        assert_eq!(m.write(2, &[0]), [0]);
        assert!(!m.enabled());
        assert_eq!(read(&m, 8, 4), [0x42, 0, 0xaa, 0xaa], "ten bytes long");
    }

    #[test]
    fn several_vectors_differ_in_the_low_bits_of_the_data() {
        let mut m = msi(true, false, 8);
        m.write(4, &0x2_fee0_0000u64.to_le_bytes());
        m.write(12, &[0xa7, 0x40]);
        // A dword write of id, next and control: four vectors, on.
        assert_eq!(m.write(0, &[5, 0x60, 0x21, 0]), [0, 1, 2, 3]);
        let datas: Vec<_> = (0..5).map(|n| m.wanted(n).map(|m| m.data)).collect();
        assert_eq!(
            datas,
            [Some(0x40a4), Some(0x40a5), Some(0x40a6), Some(0x40a7), None]
        );
        assert_eq!(m.wanted(0).unwrap().address, 0x2_fee0_0000);
        assert_eq!(read(&m, 0, 4), [0xaa, 0xaa, 0xa7, 0]);
        assert_eq!(
            m.write(2, &[0x11]).len(),
            4,
            "fewer vectors: other data too"
        );
    }

    #[test]
    fn the_enabled_count_is_clipped_to_what_the_device_has() {
        let mut m = msi(true, false, 2);
        for field in 1..8 {
            m.write(2, &[1 | field << 4]);
            assert_eq!(m.enabled_vectors(), 2);
            assert_eq!(read(&m, 2, 1), [0x93]);
        }
    }

    #[test]
    fn masked_vectors_are_not_wanted_and_pending_bits_are_shown() {
        let mut m = msi(true, true, 4);
        m.write(2, &[0x21]);
        assert_eq!(m.write(0x10, &[0xff; 4]), [0, 1, 2, 3]);
        assert_eq!(
            read(&m, 0x10, 4),
            [0x0f, 0, 0, 0],
            "vectors that exist only"
        );
        assert_eq!(m.write(0x10, &[0xfb]), [2]);
        assert!(m.wanted(2).is_some() && m.wanted(3).is_none());
        assert_eq!(read(&m, 0x14, 8), [0x0a, 0, 0, 0, 0xaa, 0xaa, 0xaa, 0xaa]);
        assert_eq!(m.write(0x14, &[0xff; 4]), [], "pending bits are read-only");
        assert_eq!(
            m.write(0x0e, &[0, 0, 0, 0]),
            [0, 1, 3],
            "straddles into the mask"
        );
        let m32 = msi(false, true, 32);
        assert_eq!(read(&m32, 0x10, 4), [0xaa; 4]);
    }

    #[test]
    fn reset_turns_it_off_and_keeps_what_the_device_can() {
        let mut m = msi(true, true, 32);
        m.write(0, &[0xff; 24]);
        assert_eq!(m.enabled_vectors(), 32);
        m.write(0x10, &[0; 4]);
        assert_eq!(m.reset().len(), 32);
        assert_eq!(m.control().bits(), 0x018a);
        assert_eq!(read(&m, 4, 4), [0; 4]);
        assert_eq!(msi(false, false, 0).vectors(), 1);
        assert_eq!(msi(false, false, 12).vectors(), 8);
    }

    proptest! {
        #[test]
        fn changes_are_exactly_the_vectors_whose_wanted_state_changed(
            is_64: bool, maskable: bool, log in 0u32..6,
            writes in prop::collection::vec(
                (0u16..30, prop::collection::vec(any::<u8>(), 1..=8), 0u8..20), 0..40),
        ) {
            let mut m = msi(is_64, maskable, 1 << log);
            for (offset, data, kind) in writes {
                let before: Vec<_> = (0..40).map(|n| m.wanted(n)).collect();
                let changes = if kind == 0 { m.reset() } else { m.write(offset, &data) };
                let changed: Vec<u16> =
                    (0..40).filter(|&n| m.wanted(n) != before[usize::from(n)]).collect();
                prop_assert_eq!(changes, changed);
                prop_assert_eq!(read(&m, 0, 2), [0xaa; 2]);
                read(&m, offset, 8);
            }
        }
    }
}
