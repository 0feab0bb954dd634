//! vCPU threads: they answer exits until the run ends.
//!
//! Stopping: [`Stop`] is set first, then every thread is signalled until it has ended. The signal
//! makes KVM_RUN and a blocked write return with EINTR; one that arrives just before KVM_RUN is
//! entered is lost, so it is sent again.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use devices::assign::ports::DmaGate;
use devices::bus::Bus;
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::error::Error;
use crate::kvm::vcpu::{ExitHandler, Pause, Vcpu};
use crate::pauses::{Entry, Pauses, Turn};
use crate::profile::{Profile, Subject};
use crate::stop::{Outcome, Stop};

/// Between two signals to a thread that has not ended yet.
const KICK_INTERVAL: Duration = Duration::from_micros(200);

/// Called when the kernel has no memory for an address that the guest touched (a device's BAR was
/// taken away from us), with the guest-physical address where the kernel tells it. Returns what the
/// user should know of it: whose memory it is.
pub type FaultHandler = Box<dyn Fn(Option<u64>) -> String + Send + Sync>;

/// What all vCPUs share.
pub struct VcpuContext {
    /// I/O ports.
    pub ports: Bus,
    /// Trapped memory.
    pub mmio: Bus,
    /// The end of the run.
    pub stop: Arc<Stop>,
    /// See [`FaultHandler`].
    pub on_fault: Option<FaultHandler>,
    /// Learns when the guest starts.
    pub profile: Arc<Profile>,
    /// Passed before the guest's first instruction.
    pub start_gate: Option<Arc<dyn DmaGate>>,
}

impl ExitHandler for VcpuContext {
    fn port_read(&self, port: u16, data: &mut [u8]) {
        self.ports.read(port.into(), data);
    }

    fn port_write(&self, port: u16, data: &[u8]) {
        self.ports.write(port.into(), data);
    }

    fn mmio_read(&self, address: u64, data: &mut [u8]) {
        self.mmio.read(address, data);
    }

    fn mmio_write(&self, address: u64, data: &[u8]) {
        self.mmio.write(address, data);
    }
}

/// Running vCPUs. Dropping it stops them.
pub struct VcpuThreads {
    pauses: Arc<Pauses>,
    stop: Arc<Stop>,
}

impl VcpuThreads {
    /// Starts a thread for each of `vcpus`; `pauses` can hold them up from then on.
    pub fn start(
        vcpus: Vec<Vcpu>,
        context: VcpuContext,
        pauses: &Arc<Pauses>,
    ) -> Result<Self, Error> {
        extern "C" fn only_interrupt(
            _: libc::c_int,
            _: *mut libc::siginfo_t,
            _: *mut libc::c_void,
        ) {
        }
        register_signal_handler(SIGRTMIN(), only_interrupt)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))
            .map_err(Error::system("install the signal that stops vCPUs"))?;
        // Dropping it ends those that were started before an error.
        let running = Self {
            pauses: Arc::clone(pauses),
            stop: Arc::clone(&context.stop),
        };
        let context = Arc::new(context);
        for vcpu in vcpus {
            let (context, turn) = (Arc::clone(&context), pauses.turn());
            let in_guest = turn.in_guest();
            let thread = thread::Builder::new()
                .name(format!("vcpu{}", vcpu.id()))
                .spawn(move || run(vcpu, turn, &context))
                .map_err(Error::system("start a vCPU's thread"))?;
            pauses.add(thread, in_guest);
        }
        Ok(running)
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        // Without an outcome of its own the run ends here all the same.
        self.stop.request(Outcome::Quit);
        while self.pauses.interrupt_all() {
            thread::sleep(KICK_INTERVAL);
        }
        // A thread that panicked has said so (see `Watch`).
        self.pauses.join();
    }
}

/// Ends the run if its thread unwinds: a guest with a vCPU missing would hang.
struct Watch<'a>(&'a Stop);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.request(Outcome::Failed(Error::System {
                what: "run a vCPU",
                source: io::Error::other("its thread panicked"),
            }));
        }
    }
}

fn run(mut vcpu: Vcpu, mut turn: Turn, context: &VcpuContext) {
    let _watch = Watch(&context.stop);
    if vcpu.id() == 0 {
        // The others wait until the guest starts them.
        let gate = context.start_gate.as_ref();
        if gate.is_some_and(|gate| gate.pass().is_err()) {
            return;
        }
        context.profile.mark("first guest instruction");
    }
    loop {
        match turn.enter(&context.stop) {
            Entry::Guest => {}
            Entry::WasHeldUp => {
                tell_held_up(&vcpu, &context.profile);
                continue;
            }
            Entry::End => return,
        }
        let outcome = match vcpu.run(context, &turn) {
            None | Some(Pause::Interrupted) => continue,
            Some(Pause::MemoryFault(gpa)) => on_fault(&vcpu, context, gpa),
            Some(Pause::Shutdown) => Outcome::Crashed(format!("triple fault at {}", vcpu.place())),
            Some(Pause::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN)) => Outcome::PoweredOff,
            Some(Pause::SystemEvent(KVM_SYSTEM_EVENT_RESET)) => Outcome::Reset,
            Some(Pause::SystemEvent(KVM_SYSTEM_EVENT_CRASH)) => {
                Outcome::Crashed("it said so".to_owned())
            }
            Some(Pause::SystemEvent(kind)) => broken(&vcpu, format!("unknown system event {kind}")),
            Some(Pause::Broken(text)) => broken(&vcpu, text),
        };
        context.stop.request(outcome);
    }
}

fn tell_held_up(vcpu: &Vcpu, profile: &Profile) {
    let tell = || vcpu.tell_held_up();
    match profile.call("KVM_KVMCLOCK_CTRL", Subject::Machine, tell) {
        Ok(true) => profile.mark("guest: told that a vCPU was held up"),
        Ok(false) => {}
        Err(error) => {
            let id = vcpu.id();
            tracing::warn!(
                "vCPU {id} was held up and its guest cannot be told, its watchdogs may complain: {error}: {}",
                error.source
            );
        }
    }
}

fn on_fault(vcpu: &Vcpu, context: &VcpuContext, gpa: Option<u64>) -> Outcome {
    let known = context.on_fault.as_ref().map(|handler| handler(gpa));
    broken(vcpu, no_memory(gpa, known, &vcpu.place()))
}

fn no_memory(gpa: Option<u64>, known: Option<String>, place: &str) -> String {
    let address = match gpa {
        Some(gpa) => format!("guest-physical address {gpa:#x}"),
        None => "an address that it touched (EFAULT)".to_owned(),
    };
    let known = known.map_or(String::new(), |known| format!("; {known}"));
    format!("no memory behind {address}, {place}{known}")
}

fn broken(vcpu: &Vcpu, text: String) -> Outcome {
    Outcome::Failed(Error::Vcpu {
        id: vcpu.id(),
        reason: text.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_told_with_address_place_and_what_is_known() {
        let known = Some("it is a BAR".to_owned());
        assert_eq!(
            no_memory(Some(0x1000), known, "RIP 0"),
            "no memory behind guest-physical address 0x1000, RIP 0; it is a BAR"
        );
        let unknown = no_memory(None, None, "RIP 0");
        assert!(unknown.ends_with("(EFAULT), RIP 0"), "{unknown}");
    }
}
