//! The virtual machine as KVM has it: created, with interrupt controllers in the kernel.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use arch::layout;
use devices::assign::ports::CallError;
use devices::host::Sysfs;
use devices::remedy::Remedy;
use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2,
    kvm_create_device, kvm_device_attr, kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::{Cap, DeviceFd, Kvm, VmFd};

use crate::error::{Error, HostError, kvm_call};

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
        check_cpus(cpus, kvm.get_max_vcpus() as u32)?;
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

    /// Creates a VM, without interrupt controllers yet.
    pub fn create_vm(&self) -> Result<Arc<VmFd>, Error> {
        let vm = self.kvm.create_vm().map_err(kvm_call("KVM_CREATE_VM"))?;
        // Intel without unrestricted guest runs real mode through these pages; harmless elsewhere.
        vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(kvm_call("KVM_SET_IDENTITY_MAP_ADDR"))?;
        vm.set_tss_address(layout::KVM_TSS as usize)
            .map_err(kvm_call("KVM_SET_TSS_ADDR"))?;
        Ok(Arc::new(vm))
    }
}

/// Adds the interrupt controllers, before there are vCPUs.
///
/// Best after the memslots of guest RAM: the controllers take their places on KVM's I/O buses by
/// call_srcu() (virt/kvm/kvm_main.c, kvm_io_bus_register_dev), and a memslot call waits behind the
/// grace period which that begins, a tick of the host's clock.
pub fn add_irqchip(vm: &VmFd) -> Result<(), Error> {
    vm.create_irq_chip().map_err(no_irqchip)
}

/// Checks the number of vCPUs against `most`, KVM's.
fn check_cpus(cpus: u32, most: u32) -> Result<(), HostError> {
    match cpus > most {
        true => Err(HostError::KvmCpus { cpus, most }),
        false => Ok(()),
    }
}

/// The error of opening /dev/kvm, with what mends it.
pub(crate) fn cannot_open(error: kvm_ioctls::Error) -> Error {
    let (remedy, besides) = match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => (
            Remedy::run("modprobe kvm-intel || modprobe kvm-amd"),
            "virtualization must be on in the firmware, or nested in the outer VM",
        ),
        libc::EACCES | libc::EPERM => (
            Remedy::Run(format!("chown {} /dev/kvm", Sysfs::own_user())),
            "for good: usermod -aG kvm USER",
        ),
        _ => (
            Remedy::advice("is it KVM's device node?"),
            "the kernel makes it",
        ),
    };
    Error::Kvm {
        remedy,
        besides,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}

/// KVM built without CONFIG_KVM_IOAPIC knows no in-kernel controllers at all.
pub(crate) fn no_irqchip(error: kvm_ioctls::Error) -> Error {
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
    fn more_vcpus_than_kvm_can_have_are_a_preflight_error() {
        assert!(check_cpus(255, 4096).is_ok());
        let of_kvm = Error::from(check_cpus(9, 8).unwrap_err());
        assert_eq!(of_kvm.class(), Class::Preflight);
        assert!(chain(&of_kvm).contains("the 8 that this host's KVM"));
    }
}
