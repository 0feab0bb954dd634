//! The machine: everything put together, in the order in which it is built.
//!
//! This is the only wiring. Each step is a function of what came before; nothing is looked up
//! globally. What concerns assigned devices is in [`assigned`].

mod assigned;
mod ram;
pub mod slots;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arch::acpi::{self, AcpiConfig};
use arch::boot::{self, BootSource, Entry, KernelImage};
use arch::cpuid::{self, CpuidConfig};
use arch::layout::{self, AddressRange};
use devices::assign::ports::MemSlots;
use devices::bus::{Bus, BusDevice};
use devices::debug_port::DebugPort;
use devices::power::{KeyboardReset, PowerHandler, PowerRegisters, PowerRequest};
use devices::range::Range;
use devices::serial::SerialPort;
use kvm_ioctls::VmFd;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::config::Config;
use crate::console::{self, Console, ConsolePort};
use crate::device_events::DeviceEvents;
use crate::error::{Error, HostError};
use crate::events::EventLoop;
use crate::kvm::memslots::{self, VmMemSlots};
use crate::kvm::routes::VmIrqs;
use crate::kvm::vcpu::Vcpu;
use crate::kvm::vm::{self, Host};
use crate::memory::{Backing, Choice, GuestRam};
use crate::memory_check;
use crate::output::Output;
use crate::pauses::Pauses;
use crate::profile::{Profile, ProfiledSlots};
use crate::ram_mapping::Surroundings;
use crate::run::{VcpuContext, VcpuThreads};
use crate::signals::Signals;
use crate::stop::{Outcome, Stop};
use crate::terminal::RawTerminal;
use assigned::{Installed, Opening, PeerMaps, Placed};
use ram::RamPreparation;

/// Builds the machine that `config` describes, runs it, and tells how it ended.
pub fn run(config: &Config, profile: &Arc<Profile>) -> Result<Outcome, Error> {
    let stop = Arc::new(Stop::new().map_err(Error::system("create an eventfd"))?);
    // Before any other thread, so that every thread leaves these signals to that one.
    let signals = Signals::take(Arc::clone(&stop), Arc::clone(profile))
        .map_err(Error::system("block signals"))?;
    let cpus = config.cpus.0;

    let mut source = {
        let _span = profile.span("check kernel and initrd");
        BootSource::open(
            &config.kernel,
            config.initrd.as_deref(),
            config.cmdline.clone(),
        )?
    };
    let host = {
        let _span = profile.span("open KVM");
        Host::open(cpus)?
    };

    let node = memory_check::check(config, profile)?;
    let opening = Opening::begin(config, profile)?;
    let holes = opening.as_ref().map(Opening::holes).unwrap_or_default();

    let (phys_bits, guest_phys_bits) = cpuid::address_bits(&host.cpuid);
    let Choice {
        backing,
        small_pages,
        why,
    } = Backing::choose(Path::new("/"), config.memory.huge_pages);
    profile.note(format!("guest RAM: {why}"));
    profile.learn(|facts| {
        facts.ram_bytes = config.memory.size.0;
        facts.reserved_pages = config.memory.huge_pages.is_some();
        facts.small_pages = small_pages;
        facts.packed_kernel = matches!(source.kernel, KernelImage::BzImage(_));
    });
    let limit = 1 << guest_phys_bits;
    let ram_layout = lay_out_ram(config, backing, &holes, limit)?;
    let ram = {
        let _span = profile.span("map guest RAM");
        GuestRam::map(&ram_layout, backing, node)?
    };

    let vm = {
        let _span = profile.span("create VM");
        host.create_vm()?
    };
    let irqs = VmIrqs::new(Arc::clone(&vm), profile);
    let irqs = Arc::new(irqs);
    let slots = Arc::new(VmMemSlots::new(Arc::clone(&vm), host.memslots));
    let slots: Arc<dyn MemSlots> = match &opening {
        Some(opening) => Arc::new(opening.iommu().slots(slots)),
        None => Arc::new(ProfiledSlots::new(slots, profile)),
    };
    {
        let _span = profile.span("memslots of guest RAM");
        add_ram(slots.as_ref(), &ram)?;
    }
    {
        let _span = profile.span("create interrupt controllers");
        vm::add_irqchip(&vm)?;
    }

    let pauses = Arc::new(Pauses::default());
    let around = Surroundings {
        stop: Arc::clone(&stop),
        profile: Arc::clone(profile),
        pauses: Arc::clone(&pauses),
        hold: Duration::from_secs(config.test_hold_dma_gate),
    };
    let iommu = opening.as_ref().map(|opening| Arc::clone(opening.iommu()));
    let prepared = RamPreparation::begin(config, &ram, backing, iommu.as_ref(), around)?;

    // What does not depend on the devices is done while they are being opened and reset.
    let entry = {
        let _span = profile.span("load kernel");
        boot::load(ram.access(), &ram_layout, &mut source, acpi::RSDP)?
    };
    let vcpus = {
        let _span = profile.span("create vCPUs");
        let cpuid = CpuidConfig {
            cpus,
            phys_bits,
            guest_phys_bits,
            tsc_deadline: host.tsc_deadline,
            pv_eoi: !config.test_no_pv_eoi,
        };
        create_vcpus(&vm, &host, &cpuid, &entry)?
    };

    let placed = match opening {
        Some(opening) => {
            let opened = opening.finish(config, profile)?;
            check_ram(&ram_layout, &opened.holes(), |holes| {
                lay_out_ram(config, backing, holes, limit)
            })?;
            Some(Placed::new(opened, config, &ram_layout, guest_phys_bits)?)
        }
        None => None,
    };
    let mmio64 = placed.as_ref().and_then(Placed::mmio64);
    let installed = {
        let _span = profile.span("install BARs");
        let install = |placed: Placed| placed.install(&vm, &slots, &irqs, &prepared.gate);
        placed.map(install).transpose()?
    };
    let peers = match &installed {
        Some(installed) => installed.map_peers(&prepared, &stop, profile)?,
        None => {
            prepared.maps().allow();
            None
        }
    };

    let console = serial_console(&irqs)?;
    let mut ports = Bus::new();
    add_ports(&mut ports, &console, &stop, profile)?;
    let mut mmio = Bus::new();
    assigned::add_to_buses(installed.as_ref(), &mut mmio, &mut ports, profile)?;

    write_tables(&ram, &AcpiConfig { cpus, mmio64 })?;

    let signals_end_run = signals.end_run();
    let terminal = RawTerminal::enter().map_err(Error::system("set the terminal to raw mode"))?;
    let mut events = EventLoop::new(Arc::clone(&stop))?;
    let input = Console::new(Arc::clone(&console), terminal.is_some(), Arc::clone(&stop))
        .map_err(Error::system("create a timer"))?;
    events.add(Box::new(input));
    if let Some(installed) = &installed {
        let (stop, profile) = (Arc::clone(&stop), Arc::clone(profile));
        let watched = DeviceEvents::new(installed.functions(), stop, profile);
        events.add(Box::new(watched));
    }

    let context = VcpuContext {
        ports,
        mmio,
        stop: Arc::clone(&stop),
        on_fault: installed.as_ref().map(Installed::fault_handler),
        profile: Arc::clone(profile),
        start_gate: prepared.start_gate(),
    };
    let threads = VcpuThreads::start(vcpus, context, &pauses)?;
    // Not sooner: it would take its time from what the guest waits for.
    peers.map(PeerMaps::begin).transpose()?;
    let ended = events.run();
    // From now on a second signal ends the process, should the rest take long.
    drop(signals_end_run);
    profile.mark("run ended");
    if let Some(iommu) = &iommu {
        iommu.note_exit();
    }
    prepared.cancel();
    console.close();
    drop(threads);
    console::write_last(&console);
    ended?;
    Ok(stop.take().unwrap_or(Outcome::Quit))
}

fn lay_out_ram(
    config: &Config,
    backing: Backing,
    holes: &[AddressRange],
    limit: u64,
) -> Result<Vec<AddressRange>, Error> {
    let size = config.memory.size.0;
    Ok(layout::ram_ranges(size, backing.granule(), holes, limit)?)
}

/// Guest RAM was laid out before the IOMMU told what it cannot map: refuses `ram` that lies there.
fn check_ram(
    ram: &[AddressRange],
    holes: &[AddressRange],
    lay_out: impl FnOnce(&[AddressRange]) -> Result<Vec<AddressRange>, Error>,
) -> Result<(), Error> {
    let meets = |range: &&AddressRange| {
        let mut holes = holes.iter();
        holes.any(|hole| hole.start < range.end && range.start < hole.end)
    };
    let Some(range) = ram.iter().find(meets) else {
        return Ok(());
    };
    // Most likely it is more than the IOMMU reaches, and no other layout would do.
    lay_out(holes)?;
    let range = *range;
    Err(HostError::RamUnmappable { range }.into())
}

fn add_ram(slots: &dyn MemSlots, ram: &GuestRam) -> Result<(), Error> {
    for range in ram.ranges() {
        let mut offset = 0;
        while offset < range.memory.len() {
            let len = memslots::LEN_MAX.min(range.memory.len() - offset);
            if let Some(part) = range.memory.part(offset, len) {
                slots.set(range.gpa + offset, &part)?;
            }
            offset += len;
        }
    }
    Ok(())
}

fn serial_console(irqs: &VmIrqs) -> Result<Arc<ConsolePort>, Error> {
    let interrupt = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
        .map_err(Error::system("create an eventfd"))?;
    irqs.connect_edge(&interrupt, layout::COM1_GSI)?;
    let port = SerialPort::new(interrupt, Output::new(io::stdout()))
        .map_err(Error::system("create an eventfd"))?;
    Ok(Arc::new(port))
}

/// Everything at I/O ports but PCI configuration.
fn add_ports(
    bus: &mut Bus,
    console: &Arc<ConsolePort>,
    stop: &Arc<Stop>,
    profile: &Arc<Profile>,
) -> Result<(), Error> {
    let mut add = |port: u64, len, device: Arc<dyn BusDevice>| {
        bus.insert(Range::from_bounds(port, port + len), device)
    };
    add(layout::COM1.into(), 8, Arc::clone(console) as _)?;
    let power = PowerRegisters::new(
        layout::SLEEP_TYPE_S5,
        layout::RESET_VALUE,
        power_handler(stop),
    );
    add(
        layout::SLEEP_CONTROL.into(),
        PowerRegisters::LEN,
        Arc::new(power),
    )?;
    let reset = KeyboardReset::new(power_handler(stop));
    add(KeyboardReset::PORT, 1, Arc::new(reset))?;
    let profile = Arc::clone(profile);
    let marks = DebugPort::new(Box::new(move |mark| profile.guest_mark(mark)));
    add(DebugPort::PORT, 1, Arc::new(marks))?;
    Ok(())
}

fn power_handler(stop: &Arc<Stop>) -> PowerHandler {
    let stop = Arc::clone(stop);
    Box::new(move |request| {
        stop.request(match request {
            PowerRequest::Off => Outcome::PoweredOff,
            PowerRequest::Reset => Outcome::Reset,
        });
    })
}

fn write_tables(ram: &GuestRam, config: &AcpiConfig) -> Result<(), Error> {
    let tables = acpi::build(config)?;
    let written = ram.access().write_slice(&tables, GuestAddress(acpi::RSDP));
    Ok(written.map_err(boot::BootError::Write)?)
}

fn create_vcpus(
    vm: &VmFd,
    host: &Host,
    config: &CpuidConfig,
    entry: &Entry,
) -> Result<Vec<Vcpu>, Error> {
    let common = cpuid::common(&host.cpuid, config);
    let mut vcpus = Vec::new();
    for id in 0..config.cpus {
        vcpus.push(Vcpu::create(vm, id, &cpuid::for_vcpu(&common, id))?);
    }
    if let Some(first) = vcpus.first() {
        first.enter(entry)?;
    }
    Ok(vcpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;
    const LIMIT: u64 = 1 << 46;

    fn check(size: u64, hole: AddressRange) -> Result<(), Error> {
        let lay_out = |holes: &[AddressRange]| {
            layout::ram_ranges(size, GRANULE, holes, LIMIT).map_err(Error::from)
        };
        check_ram(&lay_out(&[]).unwrap(), &[hole], lay_out)
    }

    #[test]
    fn ram_beyond_what_the_iommu_reaches_is_told_with_what_would_fit() {
        let beyond = AddressRange::new(1 << 39, u64::MAX);
        assert!(check(256 << 30, beyond).is_ok());
        let error = check(600 << 30, beyond).unwrap_err();
        assert_eq!(error.class().code(), 3);
        assert!(error.to_string().contains("614400 MiB"), "{error}");
    }

    #[test]
    fn ram_over_a_hole_that_sysfs_did_not_tell_is_refused() {
        let hole = AddressRange::new(0x1_2345_6000, 0x1_2345_7000);
        assert!(check(1 << 30, hole).is_ok());
        let text = check(8 << 30, hole).unwrap_err().to_string();
        assert!(text.contains("--iommu type1"), "{text}");
    }
}
