//! What this process may do and what KVM offers it: the facts that no file tells.

use arch::cpuid;

use crate::config::Config;
use crate::error::Error;
use crate::kvm::vm::Host;
use crate::limits;
use crate::memory_check;

/// See the module.
pub struct Process {
    /// Bytes that may be locked; `None` without a limit.
    pub locked: Option<u64>,
    /// Files that may be open; `None` where that is not told.
    pub files: Option<u64>,
    /// KVM, or why it cannot be used.
    pub kvm: Result<KvmFacts, Error>,
}

/// What KVM offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmFacts {
    /// Physical address bits of the host.
    pub phys_bits: u8,
    /// How many of them a guest can use.
    pub guest_phys_bits: u8,
}

impl Process {
    /// Asks; raises the limit of locked memory as a boot does.
    pub fn ask(config: &Config) -> Self {
        let kvm = Host::open(config.cpus.0).map(|host| {
            let (phys_bits, guest_phys_bits) = cpuid::address_bits(&host.cpuid);
            KvmFacts {
                phys_bits,
                guest_phys_bits,
            }
        });
        Self {
            locked: memory_check::raise_locked_limit(),
            files: limits::open_files(),
            kvm,
        }
    }

    /// Guest-physical address bits; the most that x86 has, where KVM cannot be asked: then that is
    /// the failure, not what comes of it.
    pub fn guest_phys_bits(&self) -> u8 {
        const MOST: u8 = 52;
        self.kvm.as_ref().map_or(MOST, |kvm| kvm.guest_phys_bits)
    }
}
