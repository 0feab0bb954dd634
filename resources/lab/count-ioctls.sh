#!/bin/sh
# count-ioctls.sh DIRECTORY CMD…: runs a command in L1 and leaves in DIRECTORY what the kernel traced meanwhile, for
# `cargo lab` to count (tests/src/outside): the ioctls of the command and of all that it starts, and what the IOMMU was told.
# Exits with the command's status.
#
# The trace is taken as the kernel's buffers have it: text would cost time, and knows no nanoseconds.
BUFFER_KB=32768 # for each CPU; an ioctl takes about 72 bytes
PAGE_KB=4

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
set_up() { # instance, events
    local instance=$1 event
    shift
    mkdir "$instance" || return
    echo mono >"$instance/trace_clock" || return
    echo 0 >"$instance/tracing_on" || return
    echo 0 >"$instance/options/overwrite" || return
    echo $BUFFER_KB >"$instance/buffer_size_kb" || return
    for event; do
        echo 1 >"$instance/events/$event/enable" || return
    done
}
save() { # instance, events
    local instance=$1 cpu event
    local to=$out/${instance##*/lab-}
    shift
    mkdir -p "$to" || return
    cat "$instance/events/header_page" >"$to/header_page" || return
    for event; do
        cat "$instance/events/$event/format" || return
    done >"$to/formats"
    for cpu in "$instance"/per_cpu/cpu*; do
        cat "$cpu/stats" >"$to/${cpu##*/}.stats" || return
        # Where nothing is left the kernel would wait for more, or says so with an error; whether all came is seen from
        # the statistics.
        dd if="$cpu/trace_pipe_raw" of="$to/${cpu##*/}" iflag=nonblock ibs=${PAGE_KB}k obs=256k 2>/dev/null || :
    done
}

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
