#!/bin/sh
# First program of the lab's default guest (L2).
# The kernel hands RUN="…" of its command line over in the environment, quotes removed.
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
probe mark 0x41
probe coldplug /modules/index
cd /root
export HOME=/root
if [ -n "$RUN" ]; then
    sh -c ". /functions; $RUN"
    exec probe off $?
fi
echo "The lab's guest. There are busybox, lspci, setpci and probe; 'exit' powers off."
setsid cttyhack sh
exec probe off $?
