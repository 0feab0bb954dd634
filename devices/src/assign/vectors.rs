//! The vectors of one kind (MSI or MSI-X) between VFIO and the VM's interrupt routes.
//!
//! Each vector in use has an eventfd: VFIO signals it, and an irqfd turns the signal into the
//! guest's message while the vector is *connected*. A masked vector is disconnected but stays
//! armed in VFIO, so that what arrives waits in its eventfd (that is its pending bit) and is
//! delivered by the next connection.
//!
//! Invariants: GSIs are used for connected vectors only; a vector is armed at its first connection
//! and stays armed until the kind is disabled; one routing update covers one change by the guest.

use vmm_sys_util::eventfd::EventFd;

use super::ports::{
    CallError, IrqIndex, IrqInfo, IrqRequest, MsiMessage, MsiRoutes, VectorChange, VectorId,
    VfioDevice,
};
use crate::sys::is_signalled;

/// How many vectors of a set that cannot grow are armed ahead, so that vectors unmasked one by one
/// do not each disarm and re-arm the others (and lose what arrives in between).
const ARM_AHEAD: usize = 64;

/// Where a vector stands.
#[derive(Default)]
struct Vector {
    /// Made at the first connection.
    trigger: Option<EventFd>,
    /// VFIO signals the eventfd.
    armed: bool,
    /// Where the irqfd delivers, while connected.
    message: Option<MsiMessage>,
}

/// See the module.
pub struct VectorSet {
    device: u16,
    index: IrqIndex,
    noresize: bool,
    vectors: Vec<Vector>,
    /// Vectors that VFIO has allocated, while the kind is enabled.
    allocated: Option<usize>,
    /// A change was refused: the next one considers all vectors.
    behind: bool,
}

/// The kernel's side of a [`VectorSet`].
pub struct VectorPorts<'a> {
    /// The device that signals.
    pub device: &'a dyn VfioDevice,
    /// The VM that is interrupted.
    pub routes: &'a dyn MsiRoutes,
}

/// Tells where the guest wants a vector delivered, if it may be.
pub type Wanted<'a> = &'a dyn Fn(u16) -> Option<MsiMessage>;

impl VectorSet {
    /// The set of device number `device`, with `count` vectors, all disabled.
    pub fn new(device: u16, index: IrqIndex, info: IrqInfo, count: u16) -> Self {
        let count = usize::from(count).min(info.count as usize);
        Self {
            device,
            index,
            noresize: info.noresize,
            vectors: (0..count).map(|_| Vector::default()).collect(),
            allocated: None,
            behind: false,
        }
    }

    /// Whether VFIO has the kind enabled.
    pub fn is_enabled(&self) -> bool {
        self.allocated.is_some()
    }

    /// Whether any vector has a route.
    pub fn is_connected(&self) -> bool {
        self.vectors.iter().any(|v| v.message.is_some())
    }

    /// Whether a change was refused that the next one makes up for.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Whether a signal waits in a vector that is not connected.
    pub fn is_pending(&self, vector: u16) -> bool {
        let vector = self.vectors.get(usize::from(vector));
        vector.is_some_and(|v| v.message.is_none() && v.trigger.as_ref().is_some_and(is_signalled))
    }

    /// Enables the kind: connects what is wanted with one routing update, arms with one
    /// `SET_IRQS` for at least `least` vectors.
    pub fn enable(
        &mut self,
        ports: &VectorPorts<'_>,
        wanted: Wanted<'_>,
        least: u16,
    ) -> Result<(), CallError> {
        let connected = self.connect(ports, &self.all(), wanted);
        let enabled = connected.and_then(|()| self.arm_from_zero(ports, usize::from(least)));
        if enabled.is_err() && self.disconnect_all(ports).is_ok() {
            self.forget();
        }
        enabled
    }

    /// Follows a change of the vectors in `changed` while the kind is enabled, and of those that
    /// could not be followed before.
    pub fn update(
        &mut self,
        ports: &VectorPorts<'_>,
        changed: &[u16],
        wanted: Wanted<'_>,
    ) -> Result<(), CallError> {
        let updated = match self.behind {
            true => self.connect(ports, &self.all(), wanted),
            false => self.connect(ports, changed, wanted),
        };
        let updated = updated.and_then(|()| self.arm_connected(ports));
        self.behind = updated.is_err();
        updated
    }

    fn all(&self) -> Vec<u16> {
        (0..self.vectors.len() as u16).collect()
    }

    fn arm_connected(&mut self, ports: &VectorPorts<'_>) -> Result<(), CallError> {
        let new = |v: &Vector| v.message.is_some() && !v.armed;
        match self.vectors.iter().rposition(new) {
            None => Ok(()),
            Some(last) if self.noresize && last >= self.allocated.unwrap_or(0) => {
                self.grow(ports, last + 1)
            }
            Some(_) => self.arm_new(ports),
        }
    }

    /// Arms a set that cannot grow anew, for at least `needed` vectors: twice as many as before, so
    /// that growing stays rare. What fired in between is made up for by one signal to each vector
    /// that was armed: a spurious message is harmless, a lost one is not.
    fn grow(&mut self, ports: &VectorPorts<'_>, needed: usize) -> Result<(), CallError> {
        let before = self.allocated;
        if before.is_some() {
            // When it is refused, the set stands as it was.
            ports.device.set_irqs(&IrqRequest::Disable(self.index))?;
            self.allocated = None;
        }
        let mut armed_before = Vec::new();
        for (number, vector) in self.vectors.iter_mut().enumerate() {
            if std::mem::take(&mut vector.armed) {
                armed_before.push(number);
            }
        }
        let twice = before.map_or(0, |count| 2 * count);
        let ahead = twice.clamp(needed, self.vectors.len().max(needed));
        let sizes = [Some(ahead), Some(needed), before];
        let mut result = Ok(());
        for size in sizes.into_iter().flatten() {
            let armed = self.arm(ports, 0, size);
            if armed.is_ok() {
                self.allocated = Some(size);
                break;
            }
            result = armed;
        }
        for number in armed_before {
            let trigger = self.vectors.get(number).and_then(|v| v.trigger.as_ref());
            if let Some(trigger) = trigger {
                // Fails only when the counter is full: then it is signalled anyway.
                let _ = trigger.write(1);
            }
        }
        match self.allocated {
            Some(size) if size >= needed => Ok(()),
            _ => result,
        }
    }

    /// Disarms and disconnects everything. Eventfds are dropped with what waited in them. When the
    /// kernel refuses one of both, what it keeps is kept here too, for the next attempt.
    pub fn disable(&mut self, ports: &VectorPorts<'_>) -> Result<(), CallError> {
        let disarmed = match self.allocated {
            Some(_) => ports.device.set_irqs(&IrqRequest::Disable(self.index)),
            None => Ok(()),
        };
        if disarmed.is_ok() {
            self.allocated = None;
            self.vectors.iter_mut().for_each(|v| v.armed = false);
        }
        let disconnected = self.disconnect_all(ports);
        // Should the guest turn the kind on again before, what is left is not what it wants.
        self.behind = true;
        if disarmed.is_ok() && disconnected.is_ok() {
            self.forget();
        }
        disarmed.and(disconnected)
    }

    fn forget(&mut self) {
        self.vectors.iter_mut().for_each(|v| *v = Vector::default());
        self.behind = false;
    }

    fn connect(
        &mut self,
        ports: &VectorPorts<'_>,
        changed: &[u16],
        wanted: Wanted<'_>,
    ) -> Result<(), CallError> {
        let mut moving = Vec::new();
        for number in changed {
            let Some(vector) = self.vectors.get_mut(usize::from(*number)) else {
                continue;
            };
            let message = wanted(*number);
            if message == vector.message {
                continue;
            }
            if vector.trigger.is_none() {
                vector.trigger = Some(new_eventfd()?);
            }
            moving.push((*number, message));
        }
        if moving.is_empty() {
            return Ok(());
        }
        let changes: Vec<VectorChange<'_>> = moving
            .iter()
            .filter_map(|(number, message)| {
                let trigger = self.vectors.get(usize::from(*number))?.trigger.as_ref()?;
                let (device, vector) = (self.device, *number);
                Some(VectorChange {
                    id: VectorId { device, vector },
                    trigger,
                    message: *message,
                })
            })
            .collect();
        ports.routes.apply(&changes)?;
        for (number, message) in moving {
            if let Some(vector) = self.vectors.get_mut(usize::from(number)) {
                vector.message = message;
            }
        }
        Ok(())
    }

    fn disconnect_all(&mut self, ports: &VectorPorts<'_>) -> Result<(), CallError> {
        self.connect(ports, &self.all(), &|_| None)
    }

    /// Arms from vector 0 on: as many as are wanted, ahead where the set cannot grow later.
    fn arm_from_zero(&mut self, ports: &VectorPorts<'_>, least: usize) -> Result<(), CallError> {
        let used = self.vectors.iter().rposition(|v| v.message.is_some());
        let needed = used
            .map_or(1, |last| last + 1)
            .max(least)
            .min(self.vectors.len());
        let ahead = ARM_AHEAD.min(self.vectors.len()).max(needed);
        if self.noresize && self.index == IrqIndex::Msix && ahead > needed {
            // The host may not have that many to give.
            if self.arm(ports, 0, ahead).is_ok() {
                self.allocated = Some(ahead);
                return Ok(());
            }
        }
        self.arm(ports, 0, needed)?;
        self.allocated = Some(needed);
        Ok(())
    }

    /// Arms vectors that are connected and not yet armed, one call for each run of them.
    fn arm_new(&mut self, ports: &VectorPorts<'_>) -> Result<(), CallError> {
        let new = |v: &Vector| v.message.is_some() && !v.armed;
        let mut start = 0;
        while let Some(skip) = self.vectors.iter().skip(start).position(new) {
            let first = start + skip;
            let run = self.vectors.iter().skip(first).take_while(|v| new(v));
            let count = run.count();
            self.arm(ports, first, count)?;
            start = first + count;
            self.allocated = self.allocated.map(|n| n.max(start));
        }
        Ok(())
    }

    fn arm(
        &mut self,
        ports: &VectorPorts<'_>,
        start: usize,
        count: usize,
    ) -> Result<(), CallError> {
        let part = self.vectors.get(start..start + count).unwrap_or_default();
        let used = |v: &Vector| v.message.is_some() || v.armed;
        let fds: Vec<Option<&EventFd>> = part
            .iter()
            .map(|v| v.trigger.as_ref().filter(|_| used(v)))
            .collect();
        ports.device.set_irqs(&IrqRequest::Trigger {
            index: self.index,
            start: start as u32,
            fds: &fds,
        })?;
        for vector in self.vectors.iter_mut().skip(start).take(count) {
            vector.armed = used(vector);
        }
        Ok(())
    }
}

fn new_eventfd() -> Result<EventFd, CallError> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(|source| CallError {
        call: "eventfd",
        source,
    })
}

#[cfg(test)]
#[path = "vectors_tests.rs"]
mod tests;
