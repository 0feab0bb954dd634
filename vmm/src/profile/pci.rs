//! The guest's accesses to configuration space, counted twice: by exit of a vCPU, and by function.
//! What they cost in system calls is counted where those are made (see [`super::calls`]).

use std::sync::Arc;

use devices::bus::BusDevice;
use devices::pci::address::Bdf;
use devices::pci::ecam::PciFunction;
use devices::pci::spec::{Command, Reg};

use super::{Profile, Subject};

/// Passes everything on and counts it; marks the guest's first configuration access, and times its
/// first write that turns on bus mastering.
pub struct ProfiledFunction {
    inner: Arc<dyn PciFunction>,
    bdf: Bdf,
    profile: Arc<Profile>,
}

impl ProfiledFunction {
    /// Watches `inner`, the host's device `bdf`.
    pub fn new(inner: Arc<dyn PciFunction>, bdf: Bdf, profile: &Arc<Profile>) -> Self {
        let profile = Arc::clone(profile);
        Self {
            inner,
            bdf,
            profile,
        }
    }
}

fn turns_on_master(offset: u16, data: &[u8]) -> bool {
    let low = data.first().copied().unwrap_or(0);
    offset == Reg::COMMAND.offset()
        && Command::from_bits_retain(low.into()).contains(Command::MASTER)
}

impl PciFunction for ProfiledFunction {
    fn config_read(&self, offset: u16, data: &mut [u8]) {
        self.profile.first_config_access();
        let subject = Subject::Device(self.bdf);
        let read = || self.inner.config_read(offset, data);
        self.profile.call("guest config read", subject, read);
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        self.profile.first_config_access();
        let subject = Subject::Device(self.bdf);
        let first = turns_on_master(offset, data) && self.profile.is_first_master();
        let span = || {
            self.profile
                .span_of("guest: first bus master write", subject)
        };
        let _span = first.then(span);
        let write = || self.inner.config_write(offset, data);
        self.profile.call("guest config write", subject, write);
    }
}

/// A way to configuration space, each use of which is an exit of a vCPU. An access by port takes
/// two: one names the register, one reads or writes it.
pub struct ProfiledExits<D> {
    inner: D,
    class: &'static str,
    profile: Arc<Profile>,
}

impl<D: BusDevice> ProfiledExits<D> {
    /// Counts the exits that go to `inner` as `class`.
    pub fn new(inner: D, class: &'static str, profile: &Arc<Profile>) -> Self {
        let profile = Arc::clone(profile);
        Self {
            inner,
            class,
            profile,
        }
    }
}

impl<D: BusDevice> BusDevice for ProfiledExits<D> {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let read = || self.inner.read(offset, data);
        self.profile.call(self.class, Subject::Machine, read);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let write = || self.inner.write(offset, data);
        self.profile.call(self.class, Subject::Machine, write);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use devices::pci::ecam::{ConfigPorts, Ecam, PciBus};

    use super::*;

    /// Counts what reaches it.
    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl PciFunction for Counter {
        fn config_read(&self, _: u16, _: &mut [u8]) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
        fn config_write(&self, _: u16, _: &[u8]) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn accesses_are_counted_by_exit_and_by_function() {
        let profile = Arc::new(Profile::start());
        let (counter, bdf) = (Arc::new(Counter::default()), Bdf::default());
        let function = ProfiledFunction::new(Arc::clone(&counter) as _, bdf, &profile);
        let mut bus = PciBus::new();
        bus.insert(0, Arc::new(function)).unwrap();
        let bus = Arc::new(bus);
        let memory = ProfiledExits::new(Ecam(Arc::clone(&bus)), "memory", &profile);
        let ports = ProfiledExits::new(ConfigPorts::new(bus), "ports", &profile);
        memory.read(0, &mut [0; 4]);
        memory.read(1 << 15, &mut [0; 4]);
        ports.write(0, &0x8000_0000u32.to_le_bytes());
        ports.read(4, &mut [0; 2]);
        ports.write(4, &[0; 2]);
        let calls = profile.snapshot().tallies;
        let count = |class, subject| calls.get(&(class, subject)).map(|tally| tally.count);
        assert_eq!(count("memory", Subject::Machine), Some(2));
        assert_eq!(count("ports", Subject::Machine), Some(3));
        let subject = Subject::Device(bdf);
        assert_eq!(count("guest config read", subject), Some(2));
        assert_eq!(count("guest config write", subject), Some(1));
        assert_eq!(counter.0.load(Ordering::Relaxed), 3);
    }
}
