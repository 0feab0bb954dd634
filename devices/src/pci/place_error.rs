//! Why a BAR could not be placed. The texts begin with the BAR; the caller puts the device's name
//! in front.

use std::fmt;

use super::spec::BAR_COUNT;
use crate::range::Range;
use crate::remedy::Remedy;

/// The BAR that an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Which device, as in the request.
    pub device: usize,
    /// BAR index.
    pub bar: u8,
    /// Bytes.
    pub size: u64,
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = Bytes(self.size);
        match usize::from(self.bar) {
            // The expansion ROM comes behind the BARs.
            BAR_COUNT => write!(f, "expansion ROM ({size})"),
            bar => write!(f, "BAR {bar} ({size})"),
        }
    }
}

/// Bytes in the largest binary unit that expresses them exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        let exact = |&&(shift, _): &&(u32, _)| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match units.iter().find(exact) {
            Some((shift, unit)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// An upper bound of addresses: "2^39" where it is one.
struct Bound(u64);

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_power_of_two() {
            write!(f, "2^{}", self.0.trailing_zeros())
        } else {
            write!(f, "{:#x}", self.0)
        }
    }
}

/// What bounds the addresses above RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Physical address bits, of the host's processor or of what KVM gives its guests.
    Processor(u64),
    /// The addresses that the IOMMU can map.
    Iommu(u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Processor(end) => write!(f, "the processor's limit of {}", Bound(*end)),
            Self::Iommu(end) => write!(f, "the IOMMU's limit of {}", Bound(*end)),
        }
    }
}

impl Limit {
    /// The first address beyond it.
    pub const fn end(&self) -> u64 {
        match self {
            Self::Processor(end) | Self::Iommu(end) => *end,
        }
    }

    const fn remedy(&self) -> &'static str {
        match self {
            Self::Processor(_) => "assign fewer devices, or give the guest less memory",
            Self::Iommu(_) => {
                "p2p=off on each --vfio keeps BARs out of the IOMMU; otherwise assign fewer devices, or give the \
                 guest less memory"
            }
        }
    }
}

/// What is in the way of a BAR at a place that the user chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Zero, or no multiple of the BAR's size.
    Misaligned,
    /// At or above what the BAR or the processor can address.
    TooHigh {
        /// The first address that cannot be.
        limit: u64,
    },
    /// Guest RAM.
    Ram(Range),
    /// Addresses that the platform uses.
    Reserved(Range),
    /// The IOMMU cannot map it, and peer-to-peer needs that.
    Iommu,
    /// Neither in this window nor, for a 64-bit BAR, above RAM.
    OutsideWindow {
        /// The window.
        window: Range,
    },
    /// Another BAR that was placed by the user.
    Bar(Bar),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Misaligned => f.write_str("it must be a nonzero multiple of the BAR's size"),
            Self::TooHigh { limit } => write!(f, "it must end below {}", Bound(*limit)),
            Self::Ram(range) => write!(f, "guest RAM is at {range}"),
            Self::Reserved(range) => write!(f, "{range} is reserved"),
            Self::Iommu => {
                f.write_str("the IOMMU cannot map it, which peer-to-peer needs (p2p=off)")
            }
            Self::OutsideWindow { window } => write!(
                f,
                "it must lie in {window}, or above RAM and 4 GiB for a 64-bit BAR"
            ),
            Self::Bar(other) => {
                let number = other.device + 1;
                write!(
                    f,
                    "{other} of the device of --vfio number {number} is there"
                )
            }
        }
    }
}

/// A set of BARs that cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The I/O window is full.
    #[error(
        "{bar} does not fit into what is left of the I/O ports {window}: assign fewer devices with I/O BARs"
    )]
    NoPorts {
        /// The first BAR that did not fit.
        bar: Bar,
        /// The window.
        window: Range,
    },
    /// The window below 4 GiB is full.
    #[error(
        "{bar} is a 32-bit BAR and does not fit into what is left of the window {window}: assign fewer devices"
    )]
    NoRoom32 {
        /// The first BAR that did not fit.
        bar: Bar,
        /// The window.
        window: Range,
    },
    /// There is no room above RAM.
    #[error("{bar} does not fit below {limit}: all 64-bit BARs together take {} above the guest's RAM: {}", Bytes(*needed), limit.remedy())]
    NoRoom64 {
        /// The first BAR that did not fit.
        bar: Bar,
        /// Bytes of all BARs of the 64-bit window.
        needed: u64,
        /// What bounds it.
        limit: Limit,
    },
    /// The size of the 64-bit window that the user chose is less than the BARs.
    #[error("--mmio64-size {} is too small, the BARs take {}: leave it out, or choose at least twice as much so that the guest can move BARs", Bytes(*size), Bytes(*needed))]
    WindowTooSmall {
        /// Bytes chosen.
        size: u64,
        /// Bytes needed at least.
        needed: u64,
    },
    /// There is no room for the 64-bit window that the user chose.
    #[error("a 64-bit window of {} does not fit between the guest's RAM and {limit}: choose a smaller --mmio64-size, or leave it out", Bytes(*size))]
    WindowDoesNotFit {
        /// Bytes chosen.
        size: u64,
        /// What bounds it.
        limit: Limit,
    },
    /// A BAR cannot be where the user wants it.
    #[error("{bar} cannot be at {address:#x}: {obstacle}: choose another address, or leave it out")]
    Fixed {
        /// The BAR.
        bar: Bar,
        /// Where it should have been.
        address: u64,
        /// Why not.
        obstacle: Obstacle,
    },
}

impl PlaceError {
    /// The BAR that it is about, if it is about one.
    pub const fn bar(&self) -> Option<Bar> {
        match self {
            Self::NoPorts { bar, .. }
            | Self::NoRoom32 { bar, .. }
            | Self::NoRoom64 { bar, .. }
            | Self::Fixed { bar, .. } => Some(*bar),
            Self::WindowTooSmall { .. } | Self::WindowDoesNotFit { .. } => None,
        }
    }

    /// What mends it; the message ends with it.
    pub fn remedy(&self) -> Remedy {
        Remedy::advice(match self {
            Self::NoPorts { .. } => "assign fewer devices with I/O BARs",
            Self::NoRoom32 { .. } => "assign fewer devices",
            Self::NoRoom64 { limit, .. } => limit.remedy(),
            Self::WindowTooSmall { .. } => {
                "leave it out, or choose at least twice as much so that the guest can move BARs"
            }
            Self::WindowDoesNotFit { .. } => "choose a smaller --mmio64-size, or leave it out",
            Self::Fixed { .. } => "choose another address, or leave it out",
        })
    }

    /// The same with another limit named, where a limit is named.
    pub(super) fn with_limit(mut self, new: Limit) -> Self {
        if let Self::NoRoom64 { limit, .. } | Self::WindowDoesNotFit { limit, .. } = &mut self {
            *limit = new;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_in_the_largest_exact_unit() {
        assert_eq!(Bytes(512 << 30).to_string(), "512 GiB");
        assert_eq!(Bytes(3 << 40).to_string(), "3 TiB");
        assert_eq!(Bytes((1 << 30) + (1 << 20)).to_string(), "1025 MiB");
        assert_eq!(Bytes(0).to_string(), "0 bytes");
    }

    #[test]
    fn texts_name_the_bar_the_limit_and_the_remedy() {
        let bar = Bar {
            device: 3,
            bar: 2,
            size: 512 << 30,
        };
        let error = PlaceError::NoRoom64 {
            bar,
            needed: 512 << 30,
            limit: Limit::Iommu(1 << 39),
        };
        let text = error.to_string();
        assert!(
            text.starts_with("BAR 2 (512 GiB) does not fit below the IOMMU's limit of 2^39: "),
            "{text}"
        );
        assert!(text.contains("p2p=off"), "{text}");
        assert_eq!(error.bar(), Some(bar));
    }
}
