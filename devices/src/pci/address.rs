//! PCI addresses: segment, bus, device and function.

use std::fmt;
use std::str::FromStr;

/// A host PCI function: `SSSS:BB:DD.F`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// PCI domain.
    pub segment: u16,
    /// Bus number.
    pub bus: u8,
    /// Device (slot) number, below 32.
    pub device: u8,
    /// Function number, below 8.
    pub function: u8,
}

/// Text that is not a PCI address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a PCI address: expected DDDD:BB:DD.F as in 0000:41:00.0, or BB:DD.F as in 41:00.0"
)]
pub struct BdfError(String);

impl FromStr for Bdf {
    type Err = BdfError;

    fn from_str(text: &str) -> Result<Self, BdfError> {
        parse(text).ok_or_else(|| BdfError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<Bdf> {
    let (head, function) = text.rsplit_once('.')?;
    let (head, device) = head.rsplit_once(':')?;
    let (segment, bus) = head.rsplit_once(':').unwrap_or(("0", head));
    let bdf = Bdf {
        segment: hex(segment, 4)?,
        bus: hex(bus, 2)? as u8,
        device: hex(device, 2)? as u8,
        function: hex(function, 1)? as u8,
    };
    (bdf.device < 32 && bdf.function < 8).then_some(bdf)
}

fn hex(text: &str, most: usize) -> Option<u16> {
    let plain = text.len() <= most && text.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u16::from_str_radix(text, 16).ok())?
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.segment, self.bus, self.device, self.function
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_full_addresses_are_the_same() {
        let full: Bdf = "0000:41:1f.7".parse().unwrap();
        assert_eq!(full, "41:1f.7".parse().unwrap());
        assert_eq!(full.to_string(), "0000:41:1f.7");
        assert_eq!("abcd:00:00.0".parse::<Bdf>().unwrap().segment, 0xabcd);
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for text in [
            "",
            "41",
            "41:00",
            "41:00.8",
            "41:20.0",
            "g1:00.0",
            "1:2:3:4.0",
            "+1:00.0",
            "12345:41:00.0",
            "41:00.0 ",
            "41:00.",
        ] {
            assert!(text.parse::<Bdf>().is_err(), "{text:?}");
        }
    }
}
