//! Limits of the process.

use devices::remedy::Remedy;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::starter::{Limit, starter};

/// Raises the limit of open files as far as it may be: every interrupt vector of a device takes
/// an eventfd, and the usual soft limit of 1024 is there for programs that use select(2).
pub fn raise_open_files() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
    {
        // Then the soft limit holds, and whoever meets it says so.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Files that are open besides those of interrupts, an estimate: KVM, vCPUs, groups, devices,
/// console.
const OTHER_FILES: u64 = 320;

/// How many files this process may open; `None` where that is not told.
pub fn open_files() -> Option<u64> {
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    Some(soft)
}

/// The limit of open files is too low for all `vectors` of the devices. A guest seldom uses all
/// that a device has, so this is no reason not to start.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the devices have {vectors} interrupt vectors, each of which takes an open file once the guest uses it, \
     and this process may open {limit}{}",
    in_a_shell()
)]
pub struct FewFiles {
    vectors: u64,
    limit: u64,
}

impl FewFiles {
    /// `Err` where `limit` files are too few.
    pub fn check(vectors: u64, limit: u64) -> Result<(), Self> {
        match limit < vectors.saturating_add(OTHER_FILES) {
            true => Err(Self { vectors, limit }),
            false => Ok(()),
        }
    }

    /// What mends it.
    pub fn remedy(&self) -> Remedy {
        Limit::OpenFiles.raise(self.vectors.saturating_add(OTHER_FILES))
    }
}

/// Where a shell starts us: how it raises the limit, and which one it is.
fn in_a_shell() -> String {
    starter().map_or_else(String::new, |pid| {
        format!(
            " (`ulimit -n` raises that, as root, or a command for the shell that starts mini-vmm, here PID {pid})"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_vectors_is_told_with_both_numbers_and_the_remedy() {
        assert_eq!(FewFiles::check(8192, 8192 + OTHER_FILES), Ok(()));
        let few = FewFiles::check(8192, 1024).unwrap_err();
        let text = few.to_string();
        assert!(text.contains("8192 interrupt vectors") && text.contains("1024"));
        assert!(few.remedy().to_string().contains("nofile=8512"));
    }

    #[test]
    fn as_many_files_may_be_open_as_the_hard_limit_says() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}
