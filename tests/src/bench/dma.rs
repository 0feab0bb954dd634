//! Mappings in the IOMMU by what they are of: the trace that resources/lab/bench.sh takes beside that of all ioctls.
//!
//! An ioctl's number does not tell whether RAM or a BAR is mapped; its address does: RAM and BARs do not overlap, and both
//! VMMs give devices the guest's own addresses.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::outside::{self, Calls, Format};

const VFIO_IOMMU_MAP_DMA: u32 = 0x3b71;
const VFIO_IOMMU_UNMAP_DMA: u32 = 0x3b72;
const IOMMU_IOAS_MAP: u32 = 0x3b85;
const IOMMU_IOAS_UNMAP: u32 = 0x3b86;
const IOMMU_IOAS_MAP_FILE: u32 = 0x3b8f;

const GIB: u64 = 1 << 30;
/// Below 4 GiB no VMM puts RAM from here on; what is higher than the IOAPIC's page is firmware.
const BARS_BELOW_4G: std::ops::Range<u64> = 3 * GIB..0xfec0_0000;
/// So much RAM, or all that there is, lies below 4 GiB with every VMM.
const LOW_RAM: u64 = 2 * GIB;

/// Mappings before the guest was off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dma {
    /// Of BARs, made.
    pub bar_map: Calls,
    /// Of BARs, taken away.
    pub bar_unmap: Calls,
    /// Of RAM and firmware, made.
    pub ram_map: Calls,
    /// Of RAM and firmware, taken away.
    pub ram_unmap: Calls,
}

/// Something that L1's kernel traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Traced {
    /// A thread asks the IOMMU's driver for something; the words at bytes 8, 16 and 32 of the argument.
    Call {
        thread: u64,
        cmd: u32,
        words: [u64; 3],
    },
    /// It comes back.
    Return { thread: u64 },
}

/// The trace of one run.
pub struct Trace(Vec<(u64, Traced)>);

impl Trace {
    /// Reads a directory of L1's buffers.
    pub fn read(directory: &Path) -> Result<Self, Error> {
        let mut traced = outside::records(directory, decode)?;
        traced.sort_by_key(|(time, _)| *time);
        Ok(Self(traced))
    }

    /// The mappings that were asked for until `off`, where the guest has `ram` bytes of memory.
    pub fn until(&self, off: u64, ram: u64) -> Dma {
        let mut dma = Dma::default();
        let mut pending: Vec<(u64, u64, u32, [u64; 3])> = Vec::new();
        for &(time, what) in &self.0 {
            match what {
                Traced::Call { thread, cmd, words } if time <= off => {
                    pending.push((thread, time, cmd, words));
                }
                Traced::Return { thread } => {
                    let at = pending.iter().position(|(caller, ..)| *caller == thread);
                    if let Some((_, begin, cmd, words)) = at.map(|at| pending.remove(at)) {
                        dma.add(cmd, words, time - begin, ram);
                    }
                }
                Traced::Call { .. } => {}
            }
        }
        dma
    }
}

impl Dma {
    fn add(&mut self, cmd: u32, [w8, w16, w32]: [u64; 3], took: u64, ram: u64) {
        // struct vfio_iommu_type1_dma_map, …_unmap, struct iommu_ioas_map, …_unmap and …_map_file.
        let (maps, iova) = match cmd {
            VFIO_IOMMU_MAP_DMA => (true, w16),
            VFIO_IOMMU_UNMAP_DMA => (false, w8),
            IOMMU_IOAS_MAP | IOMMU_IOAS_MAP_FILE => (true, w32),
            IOMMU_IOAS_UNMAP => (false, w8),
            _ => return,
        };
        let tally = match (maps, is_bar(iova, ram)) {
            (true, true) => &mut self.bar_map,
            (false, true) => &mut self.bar_unmap,
            (true, false) => &mut self.ram_map,
            (false, false) => &mut self.ram_unmap,
        };
        tally.calls += 1;
        tally.ns += took;
        tally.max_ns = tally.max_ns.max(took);
    }
}

fn is_bar(iova: u64, ram: u64) -> bool {
    BARS_BELOW_4G.contains(&iova) || iova >= 4 * GIB + ram.saturating_sub(LOW_RAM)
}

fn decode(format: &Format, record: &[u8]) -> Option<Traced> {
    let value = |name| format.value(record, name);
    let thread = || value("common_pid");
    Some(match format.name.as_str() {
        "dma_call" => Traced::Call {
            thread: thread()?,
            cmd: u32::try_from(value("cmd")?).ok()?,
            words: [value("w8")?, value("w16")?, value("w32")?],
        },
        "dma_return" => Traced::Return { thread: thread()? },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(thread: u64, cmd: u32, words: [u64; 3]) -> Traced {
        Traced::Call { thread, cmd, words }
    }

    #[test]
    fn mappings_are_told_apart_by_their_address() {
        let ram = 512 << 20;
        let bar = 64 * GIB;
        let trace = Trace(vec![
            (10, call(1, VFIO_IOMMU_MAP_DMA, [0, 0, 0])),
            (15, call(2, VFIO_IOMMU_MAP_DMA, [0, bar, 0])),
            (17, Traced::Return { thread: 2 }),
            (20, Traced::Return { thread: 1 }),
            (30, call(1, VFIO_IOMMU_UNMAP_DMA, [bar, 16 * GIB, 0])),
            (37, Traced::Return { thread: 1 }),
            (40, call(1, VFIO_IOMMU_MAP_DMA, [0, 0xfebf_0000, 0])),
            (41, Traced::Return { thread: 1 }),
            (42, call(1, VFIO_IOMMU_MAP_DMA, [0, 0xfffc_0000, 0])),
            (43, Traced::Return { thread: 1 }),
            // Something else that the driver is asked for.
            (44, call(1, 0x3b70, [0; 3])),
            (45, Traced::Return { thread: 1 }),
            (60, call(1, VFIO_IOMMU_UNMAP_DMA, [bar, 16 * GIB, 0])),
            (90, Traced::Return { thread: 1 }),
        ]);
        let calls = |calls, ns, max_ns| Calls { calls, ns, max_ns };
        let dma = trace.until(50, ram);
        assert_eq!(dma.bar_map, calls(2, 3, 2));
        assert_eq!(dma.bar_unmap, calls(1, 7, 7));
        assert_eq!(dma.ram_map, calls(2, 11, 10));
        assert_eq!(dma.ram_unmap, calls(0, 0, 0));
    }

    #[test]
    fn a_bar_may_lie_right_above_4_gib_where_ram_does_not_reach() {
        assert!(is_bar(4 * GIB, 512 << 20));
        assert!(!is_bar(4 * GIB, 4 * GIB));
        assert!(is_bar(6 * GIB, 4 * GIB));
    }

    #[test]
    fn structures_of_iommufd_have_their_addresses_elsewhere() {
        let trace = Trace(vec![
            (1, call(1, IOMMU_IOAS_MAP_FILE, [0, 0, 64 * GIB])),
            (2, Traced::Return { thread: 1 }),
            (3, call(1, IOMMU_IOAS_MAP, [0, 0, 0])),
            (4, Traced::Return { thread: 1 }),
            (5, call(1, IOMMU_IOAS_UNMAP, [64 * GIB, 4096, 0])),
            (6, Traced::Return { thread: 1 }),
        ]);
        let dma = trace.until(10, 4 * GIB);
        let counts = [dma.bar_map, dma.ram_map, dma.bar_unmap, dma.ram_unmap];
        assert_eq!(counts.map(|calls| calls.calls), [1, 1, 1, 0]);
    }
}
