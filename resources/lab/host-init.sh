#!/bin/sh
# First program of the lab's host (L1): takes the machine's root over 9p, hands the named devices to vfio-pci, runs the
# job in a chroot and reports its status on the control port. Messages of its own go to the error port.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
cd /modules && probe insmod $(cat order)
cd /

port() {
    for p in /sys/class/virtio-ports/*; do
        [ "$(cat "$p/name")" = "$1" ] && echo "/dev/${p##*/}"
    done
}
# Ports are announced by the device after its driver is loaded.
n=0
while [ -z "$(port lab.ctl)" ] || [ -z "$(port lab.err)" ]; do
    n=$((n + 1))
    [ $n -gt 500 ] && { echo "lab: the control port did not appear" >/dev/console; poweroff -f; }
    usleep 10000
done
exec 3<>"$(port lab.ctl)" 4>"$(port lab.err)"

finish() {
    dmesg >/host/run/lab/out/dmesg 2>/dev/null
    echo "exit $1" >&3
    poweroff -f
}
fail() {
    echo "lab: $*" >&4
    finish 125
}

share() { # tag, mount point, options
    mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2" || fail "cannot mount $1 over 9p"
}
mkdir -p /host
share root /host cache=loose,ro
mkdir -p /dev/pts /dev/shm /dev/hugepages
mount --bind /dev /host/dev
mount -t devpts -o ptmxmode=666 devpts /host/dev/pts
mount -t tmpfs shm /host/dev/shm
[ -e /sys/kernel/mm/hugepages ] && mount -t hugetlbfs huge /host/dev/hugepages
mount -t proc proc /host/proc
mount -t sysfs sysfs /host/sys
mount -t tracefs trace /host/sys/kernel/tracing
mount -t debugfs debug /host/sys/kernel/debug
mount -t tmpfs run /host/run
mkdir -p /host/run/lab/tmp /host/run/lab/home /host/run/lab/out
share out /host/run/lab/out cache=none,rw
ip link set lo up

# The lab answers with the addresses of the devices: one line for those to assign, one for those to leave, and a variable
# for each that names it.
echo ready >&3
read -r LAB_BDFS <&3
read -r LAB_HOST_BDFS <&3
read -r names <&3
# shellcheck disable=SC2086,SC2163 # words of the form NAME=ADDRESS
[ -z "$names" ] || export $names
export LAB_BDFS LAB_HOST_BDFS

for bdf in $LAB_BDFS; do
    d=/sys/bus/pci/devices/$bdf
    [ -e "$d" ] || fail "the kernel did not find device $bdf"
    echo vfio-pci >"$d/driver_override"
    [ -e "$d/driver" ] && echo "$bdf" >"$d/driver/unbind"
    echo "$bdf" >/sys/bus/pci/drivers_probe 2>/dev/null
    [ -e /sys/bus/pci/drivers/vfio-pci/"$bdf" ] || echo "lab: vfio-pci did not take $bdf" >&4
done
probe coldplug /modules/index

export TMPDIR=/run/lab/tmp HOME=/run/lab/home LAB_OUT=/run/lab/out TERM=${TERM:-linux}
if [ -e /host/run/lab/out/interactive ]; then
    # shellcheck disable=SC2046 # the file holds "rows N cols N"
    stty -F /dev/hvc0 $(cat /host/run/lab/out/interactive)
    setsid -c chroot /host /bin/bash /run/lab/out/job </dev/hvc0 >/dev/hvc0 2>&1 3>&- 4>&-
else
    chroot /host /bin/bash /run/lab/out/job </dev/null >"$(port lab.out)" 2>&4 3>&- 4>&-
fi
finish $?
