#!/bin/bash
# bench.sh VMM: starts a VMM in L1 once, with all devices that are bound to vfio-pci, and leaves in $LAB_OUT what
# `cargo lab bench` (tests/src/bench) makes numbers of. BENCH_PROGRAM, BENCH_KERNEL, BENCH_INITRD, BENCH_RAM and BENCH_IOMMU
# say with what, BENCH_BUSYBOX where busybox is.
#
# What is timed finds everything in memory: program, libraries, firmware, kernel and initrd stand in a root directory of
# their own there. Whatever opens a file over 9p waits for the outer machine, and virtual time then jumps to the next timer.
#
#   bench/console    each line of the guest's console with the time at which it was complete
#   bench/messages   the VMM's standard error
#   bench/version    what the VMM calls itself
#   bench/dma/       the kernel's trace of mappings in the IOMMU, with their addresses
#   ioctls/          the trace of all ioctls (count-ioctls.sh)
set -u
# shellcheck source=resources/lab/trace.sh
. "$LAB_REPO/resources/lab/trace.sh"
vmm=$1
root=$TMPDIR/root
out=$LAB_OUT/bench
program=/usr/bin/$vmm
firmware='bios-256k.bin kvmvapic.bin linuxboot_dma.bin pvh.bin'

fail() {
    echo "lab: bench: $*" >&2
    exit 125
}

# The program and what it is linked with, the loader among it, at their places.
stage() {
    local library
    mkdir -p "$root/usr/bin" "$root/etc" "$root/tmp" "$root/dev" "$root/proc" "$root/sys" "$out" || return
    mount --rbind /dev "$root/dev" && mount --rbind /sys "$root/sys" && mount -t proc proc "$root/proc" || return
    cp "$BENCH_PROGRAM" "$root$program" || return
    for library in $(ldd "$BENCH_PROGRAM" | grep -o '/[^ ]*'); do
        cp -L --parents "$library" "$root" || return
    done
    ldconfig -r "$root" || return
    cp "$BENCH_KERNEL" "$root/kernel" && cp "$BENCH_INITRD" "$root/initrd" || return
    cp "$LAB_REPO/target/lab/probe/release/probe" "$BENCH_BUSYBOX" "$TMPDIR"
}
stage_firmware() {
    local name directory
    for name in $firmware; do
        for directory in $("$BENCH_PROGRAM" -L help); do
            [ -e "$directory/$name" ] && cp -L --parents "$directory/$name" "$root" && continue 2
        done
        return 1
    done
}

# What users of each write to start such a guest; nothing of either that the guest does not need, and an end of interrupt that
# leaves the guest, as docs/lab.md explains.
arguments_of_mini_vmm() {
    local bdf
    words=(--kernel /kernel --initrd /initrd --cmdline "$cmdline" --memory "$BENCH_RAM" --iommu "$BENCH_IOMMU"
        --boot-profile json,at=exit --test-no-pv-eoi)
    for bdf in $LAB_BDFS; do
        words+=(--vfio "$bdf")
    done
}
arguments_of_qemu() {
    local bdf backend=
    words=(-machine q35,accel=kvm -cpu host,-kvm-pv-eoi -smp 1 -m "$BENCH_RAM" -nodefaults -no-user-config -no-reboot -nic none
        -display none -monitor none -serial stdio
        -kernel /kernel -initrd /initrd -append "$cmdline")
    if [ "$BENCH_IOMMU" = iommufd ]; then
        words+=(-object iommufd,id=iommufd0)
        backend=,iommufd=iommufd0
    fi
    for bdf in $LAB_BDFS; do
        words+=(-device "vfio-pci,host=$bdf$backend")
    done
}

# Loads whatever the program reads at its start, without a guest and without KVM, whose first VM costs the kernel more.
warm_up_mini_vmm() { chroot "$root" "$program" --version; }
warm_up_qemu() {
    echo quit | chroot "$root" "$program" -machine q35,accel=tcg -S -nodefaults -no-user-config -display none \
        -monitor stdio -kernel /kernel -initrd /initrd >/dev/null || return
    chroot "$root" "$program" --version
}

# A trace of its own beside that of all ioctls: the arguments and times of mappings. They are structures in the VMM's memory,
# whose words are taken here and told apart later.
trace=/sys/kernel/tracing/instances/lab-dma
events='lab/dma_call lab/dma_return'
trace_on() {
    local call=vfio_iommu_type1_ioctl
    [ "$BENCH_IOMMU" = iommufd ] && call=iommufd_fops_ioctl
    echo "p:lab/dma_call $call cmd=%si:u32 w8=+u8(%dx):x64 w16=+u16(%dx):x64 w32=+u32(%dx):x64
r:lab/dma_return $call" >/sys/kernel/tracing/kprobe_events || return
    # shellcheck disable=SC2086 # a list of words
    set_up $trace $events && echo 1 >$trace/tracing_on
}

stage || fail "what is timed cannot be copied to memory"
cmdline="$LAB_CMDLINE RUN=\"probe gpus\""
case $vmm in
mini-vmm)
    arguments_of_mini_vmm
    warm_up_mini_vmm
    ;;
*)
    stage_firmware || fail "no firmware of QEMU ($firmware)"
    arguments_of_qemu
    warm_up_qemu
    ;;
esac >"$out/version" || fail "$vmm does not start"
trace_on || fail "the kernel traces no mappings"

mkfifo "$TMPDIR/console"
# Of real-time priority: it runs as soon as there is something to stamp.
chrt --fifo 1 "$TMPDIR/probe" stamp "$TMPDIR/stamps" <"$TMPDIR/console" &
exec 7>"$TMPDIR/console"
sync
# The programs before the VMM in its process are in memory, too: the kernel closes their files once the VMM runs.
"$LAB_REPO/resources/lab/count-ioctls.sh" "$LAB_OUT/ioctls" \
    "$TMPDIR/probe" quiet "$TMPDIR/busybox" chroot "$root" "$program" "${words[@]}" \
    </dev/null >&7 2>"$TMPDIR/messages"
status=$?
exec 7>&-
wait
echo 0 >$trace/tracing_on
# shellcheck disable=SC2086 # a list of words
save $trace $events || fail "the trace of mappings cannot be saved"
cp "$TMPDIR/stamps" "$out/console" && cp "$TMPDIR/messages" "$out/messages" || fail "nothing can be written to $out"
[ $status = 0 ] || { cat "$out/messages" >&2; fail "$vmm ended with $status"; }
