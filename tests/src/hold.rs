//! A virtual machine that does nothing but be there.

use std::convert::Infallible;
use std::thread;

use kvm_ioctls::Kvm;

use crate::error::Error;

/// Makes a VM and keeps it until the process is ended.
pub fn run() -> Result<Infallible, Error> {
    let fail = |error: kvm_ioctls::Error| Error::Failed(format!("no VM can be made: {error}"));
    let _vm = Kvm::new().map_err(fail)?.create_vm().map_err(fail)?;
    loop {
        thread::park();
    }
}
