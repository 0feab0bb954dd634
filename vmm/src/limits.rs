//! Limits of the process.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

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

/// Files that are open besides those of interrupts; an estimate.
const OTHER_FILES: u64 = 128;

/// Whether the limit of open files may be too low for all `vectors` of the devices; the text says
/// what to do. A guest seldom uses all that a device has, so this is no reason not to start.
pub fn open_files_warning(vectors: u64) -> Option<String> {
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    warning(vectors, soft)
}

fn warning(vectors: u64, limit: u64) -> Option<String> {
    let needed = vectors.saturating_add(OTHER_FILES);
    (needed > limit).then(|| {
        format!(
            "the devices have {vectors} interrupt vectors, each of which takes an open file once the guest uses it, and the limit of open files is {limit}: raise it as root with `ulimit -n {needed}`, or LimitNOFILE= of the service"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_below_the_vectors_is_told_with_both_numbers_and_the_remedy() {
        assert_eq!(warning(8192, 8192 + OTHER_FILES), None);
        let text = warning(8192, 1024).unwrap();
        for part in ["8192 interrupt vectors", "is 1024", "ulimit -n 8320"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn as_many_files_may_be_open_as_the_hard_limit_says() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}
