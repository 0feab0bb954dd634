//! What the host keeps on the disks of a PCI function.
//!
//! A block device is traced to the function by sysfs: `slaves` of a stacked device, controllers of
//! an NVMe subsystem. Not all that holds a disk is in a list; the kernel refuses such a disk to
//! whoever opens it exclusively (open(2), `O_EXCL`).

use std::cmp::Reverse;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{HostUse, list, names};
use crate::host::Sysfs;

/// A block device: a disk, a partition, or one on top of others.
struct Block {
    name: String,
    /// Major and minor number.
    number: String,
    path: PathBuf,
    /// What it lies on, itself or through others; itself as well.
    below: Vec<PathBuf>,
    /// Its device node, below the root of the facts.
    node: PathBuf,
}

impl Block {
    fn read(sysfs: &Sysfs, class: &Path, name: String) -> Option<Self> {
        let path = fs::canonicalize(class.join(&name)).ok()?;
        let number = fs::read_to_string(path.join("dev")).ok()?.trim().to_owned();
        // As the kernel names its node (drivers/base/core.c, device_get_devnode).
        let name = name.replace('!', "/");
        Some(Self {
            node: sysfs.path("dev").join(&name),
            below: all_below(&path),
            name,
            number,
            path,
        })
    }

    fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Whether it lies on the device, or the other block device, whose directory is `directory`.
    fn lies_on(&self, directory: &Path) -> bool {
        self.below.iter().any(|path| path.starts_with(directory))
    }

    /// What lies on it directly.
    fn holders(&self) -> Vec<HostUse> {
        let holders = names(&self.path.join("holders")).into_iter();
        holders
            .map(|holder| HostUse::Held(self.node(), holder))
            .collect()
    }

    /// Whether the kernel or a program has it for itself; no, where this process may not ask.
    fn is_claimed(&self) -> bool {
        let node = fs::metadata(&self.node);
        let is_it = node.is_ok_and(|node| {
            node.file_type().is_block_device() && number(node.rdev()) == self.number
        });
        let open = || {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .custom_flags(libc::O_EXCL | libc::O_NONBLOCK);
            options.open(&self.node)
        };
        is_it && open().is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
    }
}

fn all_below(path: &Path) -> Vec<PathBuf> {
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut ahead = vec![path.to_owned()];
    while let Some(path) = ahead.pop() {
        if !seen.contains(&path) {
            ahead.extend(below(&path));
            seen.push(path);
        }
    }
    seen
}

/// What a stacked block device, or the one that it is a partition of, is made of. A namespace of an
/// NVMe subsystem lies beside the links to its controllers.
fn below(path: &Path) -> Vec<PathBuf> {
    let parent = path.parent().unwrap_or(path);
    let slaves = [path, parent].map(|of| of.join("slaves"));
    let mut found: Vec<PathBuf> = slaves.iter().flat_map(|of| resolved(of, "")).collect();
    let subsystem = path.ancestors().find(|of| {
        let name = of.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("nvme-subsys") && name != "nvme-subsystem")
    });
    found.extend(subsystem.into_iter().flat_map(|of| resolved(of, "nvme")));
    found
}

/// Where the links in `directory` lead whose names begin with `prefix`.
fn resolved(directory: &Path, prefix: &str) -> Vec<PathBuf> {
    let names = names(directory).into_iter();
    let links = names
        .filter(|name| name.starts_with(prefix))
        .map(|name| directory.join(name))
        .filter(|path| path.is_symlink());
    links
        .filter_map(|link| fs::canonicalize(link).ok())
        .collect()
}

/// Block devices, and what is on them.
pub(super) struct Storage {
    blocks: Vec<Block>,
    /// Numbers of those that are swap.
    swaps: Vec<String>,
    /// Numbers of those that are mounted, and where.
    mounts: Vec<(String, String)>,
}

impl Storage {
    pub(super) fn read(sysfs: &Sysfs) -> Self {
        let class = sysfs.path("sys/class/block");
        let names = names(&class).into_iter();
        Self {
            blocks: names
                .filter_map(|name| Block::read(sysfs, &class, name))
                .collect(),
            swaps: swaps(sysfs),
            mounts: mounts(sysfs),
        }
    }

    /// What the disks of the device whose directory is `device` are used for.
    pub(super) fn uses(&self, device: &Path) -> Vec<HostUse> {
        self.uses_with(device, Block::is_claimed)
    }

    /// The same, with the kernel's answer to an exclusive open.
    fn uses_with(&self, device: &Path, is_claimed: impl Fn(&Block) -> bool) -> Vec<HostUse> {
        let mut uses = Vec::new();
        let mut used: Vec<&Block> = Vec::new();
        for block in self.top_down(device) {
            let mut found = self.listed(block);
            // What is told of one on top holds those below, and is what is to be ended.
            if found.is_empty() && !used.iter().any(|top| top.lies_on(&block.path)) {
                found = block.holders();
                if found.is_empty() && is_claimed(block) {
                    found.push(HostUse::Exclusive(block.node()));
                }
            }
            if !found.is_empty() {
                used.push(block);
                uses.append(&mut found);
            }
        }
        uses
    }

    /// The block devices on a device, each before those that it lies on.
    fn top_down(&self, device: &Path) -> Vec<&Block> {
        let blocks = self.blocks.iter().filter(|block| block.lies_on(device));
        let mut ordered: Vec<&Block> = blocks.collect();
        let all = ordered.clone();
        ordered.sort_by_cached_key(|block| {
            Reverse(all.iter().filter(|one| block.lies_on(&one.path)).count())
        });
        ordered
    }

    fn listed(&self, block: &Block) -> Vec<HostUse> {
        let mut uses = Vec::new();
        if self.swaps.contains(&block.number) {
            uses.push(HostUse::Swap(block.node()));
        }
        // The first is the file system's own, the rest show parts of it elsewhere.
        let mut mounts = self.mounts.iter();
        let mount = mounts.find(|(number, _)| *number == block.number);
        uses.extend(mount.map(|(_, at)| HostUse::Mount(block.node(), at.clone())));
        uses
    }
}

/// Numbers of the block devices that are swap.
fn swaps(sysfs: &Sysfs) -> Vec<String> {
    let text = list(&sysfs.path("proc/swaps"));
    let nodes = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    nodes
        .filter_map(|node| block_number(sysfs, &decoded(node)))
        .collect()
}

/// Numbers of the block devices that are mounted, and where (proc(5), mountinfo).
fn mounts(sysfs: &Sysfs) -> Vec<(String, String)> {
    let text = list(&sysfs.path("proc/self/mountinfo"));
    let mut mounts = Vec::new();
    for line in text.lines() {
        let Some((mount, source)) = line.split_once(" - ") else {
            continue;
        };
        let mut fields = mount.split(' ').skip(2);
        let (Some(number), Some(at)) = (fields.next(), fields.nth(1)) else {
            continue;
        };
        let at = decoded(at);
        // btrfs has a number of its own; what it is mounted from tells the device.
        let source = source
            .split(' ')
            .nth(1)
            .and_then(|node| block_number(sysfs, &decoded(node)));
        mounts.extend(source.map(|number| (number, at.clone())));
        mounts.push((number.to_owned(), at));
    }
    mounts
}

/// A path as it was before the kernel wrote blanks and backslashes in it as `\040` and the like
/// (fs/seq_file.c, mangle_path).
fn decoded(field: &str) -> String {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let octal = behind.get(..3).filter(|_| first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = behind.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = behind;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Major and minor number of a device node.
fn block_number(sysfs: &Sysfs, node: &str) -> Option<String> {
    let name = node.strip_prefix("/dev/")?;
    if let Ok(text) = fs::read_to_string(sysfs.path("sys/class/block").join(name).join("dev")) {
        return Some(text.trim().to_owned());
    }
    // A name of another kind, as those in /dev/mapper.
    let metadata = fs::metadata(sysfs.path("dev").join(name)).ok()?;
    let is_block = metadata.file_type().is_block_device();
    is_block.then(|| number(metadata.rdev()))
}

fn number(of: u64) -> String {
    format!("{}:{}", libc::major(of), libc::minor(of))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::tree;

    /// A disk of two partitions, the first below dm-0, and one that is mounted nowhere by itself.
    const TREE: &str = "/sys/class/block/sda -> ../../devices/pci/a/block/sda
/sys/class/block/sda1 -> ../../devices/pci/a/block/sda/sda1
/sys/class/block/sda2 -> ../../devices/pci/a/block/sda/sda2
/sys/class/block/dm-0 -> ../../devices/virtual/block/dm-0
@/sys/devices/pci/a/block/sda
dev: 8:0
sda1/dev: 8:1
sda1/holders/dm-0 -> ../../../../../../virtual/block/dm-0
sda2/dev: 8:2
@/sys/devices/virtual/block/dm-0
dev: 254:0
slaves/sda1 -> ../../../../pci/a/block/sda/sda1
@/dev
sda:
sda2:
";

    /// What is told while the kernel refuses `claimed` to an exclusive open.
    fn told(claimed: &[&str], mountinfo: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let sysfs = tree::expand(TREE, root.path()).unwrap();
        tree::rewrite(root.path(), "proc/self/mountinfo", mountinfo).unwrap();
        let device = fs::canonicalize(sysfs.path("sys/devices/pci/a")).unwrap();
        let storage = Storage::read(&sysfs);
        let is_claimed =
            |block: &Block| claimed.contains(&block.name.as_str()) || block.is_claimed();
        let uses = storage.uses_with(&device, is_claimed);
        uses.iter().map(HostUse::to_string).collect()
    }

    #[test]
    fn a_disk_that_no_list_names_is_in_use_while_the_kernel_refuses_it() {
        let dm = "29 1 254:0 / /srv rw - ext4 /dev/mapper/x rw\n";
        let mounted = "/dev/dm-0 is mounted at /srv";
        // A file in place of the node is nobody's.
        assert_eq!(told(&[], dm), [mounted]);
        // Whoever has a partition has the disk; the one below dm-0 is told by what is on that.
        let claimed = ["sda", "sda1", "sda2"];
        let exclusive = "something holds /dev/sda2 exclusively";
        assert_eq!(told(&claimed, dm), [mounted, exclusive]);
        let zfs = "29 1 0:30 / /srv rw - zfs pool/srv rw\n";
        let top = "something holds /dev/dm-0 exclusively";
        assert_eq!(told(&["sda", "sda1", "dm-0"], zfs), [top]);
        assert_eq!(told(&["sda", "sda1"], zfs), ["/dev/sda1 is part of dm-0"]);
    }

    #[test]
    fn a_field_is_decoded_once_and_what_is_no_octal_number_stays() {
        for (field, path) in [
            (r"/my\040disk", "/my disk"),
            (r"/a\134040b", r"/a\040b"),
            (r"/\303\244", "/ä"),
            (r"/\9\77\", r"/\9\77\"),
            (r"/\777", r"/\777"),
        ] {
            assert_eq!(decoded(field), path);
        }
    }
}
