//! Loads the modules that the present devices ask for.
//!
//! One process in place of one `modprobe` for each device: starting processes is what costs in an emulated guest.
//! The index is written when the image is built. Each line names a pattern of modaliases and the module files to load for
//! it, in order: `pci:v00008086d000010D3sv*sd*bc*sc*i* ptp.ko e1000e.ko`.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::args::Args;
use crate::error::Error;

/// Files named `modalias` lie below this directory, one for each device, at any depth.
const DEVICES: &str = "/sys/devices";
/// Where a driver that has been chosen already is named: such a device is not ours to drive.
const OVERRIDE: &str = "driver_override";
/// What the image's maker wrote.
const INDEX: &str = "/modules/index";
/// Drivers add devices (a disk below its controller); rounds end when nothing new is asked for.
const ROUNDS: usize = 4;

/// `probe coldplug INDEX`
pub fn run(args: &mut Args) -> Result<(), Error> {
    let index_path = PathBuf::from(args.word("INDEX")?);
    args.end()?;
    let index = fs::read_to_string(&index_path).map_err(error("read", &index_path))?;
    let directory = index_path.parent().unwrap_or(Path::new("."));
    let mut loaded = HashSet::new();
    for _ in 0..ROUNDS {
        let mut aliases = Vec::new();
        collect(Path::new(DEVICES), &mut aliases);
        let before = loaded.len();
        for alias in aliases {
            for file in wanted(&index, &alias) {
                if loaded.insert(file.to_owned()) {
                    load(&directory.join(file))?;
                }
            }
        }
        if loaded.len() == before {
            break;
        }
    }
    Ok(())
}

/// `probe modprobe NAME…`: modules that no device asks for, from the same index.
pub fn modprobe(args: &mut Args) -> Result<(), Error> {
    let path = Path::new(INDEX);
    let index = fs::read_to_string(path).map_err(error("read", path))?;
    let directory = path.parent().unwrap_or(Path::new("."));
    while let Some(name) = args.optional() {
        let alias = format!("module:{}", name.replace('-', "_"));
        let mut files = wanted(&index, &alias).peekable();
        if files.peek().is_none() {
            return Err(Error::Device(format!(
                "this image has no module {name} that could be loaded"
            )));
        }
        files.try_for_each(|file| load(&directory.join(file)))?;
    }
    Ok(())
}

/// `probe insmod FILE…`
pub fn insmod(args: &mut Args) -> Result<(), Error> {
    while let Some(file) = args.optional() {
        load(Path::new(&file))?;
    }
    Ok(())
}

/// Gathers the modalias of every device below `directory`; what cannot be read is not there.
fn collect(directory: &Path, aliases: &mut Vec<String>) {
    if let Ok(text) = fs::read_to_string(directory.join("modalias")) {
        let overridden = fs::read_to_string(directory.join(OVERRIDE))
            .is_ok_and(|driver| driver.trim() != "(null)" && !driver.trim().is_empty());
        if !overridden {
            aliases.push(text.trim().to_owned());
        }
    }
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), aliases);
        }
    }
}

/// The module files that the index gives for a modalias.
fn wanted<'a>(index: &'a str, alias: &'a str) -> impl Iterator<Item = &'a str> {
    index
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(move |(pattern, _)| matches(pattern.as_bytes(), alias.as_bytes()))
        .flat_map(|(_, files)| files.split_whitespace())
}

/// Shell-style matching with `*`, `?` and `[…]`, as modaliases use it.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([], []) => true,
        ([b'*', rest @ ..], _) => {
            (0..=text.len()).any(|skip| text.get(skip..).is_some_and(|tail| matches(rest, tail)))
        }
        ([b'?', rest @ ..], [_, tail @ ..]) => matches(rest, tail),
        ([b'[', rest @ ..], [byte, tail @ ..]) => {
            let Some(end) = rest.iter().position(|&b| b == b']') else {
                return false;
            };
            let (set, rest) = rest.split_at(end);
            in_set(set, *byte) && matches(rest.get(1..).unwrap_or_default(), tail)
        }
        ([expected, rest @ ..], [byte, tail @ ..]) => expected == byte && matches(rest, tail),
        _ => false,
    }
}

fn in_set(set: &[u8], byte: u8) -> bool {
    match set {
        [low, b'-', high, rest @ ..] => (*low..=*high).contains(&byte) || in_set(rest, byte),
        [one, rest @ ..] => *one == byte || in_set(rest, byte),
        [] => false,
    }
}

fn load(path: &Path) -> Result<(), Error> {
    let file = File::open(path).map_err(error("open", path))?;
    match rustix::system::finit_module(&file, c"", 0) {
        // Built in, or already loaded for another device.
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(errno) => Err(error("load", path)(errno.into())),
    }
}

fn error<'a>(action: &'static str, path: &'a Path) -> impl Fn(std::io::Error) -> Error + 'a {
    move |source| Error::File {
        action,
        path: path.to_path_buf(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modalias_patterns() {
        let alias = b"pci:v00008086d000010D3sv00008086sd0000A01Fbc02sc00i00";
        assert!(matches(b"pci:v00008086d000010D3sv*sd*bc*sc*i*", alias));
        assert!(!matches(b"pci:v00008086d000010D4sv*sd*bc*sc*i*", alias));
        assert!(matches(b"pci:v*d*sv*sd*bc02sc00i*", alias));
        assert!(matches(b"usb:v*in0[0-3A]*", b"usb:v12in02x"));
        assert!(matches(b"usb:v*in0[0-3A]*", b"usb:v12in0A"));
        assert!(!matches(b"usb:v*in0[0-3A]*", b"usb:v12in0B"));
    }

    #[test]
    fn the_index_gives_files_in_order() {
        let index = "pci:a* first.ko second.ko\npci:b* third.ko\n";
        assert_eq!(
            wanted(index, "pci:abc").collect::<Vec<_>>(),
            ["first.ko", "second.ko"]
        );
        assert_eq!(wanted(index, "usb:abc").count(), 0);
    }
}
