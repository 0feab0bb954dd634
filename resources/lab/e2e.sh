# Functions for the scripts of end-to-end tests, which run in L1 with bash.

# guest RUN [OPTION…]: boots the default guest, which runs RUN and powers off; prints the monitor's exit status.
# GUEST_KERNEL, GUEST_MEMORY, GUEST_CPUS and GUEST_APPEND override what it boots with.
guest() {
    local run=$1
    shift
    "$LAB_VMM" --kernel "${GUEST_KERNEL:-$LAB_KERNEL}" --initrd "${GUEST_INITRD:-$LAB_INITRD}" \
        --memory "${GUEST_MEMORY:-512M}" --cpus "${GUEST_CPUS:-1}" \
        --cmdline "$LAB_CMDLINE $GUEST_APPEND${run:+ RUN=\"$run\"}" "$@"
    echo "VMM EXIT $?"
}

# vmm OPTION…: runs the monitor as it is; prints its exit status.
vmm() {
    "$LAB_VMM" "$@"
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
