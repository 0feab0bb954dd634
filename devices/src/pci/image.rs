//! Little-endian access to a byte image of configuration space.
//!
//! Invariant: never panics; bytes outside the image read as ones and swallow writes, as
//! configuration space does where nothing answers.

/// The byte at `offset`.
pub fn read_u8(image: &[u8], offset: u16) -> u8 {
    image.get(usize::from(offset)).copied().unwrap_or(u8::MAX)
}

/// The 16-bit value at `offset`, at any alignment.
pub fn read_u16(image: &[u8], offset: u16) -> u16 {
    let high = read_u8(image, offset.saturating_add(1));
    u16::from_le_bytes([read_u8(image, offset), high])
}

/// The 32-bit value at `offset`, at any alignment.
pub fn read_u32(image: &[u8], offset: u16) -> u32 {
    let high = read_u16(image, offset.saturating_add(2));
    u32::from(read_u16(image, offset)) | u32::from(high) << 16
}

/// Stores `bytes` at `offset`; what lies outside the image is lost.
pub fn write(image: &mut [u8], offset: u16, bytes: &[u8]) {
    let room = image.get_mut(usize::from(offset)..).unwrap_or_default();
    for (to, from) in room.iter_mut().zip(bytes) {
        *to = *from;
    }
}

/// Stores the byte `value` at `offset`.
pub fn write_u8(image: &mut [u8], offset: u16, value: u8) {
    write(image, offset, &[value]);
}

/// Stores the 16-bit `value` at `offset`.
pub fn write_u16(image: &mut [u8], offset: u16, value: u16) {
    write(image, offset, &value.to_le_bytes());
}

/// Stores the 32-bit `value` at `offset`.
pub fn write_u32(image: &mut [u8], offset: u16, value: u32) {
    write(image, offset, &value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_the_image_reads_ones_and_writes_are_lost() {
        let mut image = [1, 2, 3, 4, 5];
        assert_eq!(read_u16(&image, 1), 0x0302);
        assert_eq!(read_u32(&image, 3), 0xffff_0504);
        assert_eq!(read_u32(&image, u16::MAX), u32::MAX);
        write_u32(&mut image, 4, 0x0908_0706);
        write_u16(&mut image, u16::MAX, 0);
        write_u8(&mut image, 0, 9);
        assert_eq!(image, [9, 2, 3, 4, 6]);
    }
}
