//! What the kernel says of the layout of its trace: where sub-buffers have their parts, and records their fields.

use std::collections::HashMap;

/// Numbers in a buffer, none where it is too short.
pub trait Bytes {
    /// The little-endian number at an offset.
    fn u32(&self, offset: usize) -> Option<u32>;
    /// The same of 64 bits.
    fn u64(&self, offset: usize) -> Option<u64>;
}

impl Bytes for [u8] {
    fn u32(&self, offset: usize) -> Option<u32> {
        let bytes = self.get(offset..offset.checked_add(4)?)?;
        bytes.try_into().ok().map(u32::from_le_bytes)
    }

    fn u64(&self, offset: usize) -> Option<u64> {
        let bytes = self.get(offset..offset.checked_add(8)?)?;
        bytes.try_into().ok().map(u64::from_le_bytes)
    }
}

/// Where a sub-buffer has its parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// The word that tells how much is used.
    pub commit: usize,
    /// The first record.
    pub data: usize,
    /// All of it.
    pub size: usize,
}

impl Page {
    /// Reads `events/header_page`.
    pub fn parse(text: &str) -> Option<Self> {
        let mut fields = text.lines().filter_map(field);
        let mut find = |wanted| fields.find(|(name, _)| *name == wanted);
        let (_, commit) = find("commit")?;
        let (_, data) = find("data")?;
        (commit.size == 8).then_some(Self {
            commit: commit.offset,
            data: data.offset,
            size: data.offset + data.size,
        })
    }
}

/// A field of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    offset: usize,
    size: usize,
}

/// A kind of record.
#[derive(Debug)]
pub struct Format {
    /// The event's name, without its group.
    pub name: String,
    fields: HashMap<String, Field>,
}

impl Format {
    /// The value of a field; none where the record does not have it whole.
    pub fn value(&self, record: &[u8], name: &str) -> Option<u64> {
        let field = self.fields.get(name)?;
        match field.size {
            4 => record.u32(field.offset).map(u64::from),
            8 => record.u64(field.offset),
            _ => None,
        }
    }
}

/// The kinds of records in a buffer, by the number that each record begins with.
#[derive(Debug, Default)]
pub struct Formats(HashMap<u16, Format>);

impl Formats {
    /// Reads the `format` files of events, one after the other.
    pub fn parse(text: &str) -> Option<Self> {
        let mut formats = HashMap::new();
        for event in text.split("name: ").skip(1) {
            let mut lines = event.lines();
            let name = lines.next()?.trim().to_owned();
            let id = lines.next()?.strip_prefix("ID: ")?.trim().parse().ok()?;
            let fields = lines
                .filter_map(field)
                .map(|(name, field)| (name.to_owned(), field))
                .collect();
            formats.insert(id, Format { name, fields });
        }
        Some(Self(formats))
    }

    /// The kind of a record.
    pub fn of(&self, record: &[u8]) -> Option<&Format> {
        let id = record.get(..2)?.try_into().ok().map(u16::from_le_bytes)?;
        self.0.get(&id)
    }
}

/// Takes a line such as `field:unsigned int cmd; offset:24; size:8; signed:0;` apart.
fn field(line: &str) -> Option<(&str, Field)> {
    let (declaration, rest) = line.trim().strip_prefix("field:")?.split_once(';')?;
    let name = declaration.rsplit(' ').next()?;
    let number = |key: &str| -> Option<usize> {
        let (_, value) = rest.split_once(key)?;
        value.split(';').next()?.trim().parse().ok()
    };
    let (offset, size) = (number("offset:")?, number("size:")?);
    Some((name, Field { offset, size }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name() {
        let text = "name: sys_enter_ioctl\nID: 879\nformat:\n\
             \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
             \tfield:unsigned int cmd;\toffset:8;\tsize:8;\tsigned:0;\n\n\
             print fmt: \"x\"\n\
             name: map\nID: 3\nformat:\n\tfield:pid_t pid;\toffset:4;\tsize:4;\tsigned:1;\n";
        let formats = Formats::parse(text).unwrap();
        let mut record = 879u16.to_le_bytes().to_vec();
        record.resize(8, 0);
        record.extend(0x3b71u64.to_le_bytes());
        let format = formats.of(&record).unwrap();
        assert_eq!(format.name, "sys_enter_ioctl");
        assert_eq!(format.value(&record, "cmd"), Some(0x3b71));
        assert_eq!(format.value(&record[..12], "cmd"), None);
        assert_eq!(format.value(&record, "fd"), None);
        assert_eq!(formats.of(&[3, 0]).unwrap().name, "map");
        assert!(formats.of(&[4, 0]).is_none());
    }

    #[test]
    fn a_sub_buffer_is_as_large_as_the_kernel_says() {
        let text = "\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n\
             \tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;\n\
             \tfield: char overwrite;\toffset:8;\tsize:1;\tsigned:0;\n\
             \tfield: char data;\toffset:16;\tsize:4080;\tsigned:0;\n";
        let page = Page {
            commit: 8,
            data: 16,
            size: 4096,
        };
        assert_eq!(Page::parse(text), Some(page));
        assert_eq!(Page::parse(""), None);
    }
}
