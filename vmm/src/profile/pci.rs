//! A PCI function whose first accesses by the guest are marked.

use std::sync::Arc;

use devices::pci::address::Bdf;
use devices::pci::ecam::PciFunction;
use devices::pci::spec::{Command, Reg};

use super::{Profile, Subject};

/// Passes everything on; marks the guest's first configuration access, and times its first write
/// that turns on bus mastering.
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
        self.inner.config_read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) {
        self.profile.first_config_access();
        if turns_on_master(offset, data) && self.profile.is_first_master() {
            let subject = Subject::Device(self.bdf);
            let _span = self
                .profile
                .span_of("guest: first bus master write", subject);
            self.inner.config_write(offset, data);
        } else {
            self.inner.config_write(offset, data);
        }
    }
}
