//! Memslots: which guest-physical addresses are memory of this process.

use std::io;
use std::sync::Arc;

use devices::assign::ports::{CallError, MemSlots, Slot};
use devices::sys::HostRange;
use kvm_ioctls::{Error, VmFd};
use parking_lot::Mutex;

use super::sys::Regions;

const CALL: &str = "KVM_SET_USER_MEMORY_REGION";
/// A memslot has less than 2^31 pages (virt/kvm/kvm_main.c, KVM_MEM_MAX_NR_PAGES).
pub const LEN_MAX: u64 = 4 << 40;

/// The VM's memslots.
pub struct VmMemSlots {
    regions: Mutex<Regions>,
    /// KVM_CAP_NR_MEMSLOTS.
    limit: u32,
}

impl VmMemSlots {
    /// For a VM without memslots. `limit`: KVM_CAP_NR_MEMSLOTS.
    pub fn new(vm: Arc<VmFd>, limit: u32) -> Self {
        Self {
            regions: Mutex::new(Regions::new(vm)),
            limit,
        }
    }
}

/// The lowest slot id that is not in use.
fn free_slot(limit: u32, used: impl Fn(u32) -> bool) -> Option<u32> {
    (0..limit).find(|id| !used(*id))
}

fn failed(error: Error) -> CallError {
    CallError {
        call: CALL,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

impl MemSlots for VmMemSlots {
    fn set(&self, gpa: u64, memory: &HostRange) -> Result<Slot, CallError> {
        let mut regions = self.regions.lock();
        let Some(id) = free_slot(self.limit, |id| regions.contains(id)) else {
            let text = format!("all {} memslots of the VM are in use", regions.len());
            return Err(CallError {
                call: CALL,
                source: io::Error::other(text),
            });
        };
        regions.create(id, gpa, memory.clone()).map_err(failed)?;
        Ok(Slot(id))
    }

    fn move_to(&self, slot: Slot, gpa: u64) -> Result<(), CallError> {
        self.regions.lock().move_to(slot.0, gpa).map_err(failed)
    }

    fn clear(&self, slot: Slot) -> Result<(), CallError> {
        self.regions.lock().clear(slot.0).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken_and_none_beyond_the_limit() {
        assert_eq!(free_slot(4, |_| false), Some(0));
        assert_eq!(free_slot(4, |id| id != 2), Some(2));
        assert_eq!(free_slot(4, |_| true), None);
    }
}
