//! Interrupts from eventfds to the guest: message-signalled ones by routes, lines by the IOAPIC.

use std::io;
use std::sync::Arc;

use devices::assign::ports::{CallError, IntxLines, MsiRoutes, VectorChange};
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
    kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip, kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;
use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::routing_table::{Chip, Route, RoutingTable, Step};
use crate::error::kvm_call;
use crate::profile::{Profile, Subject};

/// The calls that change interrupts; KVM's, or a recorder in tests.
trait IrqKernel: Send + Sync {
    fn set_routes(&self, routes: &[Route]) -> Result<(), CallError>;
    fn connect(&self, fd: &EventFd, gsi: u32) -> Result<(), CallError>;
    fn disconnect(&self, fd: &EventFd, gsi: u32) -> Result<(), CallError>;
}

/// KVM's own calls, counted.
struct KvmCalls {
    vm: Arc<VmFd>,
    profile: Arc<Profile>,
}

/// The VM's interrupt routes.
pub struct VmIrqs {
    kvm: Arc<KvmCalls>,
    routes: Routes<KvmCalls>,
}

impl VmIrqs {
    /// For a VM with in-kernel interrupt controllers.
    pub fn new(vm: Arc<VmFd>, profile: &Arc<Profile>) -> Self {
        let profile = Arc::clone(profile);
        let kvm = Arc::new(KvmCalls { vm, profile });
        let routes = Routes::new(Arc::clone(&kvm));
        Self { kvm, routes }
    }

    /// Connects an edge-triggered line: a write to `trigger` is one interrupt at `gsi`.
    pub fn connect_edge(&self, trigger: &EventFd, gsi: u32) -> Result<(), CallError> {
        IrqKernel::connect(self.kvm.as_ref(), trigger, gsi)
    }
}

impl MsiRoutes for VmIrqs {
    fn apply(&self, changes: &[VectorChange<'_>]) -> Result<(), CallError> {
        self.routes.apply(changes)
    }
}

impl IntxLines for VmIrqs {
    fn connect(&self, gsi: u32, trigger: &EventFd, resample: &EventFd) -> Result<(), CallError> {
        let vm = &self.kvm.vm;
        let connect = || vm.register_irqfd_with_resample(trigger, resample, gsi);
        let connected = self.kvm.counted(IRQFD, connect);
        connected.map_err(kvm_call("KVM_IRQFD (resample)"))
    }

    fn disconnect(&self, gsi: u32, trigger: &EventFd) -> Result<(), CallError> {
        IrqKernel::disconnect(self.kvm.as_ref(), trigger, gsi)
    }
}

/// Message routes over some kernel.
struct Routes<K> {
    kernel: Arc<K>,
    state: Mutex<RoutingTable>,
}

/// One call that was made, so that it can be undone.
enum Done<'a> {
    Connected(&'a EventFd, u32),
    Disconnected(&'a EventFd, u32),
}

impl<K: IrqKernel> Routes<K> {
    fn new(kernel: Arc<K>) -> Self {
        Self {
            kernel,
            state: Mutex::default(),
        }
    }

    fn apply(&self, changes: &[VectorChange<'_>]) -> Result<(), CallError> {
        let mut state = self.state.lock();
        let mut table = state.clone();
        let mut connect = Vec::new();
        let mut disconnect = Vec::new();
        let steps = table.change(changes.iter().map(|change| (change.id, change.message)));
        for (change, step) in changes.iter().zip(steps.map_err(no_gsi)?) {
            match step {
                Step::Connect(gsi) => connect.push((change.trigger, gsi)),
                Step::Disconnect(gsi) => disconnect.push((change.trigger, gsi)),
                Step::Keep => {}
            }
        }
        let mut done = Vec::new();
        let result = self.execute(&mut table, &connect, &disconnect, &mut done);
        match result {
            Ok(()) => {
                *state = table;
                Ok(())
            }
            Err(error) => {
                self.undo(&mut state, &table, done);
                Err(error)
            }
        }
    }

    /// Disconnects, updates the table if it has to be, connects.
    fn execute<'a>(
        &self,
        table: &mut RoutingTable,
        connect: &[(&'a EventFd, u32)],
        disconnect: &[(&'a EventFd, u32)],
        done: &mut Vec<Done<'a>>,
    ) -> Result<(), CallError> {
        for (fd, gsi) in disconnect {
            self.kernel.disconnect(fd, *gsi)?;
            done.push(Done::Disconnected(fd, *gsi));
        }
        if table.is_stale() {
            self.kernel.set_routes(&table.routes())?;
            table.set_installed();
        }
        for (fd, gsi) in connect {
            self.kernel.connect(fd, *gsi)?;
            done.push(Done::Connected(fd, *gsi));
        }
        Ok(())
    }

    /// Back to what was before, as far as the kernel lets us; the error that led here is the one
    /// that is reported.
    fn undo(&self, before: &mut RoutingTable, tried: &RoutingTable, done: Vec<Done<'_>>) {
        for step in done.iter().rev() {
            if let Done::Connected(fd, gsi) = step {
                let _ = self.kernel.disconnect(fd, *gsi);
            }
        }
        if !tried.is_stale() {
            match self.kernel.set_routes(&before.routes()) {
                Ok(()) => before.set_installed(),
                // The next change replaces what it has now.
                Err(_) => before.has_installed(tried),
            }
        }
        for step in done.iter().rev() {
            if let Done::Disconnected(fd, gsi) = step {
                let _ = self.kernel.connect(fd, *gsi);
            }
        }
    }
}

fn no_gsi(error: super::routing_table::NoFreeGsi) -> CallError {
    CallError {
        call: "KVM_SET_GSI_ROUTING",
        source: io::Error::other(error),
    }
}

const ROUTING: &str = "KVM_SET_GSI_ROUTING";
const IRQFD: &str = "KVM_IRQFD";

impl KvmCalls {
    fn counted<T>(&self, class: &'static str, call: impl FnOnce() -> T) -> T {
        self.profile.call(class, Subject::Machine, call)
    }
}

impl IrqKernel for KvmCalls {
    fn set_routes(&self, routes: &[Route]) -> Result<(), CallError> {
        let entries: Vec<_> = routes.iter().map(entry).collect();
        let table = KvmIrqRouting::from_entries(&entries).map_err(|_| CallError {
            call: ROUTING,
            source: io::ErrorKind::InvalidInput.into(),
        })?;
        self.counted(ROUTING, || self.vm.set_gsi_routing(&table))
            .map_err(kvm_call(ROUTING))
    }

    fn connect(&self, fd: &EventFd, gsi: u32) -> Result<(), CallError> {
        self.counted(IRQFD, || self.vm.register_irqfd(fd, gsi))
            .map_err(kvm_call(IRQFD))
    }

    fn disconnect(&self, fd: &EventFd, gsi: u32) -> Result<(), CallError> {
        self.counted(IRQFD, || self.vm.unregister_irqfd(fd, gsi))
            .map_err(kvm_call("KVM_IRQFD (deassign)"))
    }
}

fn entry(route: &Route) -> kvm_irq_routing_entry {
    let (gsi, type_, u) = match *route {
        Route::Chip { gsi, chip, pin } => {
            let irqchip = match chip {
                Chip::PicMaster => KVM_IRQCHIP_PIC_MASTER,
                Chip::PicSlave => KVM_IRQCHIP_PIC_SLAVE,
                Chip::IoApic => KVM_IRQCHIP_IOAPIC,
            };
            let irqchip = kvm_irq_routing_irqchip { irqchip, pin };
            let u = kvm_irq_routing_entry__bindgen_ty_1 { irqchip };
            (gsi, KVM_IRQ_ROUTING_IRQCHIP, u)
        }
        Route::Msi { gsi, message } => {
            let msi = kvm_irq_routing_msi {
                address_lo: message.address as u32,
                address_hi: (message.address >> 32) as u32,
                data: message.data,
                ..Default::default()
            };
            let u = kvm_irq_routing_entry__bindgen_ty_1 { msi };
            (gsi, KVM_IRQ_ROUTING_MSI, u)
        }
    };
    kvm_irq_routing_entry {
        gsi,
        type_,
        u,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use devices::assign::ports::{MsiMessage, VectorId};

    /// Records the calls; can fail the nth.
    #[derive(Default)]
    struct Recorder {
        log: Mutex<Vec<String>>,
        /// Numbers of calls, from 1 on.
        fail_at: Mutex<Vec<usize>>,
    }

    impl Recorder {
        fn call(&self, text: String) -> Result<(), CallError> {
            let mut log = self.log.lock();
            log.push(text);
            if self.fail_at.lock().contains(&log.len()) {
                let source = io::Error::from_raw_os_error(libc::ENOMEM);
                return Err(CallError {
                    call: "test",
                    source,
                });
            }
            Ok(())
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut *self.log.lock())
        }
    }

    impl IrqKernel for Recorder {
        fn set_routes(&self, routes: &[Route]) -> Result<(), CallError> {
            let messages: Vec<_> = routes
                .iter()
                .filter_map(|route| match route {
                    Route::Msi { gsi, message } => Some(format!("{gsi}={}", message.data)),
                    Route::Chip { .. } => None,
                })
                .collect();
            self.call(format!("routes {}", messages.join(" ")))
        }
        fn connect(&self, _: &EventFd, gsi: u32) -> Result<(), CallError> {
            self.call(format!("connect {gsi}"))
        }
        fn disconnect(&self, _: &EventFd, gsi: u32) -> Result<(), CallError> {
            self.call(format!("disconnect {gsi}"))
        }
    }

    fn change(fd: &EventFd, vector: u16, data: Option<u32>) -> VectorChange<'_> {
        VectorChange {
            id: VectorId { device: 3, vector },
            trigger: fd,
            message: data.map(|data| MsiMessage { address: 0, data }),
        }
    }

    fn routes() -> (Routes<Recorder>, EventFd) {
        let routes = Routes::new(Arc::new(Recorder::default()));
        (routes, EventFd::new(0).unwrap())
    }

    #[test]
    fn many_vectors_take_one_table_update_before_they_are_connected() {
        let (routes, fd) = routes();
        let changes: Vec<_> = (0..3).map(|v| change(&fd, v, Some(u32::from(v)))).collect();
        routes.apply(&changes).unwrap();
        assert_eq!(
            routes.kernel.take(),
            [
                "routes 24=0 25=1 26=2",
                "connect 24",
                "connect 25",
                "connect 26"
            ]
        );
    }

    #[test]
    fn disconnecting_comes_first_and_alone_needs_no_update() {
        let (routes, fd) = routes();
        routes
            .apply(&[change(&fd, 0, Some(1)), change(&fd, 1, Some(2))])
            .unwrap();
        routes.kernel.take();
        routes.apply(&[change(&fd, 0, None)]).unwrap();
        assert_eq!(routes.kernel.take(), ["disconnect 24"]);
        routes
            .apply(&[change(&fd, 2, Some(7)), change(&fd, 1, None)])
            .unwrap();
        assert_eq!(
            routes.kernel.take(),
            ["disconnect 25", "routes 24=7", "connect 24"]
        );
    }

    #[test]
    fn a_moved_message_is_one_update_and_no_reconnection() {
        let (routes, fd) = routes();
        routes.apply(&[change(&fd, 0, Some(1))]).unwrap();
        routes.kernel.take();
        routes.apply(&[change(&fd, 0, Some(2))]).unwrap();
        routes.apply(&[change(&fd, 0, Some(2))]).unwrap();
        assert_eq!(routes.kernel.take(), ["routes 24=2"]);
    }

    #[test]
    fn a_failure_at_any_call_leaves_what_was_before() {
        for fail_at in 1..=4 {
            let (routes, fd) = routes();
            routes.apply(&[change(&fd, 0, Some(1))]).unwrap();
            routes.kernel.take();
            *routes.kernel.fail_at.lock() = vec![fail_at];
            let changes = [
                change(&fd, 0, None),
                change(&fd, 1, Some(5)),
                change(&fd, 2, Some(6)),
            ];
            assert!(routes.apply(&changes).is_err(), "{fail_at}");
            routes.kernel.fail_at.lock().clear();
            let log = routes.kernel.take();
            let count = |word: &str| log.iter().filter(|call| call.starts_with(word)).count();
            // Each completed step has its inverse.
            assert_eq!(count("routes 24=1"), usize::from(fail_at > 2), "{log:?}");
            if fail_at > 1 {
                assert_eq!(log.last().unwrap(), "connect 24", "{log:?}");
            }
            // Afterwards vector 0 is connected still and can be changed.
            routes.apply(&[change(&fd, 0, Some(9))]).unwrap();
            assert_eq!(routes.kernel.take(), ["routes 24=9"]);
        }
    }

    #[test]
    fn a_table_that_could_not_be_taken_back_is_replaced_with_the_next_change() {
        let (routes, fd) = routes();
        routes.apply(&[change(&fd, 0, Some(1))]).unwrap();
        routes.kernel.take();
        *routes.kernel.fail_at.lock() = vec![2, 3];
        let changes = [change(&fd, 0, Some(2)), change(&fd, 1, Some(5))];
        assert!(routes.apply(&changes).is_err());
        routes.kernel.fail_at.lock().clear();
        assert_eq!(
            routes.kernel.take(),
            ["routes 24=2 25=5", "connect 25", "routes 24=1"]
        );
        // The kernel still sends vector 0 where it was not to go.
        routes.apply(&[change(&fd, 0, Some(1))]).unwrap();
        assert_eq!(routes.kernel.take(), ["routes 24=1"]);
    }
}
