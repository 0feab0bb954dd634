#!/bin/bash
# guest-time.sh OPTION…: boots the default guest in L1 with all devices that are bound to vfio-pci, from memory, and tells where
# its time went until it was off: by function of its kernel, and by reason of its exits. Times are milliseconds. The options are
# mini-vmm's; GUEST_KERNEL and the like are those of e2e.sh.
#
# KVM's events tell the guest's instruction pointer at each exit, to which all time since the entry is counted: with enough exits
# (the clock alone makes one in 4 ms) a profile. Functions are named by L1's own symbols, so the guest's kernel must be L1's, both
# with nokaslr. What runs below the kernel's addresses before it ever was above them unpacks the kernel; later it is user space.
trace=/sys/kernel/tracing/instances/lab-guest
shown=40

fail() {
    echo "lab: guest-time: $*" >&2
    exit 125
}

# shellcheck source=resources/lab/e2e.sh
. "$LAB_REPO/resources/lab/e2e.sh"
cp "${GUEST_KERNEL:-$LAB_KERNEL}" "$TMPDIR/kernel" && cp "$LAB_INITRD" "$TMPDIR/initrd" && cp "$LAB_VMM" "$TMPDIR/mini-vmm" ||
    fail "what is timed cannot be copied to memory"
GUEST_KERNEL=$TMPDIR/kernel GUEST_INITRD=$TMPDIR/initrd LAB_VMM=$TMPDIR/mini-vmm
monitor --version
mkdir $trace && echo mono >$trace/trace_clock && echo 32768 >$trace/buffer_size_kb || fail "the kernel cannot trace"
for event in kvm_entry kvm_exit; do
    echo 1 >$trace/events/kvm/$event/enable || fail "KVM has no event $event"
done
sleep 1
# shellcheck disable=SC2046,SC2086 # words
guest "probe gpus" $(each --vfio $LAB_BDFS) "$@"
echo 0 >$trace/tracing_on

# Lines of `address ms` for each stretch in the guest, and totals of exits.
awk '
    { for (time = 0; ++time < NF && $time !~ /^[0-9]+\.[0-9]+:$/;); }
    $(time + 1) == "kvm_entry:" {
        now = $time + 0
        if (reason != "") { exits[reason]++; outside[reason] += now - left }
        entered = now
    }
    $(time + 1) == "kvm_exit:" && entered {
        left = $time + 0
        for (i = time; i <= NF; i++) {
            if ($i == "reason") reason = $(i + 1)
            if ($i == "rip") rip = $(i + 1)
        }
        sub(/^0x/, "", rip)
        kernel = rip ~ /^ffffffff/
        if (kernel) booted = 1
        where = kernel ? "kernel" : booted ? "user space" : "unpacking"
        inside[where] += left - entered
        if (kernel) printf "%s 1 %.6f\n", rip, (left - entered) * 1000 >file
        entered = 0
    }
    END {
        for (where in inside) printf "%9.2f  %s\n", inside[where] * 1000, where
        for (reason in exits)
            printf "%9.2f  out of the guest, %d times: %s\n", outside[reason] * 1000, exits[reason], reason
    }' file="$TMPDIR/stretches" $trace/trace
if ! grep -qaF "$(uname -r)" "$TMPDIR/kernel"; then
    echo "The guest's kernel is not the host's: its functions have no names here."
    exit 0
fi
awk '$2 ~ /[tT]/ && NF == 3 { print $1, 0, $3 }' /proc/kallsyms | LC_ALL=C sort - "$TMPDIR/stretches" |
    awk '$2 == 0 { name = $3 } $2 == 1 { spent[name] += $3 } END { for (name in spent) printf "%9.2f  %s\n", spent[name], name }' |
    sort -rn | head -n $shown
