//! What `lspci -D -vv -xxxx` prints: the bytes of configuration space, and BARs with kind and size.

/// A function as lspci shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Function {
    /// Its address.
    pub bdf: String,
    /// Configuration space: 256 or 4096 bytes.
    pub bytes: Vec<u8>,
    /// Its BARs without their addresses: `Region 0: Memory at (32-bit, non-prefetchable) [size=128K]`.
    pub regions: Vec<String>,
}

/// A standard or extended capability: id and offset.
pub type Capability = (u16, usize);

const STATUS: usize = 6;
const CAP_LIST: u8 = 1 << 4;
const POINTER: usize = 0x34;
const EXTENDED: usize = 0x100;
/// More than any list holds.
const MOST: usize = 256;

/// All functions in the output, in order.
pub fn parse(text: &str) -> Vec<Function> {
    let mut functions: Vec<Function> = Vec::new();
    for line in text.lines().map(str::trim_end) {
        if is_heading(line) {
            let bdf = line.split(' ').next().unwrap_or_default().to_owned();
            functions.push(Function {
                bdf,
                ..Function::default()
            });
        }
        let Some(function) = functions.last_mut() else {
            continue;
        };
        if let Some(region) = region(line) {
            function.regions.push(region);
        } else if let Some(bytes) = dump(line, function.bytes.len()) {
            function.bytes.extend(bytes);
        }
    }
    functions
}

/// `0000:00:03.0 Ethernet controller: …`
fn is_heading(line: &str) -> bool {
    let Some((bdf, _)) = line.split_once(' ') else {
        return false;
    };
    bdf.len() == 12 && bdf.matches(':').count() == 2 && bdf.matches('.').count() == 1
}

/// `\tRegion 0: Memory at feac0000 (32-bit, non-prefetchable) [disabled] [size=128K]` without what depends on the machine.
fn region(line: &str) -> Option<String> {
    let line = line.strip_prefix("\tRegion ")?;
    let (before, after) = line.split_once(" at ")?;
    let (_, rest) = after.split_once(' ')?;
    let rest = rest.replace("[disabled] ", "").replace("[virtual] ", "");
    Some(format!("Region {before} at {rest}"))
}

/// `010: 00 00 …`, where the next offset is expected.
fn dump(line: &str, expected: usize) -> Option<Vec<u8>> {
    let (offset, bytes) = line.split_once(": ")?;
    if usize::from_str_radix(offset, 16).ok()? != expected {
        return None;
    }
    bytes
        .split(' ')
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect()
}

impl Function {
    /// The byte there; all ones behind the end.
    pub fn byte(&self, offset: usize) -> u8 {
        self.bytes.get(offset).copied().unwrap_or(u8::MAX)
    }

    fn dword(&self, offset: usize) -> u32 {
        u32::from_le_bytes([0, 1, 2, 3].map(|at| self.byte(offset + at)))
    }

    /// The list of standard capabilities.
    pub fn standard(&self) -> Vec<Capability> {
        let mut list = Vec::new();
        let mut at = usize::from(self.byte(POINTER) & !3);
        while self.byte(STATUS) & CAP_LIST != 0 && at != 0 && list.len() < MOST {
            list.push((self.byte(at).into(), at));
            at = usize::from(self.byte(at + 1) & !3);
        }
        list
    }

    /// The list of extended capabilities, null ones left out.
    pub fn extended(&self) -> Vec<Capability> {
        let mut list = Vec::new();
        let mut at = EXTENDED;
        for _ in 0..MOST {
            let header = if at < self.bytes.len() {
                self.dword(at)
            } else {
                0
            };
            if header & 0xffff != 0 {
                list.push((header as u16, at));
            }
            at = header as usize >> 20;
            if at < EXTENDED {
                break;
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "noise\n0000:00:03.0 Ethernet controller: Intel\n\tRegion 0: Memory at feac0000 (32-bit, non-prefetchable) [disabled] [size=128K]\n\
        \tRegion 2: I/O ports at c140 [size=32]\n\tExpansion ROM at fea00000 [disabled] [size=256K]\n00: 86 80 d3 10\n04: 06 04 10 00\n10: no\n\n\
        0000:00:04.0 Other: two\n00: 01 02\n";

    #[test]
    fn bytes_and_regions_of_each_function() {
        let functions = parse(TEXT);
        assert_eq!(functions.len(), 2);
        assert_eq!(functions[0].bdf, "0000:00:03.0");
        assert_eq!(functions[0].bytes, [0x86, 0x80, 0xd3, 0x10, 6, 4, 0x10, 0]);
        assert_eq!(
            functions[0].regions,
            [
                "Region 0: Memory at (32-bit, non-prefetchable) [size=128K]",
                "Region 2: I/O ports at [size=32]"
            ]
        );
        assert_eq!(functions[1].bytes, [1, 2]);
    }

    #[test]
    fn lists_are_walked() {
        let mut function = Function {
            bytes: vec![0; 4096],
            ..Function::default()
        };
        let bytes = &mut function.bytes;
        bytes[STATUS] = CAP_LIST;
        bytes[POINTER] = 0x40;
        bytes[0x40..0x42].copy_from_slice(&[5, 0x50]);
        bytes[0x50] = 0x11;
        bytes[0x100..0x104].copy_from_slice(&0x1400_0000u32.to_le_bytes());
        bytes[0x140..0x144].copy_from_slice(&0x0001_0003u32.to_le_bytes());
        assert_eq!(function.standard(), [(5, 0x40), (0x11, 0x50)]);
        assert_eq!(function.extended(), [(3, 0x140)]);
    }
}
