//! The value of `--vfio`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use devices::pci::address::Bdf;
use devices::pci::spec::BAR_COUNT;

use super::{each_once, key};
use crate::config::P2p;

/// What a guest that switches memory decode off sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decode {
    /// The BAR still answers: nothing is torn down (default).
    #[default]
    Sticky,
    /// All ones, as on hardware.
    Strict,
}

/// `--vfio BDF[,…]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VfioOption {
    /// The host device.
    pub bdf: Bdf,
    /// Peer-to-peer mappings of its BARs.
    pub p2p: P2p,
    /// Memory decode.
    pub decode: Decode,
    /// BARs that stay trapped.
    pub trapped: [bool; BAR_COUNT],
    /// BARs that must lie somewhere.
    pub fixed: [Option<BarAddress>; BAR_COUNT],
    /// The expansion ROM.
    pub rom: RomOption,
    /// NVIDIA's peer-to-peer clique.
    pub clique: Option<u8>,
}

/// `rom=off|on|FILE`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RomOption {
    /// None is shown.
    #[default]
    Off,
    /// The device's.
    On,
    /// The contents of a file.
    File(PathBuf),
}

/// `barN=host|0x…`: where a BAR must lie in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarAddress {
    /// Where it lies on the host.
    Host,
    /// There.
    At(u64),
}

impl FromStr for BarAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "host" {
            return Ok(Self::Host);
        }
        let digits = text.strip_prefix("0x").unwrap_or_default();
        u64::from_str_radix(digits, 16)
            .map(Self::At)
            .map_err(|_| format!("\"{text}\" is neither host nor an address such as 0x4000000000"))
    }
}

/// The number of a BAR, 0 to 5.
fn bar_number(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(bar) if bar < BAR_COUNT => Ok(bar),
        _ => Err(format!("\"{text}\" is not the number of a BAR, 0 to 5")),
    }
}

impl FromStr for VfioOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut option = Self {
            bdf: device(parts.next().unwrap_or_default())?,
            p2p: P2p::default(),
            decode: Decode::default(),
            trapped: [false; BAR_COUNT],
            fixed: [None; BAR_COUNT],
            rom: RomOption::Off,
            clique: None,
        };
        // no-mmap=N is there once for each BAR.
        each_once(parts.clone().map(|part| match key(part) {
            "no-mmap" => part,
            key => key,
        }))?;
        for part in parts {
            option.set(part)?;
        }
        if option.clique.is_some() && option.p2p == P2p::Off {
            return Err(
                "gpudirect-clique says that peers can reach its BARs: not with p2p=off".to_owned(),
            );
        }
        Ok(option)
    }
}

impl VfioOption {
    /// What one part of the text says, `key=value` or `key`.
    fn set(&mut self, part: &str) -> Result<(), String> {
        match part.split_once('=') {
            Some(("p2p", value)) => {
                let unknown = |_| format!("p2p={value}: auto, on and off are known");
                self.p2p = P2p::from_str(value, false).map_err(unknown)?;
            }
            Some(("decode", "sticky")) => self.decode = Decode::Sticky,
            Some(("decode", "strict")) => self.decode = Decode::Strict,
            Some(("decode", value)) => {
                return Err(format!("decode={value}: sticky and strict are known"));
            }
            Some(("rom", "off")) => self.rom = RomOption::Off,
            Some(("rom", "on")) => self.rom = RomOption::On,
            Some(("rom", file)) if !file.is_empty() => self.rom = RomOption::File(file.into()),
            Some(("gpudirect-clique", clique)) => match clique.parse() {
                Ok(clique @ 0..=15) => self.clique = Some(clique),
                _ => return Err(format!("\"{clique}\" is not a clique, 0 to 15")),
            },
            Some(("no-mmap", bar)) => {
                let bar = bar_number(bar)?;
                self.trapped
                    .iter_mut()
                    .skip(bar)
                    .take(1)
                    .for_each(|t| *t = true);
            }
            None if part == "no-mmap" => self.trapped = [true; BAR_COUNT],
            Some((key, value)) if key.starts_with("bar") => {
                let bar = bar_number(key.trim_start_matches("bar"))?;
                let address = value.parse()?;
                let place = self.fixed.iter_mut().skip(bar).take(1);
                place.for_each(|fixed| *fixed = Some(address));
            }
            _ => {
                return Err(format!(
                    "\"{part}\" is not known; p2p=, decode=, no-mmap[=N], barN=, rom= and \
                     gpudirect-clique= are"
                ));
            }
        }
        Ok(())
    }
}

/// A BDF, or a path that ends in one or leads to one, as /sys/class/drm/card0/device does.
fn device(text: &str) -> Result<Bdf, String> {
    let name = ["host=", "path=", "bdf="]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    if !name.contains('/') {
        return name.parse::<Bdf>().map_err(|error| error.to_string());
    }
    let end = |path: &Path| path.file_name()?.to_str()?.parse::<Bdf>().ok();
    let path = Path::new(name);
    let led = || end(&path.canonicalize().ok()?);
    end(path)
        .or_else(led)
        .ok_or_else(|| format!("{name} does not lead to a PCI device"))
}
