//! The KVM calls that `kvm-ioctls` leaves unsafe, made safe by owning what they refer to. The only
//! place of this crate, beside `memory.rs`, where `unsafe` is allowed.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use devices::sys::HostRange;
use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO, KVM_EXIT_IO_IN, kvm_run, kvm_userspace_memory_region,
};
use kvm_ioctls::{Error, VmFd};

/// A memslot as the kernel has it.
struct Region {
    gpa: u64,
    /// Not dropped with the table: the VM may outlive it through a vCPU's descriptor.
    memory: ManuallyDrop<HostRange>,
}

/// The memslots of a VM, and the memory behind them.
///
/// Invariant: every memslot of the VM is in the table, and its memory stays mapped until the
/// kernel has let go of it.
pub struct Regions {
    vm: Arc<VmFd>,
    regions: BTreeMap<u32, Region>,
}

impl Regions {
    /// The table of a VM without memslots.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            regions: BTreeMap::new(),
        }
    }

    /// Whether `slot` is in use.
    pub fn contains(&self, slot: u32) -> bool {
        self.regions.contains_key(&slot)
    }

    /// Slots in use.
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Creates `slot`, which must not be in use.
    pub fn create(&mut self, slot: u32, gpa: u64, memory: HostRange) -> Result<(), Error> {
        if self.contains(slot) {
            return Err(Error::new(libc::EEXIST));
        }
        self.set(slot, gpa, &memory, memory.len())?;
        let memory = ManuallyDrop::new(memory);
        self.regions.insert(slot, Region { gpa, memory });
        Ok(())
    }

    /// Moves `slot` to another guest-physical address.
    pub fn move_to(&mut self, slot: u32, gpa: u64) -> Result<(), Error> {
        let region = self.regions.get(&slot).ok_or(Error::new(libc::ENOENT))?;
        self.set(slot, gpa, &region.memory, region.memory.len())?;
        if let Some(region) = self.regions.get_mut(&slot) {
            region.gpa = gpa;
        }
        Ok(())
    }

    /// Removes `slot` and lets go of its memory.
    pub fn clear(&mut self, slot: u32) -> Result<(), Error> {
        let region = self.regions.get(&slot).ok_or(Error::new(libc::ENOENT))?;
        self.set(slot, region.gpa, &region.memory, 0)?;
        if let Some(region) = self.regions.remove(&slot) {
            drop(ManuallyDrop::into_inner(region.memory));
        }
        Ok(())
    }

    /// `len` is that of `memory`, or 0 to remove the slot.
    fn set(&self, slot: u32, gpa: u64, memory: &HostRange, len: u64) -> Result<(), Error> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa,
            memory_size: len,
            userspace_addr: memory.address(),
        };
        // SAFETY: KVM_SET_USER_MEMORY_REGION wants the addresses to stay a mapping that the guest
        // may access for as long as the slot exists. They are a `HostRange`, which the callers put
        // into the table before anything else can happen and keep until the slot is gone; Rust
        // makes no references into it.
        unsafe { self.vm.set_user_memory_region(region) }
    }
}

/// A port access that a vCPU made.
pub struct PortAccess<'a> {
    /// The port.
    pub port: u16,
    /// Bytes of one access: 1, 2 or 4.
    pub size: usize,
    /// Whether the guest reads.
    pub is_read: bool,
    /// One or (string instructions) several accesses, one behind the other.
    pub data: &'a mut [u8],
}

/// The port access of which `run` tells, if its exit reason is one. `kvm-ioctls` drops the size
/// of a single access, which tells a string instruction from a wider access.
pub fn port_access(run: &mut kvm_run) -> Option<PortAccess<'_>> {
    if run.exit_reason != KVM_EXIT_IO {
        return None;
    }
    // SAFETY: with this exit reason the kernel filled the union's `io` (KVM API, "struct kvm_run").
    let io = unsafe { run.__bindgen_anon_1.io };
    let len = usize::from(io.size) * io.count as usize;
    let base: *mut kvm_run = run;
    // SAFETY: the kernel puts the data inside the mapping of KVM_GET_VCPU_MMAP_SIZE bytes that
    // `run` is the beginning of (`kvm-ioctls` maps it and lends `run` for as long as `self` of
    // the vCPU is borrowed, as here), and touches it only inside KVM_RUN.
    let data = unsafe {
        std::slice::from_raw_parts_mut(base.cast::<u8>().add(io.data_offset as usize), len)
    };
    Some(PortAccess {
        port: io.port,
        size: usize::from(io.size).max(1),
        is_read: u32::from(io.direction) == KVM_EXIT_IO_IN,
        data,
    })
}

/// What `run` tells of an internal error, if its exit reason is one: KVM_INTERNAL_ERROR_* and up
/// to 16 words of data, whose meaning depends on it.
pub fn internal_error(run: &kvm_run) -> Option<(u32, Vec<u64>)> {
    if run.exit_reason != KVM_EXIT_INTERNAL_ERROR {
        return None;
    }
    // SAFETY: with this exit reason the kernel filled the union's `internal` (KVM API, "struct
    // kvm_run"); it is plain integers, valid whatever their bits.
    let error = unsafe { run.__bindgen_anon_1.internal };
    let words = error.data.iter().take(error.ndata as usize).copied();
    Some((error.suberror, words.collect()))
}
