//! Sizes as QEMU writes them.

use crate::error::Error;

/// Reads `16G`, `512M`, `4096`.
pub fn parse(option: &'static str, text: &str) -> Result<u64, Error> {
    let error = |problem: &str| Error::Option {
        option,
        value: text.to_owned(),
        problem: problem.to_owned(),
    };
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (text.get(..at), 10),
        Some((at, 'm' | 'M')) => (text.get(..at), 20),
        Some((at, 'g' | 'G')) => (text.get(..at), 30),
        Some((at, 't' | 'T')) => (text.get(..at), 40),
        _ => (Some(text), 0),
    };
    let number: u64 = digits
        .unwrap_or_default()
        .parse()
        .map_err(|_| error("not a size such as 512M or 16G"))?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| error("too big for 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_and_without_unit() {
        assert_eq!(parse("s", "16G").unwrap(), 16 << 30);
        assert_eq!(parse("s", "4096").unwrap(), 4096);
        assert_eq!(parse("s", "1t").unwrap(), 1 << 40);
        for bad in ["", "G", "1.5G", "-1M", "99999999T"] {
            assert!(parse("s", bad).is_err(), "{bad}");
        }
    }
}
