//! Where the lab keeps its things.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::FlockOperation;

use crate::error::Error;

/// Names the cache directory.
const CACHE_VARIABLE: &str = "MINI_VMM_LAB";
/// Names another program to test, for instance an older release.
const VMM_VARIABLE: &str = "MINI_VMM_BINARY";
/// Runs whose logs are kept.
const RUNS_KEPT: usize = 30;
/// Runs of this process so far.
static RUNS: AtomicU32 = AtomicU32::new(0);

/// The repository that this lab belongs to.
pub fn repository() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    match manifest.parent() {
        Some(parent) => parent.to_path_buf(),
        None => manifest,
    }
}

/// The program under test, when the environment names another than the repository's release build.
pub fn other_vmm() -> Option<PathBuf> {
    let path = std::env::var_os(VMM_VARIABLE)?;
    (!path.is_empty()).then(|| PathBuf::from(path))
}

/// The program under test.
pub fn vmm(repository: &Path) -> PathBuf {
    other_vmm().unwrap_or_else(|| repository.join("target/release/mini-vmm"))
}

/// The cache, outside the repository: kernels and images survive `cargo clean` and serve several checkouts.
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// Opens the cache, creating it if need be.
    pub fn open() -> Result<Self, Error> {
        let root = match std::env::var_os(CACHE_VARIABLE) {
            Some(path) if !path.is_empty() => PathBuf::from(path),
            _ => {
                let home = std::env::var_os("HOME").ok_or_else(|| {
                    Error::Sources(format!("neither {CACHE_VARIABLE} nor HOME is set"))
                })?;
                Path::new(&home).join(".cache/mini-vmm-lab")
            }
        };
        fs::create_dir_all(&root).map_err(Error::file("create", &root))?;
        let root = fs::canonicalize(&root).map_err(Error::file("resolve", &root))?;
        Ok(Self { root })
    }

    /// A path in the cache.
    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Waits until no other set-up is at work in this cache; the lock ends with the returned file.
    pub fn lock(&self) -> Result<File, Error> {
        let path = self.path("lock");
        let file = File::options()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(Error::file("open", &path))?;
        let lock = |operation| rustix::fs::flock(&file, operation);
        if lock(FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("lab: waiting for another set-up to finish");
            lock(FlockOperation::LockExclusive)
                .map_err(|errno| Error::file("lock", &path)(errno.into()))?;
        }
        Ok(file)
    }
}

/// A fresh directory for the logs of one run, below target/lab; the oldest ones go.
pub fn run_directory() -> Result<PathBuf, Error> {
    let runs = repository().join("target/lab/runs");
    fs::create_dir_all(&runs).map_err(Error::file("create", &runs))?;
    let mut old: Vec<PathBuf> = fs::read_dir(&runs)
        .map_err(Error::file("list", &runs))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    // The names begin with the time, so that their order is that of the runs.
    old.sort();
    old.truncate((old.len() + 1).saturating_sub(RUNS_KEPT));
    for path in old {
        // A directory that somebody else removes at the same time is gone all the same.
        let _ = fs::remove_dir_all(path);
    }
    let since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let (time, process) = (since_epoch.as_millis(), std::process::id());
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let name = format!("{time}-{process}-{number}");
    let path = runs.join(name);
    fs::create_dir_all(&path).map_err(Error::file("create", &path))?;
    Ok(path)
}
