//! A vCPU: its first state, and one exit after the other.

use arch::boot::Entry;
use arch::regs;
use devices::assign::ports::CallError;
use kvm_bindings::{CpuId, KVM_INTERNAL_ERROR_EMULATION, Msrs, kvm_cpuid_entry2};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};

use super::sys::{internal_error, port_access};
use crate::error::kvm_call;
use crate::pauses::Turn;

/// Something that only the VMM can answer for a vCPU.
pub trait ExitHandler {
    /// The guest reads a port; `data` is one access of 1, 2 or 4 bytes.
    fn port_read(&self, port: u16, data: &mut [u8]);
    /// The guest writes a port.
    fn port_write(&self, port: u16, data: &[u8]);
    /// The guest reads memory that is no memory; 1 to 8 bytes.
    fn mmio_read(&self, address: u64, data: &mut [u8]);
    /// The guest writes memory that is no memory.
    fn mmio_write(&self, address: u64, data: &[u8]);
}

/// Why a vCPU stopped running, where the guest cannot simply go on.
#[derive(Debug, PartialEq, Eq)]
pub enum Pause {
    /// A signal, or nothing to do yet: run again unless told to stop.
    Interrupted,
    /// Triple fault.
    Shutdown,
    /// KVM_SYSTEM_EVENT_*.
    SystemEvent(u32),
    /// The guest touched an address whose memory the kernel could not provide; the
    /// guest-physical address where the kernel tells it.
    MemoryFault(Option<u64>),
    /// Nothing can be done; the text says what KVM told.
    Broken(String),
}

/// A vCPU.
pub struct Vcpu {
    fd: VcpuFd,
    id: u32,
}

impl Vcpu {
    /// Creates vCPU `id`, which is also its APIC id, with what CPUID is to tell it.
    pub fn create(vm: &VmFd, id: u32, cpuid: &[kvm_cpuid_entry2]) -> Result<Self, CallError> {
        let fd = vm
            .create_vcpu(id.into())
            .map_err(kvm_call("KVM_CREATE_VCPU"))?;
        let cpuid = CpuId::from_entries(cpuid).map_err(|_| too_many("KVM_SET_CPUID2"))?;
        fd.set_cpuid2(&cpuid).map_err(kvm_call("KVM_SET_CPUID2"))?;
        let vcpu = Self { fd, id };
        vcpu.set_msrs()?;
        vcpu.set_local_interrupts()?;
        Ok(vcpu)
    }

    /// Its id and APIC id.
    pub fn id(&self) -> u32 {
        self.id
    }

    fn set_msrs(&self) -> Result<(), CallError> {
        let msrs = Msrs::from_entries(&regs::boot_msrs()).map_err(|_| too_many("KVM_SET_MSRS"))?;
        // KVM stops at the first MSR that it does not know; all of ours are conveniences.
        self.fd.set_msrs(&msrs).map_err(kvm_call("KVM_SET_MSRS"))?;
        Ok(())
    }

    fn set_local_interrupts(&self) -> Result<(), CallError> {
        let mut lapic = self.fd.get_lapic().map_err(kvm_call("KVM_GET_LAPIC"))?;
        regs::local_interrupts(&mut lapic);
        self.fd.set_lapic(&lapic).map_err(kvm_call("KVM_SET_LAPIC"))
    }

    /// Makes this the vCPU that enters the kernel. Others wait for the guest to start them.
    pub fn enter(&self, entry: &Entry) -> Result<(), CallError> {
        let mut sregs = self.fd.get_sregs().map_err(kvm_call("KVM_GET_SREGS"))?;
        regs::enter(&mut sregs, entry);
        self.fd
            .set_sregs(&sregs)
            .map_err(kvm_call("KVM_SET_SREGS"))?;
        self.fd
            .set_fpu(&regs::fpu())
            .map_err(kvm_call("KVM_SET_FPU"))?;
        self.fd
            .set_regs(&regs::general(entry))
            .map_err(kvm_call("KVM_SET_REGS"))
    }

    /// Runs until something happens that `handler` cannot answer, or one exit was answered. `turn`
    /// learns when the vCPU is back from the guest.
    pub fn run(&mut self, handler: &dyn ExitHandler, turn: &Turn) -> Option<Pause> {
        let exit = self.fd.run();
        turn.left();
        match exit {
            Ok(VcpuExit::IoIn(..) | VcpuExit::IoOut(..)) => {
                self.port(handler);
                None
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                handler.mmio_read(address, data);
                None
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                handler.mmio_write(address, data);
                None
            }
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen | VcpuExit::Hlt) => {
                Some(Pause::Interrupted)
            }
            Ok(VcpuExit::Shutdown) => Some(Pause::Shutdown),
            Ok(VcpuExit::SystemEvent(kind, _)) => Some(Pause::SystemEvent(kind)),
            Ok(VcpuExit::MemoryFault { gpa, .. }) => Some(Pause::MemoryFault(Some(gpa))),
            Ok(VcpuExit::FailEntry(reason, _)) => {
                let text = format!("the processor refused its state (reason {reason:#x})");
                Some(Pause::Broken(self.with_place(text)))
            }
            Ok(VcpuExit::InternalError) => Some(self.internal_error()),
            Ok(other) => {
                let text = format!("unexpected exit {other:?}");
                Some(Pause::Broken(self.with_place(text)))
            }
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => Some(Pause::Interrupted),
                libc::EFAULT => Some(Pause::MemoryFault(None)),
                _ => {
                    let text = format!("KVM_RUN failed: {error}");
                    Some(Pause::Broken(self.with_place(text)))
                }
            },
        }
    }

    /// Answers a port access; string instructions are several of them.
    fn port(&mut self, handler: &dyn ExitHandler) {
        let Some(access) = port_access(self.fd.get_kvm_run()) else {
            return;
        };
        for data in access.data.chunks_mut(access.size) {
            if access.is_read {
                handler.port_read(access.port, data);
            } else {
                handler.port_write(access.port, data);
            }
        }
    }

    fn internal_error(&mut self) -> Pause {
        let text = match internal_error(self.fd.get_kvm_run()) {
            Some((KVM_INTERNAL_ERROR_EMULATION, words)) => {
                format!("KVM cannot emulate an instruction there (data {words:x?})")
            }
            Some((kind, words)) => format!("KVM internal error {kind} (data {words:x?})"),
            None => "KVM internal error".to_owned(),
        };
        Pause::Broken(self.with_place(text))
    }

    /// Lets the guest know that it was held up, so that its watchdogs do not fire
    /// (KVM_KVMCLOCK_CTRL); whether it is told. One without kvmclock, or that has not set it up yet,
    /// has no use for it (EINVAL).
    pub fn tell_held_up(&self) -> Result<bool, CallError> {
        match self.fd.kvmclock_ctrl() {
            Ok(()) => Ok(true),
            Err(error) if error.errno() == libc::EINVAL => Ok(false),
            Err(error) => Err(kvm_call("KVM_KVMCLOCK_CTRL")(error)),
        }
    }

    /// Where the guest is, for messages.
    pub fn place(&self) -> String {
        match (self.fd.get_regs(), self.fd.get_sregs()) {
            (Ok(regs), Ok(sregs)) => {
                let (rip, cr3, rsp) = (regs.rip, sregs.cr3, regs.rsp);
                let (cs, efer) = (sregs.cs.selector, sregs.efer);
                format!("RIP {cs:#x}:{rip:#x} RSP {rsp:#x} CR3 {cr3:#x} EFER {efer:#x}")
            }
            _ => "registers unknown".to_owned(),
        }
    }

    fn with_place(&self, text: String) -> String {
        format!("{text} at {}", self.place())
    }
}

fn too_many(call: &'static str) -> CallError {
    CallError {
        call,
        source: std::io::ErrorKind::InvalidInput.into(),
    }
}
