//! The first state of a vCPU.

use kvm_bindings::{kvm_fpu, kvm_lapic_state, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};

use crate::boot::{Entry, GDT};

/// Descriptors and selectors of both boot protocols.
pub mod segments {
    /// Selector of flat code, `__BOOT_CS`.
    pub const CODE: u16 = 0x10;
    /// Selector of flat data, `__BOOT_DS`.
    pub const DATA: u16 = 0x18;
    /// Selector of the task state segment.
    pub const TSS: u16 = 0x20;

    /// The table in guest memory: two null descriptors, 64-bit code, data. (The TSS is loaded by
    /// the registers' hidden part only.)
    pub const GDT_ENTRIES: [u64; 4] = [0, 0, 0x00AF_9B00_0000_FFFF, 0x00CF_9300_0000_FFFF];
}

/// Control register bits (Intel SDM 3A, 2.5).
mod control {
    pub const CR0_PE: u64 = 1 << 0;
    pub const CR0_ET: u64 = 1 << 4;
    pub const CR0_NE: u64 = 1 << 5;
    pub const CR0_WP: u64 = 1 << 16;
    pub const CR0_PG: u64 = 1 << 31;
    pub const CR4_PAE: u64 = 1 << 5;
    pub const EFER_LME: u64 = 1 << 8;
    pub const EFER_LMA: u64 = 1 << 10;
}

/// RFLAGS with its always-one bit only: interrupts off.
const RFLAGS: u64 = 1 << 1;

/// Segment types (Intel SDM 3A, 3.4.5.1 and 3.5).
const TYPE_CODE: u8 = 0xB;
const TYPE_DATA: u8 = 0x3;
const TYPE_TSS_BUSY: u8 = 0xB;

/// General-purpose registers of the boot vCPU.
pub fn general(entry: &Entry) -> kvm_regs {
    match *entry {
        Entry::Long {
            rip, boot_params, ..
        } => kvm_regs {
            rip,
            rsi: boot_params,
            rflags: RFLAGS,
            ..Default::default()
        },
        Entry::Pvh { rip, start_info } => kvm_regs {
            rip,
            rbx: start_info,
            rflags: RFLAGS,
            ..Default::default()
        },
    }
}

/// Changes the special registers of a vCPU after reset to those of the boot vCPU.
pub fn enter(sregs: &mut kvm_sregs, entry: &Entry) {
    let long = matches!(entry, Entry::Long { .. });
    let code = segment(segments::CODE, TYPE_CODE, true, long);
    let data = segment(segments::DATA, TYPE_DATA, true, false);
    sregs.cs = code;
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = kvm_segment {
        limit: 0x67,
        g: 0,
        db: 0,
        ..segment(segments::TSS, TYPE_TSS_BUSY, false, false)
    };
    sregs.gdt.base = GDT;
    sregs.gdt.limit = (size_of_val(&segments::GDT_ENTRIES) - 1) as u16;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cr0 = control::CR0_PE | control::CR0_ET | control::CR0_NE;
    if let Entry::Long { page_table, .. } = *entry {
        sregs.cr0 |= control::CR0_PG | control::CR0_WP;
        sregs.cr3 = page_table;
        sregs.cr4 = control::CR4_PAE;
        sregs.efer = control::EFER_LME | control::EFER_LMA;
    }
}

fn segment(selector: u16, type_: u8, memory: bool, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: u8::from(memory),
        l: u8::from(long),
        g: 1,
        ..Default::default()
    }
}

/// FPU state as after FNINIT, with all SSE exceptions masked.
pub fn fpu() -> kvm_fpu {
    kvm_fpu {
        fcw: 0x37F,
        mxcsr: 0x1F80,
        ..Default::default()
    }
}

/// IA32_MTRR_DEF_TYPE.
const MSR_MTRR_DEF_TYPE: u32 = 0x2FF;
/// IA32_MISC_ENABLE.
const MSR_MISC_ENABLE: u32 = 0x1A0;
const MTRR_ENABLE: u64 = 1 << 11;
const MTRR_WRITE_BACK: u64 = 6;
const FAST_STRINGS: u64 = 1 << 0;

/// MSRs that firmware would have set: memory is write-back by default (MMIO gets its type from
/// the guest's page tables; KVM maps device memory uncached anyhow), fast string operations on.
pub fn boot_msrs() -> [kvm_msr_entry; 2] {
    [
        msr(MSR_MTRR_DEF_TYPE, MTRR_ENABLE | MTRR_WRITE_BACK),
        msr(MSR_MISC_ENABLE, FAST_STRINGS),
    ]
}

fn msr(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        data,
        ..Default::default()
    }
}

/// Local APIC registers LVT0 and LVT1 (Intel SDM 3A, 10.5.1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
const DELIVERY_MODE: u32 = 0x700;
const DELIVERY_NMI: u32 = 4 << 8;
const DELIVERY_EXTINT: u32 = 7 << 8;

/// Connects the local interrupt pins as firmware does: LINT0 to external interrupts, LINT1 to NMI.
pub fn local_interrupts(lapic: &mut kvm_lapic_state) {
    set_delivery(lapic, LVT_LINT0, DELIVERY_EXTINT);
    set_delivery(lapic, LVT_LINT1, DELIVERY_NMI);
}

fn set_delivery(lapic: &mut kvm_lapic_state, register: usize, mode: u32) {
    let Some(bytes) = lapic.regs.get_mut(register..register + 4) else {
        return;
    };
    let mut value = 0;
    for (shift, byte) in bytes.iter().enumerate() {
        value |= u32::from(*byte as u8) << (8 * shift);
    }
    let value = value & !DELIVERY_MODE | mode;
    for (byte, new) in bytes.iter_mut().zip(value.to_le_bytes()) {
        *byte = new as _;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Entry = Entry::Long {
        rip: 0x100_0200,
        boot_params: 0x7000,
        page_table: 0x9000,
    };

    #[test]
    fn a_bzimage_starts_in_long_mode_at_its_entry() {
        let regs = general(&LONG);
        assert_eq!((regs.rip, regs.rsi, regs.rflags), (0x100_0200, 0x7000, 2));
        let mut sregs = kvm_sregs::default();
        enter(&mut sregs, &LONG);
        assert_eq!(sregs.cr3, 0x9000);
        assert_eq!((sregs.cs.l, sregs.cs.db), (1, 0));
        assert_ne!(sregs.efer & control::EFER_LMA, 0);
        assert_ne!(sregs.cr0 & control::CR0_PG, 0);
    }

    #[test]
    fn an_elf_kernel_starts_in_flat_32bit_mode_without_paging() {
        let entry = Entry::Pvh {
            rip: 0x100_0000,
            start_info: 0x6000,
        };
        assert_eq!(general(&entry).rbx, 0x6000);
        let mut sregs = kvm_sregs::default();
        enter(&mut sregs, &entry);
        assert_eq!(sregs.cr0 & control::CR0_PG, 0);
        assert_eq!((sregs.cs.l, sregs.cs.db, sregs.cs.g), (0, 1, 1));
        assert_eq!((sregs.cr4, sregs.efer), (0, 0));
    }

    #[test]
    fn the_hidden_code_segment_agrees_with_the_descriptor_table() {
        let descriptor = segments::GDT_ENTRIES[usize::from(segments::CODE / 8)];
        assert_eq!(descriptor >> 40 & 0xF, u64::from(TYPE_CODE));
        assert_eq!(descriptor >> 53 & 1, 1, "64-bit");
    }

    #[test]
    fn only_the_delivery_mode_of_the_pins_changes() {
        let mut lapic = kvm_lapic_state::default();
        lapic.regs[LVT_LINT0 + 2] = 1;
        local_interrupts(&mut lapic);
        assert_eq!(lapic.regs[LVT_LINT0 + 1], 7);
        assert_eq!(lapic.regs[LVT_LINT0 + 2], 1, "the mask bit stays");
        assert_eq!(lapic.regs[LVT_LINT1 + 1], 4);
    }
}
