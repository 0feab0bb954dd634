//! The clock, and when the process was started.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

/// CLOCK_MONOTONIC, which other programs and the kernel's trace have as well.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// How long ago the process was started; `None` where /proc is not there.
///
/// Field 22 of /proc/self/stat counts clock ticks (10 ms), proc_pid_stat(5); the CPU time that the
/// process has used since then narrows it down: until now it had nothing to wait for.
pub fn age_of_process() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field, the name, may hold blanks and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let ticks: u64 = rest.split_ascii_whitespace().nth(19)?.parse().ok()?;
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok()?;
    let tick = 1_000_000_000u64.checked_div(per_second)?;
    let started = Duration::from_nanos(ticks.checked_mul(tick)?);
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let busy = Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).ok()?);
    let longest = now.checked_sub(started)?;
    Some(busy.clamp(longest.saturating_sub(Duration::from_nanos(tick)), longest))
}
