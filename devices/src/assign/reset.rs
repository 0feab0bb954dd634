//! A reset of one function that the guest asks for: a function-level reset through PCIe device
//! control (PCIe 6.0, 6.6.2), or the way back from D3hot (7.5.2.2).
//!
//! Neither reaches the device as written: the kernel would zap the BAR mappings under a running
//! vCPU. Order, and why:
//!
//! 1. The device's interrupts are disarmed: vfio-pci resets no function with them armed.
//! 2. COMMAND.MASTER is cleared on the device: the kernel saves and restores COMMAND over a reset,
//!    so DMA would go on before the guest's driver is ready for it.
//! 3. `VFIO_DEVICE_RESET`. A vCPU that touches a BAR meanwhile waits in its page fault.
//! 4. BARs mapped by dma-buf are mapped anew ([`super::commit::BarEngine::remap`]): the reset
//!    revoked them.
//! 5. The guest sees reset values and restores them itself, as after any reset.
//!
//! A function that the host cannot reset alone: [`super::hot_reset`].

use super::config::ConfigSpace;
use super::irq::Interrupts;
use super::ports::{CallError, Region, VfioDevice};
use crate::pci::spec::{Command, Reg};

/// COMMAND bits that the physical device takes from the guest. INTx is disabled by disarming it.
const FORWARDED: Command = Command::MASTER.union(Command::PARITY).union(Command::SERR);

/// Resets the device and the guest-visible registers. The registers are reset even when the device
/// could not be; `Err` says why it could not.
pub fn reset_function(
    device: &dyn VfioDevice,
    config: &mut ConfigSpace,
    irq: &mut Interrupts,
) -> Result<(), CallError> {
    irq.reset();
    config.reset();
    forward_command(device, config.decoders(), Command::empty())?;
    device.reset()
}

/// Gives the device those bits of the guest's COMMAND that are the guest's to decide, and its
/// `decoders`, which stay on. Written each time, also when no bit has changed: a device that reset
/// itself (by a register of its own) has lost its decoders, and vfio-pci restores its BARs only
/// when COMMAND is written (drivers/vfio/pci/vfio_pci_config.c, vfio_basic_config_write).
pub fn forward_command(
    device: &dyn VfioDevice,
    decoders: Command,
    guest: Command,
) -> Result<(), CallError> {
    let physical = decoders | guest.intersection(FORWARDED);
    let offset = Reg::COMMAND.offset().into();
    device.write(Region::Config, offset, &physical.bits().to_le_bytes())
}
