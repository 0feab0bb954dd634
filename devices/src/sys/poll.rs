//! Whether an eventfd has something to read, without reading it.

use std::os::fd::AsRawFd;

use vmm_sys_util::eventfd::EventFd;

/// Whether `fd` has been signalled since it was last read. A poll that fails counts as no.
pub fn is_signalled(fd: &EventFd) -> bool {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one valid pollfd on the stack, and no waiting.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready == 1 && poll.revents & libc::POLLIN != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_does_not_consume_the_signal() {
        let fd = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        assert!(!is_signalled(&fd));
        fd.write(1).unwrap();
        assert!(is_signalled(&fd) && is_signalled(&fd));
        fd.read().unwrap();
        assert!(!is_signalled(&fd));
    }
}
