//! Step 6: the interrupts of one device. Exactly one of MSI-X, MSI and INTx is enabled in VFIO at
//! any time: the one that the guest's registers select, MSI-X before MSI before INTx.
//!
//! Invariants: a kind is enabled only once nothing of the one before is left; what the guest's
//! registers say is kept even when the kernel refuses to follow; the refusal is logged, and the next
//! change by the guest tries again.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::ports::{
    CallError, IntxLines, IrqIndex, IrqInfo, IrqRequest, MsiMessage, MsiRoutes, VfioDevice,
};
use super::vectors::{VectorPorts, VectorSet};
use crate::pci::address::Bdf;
use crate::pci::caps::Capabilities;
use crate::pci::msi::Msi;
use crate::pci::msix::Msix;
use crate::range::Range;
use crate::rate::RateLimit;

/// The VM's side of a device's interrupts.
#[derive(Clone)]
pub struct IrqPorts {
    /// Message-signalled interrupts.
    pub routes: Arc<dyn MsiRoutes>,
    /// Level-triggered lines.
    pub lines: Arc<dyn IntxLines>,
}

/// What the device has, as VFIO tells it.
#[derive(Clone, Copy, Debug)]
pub struct IrqCounts {
    /// INTx.
    pub intx: IrqInfo,
    /// MSI.
    pub msi: IrqInfo,
    /// MSI-X.
    pub msix: IrqInfo,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Off,
    Intx,
    Msi,
    Msix,
}

/// INTx between VFIO and one GSI.
struct Intx {
    /// `None`: the device has no INTx.
    gsi: Option<u32>,
    /// COMMAND lets the device assert it.
    allowed: bool,
    line: Option<Line>,
}

/// The eventfds of INTx, connected with the GSI, and how far VFIO has them.
struct Line {
    trigger: EventFd,
    resample: EventFd,
    /// VFIO has INTx enabled.
    armed: bool,
    /// The end of interrupt reaches it as well.
    complete: bool,
}

/// See the module.
pub struct Interrupts {
    bdf: Bdf,
    device: Arc<dyn VfioDevice>,
    ports: IrqPorts,
    msix: Option<(Msix, VectorSet)>,
    msi: Option<(Msi, VectorSet)>,
    intx: Intx,
    mode: Mode,
    limit: RateLimit,
}

impl Interrupts {
    /// All off. `number` is the device's index in the VM, `gsi` where its INTx pin is routed
    /// (`None` without a pin).
    pub fn new(
        (number, bdf): (u16, Bdf),
        device: Arc<dyn VfioDevice>,
        caps: &Capabilities,
        counts: IrqCounts,
        gsi: Option<u32>,
        ports: IrqPorts,
    ) -> Self {
        let msix = caps.msix.as_ref().map(|cap| {
            let set = VectorSet::new(number, IrqIndex::Msix, counts.msix, cap.vectors);
            (Msix::new(cap), set)
        });
        let msi = caps.msi.as_ref().map(|cap| {
            let set = VectorSet::new(number, IrqIndex::Msi, counts.msi, cap.max_vectors);
            (Msi::new(cap), set)
        });
        Self {
            bdf,
            device,
            ports,
            msix,
            msi,
            intx: Intx {
                gsi: gsi.filter(|_| counts.intx.count != 0),
                allowed: false,
                line: None,
            },
            mode: Mode::Off,
            limit: RateLimit::default(),
        }
    }

    /// The BAR-relative part of `bar` that MSI-X table and PBA take, each.
    pub fn msix_ranges(&self) -> Option<(Range, Range)> {
        let (msix, _) = self.msix.as_ref()?;
        Some((msix.table_range(), msix.pba_range()))
    }

    /// Reads the MSI-X table from `offset` of it.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) {
        if let Some((msix, _)) = &self.msix {
            msix.read_table(offset, data);
        }
    }

    /// Reads the pending bits from `offset` of them.
    pub fn read_pba(&self, offset: u64, data: &mut [u8]) {
        if let Some((msix, set)) = &self.msix {
            msix.read_pba(offset, data, &|vector| set.is_pending(vector));
        }
    }

    /// Writes the MSI-X table at `offset` of it.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) {
        if let Some((msix, _)) = &mut self.msix {
            let changed = msix.write_table(offset, data);
            self.follow(Mode::Msix, &changed);
        }
    }

    /// MSI-X message control as the guest reads it.
    pub fn msix_control(&self) -> u16 {
        self.msix.as_ref().map_or(0, |(msix, _)| msix.control())
    }

    /// Takes the guest's MSI-X message control.
    pub fn write_msix_control(&mut self, control: u16) {
        if let Some((msix, _)) = &mut self.msix {
            let changed = msix.write_control(control);
            self.follow(Mode::Msix, &changed);
        }
    }

    /// Reads the MSI capability from `offset` of it.
    pub fn read_msi(&self, offset: u16, data: &mut [u8]) {
        if let Some((msi, set)) = &self.msi {
            msi.read(offset, data, &|vector| set.is_pending(vector));
        }
    }

    /// Writes the MSI capability at `offset` of it.
    pub fn write_msi(&mut self, offset: u16, data: &[u8]) {
        if let Some((msi, _)) = &mut self.msi {
            let changed = msi.write(offset, data);
            self.follow(Mode::Msi, &changed);
        }
    }

    /// Takes over whether COMMAND lets the device assert INTx (a decoder or the bus master is on
    /// and INTX_DISABLE is off).
    pub fn allow_intx(&mut self, allowed: bool) {
        self.intx.allowed = allowed;
        self.follow(Mode::Intx, &[]);
    }

    /// All registers to their reset values, everything off in VFIO.
    pub fn reset(&mut self) {
        if let Some((msix, _)) = &mut self.msix {
            msix.reset();
        }
        if let Some((msi, _)) = &mut self.msi {
            msi.reset();
        }
        self.intx.allowed = false;
        self.follow(Mode::Off, &[]);
    }

    fn wanted_mode(&self) -> Mode {
        if self.msix.as_ref().is_some_and(|(msix, _)| msix.enabled()) {
            Mode::Msix
        } else if self.msi.as_ref().is_some_and(|(msi, _)| msi.enabled()) {
            Mode::Msi
        } else if self.intx.allowed && self.intx.gsi.is_some() {
            Mode::Intx
        } else {
            Mode::Off
        }
    }

    /// Lets VFIO and the routes follow the registers of `source`.
    fn follow(&mut self, source: Mode, changed: &[u16]) {
        let wanted = self.wanted_mode();
        // Half left, when the kernel refused the rest.
        let broken = wanted != Mode::Off && !self.is_enabled();
        if wanted != self.mode || broken {
            let old = self.mode;
            let left = self.leave();
            self.report(left, old, "disable");
            if self.is_in_use() {
                // VFIO enables one kind at a time, and both kinds of message share their routes:
                // the next change tries again.
                return;
            }
            self.mode = wanted;
            let entered = self.enter(wanted);
            if entered.is_err() && !self.is_in_use() {
                self.mode = Mode::Off;
            }
            self.report(entered, wanted, "enable");
        } else if wanted == source && (!changed.is_empty() || self.is_behind()) {
            let updated = self.update(changed);
            self.report(updated, wanted, "change");
        }
    }

    fn report(&self, result: Result<(), CallError>, mode: Mode, what: &str) {
        if let Err(error) = result
            && self.limit.allow()
        {
            let kind = match mode {
                Mode::Off => "its interrupts",
                Mode::Intx => "INTx",
                Mode::Msi => "MSI",
                Mode::Msix => "MSI-X",
            };
            let hint = match error.errno() {
                Some(libc::ENOSPC) => " (the host has no interrupt vectors left)",
                Some(libc::EMFILE) => " (raise the limit of open files: `ulimit -n 65536`)",
                Some(libc::EBUSY) => {
                    " (a host driver holds the same interrupt line: unload it or move the card)"
                }
                _ => "",
            };
            tracing::warn!(
                "{}: cannot {what} {kind} for the guest: {error}: {}{hint}",
                self.bdf,
                error.source
            );
        }
    }

    fn leave(&mut self) -> Result<(), CallError> {
        let ports = VectorPorts {
            device: self.device.as_ref(),
            routes: self.ports.routes.as_ref(),
        };
        match (self.mode, &mut self.msix, &mut self.msi) {
            (Mode::Msix, Some((_, set)), _) | (Mode::Msi, _, Some((_, set))) => set.disable(&ports),
            (Mode::Intx, ..) => self.disconnect_intx(),
            _ => Ok(()),
        }
    }

    /// Whether the kind of the mode is enabled in VFIO.
    fn is_enabled(&self) -> bool {
        match self.mode {
            Mode::Off => false,
            Mode::Intx => self.intx.line.as_ref().is_some_and(|line| line.complete),
            Mode::Msi | Mode::Msix => self.vectors().is_some_and(VectorSet::is_enabled),
        }
    }

    /// Whether anything of the kind of the mode is left in the kernel.
    fn is_in_use(&self) -> bool {
        let line = self.mode == Mode::Intx && self.intx.line.is_some();
        line || self.is_enabled() || self.vectors().is_some_and(VectorSet::is_connected)
    }

    /// Whether a change of the mode's vectors was refused and is to be made up for.
    fn is_behind(&self) -> bool {
        self.vectors().is_some_and(VectorSet::is_behind)
    }

    /// The vectors of the mode.
    fn vectors(&self) -> Option<&VectorSet> {
        match (self.mode, &self.msix, &self.msi) {
            (Mode::Msix, Some((_, set)), _) | (Mode::Msi, _, Some((_, set))) => Some(set),
            _ => None,
        }
    }

    fn enter(&mut self, mode: Mode) -> Result<(), CallError> {
        let ports = VectorPorts {
            device: self.device.as_ref(),
            routes: self.ports.routes.as_ref(),
        };
        match (mode, &mut self.msix, &mut self.msi) {
            (Mode::Msix, Some((msix, set)), _) => set.enable(&ports, &|v| msix.wanted(v), 1),
            (Mode::Msi, _, Some((msi, set))) => {
                set.enable(&ports, &|v| msi.wanted(v), msi.enabled_vectors())
            }
            (Mode::Intx, ..) => self.connect_intx(),
            _ => Ok(()),
        }
    }

    fn update(&mut self, changed: &[u16]) -> Result<(), CallError> {
        let ports = VectorPorts {
            device: self.device.as_ref(),
            routes: self.ports.routes.as_ref(),
        };
        let msix_wanted = |msix: &Msix, v| -> Option<MsiMessage> { msix.wanted(v) };
        match (self.mode, &mut self.msix, &mut self.msi) {
            (Mode::Msix, Some((msix, set)), _) => {
                set.update(&ports, changed, &|v| msix_wanted(msix, v))
            }
            (Mode::Msi, _, Some((msi, set))) => set.update(&ports, changed, &|v| msi.wanted(v)),
            _ => Ok(()),
        }
    }

    /// The line first, then the device: an interrupt that is already asserted must find its way.
    fn connect_intx(&mut self) -> Result<(), CallError> {
        let Some(gsi) = self.intx.gsi else {
            return Ok(());
        };
        let eventfd = || {
            EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|source| CallError {
                call: "eventfd",
                source,
            })
        };
        let (trigger, resample) = (eventfd()?, eventfd()?);
        self.ports.lines.connect(gsi, &trigger, &resample)?;
        self.intx.line = Some(Line {
            trigger,
            resample,
            armed: false,
            complete: false,
        });
        let armed = self.arm_intx();
        if armed.is_err() {
            // Should that be refused as well, it is tried again before anything else is enabled.
            let _ = self.disconnect_intx();
        }
        armed
    }

    fn arm_intx(&mut self) -> Result<(), CallError> {
        let Some(line) = &mut self.intx.line else {
            return Ok(());
        };
        self.device.set_irqs(&IrqRequest::Trigger {
            index: IrqIndex::Intx,
            start: 0,
            fds: &[Some(&line.trigger)],
        })?;
        line.armed = true;
        self.device
            .set_irqs(&IrqRequest::Resample(&line.resample))?;
        line.complete = true;
        Ok(())
    }

    /// VFIO keeps INTx when it refuses; the GSI is free in any case: the kernel disconnects an
    /// eventfd that is closed (virt/kvm/eventfd.c, irqfd_wakeup).
    fn disconnect_intx(&mut self) -> Result<(), CallError> {
        let (Some(line), Some(gsi)) = (&mut self.intx.line, self.intx.gsi) else {
            return Ok(());
        };
        if line.armed {
            self.device.set_irqs(&IrqRequest::Disable(IrqIndex::Intx))?;
        }
        match self.intx.line.take() {
            Some(line) => self.ports.lines.disconnect(gsi, &line.trigger),
            None => Ok(()),
        }
    }
}
