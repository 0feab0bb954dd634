//! Names of PCI vendors, devices and classes, from the host's pci.ids (package pciutils or hwdata).
//! Without the file numbers have to do.

use std::collections::BTreeMap;
use std::fs;

use super::Sysfs;
use super::function::Ids;

/// What stands between number and name.
const GAP: &str = "  ";

/// Where distributions keep the file.
const FILES: [&str; 2] = ["usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids"];

/// The host's pci.ids.
#[derive(Debug, Default)]
pub struct PciNames {
    text: String,
    /// Where the name of each vendor ("10de") and base class ("C 03") is in the text.
    sections: BTreeMap<String, usize>,
}

impl PciNames {
    /// Reads the first file that is there.
    pub fn load(sysfs: &Sysfs) -> Self {
        let read = |file: &&str| fs::read(sysfs.path(file)).ok();
        let bytes = FILES.iter().find_map(read).unwrap_or_default();
        let text = String::from_utf8(bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
        let mut sections = BTreeMap::new();
        let mut at = 0;
        for line in text.split_inclusive('\n') {
            if !line.starts_with(['\t', '#'])
                && let Some((key, _)) = line.split_once(GAP)
            {
                let name = at + key.len() + GAP.len();
                sections.entry(key.to_owned()).or_insert(name);
            }
            at += line.len();
        }
        Self { text, sections }
    }

    /// Vendor and device: `NVIDIA Corporation GH100 [H100 SXM5 80GB]`, or `10de:2330`, or the
    /// vendor's name and the device's number.
    pub fn device(&self, ids: &Ids) -> String {
        let Some((vendor, devices)) = self.section(&format!("{:04x}", ids.vendor)) else {
            return format!("{:04x}:{:04x}", ids.vendor, ids.device);
        };
        match entry(devices, &format!("\t{:04x}  ", ids.device)) {
            Some(device) => format!("{vendor} {device}"),
            None => format!("{vendor} {:04x}", ids.device),
        }
    }

    /// The class: `3D controller`, or `class 0302`.
    pub fn class(&self, ids: &Ids) -> String {
        let (base, sub) = (ids.class >> 16 & 0xff, ids.class >> 8 & 0xff);
        let name = self
            .section(&format!("C {base:02x}"))
            .map(|(name, subs)| entry(subs, &format!("\t{sub:02x}  ")).unwrap_or(name));
        name.map_or_else(|| format!("class {base:02x}{sub:02x}"), str::to_owned)
    }

    /// The name behind `key`, and the lines below it.
    fn section(&self, key: &str) -> Option<(&str, &str)> {
        let (name, below) = self
            .text
            .get(*self.sections.get(key)?..)?
            .split_once('\n')?;
        Some((name.trim(), below))
    }
}

/// What stands behind `key` in the lines up to the first that is not indented.
fn entry<'a>(lines: &'a str, key: &str) -> Option<&'a str> {
    let mut own = lines
        .lines()
        .take_while(|line| line.starts_with('\t') || line.starts_with('#') || line.is_empty());
    own.find_map(|line| line.strip_prefix(key)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# comment\n\
        10dd  Wrong\n\
        10de  NVIDIA Corporation\n\
        \t2330  GH100 [H100 SXM5 80GB]\n\
        \t\t10de 16c0  a subsystem\n\
        10df  Emulex\n\
        \tf100  LPe16000\n\
        C 03  Display controller\n\
        \t00  VGA compatible controller\n\
        \t02  3D controller\n\
        C 04  Multimedia controller\n";

    fn ids(vendor: u16, device: u16, class: u32) -> Ids {
        Ids {
            vendor,
            device,
            class,
        }
    }

    #[test]
    fn devices_and_classes_have_names_or_numbers() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        let gpu = ids(0x10de, 0x2330, 0x030200);
        assert_eq!(PciNames::load(&sysfs).device(&gpu), "10de:2330");
        assert_eq!(PciNames::load(&sysfs).class(&gpu), "class 0302");
        let directory = root.path().join("usr/share/hwdata");
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("pci.ids"), TEXT).unwrap();
        let names = PciNames::load(&sysfs);
        assert_eq!(
            names.device(&gpu),
            "NVIDIA Corporation GH100 [H100 SXM5 80GB]"
        );
        assert_eq!(names.class(&gpu), "3D controller");
        // A device of the next vendor is not this one's.
        assert_eq!(
            names.device(&ids(0x10de, 0xf100, 0)),
            "NVIDIA Corporation f100"
        );
        assert_eq!(names.class(&ids(1, 2, 0x03ff00)), "Display controller");
        assert_eq!(names.device(&ids(1, 2, 0)), "0001:0002");
    }
}
