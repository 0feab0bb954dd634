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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_files_may_be_open_as_the_hard_limit_says() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (hard, hard));
    }
}
