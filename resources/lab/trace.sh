# Functions for scripts that trace in L1, in instances of tracefs of their own. What they leave in the directory $out is read by
# tests/src/outside.
#
# The trace is taken as the kernel's buffers have it: text would cost time, and knows no nanoseconds.
BUFFER_KB=32768 # for each CPU; an ioctl takes about 72 bytes
PAGE_KB=4

# set_up INSTANCE EVENT…: an instance that traces these once its tracing_on is set.
set_up() {
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
# save INSTANCE EVENT…: the buffers of the instance lab-NAME and what is known of their layout, in $out/NAME.
save() {
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
