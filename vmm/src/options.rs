//! Values of command-line options.

mod vfio;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;

pub use vfio::{BarAddress, Decode, RomOption, VfioOption};

/// Bytes, written with a unit: 512M, 64G, 2T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let unit = text[digits.len()..].to_ascii_lowercase();
        let unit = unit.strip_suffix("ib").unwrap_or(&unit);
        let shift = match unit {
            "k" => 10,
            "m" => 20,
            "g" => 30,
            "t" => 40,
            // Without a unit it means the same; whoever needs more than nothing says so.
            "" if !digits.is_empty() && digits.bytes().all(|digit| digit == b'0') => 0,
            "" if !digits.is_empty() => {
                return Err(format!(
                    "\"{text}\" has no unit; write {digits}M or {digits}G"
                ));
            }
            _ => return Err(format!("\"{text}\" is not a size such as 512M or 64G")),
        };
        let number: u64 = digits
            .parse()
            .map_err(|_| format!("\"{text}\" is not a size such as 512M or 64G"))?;
        number
            .checked_mul(1 << shift)
            .map(Self)
            .ok_or_else(|| format!("\"{text}\" is too large"))
    }
}

/// The key of `key=value`, or of `key` alone.
fn key(part: &str) -> &str {
    part.split_once('=').map_or(part, |(key, _)| key)
}

/// A key that is given twice is a slip, and either value may be the one that is meant.
fn each_once<'a>(keys: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = Vec::new();
    for key in keys {
        if seen.contains(&key) {
            return Err(format!("{key} is given twice: leave one out"));
        }
        seen.push(key);
    }
    Ok(())
}

/// Size of huge pages from the host's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// 2 MiB.
    Size2M,
    /// 1 GiB.
    Size1G,
}

impl HugePages {
    /// Bytes of a page.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Size2M => 2 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

/// `node=N|auto`: the host's NUMA node that guest RAM comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// This one and no other.
    Number(u32),
    /// That of the first assigned device, where it has memory free.
    Auto,
}

/// `--memory SIZE[,hugepages=2M|1G][,node=N|auto]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryOption {
    /// Bytes of guest RAM.
    pub size: Size,
    /// Back it with reserved huge pages.
    pub huge_pages: Option<HugePages>,
    /// Where it comes from; `None` leaves it to the kernel.
    pub node: Option<Node>,
}

impl FromStr for MemoryOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let size = parts.next().unwrap_or_default();
        let size = size.strip_prefix("size=").unwrap_or(size).parse()?;
        if size == Size(0) {
            return Err(
                "a guest needs some tens of MiB at least; write, for example, 1G".to_owned(),
            );
        }
        each_once(parts.clone().map(key))?;
        let mut option = Self {
            size,
            huge_pages: None,
            node: None,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("hugepages", "2M")) => option.huge_pages = Some(HugePages::Size2M),
                Some(("hugepages", "1G")) => option.huge_pages = Some(HugePages::Size1G),
                Some(("node", "auto")) => option.node = Some(Node::Auto),
                Some(("node", number)) => {
                    let number = number.parse();
                    let wrong = |_| format!("\"{part}\" is not node=auto or a number");
                    option.node = Some(Node::Number(number.map_err(wrong)?));
                }
                _ => {
                    return Err(format!(
                        "\"{part}\" is not known; hugepages=2M or 1G and node=N or auto are"
                    ));
                }
            }
        }
        Ok(option)
    }
}

/// APIC ids are 0 to 254 at most: 255 means all of them. KVM's IOAPIC has 8 bits for the id of the
/// vCPU that an interrupt goes to (arch/x86/kvm/ioapic.h, `dest_id`) and ignores those that a guest
/// with KVM_FEATURE_MSI_EXT_DEST_ID would add: it would interrupt another vCPU.
const CPUS_MAX: u32 = 255;

/// `--cpus N`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus(pub u32);

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(0) => Err("a guest needs at least 1 vCPU".to_owned()),
            Ok(cpus) if cpus > CPUS_MAX => Err(format!(
                "more than {CPUS_MAX}, the most that KVM's IOAPIC can interrupt (its APIC ids have 8 bits)"
            )),
            Ok(cpus) => Ok(Self(cpus)),
            Err(_) => Err(format!("\"{text}\" is not a number of vCPUs")),
        }
    }
}

/// How `--boot-profile` reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileForm {
    /// Lines for people, on standard error.
    Table,
    /// One JSON object, on standard error.
    Json,
    /// A trace in this file, for Perfetto or chrome://tracing.
    Trace(PathBuf),
    /// A page in this file, for a browser.
    Html(PathBuf),
}

impl ProfileForm {
    /// The file that it is written to.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Table | Self::Json => None,
            Self::Trace(path) | Self::Html(path) => Some(path),
        }
    }
}

impl FromStr for ProfileForm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            None if text == "table" => Ok(Self::Table),
            None if text == "json" => Ok(Self::Json),
            Some(("trace", path)) if !path.is_empty() => Ok(Self::Trace(path.into())),
            Some(("html", path)) if !path.is_empty() => Ok(Self::Html(path.into())),
            None if matches!(text, "trace" | "html") => {
                Err(format!("{text} needs a file: write {text}=FILE"))
            }
            Some((form @ ("trace" | "html"), _)) => {
                Err(format!("{form}= needs a file: write {form}=FILE"))
            }
            _ => Err(format!(
                "\"{text}\" is not known; table, json, trace=FILE and html=FILE are"
            )),
        }
    }
}

/// When `--boot-profile` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileMoment {
    /// When the guest writes this mark to port 0x80.
    Mark(u8),
    /// When mini-vmm ends.
    Exit,
}

/// `--boot-profile table|json|trace=FILE|html=FILE[,at=41|42|exit]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootProfile {
    /// How.
    pub form: ProfileForm,
    /// When. A mark that never comes counts as the end.
    pub moment: ProfileMoment,
}

impl FromStr for BootProfile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The name of a file may hold a comma.
        let (form, moment) = match text.rsplit_once(",at=") {
            None => (text, ProfileMoment::Exit),
            Some((form, "exit")) => (form, ProfileMoment::Exit),
            Some((form, "41" | "0x41")) => (form, ProfileMoment::Mark(0x41)),
            Some((form, "42" | "0x42")) => (form, ProfileMoment::Mark(0x42)),
            Some((_, other)) => {
                return Err(format!("\"at={other}\" is not at=41, at=42 or at=exit"));
            }
        };
        if [",at=exit", ",at=41", ",at=0x41", ",at=42", ",at=0x42"]
            .iter()
            .any(|end| form.ends_with(end))
        {
            return Err("at is given twice: leave one out".to_owned());
        }
        let form = form.parse()?;
        Ok(Self { form, moment })
    }
}

/// `--log-level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What ends the VM or harms it.
    Error,
    /// What the user should know.
    Warn,
    /// Moments and decisions.
    Info,
    /// Phases.
    Debug,
    /// System calls.
    Trace,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    Text,
    /// A JSON object a line.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::P2p;

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!("512M".parse(), Ok(Size(512 << 20)));
        assert_eq!("64g".parse(), Ok(Size(64 << 30)));
        assert_eq!("2TiB".parse(), Ok(Size(2 << 40)));
        assert_eq!("1GiB".parse(), Ok(Size(1 << 30)));
        for text in ["", "G", "-1G", "1.5G", "1X", "1 G", "99999999999T"] {
            assert!(text.parse::<Size>().is_err(), "{text:?}");
        }
        let error = "4096".parse::<Size>().unwrap_err();
        assert_eq!(error, "\"4096\" has no unit; write 4096M or 4096G");
    }

    #[test]
    fn a_guest_of_no_memory_is_told_how_much_it_needs() {
        for text in ["0", "0M", "00G,hugepages=2M"] {
            let error = text.parse::<MemoryOption>().unwrap_err();
            assert!(error.contains("some tens of MiB"), "{text}: {error}");
        }
    }

    #[test]
    fn a_key_that_is_given_twice_is_refused() {
        let twice = |error: String| assert!(error.contains("given twice"), "{error}");
        twice(
            "1G,hugepages=2M,hugepages=1G"
                .parse::<MemoryOption>()
                .unwrap_err(),
        );
        twice("1G,node=0,node=0".parse::<MemoryOption>().unwrap_err());
        twice("table,at=41,at=42".parse::<BootProfile>().unwrap_err());
        twice("html=x,at=exit,at=42".parse::<BootProfile>().unwrap_err());
        twice("41:00.0,p2p=on,p2p=off".parse::<VfioOption>().unwrap_err());
        twice(
            "41:00.0,bar1=host,bar1=0x1000"
                .parse::<VfioOption>()
                .unwrap_err(),
        );
        twice(
            "41:00.0,no-mmap=1,no-mmap=1"
                .parse::<VfioOption>()
                .unwrap_err(),
        );
        let bars: VfioOption = "41:00.0,no-mmap=1,no-mmap=2,bar0=host,bar2=host"
            .parse()
            .unwrap();
        assert_eq!(bars.trapped, [false, true, true, false, false, false]);
    }

    #[test]
    fn a_wrong_value_is_told_what_is_right() {
        for form in ["html", "html=", "trace,at=41"] {
            let error = form.parse::<BootProfile>().unwrap_err();
            assert!(error.contains("needs a file: write "), "{error}");
        }
        let error = "41:00.0,foo=1".parse::<VfioOption>().unwrap_err();
        assert!(
            error.contains("\"foo=1\"") && error.contains("p2p=, decode="),
            "{error}"
        );
        assert_eq!("255".parse(), Ok(Cpus(255)));
        assert!("256".parse::<Cpus>().unwrap_err().contains("255"));
    }

    #[test]
    fn memory_may_be_of_huge_pages() {
        let option: MemoryOption = "64G,hugepages=1G".parse().unwrap();
        assert_eq!(option.huge_pages, Some(HugePages::Size1G));
        let option: MemoryOption = "size=2G,hugepages=2M".parse().unwrap();
        assert_eq!(option.size, Size(2 << 30));
        let option: MemoryOption = "64G,node=1,hugepages=2M".parse().unwrap();
        assert_eq!(option.node, Some(Node::Number(1)));
        let option: MemoryOption = "64G,node=auto".parse().unwrap();
        assert_eq!(option.node, Some(Node::Auto));
        for text in ["1G,node=", "1G,node=-1", "1G,node=near"] {
            assert!(text.parse::<MemoryOption>().is_err(), "{text}");
        }
        for text in ["1G,hugepages=4K", "1G,shared=on", "1G,", ",hugepages=2M"] {
            assert!(text.parse::<MemoryOption>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_profile_has_a_form_and_a_moment() {
        let at_exit: BootProfile = "table".parse().unwrap();
        assert_eq!(at_exit.moment, ProfileMoment::Exit);
        let at_mark: BootProfile = "json,at=42".parse().unwrap();
        assert_eq!(at_mark.form, ProfileForm::Json);
        assert_eq!(at_mark.moment, ProfileMoment::Mark(0x42));
        let file: BootProfile = "html=a,b.html,at=41".parse().unwrap();
        assert_eq!(file.form.file(), Some(Path::new("a,b.html")));
        assert_eq!(file.moment, ProfileMoment::Mark(0x41));
        for text in [
            "",
            "xml",
            "table,at=43",
            "table,",
            "trace",
            "html=",
            "table=x",
        ] {
            assert!(text.parse::<BootProfile>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_device_is_named_in_any_usual_way() {
        for text in [
            "41:00.0",
            "0000:41:00.0",
            "host=41:00.0",
            "path=/sys/bus/pci/devices/0000:41:00.0",
            "/sys/bus/pci/devices/0000:41:00.0/",
        ] {
            let option: VfioOption = text.parse().unwrap();
            assert_eq!(option.bdf.to_string(), "0000:41:00.0", "{text}");
        }
    }

    #[test]
    fn a_path_may_lead_to_a_device_by_links() {
        let root = tempfile::tempdir().unwrap();
        let link = root.path().join("device");
        std::os::unix::fs::symlink("0000:41:00.0", &link).unwrap();
        let named = |text: String| text.parse::<VfioOption>();
        let path = link.display();
        let error = named(format!("{path},p2p=off")).unwrap_err();
        assert!(error.contains("does not lead to a PCI device"), "{error}");
        std::fs::create_dir(root.path().join("0000:41:00.0")).unwrap();
        let option = named(format!("path={path},p2p=off")).unwrap();
        assert_eq!(option.bdf.to_string(), "0000:41:00.0");
        assert!(named("/".to_owned()).is_err());
    }

    #[test]
    fn device_options_are_parsed_and_unknown_ones_refused() {
        let option: VfioOption = "41:00.0,p2p=off,decode=strict,rom=off".parse().unwrap();
        assert_eq!((option.p2p, option.decode), (P2p::Off, Decode::Strict));
        let option: VfioOption = "41:00.0,rom=gpu.rom,gpudirect-clique=3".parse().unwrap();
        assert_eq!(option.rom, RomOption::File("gpu.rom".into()));
        assert_eq!(option.clique, Some(3));
        let option: VfioOption = "41:00.0,no-mmap=3,bar0=host,bar2=0x4000000000"
            .parse()
            .unwrap();
        assert_eq!(option.trapped, [false, false, false, true, false, false]);
        assert_eq!(option.fixed[0], Some(BarAddress::Host));
        assert_eq!(option.fixed[2], Some(BarAddress::At(0x40_0000_0000)));
        for text in [
            "41:00.0,no-mmap=6",
            "41:00.0,bar6=host",
            "41:00.0,bar2=4G",
            "41:00.0,p2p=maybe",
            "41:00.0,rom=",
            "41:00.0,gpudirect-clique=16",
            "41:00.0,gpudirect-clique=1,p2p=off",
            "41:00.0,x",
            "41:00.0,id=gpu0",
            "41:00.0,",
        ] {
            assert!(text.parse::<VfioOption>().is_err(), "{text}");
        }
    }
}
