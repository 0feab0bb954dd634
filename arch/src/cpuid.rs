//! What CPUID tells a vCPU: what KVM supports, with our topology, APIC ids and address widths.
//!
//! The topology is one package, one thread a core, one core a vCPU, whatever the host's is: KVM
//! hands out the host's own numbers, which describe other processors than the guest has.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

/// CPUID leaves (Intel SDM 2A, CPUID; AMD APM 3, appendix E).
mod leaf {
    pub const BASIC: u32 = 0;
    pub const FEATURES: u32 = 1;
    pub const CACHES: u32 = 4;
    pub const TOPOLOGY: u32 = 0xB;
    pub const TOPOLOGY_V2: u32 = 0x1F;
    pub const KVM_FEATURES: u32 = 0x4000_0001;
    pub const EXTENDED_FEATURES: u32 = 0x8000_0001;
    pub const ADDRESS_SIZES: u32 = 0x8000_0008;
    pub const AMD_CACHES: u32 = 0x8000_001D;
    pub const AMD_TOPOLOGY: u32 = 0x8000_001E;
    pub const AMD_TOPOLOGY_V2: u32 = 0x8000_0026;
}

const FEATURE_ECX_X2APIC: u32 = 1 << 21;
const FEATURE_ECX_TSC_DEADLINE: u32 = 1 << 24;
const FEATURE_ECX_HYPERVISOR: u32 = 1 << 31;
const FEATURE_EDX_HTT: u32 = 1 << 28;
const EXTENDED_ECX_CMP_LEGACY: u32 = 1 << 1;
/// KVM_FEATURE_PV_EOI (Documentation/virt/kvm/x86/cpuid.rst): an end of interrupt that does not leave the guest.
const KVM_EAX_PV_EOI: u32 = 1 << 6;
/// KVM_FEATURE_MSI_EXT_DEST_ID (Documentation/virt/kvm/x86/cpuid.rst): 15-bit APIC ids in MSIs.
const KVM_EAX_MSI_EXT_DEST_ID: u32 = 1 << 15;

/// Level types of leaf 0xB.
const LEVEL_SMT: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// What the vCPUs are to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidConfig {
    /// vCPUs of the guest; APIC ids are 0 to `cpus - 1`.
    pub cpus: u32,
    /// Physical address bits: CPUID 0x80000008 EAX\[7:0\].
    pub phys_bits: u8,
    /// Guest-physical bits that the host can map, where less: EAX\[23:16\] is set whenever KVM
    /// reports it or it is smaller than `phys_bits`.
    pub guest_phys_bits: u8,
    /// KVM offers the TSC deadline timer (KVM_CAP_TSC_DEADLINE_TIMER).
    pub tsc_deadline: bool,
    /// Tell the guest of KVM_FEATURE_PV_EOI, where KVM has it.
    pub pv_eoi: bool,
}

/// Address widths that KVM reports: physical bits, and how many of them the host can map for a
/// guest (new kernels say it in 0x80000008 EAX\[23:16\]; others mean all). 36 bits where the leaf is
/// missing (Intel SDM 2A).
pub fn address_bits(supported: &[kvm_cpuid_entry2]) -> (u8, u8) {
    let found = supported
        .iter()
        .find(|entry| entry.function == leaf::ADDRESS_SIZES);
    let Some(entry) = found else { return (36, 36) };
    let physical = entry.eax as u8;
    match (entry.eax >> 16) as u8 {
        0 => (physical, physical),
        guest => (physical, guest.min(physical)),
    }
}

/// The common part of every vCPU's CPUID, from what `KVM_GET_SUPPORTED_CPUID` returned.
pub fn common(supported: &[kvm_cpuid_entry2], config: &CpuidConfig) -> Vec<kvm_cpuid_entry2> {
    let mut entries: Vec<_> = supported
        .iter()
        .filter(|entry| {
            // Replaced below, or (AMD's second leaf) told by the others well enough.
            !matches!(
                entry.function,
                leaf::TOPOLOGY | leaf::TOPOLOGY_V2 | leaf::AMD_TOPOLOGY_V2
            )
        })
        .copied()
        .collect();
    let amd = is_amd(supported);
    for entry in &mut entries {
        adjust(entry, config, amd);
    }
    let highest = |function| {
        supported
            .iter()
            .any(|entry| entry.function == leaf::BASIC && entry.eax >= function)
    };
    for function in [leaf::TOPOLOGY, leaf::TOPOLOGY_V2] {
        if highest(function) {
            entries.extend(topology(function, config.cpus));
        }
    }
    entries
}

/// Writes what only the vCPU with `apic_id` is told into a copy of the common part.
pub fn for_vcpu(common: &[kvm_cpuid_entry2], apic_id: u32) -> Vec<kvm_cpuid_entry2> {
    let mut entries = common.to_vec();
    for entry in &mut entries {
        match entry.function {
            leaf::FEATURES => entry.ebx = entry.ebx & 0x00FF_FFFF | apic_id << 24,
            leaf::TOPOLOGY | leaf::TOPOLOGY_V2 => entry.edx = apic_id,
            leaf::AMD_TOPOLOGY => {
                entry.eax = apic_id;
                entry.ebx = apic_id & 0xFF;
            }
            _ => {}
        }
    }
    entries
}

fn adjust(entry: &mut kvm_cpuid_entry2, config: &CpuidConfig, amd: bool) {
    let cpus = config.cpus;
    match entry.function {
        leaf::FEATURES => {
            entry.ecx |= FEATURE_ECX_X2APIC | FEATURE_ECX_HYPERVISOR;
            set(
                &mut entry.ecx,
                FEATURE_ECX_TSC_DEADLINE,
                config.tsc_deadline,
            );
            set(&mut entry.edx, FEATURE_EDX_HTT, cpus > 1);
            let logical = 1u32 << id_bits(cpus);
            entry.ebx = entry.ebx & 0xFF00_FFFF | logical.min(0xFF) << 16;
        }
        leaf::CACHES if entry.eax & 0x1F != 0 => {
            let level = entry.eax >> 5 & 7;
            let cores = (1u32 << id_bits(cpus).min(6)) - 1;
            entry.eax = entry.eax & 0x3FFF | sharing(level, cpus) << 14 | cores << 26;
        }
        leaf::KVM_FEATURES => {
            // Every APIC id fits into the 8 bits of a plain message.
            set(&mut entry.eax, KVM_EAX_MSI_EXT_DEST_ID, false);
            if !config.pv_eoi {
                set(&mut entry.eax, KVM_EAX_PV_EOI, false);
            }
        }
        leaf::EXTENDED_FEATURES if cpus == 1 => entry.ecx &= !EXTENDED_ECX_CMP_LEGACY,
        leaf::ADDRESS_SIZES => address_sizes(entry, config, amd),
        leaf::AMD_CACHES if entry.eax & 0x1F != 0 => {
            let level = entry.eax >> 5 & 7;
            entry.eax = entry.eax & 0x3FFF | sharing(level, cpus) << 14;
        }
        leaf::AMD_TOPOLOGY => {
            // EBX and EAX: see for_vcpu. One node.
            entry.ecx = 0;
        }
        _ => {}
    }
}

/// AMD and what descends from it; EBX holds the first four letters of the vendor's name.
fn is_amd(supported: &[kvm_cpuid_entry2]) -> bool {
    const AUTH: u32 = u32::from_le_bytes(*b"Auth");
    const HYGO: u32 = u32::from_le_bytes(*b"Hygo");
    supported
        .iter()
        .any(|entry| entry.function == leaf::BASIC && matches!(entry.ebx, AUTH | HYGO))
}

fn address_sizes(entry: &mut kvm_cpuid_entry2, config: &CpuidConfig, amd: bool) {
    let told = entry.eax >> 16 & 0xFF != 0 || config.guest_phys_bits < config.phys_bits;
    let guest = if told {
        u32::from(config.guest_phys_bits)
    } else {
        0
    };
    entry.eax = entry.eax & 0xFF00_FF00 | guest << 16 | u32::from(config.phys_bits);
    // ECX: cores less one, and how many bits of the APIC id number them. Reserved on Intel.
    if amd {
        let cores = (config.cpus - 1).min(0xFF);
        entry.ecx = entry.ecx & !0xF0FF | id_bits(config.cpus) << 12 | cores;
    }
}

/// Logical processors less one that share a cache: all share the third level, none the others.
fn sharing(level: u32, cpus: u32) -> u32 {
    if level >= 3 {
        ((1u32 << id_bits(cpus)) - 1).min(0xFFF)
    } else {
        0
    }
}

/// Leaf 0xB or 0x1F: one thread a core, `cpus` cores.
fn topology(function: u32, cpus: u32) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, logical, kind: u32| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: logical,
        ecx: index | kind << 8,
        ..Default::default()
    };
    [
        level(0, 0, 1, LEVEL_SMT),
        level(1, id_bits(cpus), cpus.min(0xFFFF), LEVEL_CORE),
        level(2, 0, 0, 0),
    ]
}

/// Bits that number `cpus` APIC ids from 0.
fn id_bits(cpus: u32) -> u32 {
    cpus.max(1).next_power_of_two().trailing_zeros()
}

fn set(register: &mut u32, bit: u32, on: bool) {
    if on {
        *register |= bit;
    } else {
        *register &= !bit;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(cpus: u32) -> CpuidConfig {
        CpuidConfig {
            cpus,
            phys_bits: 46,
            guest_phys_bits: 46,
            tsc_deadline: true,
            pv_eoi: true,
        }
    }

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            ..Default::default()
        }
    }

    fn host() -> Vec<kvm_cpuid_entry2> {
        let mut basic = entry(0, 0);
        basic.eax = 0x1F;
        let mut caches = entry(4, 3);
        caches.eax = 0x163 | 0xFFF << 14 | 0x3F << 26;
        let mut sizes = entry(0x8000_0008, 0);
        sizes.eax = 52 | 48 << 8 | 48 << 16;
        let mut kvm = entry(0x4000_0001, 0);
        kvm.eax = u32::MAX;
        let mut topology = entry(0xB, 0);
        topology.edx = 77;
        vec![
            basic,
            entry(1, 0),
            caches,
            topology,
            sizes,
            entry(0x8000_001E, 0),
            kvm,
        ]
    }

    fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> kvm_cpuid_entry2 {
        let mut found = entries
            .iter()
            .filter(|e| (e.function, e.index) == (function, index));
        let entry = *found.next().unwrap();
        assert!(found.next().is_none(), "{function:#x}.{index} twice");
        entry
    }

    #[test]
    fn every_vcpu_is_a_core_of_one_package() {
        for cpus in [1, 2, 6, 8, 300] {
            let common = common(&host(), &config(cpus));
            for apic_id in [0, cpus - 1] {
                let entries = for_vcpu(&common, apic_id);
                for function in [0xB, 0x1F] {
                    let smt = find(&entries, function, 0);
                    let core = find(&entries, function, 1);
                    assert_eq!((smt.eax, smt.ebx, smt.edx), (0, 1, apic_id));
                    assert_eq!((core.ebx, core.edx), (cpus, apic_id));
                    assert_eq!(apic_id >> core.eax, 0, "one package");
                }
                assert_eq!(find(&entries, 0x8000_001E, 0).eax, apic_id);
                assert_eq!(find(&entries, 1, 0).ebx >> 24, apic_id & 0xFF);
            }
        }
    }

    #[test]
    fn the_last_cache_is_shared_by_all_and_by_no_more() {
        let one = find(&common(&host(), &config(1)), 4, 3);
        assert_eq!((one.eax >> 14 & 0xFFF, one.eax >> 26), (0, 0));
        let eight = find(&common(&host(), &config(8)), 4, 3);
        assert_eq!((eight.eax >> 14 & 0xFFF, eight.eax >> 26), (7, 7));
    }

    #[test]
    fn address_widths_are_as_given_and_agree() {
        assert_eq!(address_bits(&host()), (52, 48));
        let mut config = config(1);
        (config.phys_bits, config.guest_phys_bits) = (52, 48);
        let sizes = find(&common(&host(), &config), 0x8000_0008, 0);
        assert_eq!((sizes.eax & 0xFF, sizes.eax >> 16 & 0xFF), (52, 48));
        assert_eq!(sizes.eax >> 8 & 0xFF, 48, "linear bits stay the host's");
    }

    #[test]
    fn a_host_that_tells_no_guest_width_can_map_all() {
        let mut host = host();
        host[4].eax = 39 | 48 << 8;
        assert_eq!(address_bits(&host), (39, 39));
        assert_eq!(address_bits(&[]), (36, 36));
    }

    #[test]
    fn x2apic_and_hypervisor_are_told_and_extended_msis_are_not() {
        let entries = common(&host(), &config(2));
        let features = find(&entries, 1, 0);
        assert_ne!(features.ecx & FEATURE_ECX_X2APIC, 0);
        assert_ne!(features.ecx & FEATURE_ECX_HYPERVISOR, 0);
        assert_ne!(features.ecx & FEATURE_ECX_TSC_DEADLINE, 0);
        let kvm = find(&entries, 0x4000_0001, 0);
        assert_eq!(kvm.eax & KVM_EAX_MSI_EXT_DEST_ID, 0);
    }

    #[test]
    fn an_end_of_interrupt_without_exit_is_told_unless_it_is_not_wanted() {
        let told = |config| find(&common(&host(), &config), 0x4000_0001, 0).eax & KVM_EAX_PV_EOI;
        assert_ne!(told(config(1)), 0);
        assert_eq!(
            told(CpuidConfig {
                pv_eoi: false,
                ..config(1)
            }),
            0
        );
    }
}
