//! What a driver does first with a GPU: enable it and reach both ends of each BAR.

use crate::args::Args;
use crate::error::Error;
use crate::mmio::{PAGE, Page};
use crate::pci::{Bar, Device};
use crate::port;

/// The lab's stand-ins for GPUs: `pci-testdev` with a big BAR, and `ivshmem`.
const GPU_IDS: [&str; 2] = ["1b36:0005", "1af4:1110"];
/// The mark that says that every device is in use.
const IN_USE: u8 = 0x42;

/// `probe gpus`
pub fn run(args: &mut Args) -> Result<(), Error> {
    args.end()?;
    let mut count = 0;
    for device in Device::all()? {
        if !GPU_IDS.contains(&device.id()?.as_str()) {
            continue;
        }
        count += 1;
        let command = device.enable()?;
        println!("PROBE gpu bdf={} command={command:#06x}", device.bdf);
        for bar in device.bars()?.iter().filter(|bar| bar.is_memory()) {
            touch(&device, bar)?;
        }
    }
    println!("PROBE gpus count={count}");
    if count == 0 {
        return Err(Error::Device("no GPU found".to_owned()));
    }
    port::mark(IN_USE)
}

/// Reads the first and the last word of the BAR and writes back what was there.
fn touch(device: &Device, bar: &Bar) -> Result<(), Error> {
    let last = bar.size.saturating_sub(4) & !3;
    let mut values = [0; 2];
    for (offset, value) in [0, last].into_iter().zip(&mut values) {
        let page = Page::of_file(&device.resource_file(bar.index), offset & !(PAGE - 1))?;
        *value = page.read(offset, 4)?;
        page.write(offset, 4, *value)?;
    }
    let [first, last] = values;
    println!(
        "PROBE touched bdf={} bar={} address={:#x} size={:#x} first={first:#x} last={last:#x}",
        device.bdf, bar.index, bar.start, bar.size
    );
    Ok(())
}
