#!/bin/sh
# count-ioctls.sh DIRECTORY CMD…: runs a command in L1 and leaves in DIRECTORY what the kernel traced meanwhile, for
# `cargo lab` to count (tests/src/outside): the ioctls of the command and of all that it starts, and what the IOMMU was told.
# Exits with the command's status.
tracing=/sys/kernel/tracing/instances
ioctls=$tracing/lab-ioctls # the command's processes only
iommu=$tracing/lab-iommu   # whoever maps: what a process unmaps when it exits is no longer counted as its own

# shellcheck disable=SC2086 # lists of words
events='sched/sched_process_fork sched/sched_process_exec syscalls/sys_enter_ioctl syscalls/sys_exit_ioctl'
mappings='iommu/map iommu/unmap'

fail() {
    echo "lab: cannot count ioctls: $*" >&2
    exit 125
}
# shellcheck source=resources/lab/trace.sh
. "$LAB_REPO/resources/lab/trace.sh"

out=$1
shift
[ $# -gt 0 ] || fail "no command was given"
rmdir "$ioctls" "$iommu" 2>/dev/null
set_up "$iommu" $mappings || fail "no events of the IOMMU"
set_up "$ioctls" $events || fail "no events of processes or system calls"
echo 1 >"$ioctls/options/event-fork" || fail "children cannot be followed"
echo $$ >"$ioctls/set_event_pid" || fail "this process cannot be followed"
echo 1 >"$iommu/tracing_on"
echo 1 >"$ioctls/tracing_on"

"$@"
status=$?
# Fails where the buffer is full, which the statistics tell.
echo end >"$ioctls/trace_marker" 2>/dev/null

echo 0 >"$ioctls/tracing_on"
echo 0 >"$iommu/tracing_on"
save "$ioctls" ftrace/print $events && save "$iommu" $mappings || fail "the trace cannot be saved in $out"
rmdir "$ioctls" "$iommu"
exit $status
