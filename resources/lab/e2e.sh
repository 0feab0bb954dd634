# Functions for the scripts of end-to-end tests, which run in L1 with bash.

# monitor OPTION…: runs the program under test, with the options that the tests are run with unless these say otherwise.
# REFUSED_IOCTL=0x… keeps an ioctl from it, as a kernel does that has none of that number.
monitor() {
    local options=$LAB_VMM_OPTIONS
    case " $* " in *" --iommu "*) options= ;; esac
    # shellcheck disable=SC2086 # words
    ${REFUSED_IOCTL:+"$LAB_TOOL" without-ioctl "$REFUSED_IOCTL" --} "$LAB_VMM" "$@" $options
}

# hold_vm: keeps a VM in L1's kernel to the end. KVM rewrites instructions of the running kernel whenever its first VM comes and
# the last one goes, which the emulator's CPUs, each with translations of its own, now and then do not survive (docs/lab.md).
hold_vm() {
    [ ! -e /dev/kvm ] || "$LAB_TOOL" hold-vm </dev/null >/dev/null 2>&1 &
}

# guest RUN [OPTION…]: boots the default guest, which runs RUN and powers off; prints the monitor's exit status.
# GUEST_KERNEL, GUEST_MEMORY, GUEST_CPUS and GUEST_APPEND override what it boots with. Its kernel is the unpacked one: unpacking
# takes half the time of a start here, and few tests are about that. Those take $LAB_KERNEL.
guest() {
    local run=$1
    shift
    monitor --kernel "${GUEST_KERNEL:-$LAB_VMLINUX}" --initrd "${GUEST_INITRD:-$LAB_INITRD}" \
        --memory "${GUEST_MEMORY:-512M}" --cpus "${GUEST_CPUS:-1}" --test-no-pv-eoi \
        --cmdline "$LAB_CMDLINE $GUEST_APPEND${run:+ RUN=\"$run\"}" "$@"
    echo "VMM EXIT $?"
}

# once NAME COMMAND…: what the command prints; the next test of this machine that asks for NAME sees the same again. So
# several tests look at one boot of a guest.
once() {
    local kept=/run/lab/once.$1
    shift
    [ -e "$kept" ] || "$@" >"$kept" 2>&1
    cat "$kept"
}

# lspci_of BDF…: configuration space of devices of this host, for tests/src/e2e/lspci.rs to compare.
lspci_of() {
    local bdf
    for bdf; do
        echo "LSPCI host"
        lspci -D -vv -xxxx -s "$bdf"
    done
    echo "LSPCI end"
}

# unpacked COMMAND…: passes the command's output on. What a guest has packed (see guest-functions.sh) comes
# last.
unpacked() {
    "$@" | tr -d '\r' | awk '
        /^PACKED / { sub(/^PACKED /, ""); packed = packed $0 "\n"; next }
        { print; fflush() }
        END { if (packed != "") { printf "%s", packed | "base64 -d | gunzip"; close("base64 -d | gunzip") } }'
}

# vmm OPTION…: runs the monitor as it is; prints its exit status.
vmm() {
    monitor "$@"
    echo "VMM EXIT $?"
}

# counted NAME FUNCTION ARGUMENT…: calls a function of this file while the host's kernel counts ioctls; the test's check finds
# the counts by their name.
counted() {
    local name=$1
    shift
    "$LAB_REPO/resources/lab/count-ioctls.sh" "$LAB_OUT/counted-$name" \
        bash -c '. "$LAB_REPO/resources/lab/e2e.sh"; "$@"' bash "$@"
}

# each OPTION VALUE…: the option before each value.
each() {
    local option=$1 value
    shift
    for value; do
        printf '%s %s ' "$option" "$value"
    done
}

# lab_test NAME SECONDS SCRIPT: runs one test between two lines that the lab recognises. What the kernel of L1 has to
# complain about meanwhile is reported as well: a fault in the IOMMU is a failure even if the guest did not notice.
lab_test() {
    local status
    printf '\n@lab begin %s\n' "$1"
    echo "lab: test $1" >/dev/kmsg
    TMPDIR=$(mktemp -d) timeout --kill-after=5 "$2" bash -c ". \"\$LAB_REPO/resources/lab/e2e.sh\"; $3" </dev/null 2>&1
    status=$?
    dmesg | sed -n "/lab: test $1\$/,\$p" |
        grep -aE 'BUG:|Oops|WARNING:|DMAR: .*fault|nobody cared|general protection' | sed 's/^/@lab host /'
    printf '\n@lab end %s %d\n' "$1" "$status"
}
