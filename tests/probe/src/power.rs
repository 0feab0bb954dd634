//! The end of a guest.

use rustix::system::RebootCommand;

use crate::args::Args;
use crate::error::Error;

/// `probe off STATUS`
pub fn off(args: &mut Args) -> Result<(), Error> {
    let status = args.number("STATUS")?;
    args.end()?;
    println!("GUEST EXIT {status}");
    // The kernel powers off without waiting for what the console still holds. A console that cannot be waited for (a pipe)
    // holds nothing.
    let _ = rustix::termios::tcdrain(rustix::stdio::stdout());
    rustix::system::reboot(RebootCommand::PowerOff)
        .map_err(|errno| Error::Device(format!("cannot power off: {errno}")))
}
