//! Guest RAM and bus mastering on the fake kernel: no device masters the bus before all guest RAM is
//! mapped for it, also when other threads map it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::AssignError;
use super::ports::{DmaGate, GateClosed, IommuBackend, IommuNature};
use super::ram::{Populate, RamWork};
use super::testing::{DMABUF, GIB, RAM, Rig, bdf};
use crate::fake::{Event, FakeDeviceSpec, FakeKernel};
use crate::pci::spec::{Command, Reg};
use crate::sys::{Alignment, HostMap, HostRange};

const MEM: u16 = Command::MEMORY.bits();
const MASTER: u16 = Command::MASTER.bits();

/// A gate that is open or closed from some moment on.
#[derive(Default)]
struct Gate {
    end: Mutex<Option<bool>>,
    changed: Condvar,
    reached: AtomicBool,
}

impl Gate {
    fn settle(&self, open: bool) {
        *self.end.lock() = Some(open);
        self.changed.notify_all();
    }
}

impl DmaGate for Gate {
    fn pass(&self) -> Result<(), GateClosed> {
        self.reached.store(true, Ordering::SeqCst);
        let mut end = self.end.lock();
        self.changed.wait_while(&mut end, |end| end.is_none());
        if *end == Some(true) {
            Ok(())
        } else {
            Err(GateClosed)
        }
    }
}

fn rig(nature: IommuNature, gate: &Arc<Gate>) -> Rig {
    let specs = vec![FakeDeviceSpec::gpu(bdf(1), 16 * GIB)];
    let rig = Rig::gated(nature, specs, Arc::clone(gate) as _);
    rig.kernel.take_log();
    rig
}

/// Maps all RAM on threads of its own, beginning when a vCPU waits.
fn map_ram(kernel: &Arc<FakeKernel>, gate: &Arc<Gate>) -> JoinHandle<Result<(), AssignError>> {
    let memory = HostMap::anonymous(RAM.len(), Alignment::PAGE).unwrap();
    let blocks = [(RAM.start(), HostRange::whole(Arc::new(memory)))];
    let faults = Arc::clone(kernel);
    let populate: Populate = Box::new(move |range, _| faults.populate(range));
    let iommu: Arc<dyn IommuBackend> = Arc::new(Arc::clone(kernel));
    let work = RamWork::new(&blocks, 4096, Some(iommu), populate);
    let gate = Arc::clone(gate);
    thread::spawn(move || {
        while !gate.reached.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        work.allow_maps();
        let result = work.take_part();
        gate.settle(result.is_ok() && work.is_done());
        result
    })
}

fn masters(event: &Event) -> bool {
    matches!(event, Event::ConfigWrite(_, 4, data) if data[0] & MASTER as u8 != 0)
}

#[test]
fn all_ram_is_mapped_before_the_device_masters_the_bus() {
    for nature in [IommuNature::default(), DMABUF] {
        let gate = Arc::new(Gate::default());
        let rig = rig(nature, &gate);
        let mapper = map_ram(&rig.kernel, &gate);
        rig.write_command(0, MEM | MASTER);
        mapper.join().unwrap().unwrap();
        let log = rig.kernel.take_log();
        let last_map = log.iter().rposition(|e| matches!(e, Event::Map(_)));
        let master = log.iter().position(masters);
        assert!(last_map.is_some() && last_map < master, "{log:?}");
        let mapped = rig.kernel.mappings();
        assert!(mapped.iter().any(|(range, _)| *range == RAM));
    }
}

#[test]
fn a_failed_call_on_the_way_keeps_the_device_from_mastering() {
    let pieces = (RAM.len() / (2 << 20)) as usize;
    for after in [0, 1, pieces - 1, pieces] {
        let gate = Arc::new(Gate::default());
        let rig = rig(IommuNature::default(), &gate);
        rig.kernel.fail_after(after, libc::ENOMEM);
        let mapper = map_ram(&rig.kernel, &gate);
        rig.write_command(0, MEM | MASTER);
        assert!(mapper.join().unwrap().is_err());
        // Also when the guest writes COMMAND again, with the bus master on all the while.
        rig.write_command(0, MEM | MASTER | Command::PARITY.bits());
        rig.write_command(0, MEM | MASTER);
        let log = rig.kernel.take_log();
        assert!(!log.iter().any(masters), "{log:?}");
        let device = rig.kernel.device(bdf(1)).unwrap();
        assert_eq!(device.physical_config()[4] & MASTER as u8, 0);
    }
}

#[test]
fn only_mastering_waits() {
    let gate = Arc::new(Gate::default());
    let rig = rig(IommuNature::default(), &gate);
    rig.write_command(0, MEM);
    rig.write_config(0, Reg::CACHE_LINE_SIZE.offset(), &[8]);
    rig.write_command(0, MEM | Command::PARITY.bits());
    rig.write_command(0, 0);
    assert!(!gate.reached.load(Ordering::SeqCst));
}
