//! Waiting for a device that appears after its driver was loaded.

use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::error::Error;

const SECONDS: u64 = 30;
const INTERVAL: Duration = Duration::from_millis(5);

/// `probe wait PATH [SECONDS]`
pub fn run(args: &mut Args) -> Result<(), Error> {
    let path = PathBuf::from(args.word("PATH")?);
    let limit = Duration::from_secs(args.number_or("SECONDS", SECONDS)?);
    args.end()?;
    let start = Instant::now();
    while !path.exists() {
        if start.elapsed() > limit {
            return Err(Error::Device(format!(
                "{} did not appear within {} s",
                path.display(),
                limit.as_secs()
            )));
        }
        sleep(INTERVAL);
    }
    Ok(())
}
