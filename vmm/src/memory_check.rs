//! What the host must grant before anything is opened for a guest: enough reserved huge pages, a
//! NUMA node that is there, and leave to lock guest RAM in memory for assigned devices.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use devices::host::Sysfs;
use devices::pci::place_error::Bytes;
use devices::remedy::Remedy;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use crate::config::Config;
use crate::host_ram::{count, meminfo, ram_outside_pools};
use crate::memory::NodePolicy;
use crate::options::{HugePages, Node};
use crate::profile::Profile;
use crate::starter::{Limit, starter};

/// The host does not grant what guest RAM needs. Each message ends with its
/// [`MemoryCheckError::remedy`].
#[derive(Debug, thiserror::Error)]
pub enum MemoryCheckError {
    /// The pool of huge pages is too small.
    #[error(
        "guest memory needs {needed} huge pages of {size}, {free} are free on {place}: {}",
        reserve(pool, missing(*needed, *free, *total))
    )]
    HugePages {
        /// Pages needed.
        needed: u64,
        /// Pages free and not promised to others.
        free: u64,
        /// Pages of the pool.
        total: u64,
        /// 2M or 1G.
        size: &'static str,
        /// The NUMA node, or the whole host.
        place: String,
        /// The pool's directory.
        pool: String,
    },
    /// The pool is too small, and there is no RAM to enlarge it from.
    #[error(
        "guest memory needs {needed} huge pages of {size}, {free} are free on {place}, and the {} of its RAM \
         that are not in huge pages yet are too few for the rest: {LESS}",
        Mebibytes(*left)
    )]
    RamForHugePages {
        /// Pages needed.
        needed: u64,
        /// Pages free and not promised to others.
        free: u64,
        /// 2M or 1G.
        size: &'static str,
        /// The NUMA node, or the whole host.
        place: String,
        /// Bytes of RAM that are in no pool.
        left: u64,
    },
    /// The host kernel has no such huge pages.
    #[error("this host has no huge pages of {size} ({pool} is missing): {POOL}")]
    NoHugePages {
        /// 2M or 1G.
        size: &'static str,
        /// The pool's directory.
        pool: String,
    },
    /// There is no such NUMA node.
    #[error("--memory node={node}: the host has no such NUMA node, it has {present}: {NODE}")]
    NoNode {
        /// The one asked for.
        node: u32,
        /// Those that there are, as in 0-1.
        present: String,
    },
    /// The host has less memory than devices need.
    #[error(
        "devices need all {} of guest memory, and the host has {}: {LESS}",
        Bytes(*needed),
        Mebibytes(*total)
    )]
    HostMemory {
        /// Bytes of guest RAM.
        needed: u64,
        /// Bytes of the host's RAM.
        total: u64,
    },
    /// The limit of locked memory is too low.
    #[error(
        "devices need all {} of guest memory locked, and this process may lock {}{}: {}",
        Bytes(*needed),
        Bytes(*limit),
        in_a_shell(*needed),
        Limit::Memlock.raise(*needed)
    )]
    Locked {
        /// Bytes to be locked.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
    },
}

const POOL: &str = "a pool of 1 GiB pages needs `hugepagesz=1G` on the host kernel's command line, \
                    one of 2 MiB a kernel with CONFIG_HUGETLBFS";
const NODE: &str = "name one of those, or node=auto";
const LESS: &str = "ask for less with --memory";

impl MemoryCheckError {
    /// What mends it; the message ends with it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::HugePages {
                needed,
                free,
                total,
                pool,
                ..
            } => reserve(pool, missing(*needed, *free, *total)),
            Self::NoHugePages { .. } => Remedy::advice(POOL),
            Self::NoNode { .. } => Remedy::advice(NODE),
            Self::HostMemory { .. } | Self::RamForHugePages { .. } => Remedy::advice(LESS),
            Self::Locked { needed, .. } => Limit::Memlock.raise(*needed),
        }
    }
}

/// How many pages a pool must have for `needed` of them to be free, of whose `total` now `free` are.
fn missing(needed: u64, free: u64, total: u64) -> u64 {
    total.saturating_add(needed.saturating_sub(free))
}

/// Makes `pages` the size of a pool.
fn reserve(pool: &str, pages: u64) -> Remedy {
    Remedy::Run(format!("echo {pages} > {pool}/nr_hugepages"))
}

/// Where a shell starts us: what to type there instead, and which one it is.
fn in_a_shell(needed: u64) -> String {
    starter().map_or_else(String::new, |pid| {
        format!(
            " (`ulimit -l {}` as root before the start, or for the shell that starts mini-vmm, here PID {pid})",
            needed >> 10
        )
    })
}

/// Checks what the options need; decides which NUMA node RAM comes from.
pub fn check(config: &Config, profile: &Profile) -> Result<Option<NodePolicy>, MemoryCheckError> {
    let root = Path::new("/");
    let size = config.memory.size.0;
    let (policy, note) = node_policy(config, root)?;
    note.into_iter().for_each(|note| profile.note(note));
    if let Some(pages) = config.memory.huge_pages {
        let strict = policy.filter(|policy| policy.strict);
        check_huge_pages(root, size, pages, strict.map(|policy| policy.node))?;
    }
    if !config.vfio.is_empty() {
        if config.memory.huge_pages.is_none()
            && let Some(available) = check_host_memory(root, size)?
        {
            tracing::warn!("{}: {LESS}", little_memory(size, available));
        }
        check_locked(size, raise_locked_limit())?;
    }
    Ok(policy)
}

/// The word on a host that has less memory free than devices need.
pub fn little_memory(needed: u64, available: u64) -> String {
    format!(
        "devices need all {} of guest memory, and {} are available on the host now, so that the kernel may kill this process",
        Bytes(needed),
        Mebibytes(available)
    )
}

/// Bytes as whole MiB.
struct Mebibytes(u64);

impl fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0 >> 20)
    }
}

/// Devices need all guest RAM at once: more than the host has would get the process killed in the
/// midst of it. Less than that but more than is free now may work or not: then what is free is
/// returned.
pub fn check_host_memory(root: &Path, needed: u64) -> Result<Option<u64>, MemoryCheckError> {
    let text = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    match (meminfo(&text, "MemTotal:"), meminfo(&text, "MemAvailable:")) {
        (Some(total), _) if needed > total => Err(MemoryCheckError::HostMemory { needed, total }),
        (_, Some(available)) if needed > available => Ok(Some(available)),
        _ => Ok(None),
    }
}

/// The NUMA node that the options choose, and a word for the profile.
pub fn node_policy(
    config: &Config,
    root: &Path,
) -> Result<(Option<NodePolicy>, Option<String>), MemoryCheckError> {
    let (node, strict) = match config.memory.node {
        None => return Ok((None, None)),
        Some(Node::Number(node)) => (node, true),
        Some(Node::Auto) => {
            let first = config.vfio.first().map(|option| option.bdf);
            match first.and_then(|bdf| Sysfs::below(root).numa_node(bdf)) {
                Some(node) => (node, false),
                None => {
                    let note = "guest RAM: node=auto: no assigned device tells its NUMA node";
                    return Ok((None, Some(note.to_owned())));
                }
            }
        }
    };
    let nodes = root.join("sys/devices/system/node");
    if strict && !nodes.join(format!("node{node}")).is_dir() {
        let online = fs::read_to_string(nodes.join("online")).unwrap_or_default();
        let present = match online.trim() {
            "" => "none".to_owned(),
            online => online.to_owned(),
        };
        return Err(MemoryCheckError::NoNode { node, present });
    }
    let how = if strict { "only" } else { "preferably" };
    let note = format!("guest RAM: {how} from NUMA node {node}");
    Ok((Some(NodePolicy { node, strict }), Some(note)))
}

/// Checks that the pool, that of `node` if there is one, holds `size` bytes of free huge pages.
pub fn check_huge_pages(
    root: &Path,
    size: u64,
    pages: HugePages,
    node: Option<u32>,
) -> Result<(), MemoryCheckError> {
    let name = match pages {
        HugePages::Size2M => "2M",
        HugePages::Size1G => "1G",
    };
    let kind = format!("hugepages-{}kB", pages.bytes() >> 10);
    let (pool, place): (PathBuf, String) = match node {
        Some(node) => (
            format!("sys/devices/system/node/node{node}/hugepages/{kind}").into(),
            format!("NUMA node {node}"),
        ),
        None => (
            format!("sys/kernel/mm/hugepages/{kind}").into(),
            "this host".to_owned(),
        ),
    };
    let pool = root.join(pool);
    let told = pool.display().to_string();
    if !pool.is_dir() {
        return Err(MemoryCheckError::NoHugePages {
            size: name,
            pool: told,
        });
    }
    // Reservations are counted for the whole host alone.
    let free = count(&pool, "free_hugepages").saturating_sub(count(&pool, "resv_hugepages"));
    let needed = size.div_ceil(pages.bytes());
    if free >= needed {
        return Ok(());
    }
    let rest = (needed - free).saturating_mul(pages.bytes());
    if let Some(left) = ram_outside_pools(root, node).filter(|left| *left < rest) {
        return Err(MemoryCheckError::RamForHugePages {
            needed,
            free,
            size: name,
            place,
            left,
        });
    }
    Err(MemoryCheckError::HugePages {
        needed,
        free,
        total: count(&pool, "nr_hugepages"),
        size: name,
        place,
        pool: told,
    })
}

/// Raises the soft limit of locked memory to the hard one, which takes no privilege; returns the
/// limit in bytes, `None` without one.
pub fn raise_locked_limit() -> Option<u64> {
    // What the kernel asks for: capable(CAP_IPC_LOCK) (drivers/vfio/vfio_iommu_type1.c,
    // vfio_lock_acct; drivers/iommu/iommufd/pages.c, incr_user_locked_vm).
    let exempt =
        capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
    if exempt {
        return None;
    }
    let before = getrlimit(Resource::Memlock);
    let raised = Rlimit {
        current: before.maximum,
        maximum: before.maximum,
    };
    match setrlimit(Resource::Memlock, raised) {
        Ok(()) => before.maximum,
        Err(_) => before.current,
    }
}

pub fn check_locked(needed: u64, limit: Option<u64>) -> Result<(), MemoryCheckError> {
    match limit {
        Some(limit) if limit < needed => Err(MemoryCheckError::Locked { needed, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(root: &Path, directory: &str, values: [(&str, &str); 3]) {
        let directory = root.join(directory);
        fs::create_dir_all(&directory).unwrap();
        for (name, value) in values {
            fs::write(directory.join(name), value).unwrap();
        }
    }

    #[test]
    fn more_memory_than_the_host_has_is_refused_and_named() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        let text = "MemTotal:        6000000 kB\nMemAvailable:    5000000 kB\n";
        fs::write(root.path().join("proc/meminfo"), text).unwrap();
        for gib in [1, 5] {
            let _ = check_host_memory(root.path(), gib << 30).unwrap();
        }
        let error = check_host_memory(root.path(), 100 << 30).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("100 GiB") && text.contains("5859 MiB"),
            "{text}"
        );
        // A host that does not tell is not held against the user.
        assert!(check_host_memory(Path::new("/nonexistent"), 100 << 30).is_ok());
    }

    #[test]
    fn too_few_huge_pages_are_told_with_the_command_that_reserves_them() {
        let root = tempfile::tempdir().unwrap();
        let check = |node| check_huge_pages(root.path(), 4 << 30, HugePages::Size1G, node);
        let missing = check(None).unwrap_err().to_string();
        assert!(missing.contains("hugepagesz=1G"), "{missing}");
        let values = [
            ("free_hugepages", "5\n"),
            ("resv_hugepages", "2\n"),
            ("nr_hugepages", "6\n"),
        ];
        pool(
            root.path(),
            "sys/kernel/mm/hugepages/hugepages-1048576kB",
            values,
        );
        let text = check(None).unwrap_err().to_string();
        for part in ["needs 4 huge pages of 1G", "3 are free", "echo 7 > "] {
            assert!(text.contains(part), "{text}");
        }
        // A node's own pool counts, and has no reservations.
        let node = "sys/devices/system/node/node1/hugepages/hugepages-1048576kB";
        let values = [
            ("free_hugepages", "4\n"),
            ("surplus_hugepages", "0\n"),
            ("nr_hugepages", "4\n"),
        ];
        pool(root.path(), node, values);
        assert!(check(Some(1)).is_ok());
        fs::write(root.path().join(node).join("free_hugepages"), "1\n").unwrap();
        let text = check(Some(1)).unwrap_err().to_string();
        for part in ["1 are free on NUMA node 1", "echo 7 > ", "node1/hugepages"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn huge_pages_for_which_there_is_no_ram_are_refused_without_a_command() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let pools = "sys/kernel/mm/hugepages";
        let node = "sys/devices/system/node/node1";
        for pools in [pools, &format!("{node}/hugepages")] {
            for (size, pages) in [("1048576", "1\n"), ("2048", "512\n")] {
                let values = [("free_hugepages", "0\n"), ("resv_hugepages", "0\n")];
                let pool_of = format!("{pools}/hugepages-{size}kB");
                pool(
                    root,
                    &pool_of,
                    [values[0], values[1], ("nr_hugepages", pages)],
                );
            }
        }
        fs::create_dir_all(root.join("proc")).unwrap();
        fs::write(root.join("proc/meminfo"), "MemTotal:       16777216 kB\n").unwrap();
        let meminfo = "Node 1 MemTotal:        8388608 kB\nNode 1 MemFree:  1 kB\n";
        fs::write(root.join(node).join("meminfo"), meminfo).unwrap();
        // 2 GiB of them are in pools, of both sizes.
        for (node, fit) in [(None, 14), (Some(1), 6)] {
            let check = |gib: u64| check_huge_pages(root, gib << 30, HugePages::Size1G, node);
            let error = check(fit).unwrap_err();
            assert!(matches!(error.remedy(), Remedy::Run(_)), "{error}");
            let error = check(fit + 1).unwrap_err();
            assert_eq!(error.remedy(), Remedy::advice(LESS), "{error}");
            let left = format!("{} MiB of its RAM", fit << 10);
            assert!(error.to_string().contains(&left), "{error}");
        }
    }

    #[test]
    fn a_low_limit_of_locked_memory_is_told_with_both_numbers_and_the_command() {
        assert!(check_locked(1 << 30, None).is_ok());
        assert!(check_locked(1 << 30, Some(1 << 30)).is_ok());
        let text = check_locked(1 << 30, Some(64 << 10))
            .unwrap_err()
            .to_string();
        for part in ["1 GiB", "64 KiB", "ulimit -l 1048576"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_refused_and_those_present_are_named() {
        let root = tempfile::tempdir().unwrap();
        let nodes = root.path().join("sys/devices/system/node");
        fs::create_dir_all(nodes.join("node0")).unwrap();
        fs::write(nodes.join("online"), "0\n").unwrap();
        let policy = |memory: &str| {
            let arguments = ["mini-vmm", "--kernel", "k", "--memory", memory];
            let Ok(crate::config::Command::Run(config)) = crate::config::parse(arguments) else {
                panic!("{memory}");
            };
            node_policy(&config, root.path()).map(|(policy, _)| policy)
        };
        let strict = NodePolicy {
            node: 0,
            strict: true,
        };
        assert_eq!(policy("1G,node=0").unwrap(), Some(strict));
        assert_eq!(policy("1G,node=auto").unwrap(), None);
        assert_eq!(policy("1G").unwrap(), None);
        let text = policy("1G,node=3").unwrap_err().to_string();
        assert!(
            text.contains("node=3") && text.contains("it has 0"),
            "{text}"
        );
    }
}
