//! Writes an initramfs: an archive of the "newc" format of cpio, uncompressed.
//!
//! Uncompressed, because an emulated guest copies faster than it decompresses; and written here, because it needs no
//! privileges that way and comes out the same every time.

use std::collections::BTreeSet;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;
const TRAILER: &str = "TRAILER!!!";

/// An archive being written.
#[derive(Default)]
pub struct Initramfs {
    bytes: Vec<u8>,
    paths: BTreeSet<String>,
    entries: u32,
}

impl Initramfs {
    /// Whether something was added under that path.
    pub fn contains(&self, path: &str) -> bool {
        self.paths.contains(path)
    }

    /// Adds a directory and those above it, each once.
    pub fn directory(&mut self, path: &str) {
        if path.is_empty() || self.contains(path) {
            return;
        }
        self.parents(path);
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file with its permissions.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.parents(path);
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, CHARACTER | 0o600, (major, minor), &[]);
    }

    /// Ends the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, (0, 0), &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        self.paths.insert(path.to_owned());
        // Inode, mode, user, group, links, time, size, device (2), the node's own device (2), name's length, checksum.
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            path.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_parents_come_first() {
        let mut archive = Initramfs::default();
        archive.file("a/b/c", 0o644, b"hello");
        archive.file("a/b/d", 0o644, b"");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<_> = text
            .match_indices("070701")
            .map(|(at, _)| {
                assert_eq!(at % 4, 0);
                text[at + 110..].split('\0').next().unwrap()
            })
            .collect();
        assert_eq!(names, ["a", "a/b", "a/b/c", "a/b/d", "TRAILER!!!"]);
    }
}
