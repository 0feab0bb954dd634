//! QEMU's command line.

use std::os::fd::RawFd;
use std::path::Path;

use crate::cli::MachineArgs;
use crate::error::Error;
use crate::machine::devices::{self, Device, LAB_SLOT};
use crate::machine::size;
use crate::setup::{self, Bootable};

/// The 64-bit window of L1 where nothing bigger is needed.
const WINDOW: u64 = 8 << 40;
/// Share of the address space that the window may take.
const WINDOW_SHARE_BITS: u32 = 2;
/// An IOMMU with fewer bits cannot reach RAM that QEMU puts above 1 TiB.
const WIDE_IOMMU_BITS: u32 = 41;

/// What L1's kernel is always told. To load certificates takes half a second of emulated arithmetic.
const HOST_CMDLINE: &str = "console=ttyS0 intel_iommu=on iommu=pt panic=-1 mitigations=off nokaslr \
    random.trust_cpu=on no_timer_check cryptomgr.notests initcall_blacklist=load_system_certificate_list";

/// What a kernel with a built-in KVM is told as well. The emulated CPU does not say that its time-stamp counter is
/// constant: a KVM that starts before the kernel has measured the counter a second time would then give guests the first
/// result, and no timer interrupts where the two differ.
const BUILT_IN_KVM_CMDLINE: &str = " setcpuid=constant_tsc";

/// L1's CPU. `max` offers SVM with nested paging; what is left out are promises that `rep stosb` and `rep movsb` are fast:
/// the emulator executes them byte by byte, which makes a kernel that believes them clear memory three times slower.
const CPU: &str = "max,-erms,-fsrm,-fzrm,-fsrs";

/// QEMU's arguments and the devices whose addresses the host needs to know.
pub struct Plan {
    /// Everything after the program's name, but for the channels.
    pub arguments: Vec<String>,
    /// To be bound to vfio-pci.
    pub assigned: Vec<Device>,
    /// Left to the host's drivers.
    pub left: Vec<Device>,
}

/// The ends of the channels that QEMU inherits.
pub struct Channels {
    /// Console of L1's kernel.
    pub console: RawFd,
    /// The command's standard output (and input, when interactive).
    pub out: RawFd,
    /// The command's standard error.
    pub err: RawFd,
    /// Between the lab and L1's init.
    pub control: RawFd,
    /// QEMU's monitor.
    pub monitor: RawFd,
}

/// Makes the arguments for a machine.
pub fn plan(
    machine: &MachineArgs,
    kernel: &Bootable,
    shared: &Path,
    interactive: bool,
) -> Result<Plan, Error> {
    let qemu_args: Vec<String> = machine.qemu_arg.iter().flat_map(|arg| split(arg)).collect();
    let mut assigned = gpus(machine)?;
    assigned.extend(machine.device.iter().cloned());
    let mut taken = devices::named_slots(
        assigned
            .iter()
            .chain(&machine.host_device)
            .chain(&qemu_args),
    );
    let assigned = devices::place(&assigned, "lab-assigned", &mut taken)?;
    let left = devices::place(&machine.host_device, "lab-host", &mut taken)?;

    let mut arguments = base(machine)?;
    arguments.extend(boot(machine, kernel));
    arguments.extend(lab_devices(shared, interactive));
    // Root ports and drives come before the devices that name them.
    arguments.extend(qemu_args);
    // Disks, which are left to nobody, come after the assigned controllers that they sit on.
    for device in assigned.iter().chain(&left) {
        arguments.extend(["-device".to_owned(), device.argument.clone()]);
    }
    Ok(Plan {
        arguments,
        assigned,
        left,
    })
}

/// An option and its value may come in one argument.
fn split(argument: &str) -> Vec<String> {
    match argument.split_once(' ') {
        Some((option, value)) if option.starts_with('-') => {
            vec![option.to_owned(), value.trim_start().to_owned()]
        }
        _ => vec![argument.to_owned()],
    }
}

fn gpus(machine: &MachineArgs) -> Result<Vec<String>, Error> {
    let size = size::parse("--bar-size", &machine.bar_size)?;
    if !size.is_power_of_two() {
        return Err(Error::Option {
            option: "--bar-size",
            value: machine.bar_size.clone(),
            problem: "a BAR's size is a power of two".to_owned(),
        });
    }
    let gpu = format!("pci-testdev,membar={size}");
    Ok(vec![gpu; machine.gpus as usize])
}

/// The machine without its kernel and devices.
fn base(machine: &MachineArgs) -> Result<Vec<String>, Error> {
    let (accelerator, cpus) = if machine.deterministic {
        ("tcg,thread=single", 1)
    } else {
        ("tcg,thread=multi,tb-size=1024", machine.cpus)
    };
    let memory = machine
        .memory
        .as_deref()
        .unwrap_or(if machine.iommu_bits < WIDE_IOMMU_BITS {
            "2G"
        } else {
            "6G"
        });
    let bytes = size::parse("--bar-size", &machine.bar_size)?.saturating_mul(machine.gpus.into());
    let limit = 1u64
        .checked_shl(machine.phys_bits.saturating_sub(WINDOW_SHARE_BITS))
        .unwrap_or(u64::MAX);
    // Twice the demand, since BARs of other devices and alignment take some as well.
    let window = bytes
        .saturating_mul(2)
        .checked_next_power_of_two()
        .unwrap_or(limit);
    let window = window.max(WINDOW).min(limit);
    let mut arguments: Vec<String> = [
        "-accel",
        accelerator,
        "-machine",
        "q35,sata=off,smbus=off",
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-vga",
        "none",
        "-nic",
        "none",
    ]
    .map(str::to_owned)
    .to_vec();
    for (option, value) in [
        ("-cpu", format!("{CPU},phys-bits={}", machine.phys_bits)),
        ("-smp", cpus.to_string()),
        ("-m", memory.to_owned()),
        // The default of 39 bits cannot map high BARs.
        (
            "-device",
            format!("intel-iommu,intremap=on,aw-bits={}", machine.iommu_bits),
        ),
        ("-global", format!("q35-pcihost.pci-hole64-size={window}")),
    ] {
        arguments.extend([option.to_owned(), value]);
    }
    if machine.deterministic {
        arguments.extend(["-icount".to_owned(), "shift=0,sleep=off".to_owned()]);
    }
    Ok(arguments)
}

fn boot(machine: &MachineArgs, kernel: &Bootable) -> [String; 6] {
    let mut append = HOST_CMDLINE.to_owned();
    if machine.host_kernel == setup::IOMMUFD_KERNEL {
        append.push_str(BUILT_IN_KVM_CMDLINE);
    }
    append.push_str(if machine.verbose {
        " ignore_loglevel"
    } else {
        " loglevel=5"
    });
    for more in &machine.host_append {
        append.push(' ');
        append.push_str(more);
    }
    [
        "-kernel".to_owned(),
        kernel.elf.display().to_string(),
        "-initrd".to_owned(),
        kernel.host_initrd.display().to_string(),
        "-append".to_owned(),
        append,
    ]
}

/// The machine's root and the run's directory over 9p, and the channels' ports.
fn lab_devices(shared: &Path, interactive: bool) -> Vec<String> {
    let out = if interactive {
        "virtconsole"
    } else {
        "virtserialport"
    };
    let shared = shared.display().to_string().replace(',', ",,");
    let mut arguments = Vec::new();
    for (option, value) in [
        (
            "-fsdev",
            "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap".to_owned(),
        ),
        (
            "-fsdev",
            format!("local,id=out,path={shared},security_model=none,multidevs=remap"),
        ),
        (
            "-device",
            format!(
                "virtio-9p-pci,fsdev=root,mount_tag=root,multifunction=on,addr={LAB_SLOT:02x}.0"
            ),
        ),
        (
            "-device",
            format!("virtio-9p-pci,fsdev=out,mount_tag=out,addr={LAB_SLOT:02x}.1"),
        ),
        (
            "-device",
            format!("virtio-serial-pci,id=lab-ports,addr={LAB_SLOT:02x}.2"),
        ),
        (
            "-device",
            format!("{out},bus=lab-ports.0,chardev=out,name=lab.out"),
        ),
        (
            "-device",
            "virtserialport,bus=lab-ports.0,chardev=err,name=lab.err".to_owned(),
        ),
        (
            "-device",
            "virtserialport,bus=lab-ports.0,chardev=control,name=lab.ctl".to_owned(),
        ),
        ("-serial", "chardev:console".to_owned()),
        ("-mon", "chardev=monitor,mode=control".to_owned()),
    ] {
        arguments.extend([option.to_owned(), value]);
    }
    arguments
}

impl Channels {
    /// The arguments that hand the inherited descriptors to QEMU.
    pub fn arguments(&self) -> Vec<String> {
        [
            ("console", self.console),
            ("out", self.out),
            ("err", self.err),
            ("control", self.control),
            ("monitor", self.monitor),
        ]
        .into_iter()
        .flat_map(|(id, fd)| ["-chardev".to_owned(), format!("socket,id={id},fd={fd}")])
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bootable() -> Bootable {
        Bootable {
            name: "7.3",
            release: "7.3.4".to_owned(),
            image: "/k".into(),
            elf: "/e".into(),
            host_initrd: "/i".into(),
            guest_initrd: "/g".into(),
        }
    }

    fn window(machine: &MachineArgs) -> String {
        let plan = plan(machine, &bootable(), Path::new("/out"), false).unwrap();
        let global = plan.arguments.iter().find(|arg| arg.contains("hole64"));
        global.unwrap().rsplit('=').next().unwrap().to_owned()
    }

    #[test]
    fn the_window_grows_with_the_gpus() {
        let mut machine = MachineArgs {
            gpus: 8,
            ..MachineArgs::default()
        };
        assert_eq!(window(&machine), (8u64 << 40).to_string());
        machine.bar_size = "1T".to_owned();
        assert_eq!(window(&machine), (16u64 << 40).to_string());
    }

    #[test]
    fn gpus_come_first_and_drives_before_devices() {
        let machine = MachineArgs {
            gpus: 1,
            device: vec!["nvme,serial=1,drive=d0".to_owned()],
            qemu_arg: vec!["-drive if=none,id=d0,file=/x".to_owned()],
            ..MachineArgs::default()
        };
        let plan = plan(&machine, &bootable(), Path::new("/a,b"), false).unwrap();
        assert_eq!(
            plan.assigned[0].argument,
            format!(
                "pci-testdev,membar={},addr=03,id=lab-assigned0",
                16u64 << 30
            )
        );
        let position = |text: &str| {
            plan.arguments
                .iter()
                .position(|arg| arg.starts_with(text))
                .unwrap()
        };
        assert!(position("if=none") < position("nvme"));
        assert!(plan.arguments.iter().any(|arg| arg.contains("path=/a,,b")));
    }

    #[test]
    fn a_bar_size_that_no_bar_can_have() {
        let machine = MachineArgs {
            gpus: 1,
            bar_size: "3G".to_owned(),
            ..MachineArgs::default()
        };
        let error = plan(&machine, &bootable(), Path::new("/"), false)
            .err()
            .unwrap();
        assert!(error.to_string().contains("power of two"), "{error}");
    }
}
