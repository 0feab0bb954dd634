//! The virtual machine as KVM has it: created, with interrupt controllers in the kernel.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use arch::layout;
use devices::assign::ports::CallError;
use kvm_bindings::{
    KVM_CAP_X2APIC_API, KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_MAX_CPUID_ENTRIES,
    KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK, KVM_X2APIC_API_USE_32BIT_IDS, kvm_cpuid_entry2,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_VFIO, kvm_enable_cap,
};
use kvm_ioctls::{Cap, DeviceFd, Kvm, VmFd};

use crate::error::{Error, kvm_call};

/// From this many vCPUs on there are APIC ids that need x2APIC: 255 is the broadcast id.
const X2APIC_CPUS: u32 = 256;
/// KVM_GET_API_VERSION has answered this since 2007.
const API_VERSION: i32 = 12;

/// The host's KVM.
pub struct Host {
    kvm: Kvm,
    /// What KVM_GET_SUPPORTED_CPUID says.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// KVM offers the TSC deadline timer.
    pub tsc_deadline: bool,
    /// Memslots of a VM.
    pub memslots: u32,
}

impl Host {
    /// Opens /dev/kvm and checks that it can run `cpus` vCPUs.
    pub fn open(cpus: u32) -> Result<Self, Error> {
        let kvm = Kvm::new().map_err(cannot_open)?;
        if kvm.get_api_version() != API_VERSION {
            let lack = format!("has API version {}, not 12", kvm.get_api_version());
            return Err(Error::KvmLacks { lack });
        }
        for (capability, name) in [
            (Cap::Irqchip, "interrupt controllers in the kernel"),
            (Cap::UserMemory, "memory slots"),
            (Cap::Irqfd, "irqfd"),
            (Cap::IrqRouting, "interrupt routing"),
            (Cap::ImmediateExit, "immediate exit"),
        ] {
            if !kvm.check_extension(capability) {
                let lack = format!("has no {name}; a newer kernel is needed");
                return Err(Error::KvmLacks { lack });
            }
        }
        let most = kvm.get_max_vcpus() as u32;
        if cpus > most {
            let text = format!("{cpus} vCPUs are more than the {most} that this host's KVM allows");
            return Err(Error::Host(text));
        }
        let cpuid = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(kvm_call("KVM_GET_SUPPORTED_CPUID"))?;
        Ok(Self {
            cpuid: cpuid.as_slice().to_vec(),
            tsc_deadline: kvm.check_extension(Cap::TscDeadlineTimer),
            memslots: kvm.get_nr_memslots() as u32,
            kvm,
        })
    }

    /// Creates a VM with in-kernel interrupt controllers for `cpus` vCPUs.
    pub fn create_vm(&self, cpus: u32) -> Result<Arc<VmFd>, Error> {
        let vm = self.kvm.create_vm().map_err(kvm_call("KVM_CREATE_VM"))?;
        // Intel without unrestricted guest runs real mode through these pages; harmless elsewhere.
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(kvm_call("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS as usize)
            .map_err(kvm_call("KVM_SET_TSS_ADDR"))?;
        vm.create_irq_chip().map_err(no_irqchip)?;
        if needs_x2apic(cpus) {
            let flags = KVM_X2APIC_API_USE_32BIT_IDS | KVM_X2APIC_API_DISABLE_BROADCAST_QUIRK;
            let capability = kvm_enable_cap {
                cap: KVM_CAP_X2APIC_API,
                args: [flags.into(), 0, 0, 0],
                ..Default::default()
            };
            vm.enable_cap(&capability)
                .map_err(kvm_call("KVM_ENABLE_CAP (KVM_CAP_X2APIC_API)"))?;
        }
        Ok(Arc::new(vm))
    }
}

/// Whether some APIC id does not fit into the 8 bits of an MSI or xAPIC.
pub fn needs_x2apic(cpus: u32) -> bool {
    cpus >= X2APIC_CPUS
}

fn cannot_open(error: kvm_ioctls::Error) -> Error {
    let remedy = match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => {
            "load the module with: modprobe kvm-intel, or modprobe kvm-amd; \
             virtualization must be on in the firmware, or nested in the outer VM"
        }
        libc::EACCES | libc::EPERM => {
            "run as root, or join the group that owns it: usermod -aG kvm USER"
        }
        _ => "is it KVM's device node?",
    };
    Error::Kvm {
        remedy,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

/// KVM built without CONFIG_KVM_IOAPIC knows no in-kernel controllers at all.
fn no_irqchip(error: kvm_ioctls::Error) -> Error {
    if error.errno() == libc::ENOTTY {
        let lack = "has no in-kernel IOAPIC (the host kernel was built without CONFIG_KVM_IOAPIC); \
                    boot a host kernel with it";
        return Error::KvmLacks {
            lack: lack.to_owned(),
        };
    }
    kvm_call("KVM_CREATE_IRQCHIP")(error).into()
}

/// Tells KVM which VFIO groups or devices the VM has, before any vCPU runs: KVM then knows that
/// there is non-coherent DMA, and VFIO which VM a device belongs to
/// (Documentation/virt/kvm/devices/vfio.rst). The returned device must be kept: closing it
/// undoes the registration.
pub fn add_vfio_files(vm: &VmFd, files: &[RawFd]) -> Result<DeviceFd, CallError> {
    let mut device = kvm_create_device {
        type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
        fd: 0,
        flags: 0,
    };
    let device = vm
        .create_device(&mut device)
        .map_err(kvm_call("KVM_CREATE_DEVICE (KVM_DEV_TYPE_VFIO)"))?;
    for file in files {
        let attribute = kvm_device_attr {
            group: KVM_DEV_VFIO_FILE,
            attr: KVM_DEV_VFIO_FILE_ADD.into(),
            addr: &raw const *file as u64,
            flags: 0,
        };
        device
            .set_device_attr(&attribute)
            .map_err(kvm_call("KVM_SET_DEVICE_ATTR (KVM_DEV_VFIO_FILE_ADD)"))?;
    }
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Class, chain};

    #[test]
    fn an_absent_or_forbidden_kvm_is_told_with_its_remedy() {
        let absent = cannot_open(kvm_ioctls::Error::new(libc::ENOENT));
        assert_eq!(absent.class(), Class::Preflight);
        assert!(chain(&absent).contains("modprobe"));
        let forbidden = cannot_open(kvm_ioctls::Error::new(libc::EACCES));
        assert!(chain(&forbidden).contains("usermod"));
    }

    #[test]
    fn a_kernel_without_ioapic_is_a_preflight_error() {
        let error = no_irqchip(kvm_ioctls::Error::new(libc::ENOTTY));
        assert_eq!(error.class(), Class::Preflight);
        assert!(chain(&error).contains("CONFIG_KVM_IOAPIC"));
        let other = no_irqchip(kvm_ioctls::Error::new(libc::ENOMEM));
        assert_eq!(other.class(), Class::Runtime);
    }

    #[test]
    fn x2apic_is_needed_when_an_apic_id_reaches_255() {
        assert!(!needs_x2apic(255));
        assert!(needs_x2apic(256));
    }
}
