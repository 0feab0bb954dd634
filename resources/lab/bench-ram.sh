#!/bin/bash
# bench-ram.sh threads [RUNS [SIZE]]: in L1 with two CPUs, how much faster two threads populate guest RAM than one.
# bench-ram.sh dma-map [RUNS]: how soon a guest with one GPU is in user space, and how soon its first write that makes a device
# a bus master has returned, with RAM mapped for DMA while the guest runs (deferred) and before (eager).
#
# What is compared runs by turns, so that whatever else the outer machine does meets all alike; medians of RUNS (5). A clock
# measures it: overlapping work shows on two CPUs only, without --deterministic. Program, kernel and initrd are in memory.
# docs/performance.md has the commands and what came of them.
set -u
what=${1:-}
runs=${2:-5}
size=${3:-2G}

[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
cp "$LAB_VMM" "$TMPDIR/mini-vmm" && cp "$LAB_KERNEL" "$TMPDIR/kernel" && cp "$LAB_INITRD" "$TMPDIR/initrd" || exit 125
vmm=("$TMPDIR/mini-vmm" --kernel "$TMPDIR/kernel" --initrd "$TMPDIR/initrd" --boot-profile json)

fail() {
    echo "bench-ram: $*" >&2
    exit 125
}

# moments NAME FILE: begin and end of each event of that name in a profile, in microseconds since the start of the process.
moments() {
    grep -o "{\"name\":\"$1\"[^}]*}" "$2" |
        sed 's/.*"at_ns":\([0-9]*\),"took_ns":\([0-9]*\).*/\1 \2/; s/.*"at_ns":\([0-9]*\)}/\1 0/' |
        while read -r at took; do echo $((at / 1000)) $(((at + took) / 1000)); done
}
# median NUMBER…
median() { printf '%s\n' "$@" | sort -n | sed -n $((($# + 1) / 2))p; }
ms() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
# ratio A B: with three digits.
ratio() { printf '%d.%03d' $(($1 / $2)) $(($1 * 1000 / $2 % 1000)); }

# populate CPUS MEMORY: prints how long it took. The guest is ended at its first instruction: nobody waits for it to boot.
populate() {
    local cpus=$1 memory=$2 line profile=$TMPDIR/profile begin= end=0 threads=0 from to
    : >"$profile"
    exec 3< <(exec taskset -c "$cpus" "${vmm[@]}" --memory "$memory" --prefault on --log-level info 2>&1 >/dev/null </dev/null)
    while read -r line <&3; do
        case $line in
        '{'*) echo "$line" >"$profile" ;;
        *"first guest instruction"*) kill $! ;;
        esac
    done
    exec 3<&-
    while read -r from to; do
        threads=$((threads + 1))
        [ -n "$begin" ] && [ "$from" -ge "$begin" ] || begin=$from
        [ "$to" -le "$end" ] || end=$to
    done < <(moments 'populate RAM' "$profile")
    [ -n "$begin" ] || fail "the profile tells no populating"
    echo "$threads $((end - begin))"
}

threads() {
    local run one=() two=() ratios=() number took
    populate 0,1 "$size" >/dev/null # the outer machine gives L1 its memory
    for ((run = 0; run < runs; run++)); do
        read -r number took < <(populate 1 "$size") || exit 125
        [ "$number" = 1 ] || fail "$number threads on one CPU"
        one+=("$took")
        read -r number took < <(populate 0,1 "$size") || exit 125
        [ "$number" = 2 ] || fail "$number threads on two CPUs"
        two+=("$took")
        ratios+=($((one[run] * 1000 / two[run])))
        echo "run $((run + 1)): one thread $(ms "${one[run]}") ms, two $(ms "${two[run]}") ms, $(ratio "${ratios[run]}" 1000)"
    done
    local first second
    first=$(median "${one[@]}")
    second=$(median "${two[@]}")
    echo "| $size | $(ms "$first") | $(ms "$second") | $(ratio "$first" "$second") | $(ratio "$(median "${ratios[@]}")" 1000) |"
}

# boot MEMORY MODE: prints when the guest was in user space and when the first bus-master write had returned.
boot() {
    local profile=$TMPDIR/profile user master
    "${vmm[@]}" --memory "$1" --dma-map "$2" --vfio "${LAB_BDFS%% *}" --cmdline "$LAB_CMDLINE RUN=\"probe gpus\"" \
        2>"$profile" >"$TMPDIR/console" </dev/null || fail "the guest's end: $? $(cat "$profile")"
    read -r user _ < <(moments 'guest: user space' "$profile")
    read -r _ master < <(moments 'guest: first bus master write' "$profile")
    [ -n "$user" ] && [ -n "$master" ] || fail "the profile has no marks"
    echo "$user $master"
}

dma_map() {
    local run memory mode user master
    local -A users=() masters=()
    boot 4G deferred >/dev/null
    for ((run = 0; run < runs; run++)); do
        for memory in 512M 4G; do
            for mode in deferred eager; do
                read -r user master < <(boot $memory $mode) || exit 125
                users[$memory $mode]+=" $user"
                masters[$memory $mode]+=" $master"
                echo "run $((run + 1)): $memory $mode: user space $(ms "$user") ms, bus master $(ms "$master") ms"
            done
        done
    done
    for memory in 512M 4G; do
        for mode in deferred eager; do
            # shellcheck disable=SC2086 # lists of words
            user=$(median ${users[$memory $mode]}) master=$(median ${masters[$memory $mode]})
            echo "| $memory | $mode | $(ms "$user") | $(ms "$master") |"
        done
    done
}

case $what in
threads) threads ;;
dma-map) dma_map ;;
*) fail "threads or dma-map?" ;;
esac
