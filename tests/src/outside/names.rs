//! Names of ioctls: VFIO's, iommufd's and KVM's on x86.
//!
//! Numbers and names are those of include/uapi/linux/vfio.h, iommufd.h and kvm.h. VFIO and iommufd share a type byte, and
//! VFIO has numbers that mean one thing on a container and another on a device.

use std::borrow::Cow;

/// Of VFIO and iommufd (`_IO(';', …)`: neither direction nor size in the number).
const VFIO: u8 = b';';
/// Of KVM.
const KVM: u8 = 0xae;
/// Runs a vCPU.
pub const KVM_RUN: u32 = 0xae80;

/// What a descriptor belongs to, as far as the names of its ioctls depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A VFIO container, or an iommufd.
    Iommu,
    /// A device.
    Device,
}

/// Whether an ioctl is one of those that are counted.
pub fn is_counted(cmd: u32) -> bool {
    matches!(kind(cmd), VFIO | KVM)
}

/// Its name, or its number where that is unknown.
///
/// `target` tells apart what has one number; where it is not known, an ioctl that maps or unmaps is taken for one.
pub fn name(cmd: u32, target: Option<Target>) -> Cow<'static, str> {
    let find = |table: &[(u32, &'static str)]| {
        let found = table.iter().find(|(number, _)| *number == cmd);
        found.map(|(_, name)| *name)
    };
    let shared = SHARED.iter().find(|(number, ..)| *number == cmd);
    let name = match (kind(cmd), shared) {
        (KVM, _) => find(&KVM_NAMES),
        (VFIO, Some((_, iommu, device))) => Some(match target.or_else(|| usual(cmd)) {
            Some(Target::Device) => *device,
            _ => *iommu,
        }),
        (VFIO, None) => find(&VFIO_NAMES),
        _ => None,
    };
    name.map_or_else(|| format!("{cmd:#x}").into(), Cow::Borrowed)
}

/// What an ioctl tells about the descriptor that it goes to.
pub fn target(cmd: u32) -> Option<Target> {
    match cmd {
        // Asked of every container before it maps, and of every device before it is used.
        0x3b64..=0x3b66 | 0x3b81..=0x3b8f => Some(Target::Iommu),
        0x3b6b..=0x3b6f | 0x3b76..=0x3b78 => Some(Target::Device),
        _ => None,
    }
}

fn usual(cmd: u32) -> Option<Target> {
    (cmd == VFIO_DEVICE_FEATURE).then_some(Target::Device)
}

fn kind(cmd: u32) -> u8 {
    let [_, kind, _, _] = cmd.to_le_bytes();
    kind
}

const VFIO_DEVICE_FEATURE: u32 = 0x3b75;

/// Numbers with two meanings: on a container, and on a device.
const SHARED: [(u32, &str, &str); 6] = [
    (
        0x3b70,
        "VFIO_IOMMU_GET_INFO",
        "VFIO_DEVICE_GET_PCI_HOT_RESET_INFO",
    ),
    (0x3b71, "VFIO_IOMMU_MAP_DMA", "VFIO_DEVICE_PCI_HOT_RESET"),
    (
        0x3b72,
        "VFIO_IOMMU_UNMAP_DMA",
        "VFIO_DEVICE_QUERY_GFX_PLANE",
    ),
    (0x3b73, "VFIO_IOMMU_ENABLE", "VFIO_DEVICE_GET_GFX_DMABUF"),
    (0x3b74, "VFIO_IOMMU_DISABLE", "VFIO_DEVICE_IOEVENTFD"),
    (
        VFIO_DEVICE_FEATURE,
        "VFIO_IOMMU_DIRTY_PAGES",
        "VFIO_DEVICE_FEATURE",
    ),
];

const VFIO_NAMES: [(u32, &str); 36] = [
    (0x3b64, "VFIO_GET_API_VERSION"),
    (0x3b65, "VFIO_CHECK_EXTENSION"),
    (0x3b66, "VFIO_SET_IOMMU"),
    (0x3b67, "VFIO_GROUP_GET_STATUS"),
    (0x3b68, "VFIO_GROUP_SET_CONTAINER"),
    (0x3b69, "VFIO_GROUP_UNSET_CONTAINER"),
    (0x3b6a, "VFIO_GROUP_GET_DEVICE_FD"),
    (0x3b6b, "VFIO_DEVICE_GET_INFO"),
    (0x3b6c, "VFIO_DEVICE_GET_REGION_INFO"),
    (0x3b6d, "VFIO_DEVICE_GET_IRQ_INFO"),
    (0x3b6e, "VFIO_DEVICE_SET_IRQS"),
    (0x3b6f, "VFIO_DEVICE_RESET"),
    (0x3b76, "VFIO_DEVICE_BIND_IOMMUFD"),
    (0x3b77, "VFIO_DEVICE_ATTACH_IOMMUFD_PT"),
    (0x3b78, "VFIO_DEVICE_DETACH_IOMMUFD_PT"),
    (0x3b80, "IOMMU_DESTROY"),
    (0x3b81, "IOMMU_IOAS_ALLOC"),
    (0x3b82, "IOMMU_IOAS_ALLOW_IOVAS"),
    (0x3b83, "IOMMU_IOAS_COPY"),
    (0x3b84, "IOMMU_IOAS_IOVA_RANGES"),
    (0x3b85, "IOMMU_IOAS_MAP"),
    (0x3b86, "IOMMU_IOAS_UNMAP"),
    (0x3b87, "IOMMU_OPTION"),
    (0x3b88, "IOMMU_VFIO_IOAS"),
    (0x3b89, "IOMMU_HWPT_ALLOC"),
    (0x3b8a, "IOMMU_GET_HW_INFO"),
    (0x3b8b, "IOMMU_HWPT_SET_DIRTY_TRACKING"),
    (0x3b8c, "IOMMU_HWPT_GET_DIRTY_BITMAP"),
    (0x3b8d, "IOMMU_HWPT_INVALIDATE"),
    (0x3b8e, "IOMMU_FAULT_QUEUE_ALLOC"),
    (0x3b8f, "IOMMU_IOAS_MAP_FILE"),
    (0x3b90, "IOMMU_VIOMMU_ALLOC"),
    (0x3b91, "IOMMU_VDEVICE_ALLOC"),
    (0x3b92, "IOMMU_IOAS_CHANGE_PROCESS"),
    (0x3b93, "IOMMU_VEVENTQ_ALLOC"),
    (0x3b94, "IOMMU_HW_QUEUE_ALLOC"),
];

const KVM_NAMES: [(u32, &str); 107] = [
    (0xae00, "KVM_GET_API_VERSION"),
    (0xae01, "KVM_CREATE_VM"),
    (0xc004_ae02, "KVM_GET_MSR_INDEX_LIST"),
    (0xae03, "KVM_CHECK_EXTENSION"),
    (0xae04, "KVM_GET_VCPU_MMAP_SIZE"),
    (0xc008_ae05, "KVM_GET_SUPPORTED_CPUID"),
    (0xc008_ae09, "KVM_GET_EMULATED_CPUID"),
    (0xc004_ae0a, "KVM_GET_MSR_FEATURE_INDEX_LIST"),
    (0xae41, "KVM_CREATE_VCPU"),
    (0x4010_ae42, "KVM_GET_DIRTY_LOG"),
    (0xae44, "KVM_SET_NR_MMU_PAGES"),
    (0xae45, "KVM_GET_NR_MMU_PAGES"),
    (0x4020_ae46, "KVM_SET_USER_MEMORY_REGION"),
    (0xae47, "KVM_SET_TSS_ADDR"),
    (0x4008_ae48, "KVM_SET_IDENTITY_MAP_ADDR"),
    (0x40a0_ae49, "KVM_SET_USER_MEMORY_REGION2"),
    (0xae60, "KVM_CREATE_IRQCHIP"),
    (0x4008_ae61, "KVM_IRQ_LINE"),
    (0xc208_ae62, "KVM_GET_IRQCHIP"),
    (0x8208_ae63, "KVM_SET_IRQCHIP"),
    (0xae64, "KVM_CREATE_PIT"),
    (0xc048_ae65, "KVM_GET_PIT"),
    (0x8048_ae66, "KVM_SET_PIT"),
    (0x4010_ae67, "KVM_REGISTER_COALESCED_MMIO"),
    (0xc008_ae67, "KVM_IRQ_LINE_STATUS"),
    (0x4010_ae68, "KVM_UNREGISTER_COALESCED_MMIO"),
    (0x4008_ae6a, "KVM_SET_GSI_ROUTING"),
    (0xae71, "KVM_REINJECT_CONTROL"),
    (0x4020_ae76, "KVM_IRQFD"),
    (0x4040_ae77, "KVM_CREATE_PIT2"),
    (0xae78, "KVM_SET_BOOT_CPU_ID"),
    (0x4040_ae79, "KVM_IOEVENTFD"),
    (0x4038_ae7a, "KVM_XEN_HVM_CONFIG"),
    (0x4030_ae7b, "KVM_SET_CLOCK"),
    (0x8030_ae7c, "KVM_GET_CLOCK"),
    (0xae80, "KVM_RUN"),
    (0x8090_ae81, "KVM_GET_REGS"),
    (0x4090_ae82, "KVM_SET_REGS"),
    (0x8138_ae83, "KVM_GET_SREGS"),
    (0x4138_ae84, "KVM_SET_SREGS"),
    (0xc018_ae85, "KVM_TRANSLATE"),
    (0x4004_ae86, "KVM_INTERRUPT"),
    (0xc008_ae88, "KVM_GET_MSRS"),
    (0x4008_ae89, "KVM_SET_MSRS"),
    (0x4008_ae8a, "KVM_SET_CPUID"),
    (0x4004_ae8b, "KVM_SET_SIGNAL_MASK"),
    (0x81a0_ae8c, "KVM_GET_FPU"),
    (0x41a0_ae8d, "KVM_SET_FPU"),
    (0x8400_ae8e, "KVM_GET_LAPIC"),
    (0x4400_ae8f, "KVM_SET_LAPIC"),
    (0x4008_ae90, "KVM_SET_CPUID2"),
    (0xc008_ae91, "KVM_GET_CPUID2"),
    (0xc028_ae92, "KVM_TPR_ACCESS_REPORTING"),
    (0x4008_ae93, "KVM_SET_VAPIC_ADDR"),
    (0x8004_ae98, "KVM_GET_MP_STATE"),
    (0x4004_ae99, "KVM_SET_MP_STATE"),
    (0xae9a, "KVM_NMI"),
    (0x4048_ae9b, "KVM_SET_GUEST_DEBUG"),
    (0x4008_ae9c, "KVM_X86_SETUP_MCE"),
    (0x8008_ae9d, "KVM_X86_GET_MCE_CAP_SUPPORTED"),
    (0x4040_ae9e, "KVM_X86_SET_MCE"),
    (0x8040_ae9f, "KVM_GET_VCPU_EVENTS"),
    (0x8070_ae9f, "KVM_GET_PIT2"),
    (0x4040_aea0, "KVM_SET_VCPU_EVENTS"),
    (0x4070_aea0, "KVM_SET_PIT2"),
    (0x8080_aea1, "KVM_GET_DEBUGREGS"),
    (0xaea2, "KVM_SET_TSC_KHZ"),
    (0x4080_aea2, "KVM_SET_DEBUGREGS"),
    (0xaea3, "KVM_GET_TSC_KHZ"),
    (0x4068_aea3, "KVM_ENABLE_CAP"),
    (0x9000_aea4, "KVM_GET_XSAVE"),
    (0x4020_aea5, "KVM_SIGNAL_MSI"),
    (0x5000_aea5, "KVM_SET_XSAVE"),
    (0x8188_aea6, "KVM_GET_XCRS"),
    (0x4188_aea7, "KVM_SET_XCRS"),
    (0x4010_aeab, "KVM_GET_ONE_REG"),
    (0x4010_aeac, "KVM_SET_ONE_REG"),
    (0xaead, "KVM_KVMCLOCK_CTRL"),
    (0xc008_aeb0, "KVM_GET_REG_LIST"),
    (0x4020_aeb2, "KVM_SET_PMU_EVENT_FILTER"),
    (0xaeb7, "KVM_SMI"),
    (0xc008_aeba, "KVM_MEMORY_ENCRYPT_OP"),
    (0x8010_aebb, "KVM_MEMORY_ENCRYPT_REG_REGION"),
    (0x8010_aebc, "KVM_MEMORY_ENCRYPT_UNREG_REGION"),
    (0x4018_aebd, "KVM_HYPERV_EVENTFD"),
    (0xc080_aebe, "KVM_GET_NESTED_STATE"),
    (0x4080_aebf, "KVM_SET_NESTED_STATE"),
    (0xc018_aec0, "KVM_CLEAR_DIRTY_LOG"),
    (0xc008_aec1, "KVM_GET_SUPPORTED_HV_CPUID"),
    (0x4188_aec6, "KVM_X86_SET_MSR_FILTER"),
    (0xaec7, "KVM_RESET_DIRTY_RINGS"),
    (0xc048_aec8, "KVM_XEN_HVM_GET_ATTR"),
    (0x4048_aec9, "KVM_XEN_HVM_SET_ATTR"),
    (0xc048_aeca, "KVM_XEN_VCPU_GET_ATTR"),
    (0x4048_aecb, "KVM_XEN_VCPU_SET_ATTR"),
    (0x8140_aecc, "KVM_GET_SREGS2"),
    (0x4140_aecd, "KVM_SET_SREGS2"),
    (0xaece, "KVM_GET_STATS_FD"),
    (0x9000_aecf, "KVM_GET_XSAVE2"),
    (0x400c_aed0, "KVM_XEN_HVM_EVTCHN_SEND"),
    (0x4020_aed2, "KVM_SET_MEMORY_ATTRIBUTES"),
    (0xc040_aed4, "KVM_CREATE_GUEST_MEMFD"),
    (0xc040_aed5, "KVM_PRE_FAULT_MEMORY"),
    (0xc00c_aee0, "KVM_CREATE_DEVICE"),
    (0x4018_aee1, "KVM_SET_DEVICE_ATTR"),
    (0x4018_aee2, "KVM_GET_DEVICE_ATTR"),
    (0x4018_aee3, "KVM_HAS_DEVICE_ATTR"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_numbers_carry_size_and_direction() {
        assert_eq!(name(0x4020_ae46, None), "KVM_SET_USER_MEMORY_REGION");
        assert_eq!(name(KVM_RUN, None), "KVM_RUN");
        assert_eq!(name(0x4008_ae6a, None), "KVM_SET_GSI_ROUTING");
        // Another structure, another ioctl.
        assert_eq!(name(0x4021_ae46, None), "0x4021ae46");
    }

    #[test]
    fn one_number_has_a_name_for_each_target() {
        let on = |target| name(0x3b71, target);
        assert_eq!(on(Some(Target::Iommu)), "VFIO_IOMMU_MAP_DMA");
        assert_eq!(on(Some(Target::Device)), "VFIO_DEVICE_PCI_HOT_RESET");
        assert_eq!(on(None), "VFIO_IOMMU_MAP_DMA");
        assert_eq!(name(0x3b75, None), "VFIO_DEVICE_FEATURE");
        assert_eq!(name(0x3b85, None), "IOMMU_IOAS_MAP");
    }

    #[test]
    fn only_virtualisation_is_counted() {
        assert!(is_counted(0x3b71) && is_counted(KVM_RUN));
        // TCGETS, FIONBIO.
        assert!(!is_counted(0x5401) && !is_counted(0x5421));
        assert_eq!(name(0x3bff, None), "0x3bff");
    }

    #[test]
    fn numbers_and_names_are_unique() {
        let mut numbers: Vec<u32> = KVM_NAMES.iter().map(|row| row.0).collect();
        numbers.extend(VFIO_NAMES.iter().map(|row| row.0));
        numbers.extend(SHARED.iter().map(|row| row.0));
        assert!(numbers.iter().all(|&number| is_counted(number)));
        let count = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), count);
    }
}
