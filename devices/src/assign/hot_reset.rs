//! Resetting functions that the host cannot reset alone: the slot or bus that they are on
//! (`VFIO_DEVICE_PCI_HOT_RESET`, drivers/vfio/pci/vfio_pci_core.c).
//!
//! The kernel's reset of one function (`VFIO_DEVICE_RESET`) does a function-level reset, one by
//! power management, or, of a function that is alone on its bus, one of the bus. What is left
//! are functions of a device with several, without any of these.
//!
//! Every function that is affected is handled like the one whose reset was asked for (the order
//! is that of [`super::reset`]): interrupts disarmed and bus mastering off before, BARs mapped by
//! dma-buf mapped anew and registers at their reset values afterwards. Hence the two conditions:
//! all of them are ours, and the guest uses none but the one that it wants reset. A function that
//! sleeps in D3hot is not in use: its guest expects it reset when it wakes up.
//!
//! Invariant: only here are several functions locked at once, in the order of their numbers. The
//! caller holds no lock of a function.

use std::fmt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::commit::{BarEngine, CommitError};
use super::config::ConfigSpace;
use super::irq::Interrupts;
use super::ports::{CallError, VfioDevice};
use super::reset::forward_command;
use crate::pci::address::Bdf;
use crate::pci::spec::Command;

/// What the guest can change of a function.
pub struct Registers {
    /// Configuration space.
    pub config: ConfigSpace,
    /// Interrupts.
    pub irq: Interrupts,
    /// A reset that is to be done once the function is no longer locked, and what asked for it.
    pub wanted_reset: Option<&'static str>,
}

/// An assigned function, for those that change several at once.
pub struct FunctionCore {
    /// Its index in the VM.
    pub number: usize,
    /// Its host address.
    pub bdf: Bdf,
    /// The kernel's side of it.
    pub device: Arc<dyn VfioDevice>,
    /// The guest's side of it.
    pub registers: Mutex<Registers>,
}

/// Host addresses in a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names(pub Vec<Bdf>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, bdf) in self.0.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            write!(f, "{separator}{bdf}")?;
        }
        Ok(())
    }
}

/// Why functions were not reset, or not handled as they should be afterwards.
#[derive(Debug, thiserror::Error)]
pub enum HotResetError {
    /// Neither slot nor bus can be reset.
    #[error("the host has no way to reset its slot or bus")]
    Impossible(#[source] CallError),
    /// Others would be reset that are not this VM's.
    #[error("{0} would be reset with it, and belong to others (assign them to this guest as well)")]
    NotOurs(Names),
    /// The guest uses others that would be reset.
    #[error("{0} would be reset with it, and the guest uses them")]
    InUse(Names),
    /// The reset, or what goes before it, failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It was reset, and other devices cannot reach a BAR of it by DMA any more.
    #[error("after the reset")]
    Remap(#[source] CommitError),
}

/// See the module.
pub struct HotReset {
    functions: Vec<Arc<FunctionCore>>,
    engine: Arc<BarEngine>,
}

impl HotReset {
    /// For all functions of the VM, in the order of their numbers.
    pub fn new(functions: Vec<Arc<FunctionCore>>, engine: Arc<BarEngine>) -> Self {
        Self { functions, engine }
    }

    /// Resets `asked` together with whatever shares its slot or bus. On [`HotResetError::Impossible`],
    /// `NotOurs` and `InUse` nothing has changed.
    pub fn reset(&self, asked: &FunctionCore) -> Result<(), HotResetError> {
        let affected = asked.device.hot_reset_functions();
        let affected = affected.map_err(HotResetError::Impossible)?;
        let foreign = affected.iter().filter(|function| !function.ours);
        let foreign: Vec<Bdf> = foreign.map(|function| function.bdf).collect();
        if !foreign.is_empty() {
            return Err(HotResetError::NotOurs(Names(foreign)));
        }
        let is_affected =
            |core: &&Arc<FunctionCore>| affected.iter().any(|other| other.bdf == core.bdf);
        let cores: Vec<_> = self.functions.iter().filter(is_affected).collect();
        let mut locked: Vec<_> = cores.iter().map(|core| core.registers.lock()).collect();
        let both = cores.iter().zip(&locked);
        let used =
            both.filter(|(core, registers)| core.number != asked.number && in_use(registers));
        let used: Vec<Bdf> = used.map(|(core, _)| core.bdf).collect();
        if !used.is_empty() {
            return Err(HotResetError::InUse(Names(used)));
        }
        let reset = reset_all(asked, &cores, &mut locked);
        // Also when it failed: the kernel may have got as far as revoking.
        let remapped = self.follow(&cores, &locked);
        reset?;
        remapped.map_err(HotResetError::Remap)
    }

    /// What dma-bufs and slots need after the reset; the first error is told.
    fn follow(
        &self,
        cores: &[&Arc<FunctionCore>],
        locked: &[MutexGuard<'_, Registers>],
    ) -> Result<(), CommitError> {
        let mut result = Ok(());
        for (core, registers) in cores.iter().zip(locked) {
            let programmed = registers.config.programmed();
            let remapped = self.engine.remap(core.number);
            let committed = self.engine.commit(core.number, &programmed);
            result = result.and(remapped).and(committed);
        }
        result
    }
}

/// Whether a driver of the guest relies on the function: it is awake, and decodes or masters the
/// bus.
fn in_use(registers: &Registers) -> bool {
    let on = Command::MEMORY | Command::IO | Command::MASTER;
    registers.config.is_awake() && registers.config.command().intersects(on)
}

/// Registers to their reset values first: they are so also when the kernel refuses.
fn reset_all(
    asked: &FunctionCore,
    cores: &[&Arc<FunctionCore>],
    locked: &mut [MutexGuard<'_, Registers>],
) -> Result<(), CallError> {
    for registers in locked.iter_mut() {
        registers.irq.reset();
        registers.config.reset();
    }
    for (core, registers) in cores.iter().zip(locked) {
        let decoders = registers.config.decoders();
        forward_command(core.device.as_ref(), decoders, Command::empty())?;
    }
    asked.device.hot_reset()
}
