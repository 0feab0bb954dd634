//! The ports of device assignment with every call counted and timed, by device and BAR.

use std::collections::BTreeMap;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

use devices::assign::ports::{
    CallError, IommuBackend, IommuNature, IrqIndex, IrqInfo, IrqRequest, MapRequest, MemSlots,
    OpenError, Region, RegionInfo, ResetFunction, Slot, VfioDevice,
};
use devices::pci::address::Bdf;
use devices::range::Range;
use devices::sys::{Alignment, HostMap, HostRange};
use parking_lot::Mutex;

use super::{Profile, Subject};

/// Which host-virtual addresses are which BAR; anything else is RAM.
#[derive(Default)]
struct Mappings(Mutex<BTreeMap<u64, (u64, Subject)>>);

impl Mappings {
    fn add(&self, map: &HostMap, subject: Subject) {
        let entry = (map.address() + map.len(), subject);
        self.0.lock().insert(map.address(), entry);
    }

    fn subject(&self, memory: &HostRange) -> Subject {
        let known = self.0.lock();
        let before = known.range(..=memory.address()).next_back();
        match before {
            Some((_, (end, subject))) if memory.address() < *end => *subject,
            _ => Subject::Ram,
        }
    }
}

/// An IOMMU backend whose calls are counted.
pub struct ProfiledIommu {
    inner: Arc<dyn IommuBackend>,
    profile: Arc<Profile>,
    mappings: Arc<Mappings>,
    /// What is mapped at an IO-virtual address, and how long it is.
    mapped: Mutex<BTreeMap<u64, (Subject, u64)>>,
}

impl ProfiledIommu {
    /// Counts the calls that go to `inner`.
    pub fn new(inner: Arc<dyn IommuBackend>, profile: &Arc<Profile>) -> Self {
        profile.learn(|facts| facts.iommu = Some(inner.name()));
        Self {
            inner,
            profile: Arc::clone(profile),
            mappings: Arc::default(),
            mapped: Mutex::default(),
        }
    }

    /// Notes what the kernel has to do when the process ends, and no profile shows: BARs that are
    /// mapped page by page are unmapped so, and nothing spares it that.
    pub fn note_exit(&self) {
        const GIB: f64 = (1u64 << 30) as f64;
        if self.inner.nature().cheap_unmap {
            return;
        }
        let mapped = self.mapped.lock();
        let bars = mapped
            .values()
            .filter(|(subject, _)| *subject != Subject::Ram);
        let bytes: u64 = bars.map(|(_, len)| len).sum();
        if bytes > 0 {
            let gib = bytes as f64 / GIB;
            self.profile.note(format!(
                "exit: {gib:.3} GiB of BARs are mapped for other devices; the kernel unmaps them, 4 KiB by 4 KiB, when the process ends, after this profile"
            ));
        }
    }

    /// Memslots whose calls are counted, told apart by what was mapped through this backend.
    pub fn slots(&self, inner: Arc<dyn MemSlots>) -> ProfiledSlots {
        ProfiledSlots {
            mappings: Arc::clone(&self.mappings),
            ..ProfiledSlots::new(inner, &self.profile)
        }
    }
}

impl IommuBackend for ProfiledIommu {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn nature(&self) -> IommuNature {
        self.inner.nature()
    }

    fn open(&self, bdf: Bdf) -> Result<Box<dyn VfioDevice>, OpenError> {
        let subject = Subject::Device(bdf);
        let _span = self.profile.span_of("open and reset", subject);
        let open = || self.inner.open(bdf);
        let inner = self.profile.call("open device", subject, open)?;
        Ok(Box::new(ProfiledDevice {
            inner,
            bdf,
            profile: Arc::clone(&self.profile),
            mappings: Arc::clone(&self.mappings),
        }))
    }

    fn map(&self, request: &MapRequest) -> Result<(), CallError> {
        let subject = self.mappings.subject(&request.memory);
        let is_ram = subject == Subject::Ram;
        let _span = is_ram.then(|| self.profile.span_of("map RAM for DMA", subject));
        self.profile
            .call("map DMA", subject, || self.inner.map(request))?;
        let entry = (subject, request.memory.len());
        self.mapped.lock().insert(request.iova, entry);
        if !is_ram {
            let len = request.memory.len();
            self.profile
                .learn(|facts| facts.bar_bytes = facts.bar_bytes.saturating_add(len));
        }
        Ok(())
    }

    fn unmap(&self, range: Range) -> Result<(), CallError> {
        let known = self.mapped.lock().get(&range.start()).copied();
        let subject = known.map_or(Subject::Machine, |(subject, _)| subject);
        self.profile
            .call("unmap DMA", subject, || self.inner.unmap(range))?;
        self.mapped.lock().remove(&range.start());
        Ok(())
    }

    fn iova_ranges(&self) -> Result<Vec<Range>, CallError> {
        self.inner.iova_ranges()
    }

    fn kvm_files(&self) -> Vec<RawFd> {
        self.inner.kvm_files()
    }
}

struct ProfiledDevice {
    inner: Box<dyn VfioDevice>,
    bdf: Bdf,
    profile: Arc<Profile>,
    mappings: Arc<Mappings>,
}

impl ProfiledDevice {
    fn subject(&self, region: Region) -> Subject {
        match region {
            Region::Bar(bar) => Subject::Bar(self.bdf, bar),
            Region::Rom | Region::Config => Subject::Device(self.bdf),
        }
    }

    fn call<T>(&self, class: &'static str, call: impl FnOnce() -> T) -> T {
        self.profile.call(class, Subject::Device(self.bdf), call)
    }
}

impl VfioDevice for ProfiledDevice {
    fn region_info(&self, region: Region) -> Result<RegionInfo, CallError> {
        self.call("region info", || self.inner.region_info(region))
    }

    fn read(&self, region: Region, offset: u64, data: &mut [u8]) -> Result<(), CallError> {
        let class = match region {
            Region::Config if self.profile.guest_configures() => "config read for the guest",
            Region::Config => "config read",
            _ => "BAR read",
        };
        let read = || self.inner.read(region, offset, data);
        self.profile.call(class, self.subject(region), read)
    }

    fn write(&self, region: Region, offset: u64, data: &[u8]) -> Result<(), CallError> {
        let class = match region {
            Region::Config if self.profile.guest_configures() => "config write for the guest",
            Region::Config => "config write",
            _ => "BAR write",
        };
        let write = || self.inner.write(region, offset, data);
        self.profile.call(class, self.subject(region), write)
    }

    fn mmap(&self, region: Region, area: Range, at: Alignment) -> Result<HostMap, CallError> {
        let subject = self.subject(region);
        let mmap = || self.inner.mmap(region, area, at);
        let map = self.profile.call("mmap BAR", subject, mmap)?;
        self.mappings.add(&map, subject);
        Ok(map)
    }

    fn export_dmabuf(&self, region: Region, area: Range) -> Result<OwnedFd, CallError> {
        let export = || self.inner.export_dmabuf(region, area);
        self.profile
            .call("export BAR", self.subject(region), export)
    }

    fn irq_info(&self, index: IrqIndex) -> Result<IrqInfo, CallError> {
        self.call("interrupt info", || self.inner.irq_info(index))
    }

    fn set_irqs(&self, request: &IrqRequest<'_>) -> Result<(), CallError> {
        self.call("set interrupts", || self.inner.set_irqs(request))
    }

    fn can_reset(&self) -> bool {
        self.inner.can_reset()
    }

    fn reset(&self) -> Result<(), CallError> {
        self.call("reset", || self.inner.reset())
    }

    fn hot_reset_functions(&self) -> Result<Vec<ResetFunction>, CallError> {
        self.call("hot reset info", || self.inner.hot_reset_functions())
    }

    fn hot_reset(&self) -> Result<(), CallError> {
        self.call("hot reset", || self.inner.hot_reset())
    }
}

/// Memslots whose calls are counted.
pub struct ProfiledSlots {
    inner: Arc<dyn MemSlots>,
    profile: Arc<Profile>,
    mappings: Arc<Mappings>,
    owners: Mutex<BTreeMap<Slot, Subject>>,
}

const SLOT: &str = "memslot";

impl ProfiledSlots {
    /// Counts the calls that go to `inner`.
    pub fn new(inner: Arc<dyn MemSlots>, profile: &Arc<Profile>) -> Self {
        Self {
            inner,
            profile: Arc::clone(profile),
            mappings: Arc::default(),
            owners: Mutex::default(),
        }
    }

    fn owner(&self, slot: Slot) -> Subject {
        let owner = self.owners.lock().get(&slot).copied();
        owner.unwrap_or(Subject::Machine)
    }
}

impl MemSlots for ProfiledSlots {
    fn set(&self, gpa: u64, memory: &HostRange) -> Result<Slot, CallError> {
        let subject = self.mappings.subject(memory);
        let set = || self.inner.set(gpa, memory);
        let slot = self.profile.call(SLOT, subject, set)?;
        self.owners.lock().insert(slot, subject);
        Ok(slot)
    }

    fn move_to(&self, slot: Slot, gpa: u64) -> Result<(), CallError> {
        let subject = self.owner(slot);
        self.profile
            .call(SLOT, subject, || self.inner.move_to(slot, gpa))
    }

    fn clear(&self, slot: Slot) -> Result<(), CallError> {
        let subject = self.owner(slot);
        self.profile.call(SLOT, subject, || self.inner.clear(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::fake::FakeKernel;
    use devices::sys::HostMap;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_end_of_a_run_tells_of_bars_that_are_still_mapped_and_of_nothing_else() {
        let profile = Arc::new(Profile::start());
        let kernel = Arc::new(FakeKernel::new(Vec::new()));
        let iommu = ProfiledIommu::new(kernel, &profile);
        let map = |iova, subject: Option<Subject>| {
            let memory = HostMap::anonymous(512 * MIB, Alignment::PAGE).unwrap();
            if let Some(subject) = subject {
                iommu.mappings.add(&memory, subject);
            }
            let memory = HostRange::whole(Arc::new(memory));
            iommu.map(&MapRequest { iova, memory }).unwrap();
        };
        map(0, None);
        iommu.note_exit();
        assert_eq!(profile.note_count(), 0);
        let bar = Subject::Bar(Bdf::default(), 2);
        map(1 << 40, Some(bar));
        map(1 << 41, Some(bar));
        let gone = Range::from_bounds(1 << 40, (1 << 40) + 512 * MIB);
        iommu.unmap(gone).unwrap();
        iommu.note_exit();
        let notes = profile.snapshot().notes;
        assert!(
            matches!(notes.as_slice(), [one] if one.contains(" 0.500 GiB ")),
            "{notes:?}"
        );
    }
}
