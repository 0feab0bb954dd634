//! I/O port 0x80, the guest's way to leave a mark in the monitor's profile.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::args::Args;
use crate::error::Error;

const PORTS: &str = "/dev/port";
const MARK_PORT: u64 = 0x80;

/// Writes `mark` to the port and prints it.
pub fn mark(mark: u8) -> Result<(), Error> {
    let path = Path::new(PORTS);
    let file = |action| {
        move |source| Error::File {
            action,
            path: path.to_path_buf(),
            source,
        }
    };
    let ports = OpenOptions::new()
        .write(true)
        .open(path)
        .map_err(file("open"))?;
    ports.write_at(&[mark], MARK_PORT).map_err(file("write"))?;
    println!("MARK {mark:#04x}");
    Ok(())
}

/// `probe mark N`
pub fn mark_command(args: &mut Args) -> Result<(), Error> {
    let value = args.number("N")?;
    args.end()?;
    let value = u8::try_from(value)
        .map_err(|_| Error::Usage(format!("mark {value:#x} does not fit into a byte")))?;
    mark(value)
}
