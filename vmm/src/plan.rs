//! What is decided before a device is opened or memory mapped: functions of the options and of facts
//! about the host. The boot goes by them, and so do `check` and `--dry-run`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use arch::layout::{self, AddressRange};
use devices::assign::rom::RomSource;
use devices::assign::{DeviceOptions, PeerToPeer};
use devices::host::Sysfs;
use devices::iommu::choose::Wanted;
use devices::pci::address::Bdf;
use devices::pci::place::{PlaceRequest, Placement, Windows, place};
use devices::pci::spec::BAR_COUNT;
use devices::range::Range;

use crate::config::{Config, Iommu, P2p, UsageError};
use crate::error::{Error, HostError};
use crate::options::{BarAddress, Decode, RomOption, VfioOption};

/// The largest file that is taken for an expansion ROM.
const ROM_MAX: usize = 16 << 20;

/// The word on a 64-bit window without room for moves, and what helps.
pub const LITTLE_ROOM: (&str, &str) = (
    "the 64-bit window has little room, so that a guest that moves BARs about may not find a place for them",
    "assign fewer devices, or give the guest less memory",
);

/// The address space that BARs are placed in.
pub struct AddressSpace<'a> {
    /// Guest RAM.
    pub ram: &'a [AddressRange],
    /// What the IOMMU can map.
    pub usable: &'a [Range],
    /// Guest-physical address bits.
    pub guest_phys_bits: u8,
}

/// Gives each of the `requests` its address: above or between the RAM, below the limits of
/// processor and, where peers are to reach BARs, IOMMU.
pub fn place_bars(
    config: &Config,
    space: &AddressSpace<'_>,
    devices: &[Bdf],
    options: &[DeviceOptions],
    requests: &[PlaceRequest],
) -> Result<Placement, Error> {
    let reachable = |option: &DeviceOptions| option.peer_to_peer != PeerToPeer::Off;
    let windows = Windows {
        mmio32: from_arch(&layout::MMIO32),
        io: io_window(),
        ram: space.ram.iter().map(from_arch).collect(),
        usable_iova: options.iter().any(reachable).then(|| space.usable.to_vec()),
        address_limit: 1 << space.guest_phys_bits,
        reserved: Vec::new(),
        mmio64_size: config.mmio64_size.map(|size| size.0),
    };
    place(requests, &windows).map_err(|source| {
        let device = source.bar().and_then(|bar| devices.get(bar.device));
        Error::Place {
            device: device.copied(),
            source,
        }
    })
}

/// What an IOMMU that maps the `usable` addresses cannot: no guest RAM may lie there.
pub fn holes(usable: &[Range]) -> Vec<AddressRange> {
    let usable: Vec<_> = usable.iter().map(to_arch).collect();
    layout::complement(&usable)
}

/// The expansion ROM that the options ask for; a file is read.
pub fn rom_source(option: &RomOption) -> Result<RomSource, UsageError> {
    Ok(match option {
        RomOption::Off => RomSource::Off,
        RomOption::On => RomSource::Device,
        RomOption::File(path) => match read_rom(path) {
            Ok(bytes) if !bytes.is_empty() && bytes.len() <= ROM_MAX => {
                RomSource::Bytes(bytes.into())
            }
            Ok(bytes) => {
                let much = match bytes.len() {
                    0 => "nothing is",
                    _ => "more than 16 MiB are",
                };
                let path = path.clone();
                return Err(UsageError::NoRom { path, much });
            }
            Err(source) => {
                return Err(UsageError::File {
                    what: "read the expansion ROM",
                    path: path.clone(),
                    remedy: "name a file that can be read, or leave rom= out",
                    source,
                });
            }
        },
    })
}

/// All of the file, or a byte more than there may be: a file need not end (/dev/zero).
fn read_rom(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let most = ROM_MAX as u64 + 1;
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The IOMMU backend that the options ask for.
pub fn wanted(config: &Config) -> Wanted {
    match config.iommu {
        Iommu::Auto => Wanted::Auto,
        Iommu::Type1 => Wanted::Type1,
        Iommu::Iommufd => Wanted::Iommufd,
    }
}

/// Whether devices are to reach each other's BARs.
pub fn has_peers(config: &Config) -> bool {
    let devices = &config.vfio;
    let any = |p2p| devices.iter().any(|option| option.p2p == p2p);
    any(P2p::On) || (devices.len() > 1 && any(P2p::Auto))
}

/// What the options say of one device, in the terms of the assignment.
pub fn device_options(sysfs: &Sysfs, option: &VfioOption) -> Result<DeviceOptions, HostError> {
    let mut fixed = [None; BAR_COUNT];
    for ((bar, wanted), address) in (0..).zip(&option.fixed).zip(&mut fixed) {
        *address = match wanted {
            None => None,
            Some(BarAddress::At(address)) => Some(*address),
            Some(BarAddress::Host) => Some(host_address(sysfs, option.bdf, bar)?),
        };
    }
    Ok(DeviceOptions {
        peer_to_peer: match option.p2p {
            P2p::Auto => PeerToPeer::Auto,
            P2p::On => PeerToPeer::On,
            P2p::Off => PeerToPeer::Off,
        },
        strict_decode: option.decode == Decode::Strict,
        trapped: option.trapped,
        fixed,
    })
}

fn host_address(sysfs: &Sysfs, bdf: Bdf, bar: u8) -> Result<u64, HostError> {
    let address = sysfs.bar_address(bdf, bar);
    address.ok_or(HostError::NoBarAddress { bdf, bar })
}

/// The I/O ports of BARs.
pub fn io_window() -> Range {
    let ports = layout::PCI_IO;
    Range::from_bounds((*ports.start()).into(), u64::from(*ports.end()) + 1)
}

/// As `arch` has it.
pub fn to_arch(range: &Range) -> AddressRange {
    AddressRange::new(range.start(), range.end())
}

/// As `devices` has it.
pub fn from_arch(range: &AddressRange) -> Range {
    Range::from_bounds(range.start, range.end)
}
