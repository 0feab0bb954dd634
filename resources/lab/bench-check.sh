#!/bin/bash
# bench-check.sh [RUNS]: in L1, how long `mini-vmm check` takes for all devices that are bound to vfio-pci: the median of RUNS
# (11), and the fastest and slowest. The program and what it is linked with are in memory: opening a file over 9p waits for
# the outer machine. Exits with 1 where the median is above the limit.
#
#   cargo lab run --gpus 8 -- resources/lab/bench-check.sh                    # seconds of a clock
#   cargo lab run --gpus 8 --deterministic -- resources/lab/bench-check.sh    # instructions / 10^9
set -u
runs=${1:-11}
limit_us=200000

[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
cp "$LAB_VMM" "$TMPDIR/mini-vmm" || exit 125
for library in $(ldd "$LAB_VMM" | grep -o '/[^ ]*'); do
    cp -L "$library" "$TMPDIR" || exit 125
done
vmm=("$TMPDIR"/ld-linux-x86-64.so.2 --library-path "$TMPDIR" "$TMPDIR/mini-vmm")
# shellcheck disable=SC2086 # a list of words
set -- $LAB_BDFS
times=()
for ((run = 0; run <= runs; run++)); do
    begin=${EPOCHREALTIME/./}
    "${vmm[@]}" check "$@" >"$TMPDIR/said" || { cat "$TMPDIR/said"; exit 125; }
    end=${EPOCHREALTIME/./}
    # The first loads what is linked.
    [ $run = 0 ] || times+=($((end - begin)))
done
mapfile -t times < <(printf '%s\n' "${times[@]}" | sort -n)
median=${times[$((runs / 2))]}
ms() { printf '%d.%03d' $(($1 / 1000)) $(($1 % 1000)); }
echo "mini-vmm check, $# devices: $(ms "$median") ms, $(ms "${times[0]}") to $(ms "${times[-1]}") in $runs runs"
[ "$median" -lt "$limit_us" ] || { echo "more than $(ms $limit_us) ms"; exit 1; }
