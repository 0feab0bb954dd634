//! The kernel's ring buffer, as a file of `trace_pipe_raw` holds it: sub-buffers of one size, each a header and records.
//!
//! The layout is kernel/trace/ring_buffer.c and include/linux/ring_buffer.h (`enum ring_buffer_type`); user space such as
//! trace-cmd relies on it. Numbers are little-endian, `local_t` is 64 bits wide.

use super::format::{self, Bytes};

/// In a header's commit word: records were lost before this sub-buffer.
const MISSED: u64 = 1 << 31;
/// The part of the commit word that tells how many bytes of records follow.
const LENGTH: u64 = (1 << 20) - 1;
/// Bits of a record's first word that hold its kind; the others are the time since the record before.
const KIND_BITS: u32 = 5;
/// The longest record whose length is part of its kind, in words of 4 bytes.
const LONGEST_SHORT: u32 = 28;
const PADDING: u32 = 29;
const TIME_EXTEND: u32 = 30;
const TIME_STAMP: u32 = 31;
/// Bits that a time stamp of 59 bits takes from the sub-buffer's own.
const STAMP_HIGH: u64 = 0xf8 << 56;

/// What is wrong with a buffer.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The kernel had no room for records.
    #[error("records were lost")]
    Missed,
    /// It is not what the kernel writes.
    #[error("it is cut off or of an unknown layout at byte {0:#x}")]
    Layout(usize),
}

/// Calls `record` with the time and the bytes of each record of one CPU, in the order of their time.
pub fn records<'a>(
    buffer: &'a [u8],
    page: format::Page,
    mut record: impl FnMut(u64, &'a [u8]),
) -> Result<(), Damage> {
    for (index, bytes) in buffer.chunks(page.size).enumerate() {
        let at = index * page.size;
        let broken = |offset: usize| Damage::Layout(at + offset);
        let stamp = bytes.u64(0).ok_or_else(|| broken(0))?;
        let commit = bytes.u64(page.commit).ok_or_else(|| broken(0))?;
        if commit & MISSED != 0 {
            return Err(Damage::Missed);
        }
        let length = usize::try_from(commit & LENGTH).map_err(|_| broken(page.commit))?;
        let data = bytes.get(page.data..page.data + length);
        let data = data.ok_or_else(|| broken(page.commit))?;
        sub_buffer(stamp, data, &mut record).map_err(|offset| broken(page.data + offset))?;
    }
    Ok(())
}

/// The records of one sub-buffer; the error is the offset of what makes no sense.
fn sub_buffer<'a>(
    mut time: u64,
    data: &'a [u8],
    record: &mut impl FnMut(u64, &'a [u8]),
) -> Result<(), usize> {
    let mut at = 0;
    while at < data.len() {
        let word = data.u32(at).ok_or(at)?;
        let (kind, delta) = (word & ((1 << KIND_BITS) - 1), word >> KIND_BITS);
        let next = || data.u32(at + 4).ok_or(at);
        match kind {
            // Nothing follows in this sub-buffer.
            PADDING if delta == 0 => return Ok(()),
            PADDING => {
                time += u64::from(delta);
                at += 4 + next()? as usize;
            }
            TIME_EXTEND => {
                time += u64::from(delta) + (u64::from(next()?) << 27);
                at += 8;
            }
            TIME_STAMP => {
                time = (time & STAMP_HIGH) | (u64::from(delta) + (u64::from(next()?) << 27));
                at += 8;
            }
            _ => {
                let (begin, end) = match kind {
                    // The length counts the word that it stands in.
                    0 => (at + 8, at + 4 + next()? as usize),
                    1..=LONGEST_SHORT => (at + 4, at + 4 + kind as usize * 4),
                    _ => return Err(at),
                };
                time += u64::from(delta);
                record(time, data.get(begin..end).ok_or(at)?);
                at = end;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: format::Page = format::Page {
        commit: 8,
        data: 16,
        size: 64,
    };

    fn page(stamp: u64, flags: u64, words: &[u32]) -> Vec<u8> {
        let mut bytes = stamp.to_le_bytes().to_vec();
        bytes.extend((flags | (words.len() as u64 * 4)).to_le_bytes());
        words
            .iter()
            .for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.resize(PAGE.size, 0xff);
        bytes
    }

    fn read(buffer: &[u8]) -> Result<Vec<(u64, Vec<u8>)>, Damage> {
        let mut all = Vec::new();
        records(buffer, PAGE, |time, bytes| all.push((time, bytes.to_vec())))?;
        Ok(all)
    }

    fn word(kind: u32, delta: u32) -> u32 {
        kind | delta << KIND_BITS
    }

    #[test]
    fn times_add_up_over_records_of_every_kind() {
        let mut buffer = page(
            1000,
            0,
            &[
                word(1, 5),
                0x0403_0201,
                word(TIME_EXTEND, 3),
                2,
                word(0, 0),
                8,
                7,
            ],
        );
        buffer.extend(page(
            STAMP_HIGH | 5,
            0,
            &[
                word(TIME_STAMP, 9),
                1,
                word(1, 1),
                0,
                word(PADDING, 2),
                8,
                0,
                word(1, 1),
                1,
                word(PADDING, 0),
            ],
        ));
        let stamped = STAMP_HIGH | ((1 << 27) + 9);
        assert_eq!(
            read(&buffer),
            Ok(vec![
                (1005, vec![1, 2, 3, 4]),
                (1008 + (2 << 27), vec![7, 0, 0, 0]),
                (stamped + 1, vec![0; 4]),
                (stamped + 4, vec![1, 0, 0, 0]),
            ])
        );
    }

    #[test]
    fn lost_records_are_told() {
        let mut buffer = page(0, 0, &[word(1, 0), 0]);
        buffer.extend(page(0, MISSED, &[word(1, 0), 0]));
        assert_eq!(read(&buffer), Err(Damage::Missed));
    }

    #[test]
    fn damage_is_told_and_never_read_beyond() {
        let good = page(0, 0, &[word(2, 0), 1, 2]);
        assert!(read(&good).is_ok());
        for end in 1..PAGE.data + 12 {
            assert!(read(&good[..end]).is_err(), "{end}");
        }
        let too_long = page(0, 0, &[word(5, 0), 1]);
        assert_eq!(read(&too_long), Err(Damage::Layout(PAGE.data)));
        let beyond_the_page = page(0, 4000, &[word(1, 0), 1]);
        assert_eq!(read(&beyond_the_page), Err(Damage::Layout(PAGE.commit)));
    }
}
