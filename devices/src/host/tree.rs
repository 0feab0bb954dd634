//! Trees of sysfs, procfs and device nodes for tests, from the text that
//! `resources/sysfs-trees/capture.sh` writes (the format is described beside it).

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::Sysfs;

/// Makes the tree that `text` describes below `root`, which must be empty; returns a reader of it.
pub fn expand(text: &str, root: &Path) -> io::Result<Sysfs> {
    let mut directory = root.to_owned();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(path) = line.strip_prefix('@') {
            directory = below(root, path);
            fs::create_dir_all(&directory)?;
        } else {
            entry(line, root, &directory)?;
        }
    }
    Ok(Sysfs::below(root))
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

fn entry(line: &str, root: &Path, directory: &Path) -> io::Result<()> {
    let place = |path: &str| -> io::Result<PathBuf> {
        let path = match path.starts_with('/') {
            true => below(root, path),
            false => directory.join(path),
        };
        fs::create_dir_all(path.parent().unwrap_or(root))?;
        Ok(path)
    };
    if let Some((path, target)) = line.split_once(" -> ") {
        return symlink(target, place(path)?);
    }
    if let Some((path, row)) = line.split_once(" = ") {
        return bytes(&place(path)?, row);
    }
    if let Some(path) = line.strip_suffix('/') {
        return fs::create_dir_all(place(path)?);
    }
    let (path, content) = match line.split_once(": ") {
        Some((path, text)) => (path, format!("{text}\n")),
        None => (line.strip_suffix(':').unwrap_or(line), String::new()),
    };
    let file = OpenOptions::new()
        .create(true)
        .append(true)
        .open(place(path)?);
    file?.write_all(content.as_bytes())
}

/// A row of a binary file: `e0: 10 00 92`, all numbers hexadecimal. The file grows to the next of
/// the sizes that configuration space has.
fn bytes(path: &Path, row: &str) -> io::Result<()> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, row.to_owned());
    let (offset, bytes) = row.split_once(": ").ok_or_else(invalid)?;
    let offset = u64::from_str_radix(offset, 16).map_err(|_| invalid())?;
    let bytes: Result<Vec<u8>, _> = bytes
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16))
        .collect();
    let bytes = bytes.map_err(|_| invalid())?;
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(path)?;
    let end = offset + bytes.len() as u64;
    let sizes = [64, 256, 4096];
    let size = sizes.into_iter().find(|size| *size >= end).unwrap_or(end);
    if file.metadata()?.len() < size {
        file.set_len(size)?;
    }
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(&bytes)
}

/// Gives `link` (as in sys/bus/pci/devices/0000:41:00.0/driver) another target, or removes it.
pub fn relink(root: &Path, link: &str, target: Option<&str>) -> io::Result<()> {
    let path = below(root, link);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    target.map_or(Ok(()), |target| symlink(target, path))
}

/// Writes `text` to a file of the tree, in place of what it held.
pub fn rewrite(root: &Path, file: &str, text: &str) -> io::Result<()> {
    let path = below(root, file);
    fs::create_dir_all(path.parent().unwrap_or(root))?;
    fs::write(path, text)
}

/// A file of `directory`, as the tests of several crates name them.
pub fn read(directory: &Path, name: &str) -> io::Result<String> {
    let mut text = String::new();
    let path = directory.join(format!("{name}.tree"));
    fs::File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}
