//! What the host tells of its RAM and of its pools of huge pages
//! (Documentation/admin-guide/mm/hugetlbpage.rst of the kernel).

use std::fs;
use std::path::Path;

/// Bytes behind `name` in /proc/meminfo, or in a node's, where `Node N` stands before each name.
pub fn meminfo(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_ascii_whitespace);
    let kib: u64 = lines.find_map(|mut words| {
        words.find(|word| *word == name)?;
        words.next()?.parse().ok()
    })?;
    kib.checked_mul(1024)
}

/// Bytes of RAM, of the whole host or of `node`, that are in no pool of huge pages: what a pool can be
/// enlarged from at the very most. `None` where that is not told.
pub fn ram_outside_pools(root: &Path, node: Option<u32>) -> Option<u64> {
    let (text, pools) = match node {
        Some(node) => {
            let node = root.join(format!("sys/devices/system/node/node{node}"));
            (node.join("meminfo"), node.join("hugepages"))
        }
        None => (
            root.join("proc/meminfo"),
            root.join("sys/kernel/mm/hugepages"),
        ),
    };
    let total = meminfo(&fs::read_to_string(text).ok()?, "MemTotal:")?;
    let pools = fs::read_dir(pools).into_iter().flatten().flatten();
    let reserved = pools.filter_map(|pool| {
        let name = pool.file_name().into_string().ok()?;
        let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        let kib: u64 = kib.parse().ok()?;
        let pages = count(&pool.path(), "nr_hugepages");
        Some(pages.saturating_mul(kib).saturating_mul(1024))
    });
    Some(total.saturating_sub(reserved.fold(0, u64::saturating_add)))
}

/// A number of pages of a pool.
pub fn count(pool: &Path, what: &str) -> u64 {
    let text = fs::read_to_string(pool.join(what)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}
