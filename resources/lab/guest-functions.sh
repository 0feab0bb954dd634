# Functions for what a test has the lab's default guest run: they are there in RUN="…".

# nic DRIVER: the name of the network card with that driver.
nic() {
    local card
    for card in /sys/class/net/*; do
        [ "$(basename "$(readlink "$card/device/driver")")" = "$1" ] && basename "$card"
    done
}

# network DRIVER N: gives the card 10.0.N.15, waits until the emulated network's gateway answers, and sends it ten packets.
network() {
    local card attempt
    card=$(nic "$1")
    ip link set "$card" up
    ip addr add "10.0.$2.15/24" dev "$card"
    for attempt in $(seq 50); do
        ping -c 1 -W 1 "10.0.$2.2" >/dev/null && break
    done
    echo "NIC $1 $card"
    echo "PINGED $1 $(ping -c 10 -i 0.1 -s 1400 "10.0.$2.2" | grep -c from)"
}

# packed COMMAND…: the command's output in few lines, for the console is slow; `unpacked` of e2e.sh reads them.
packed() {
    "$@" | gzip -9 | base64 | sed 's/^/PACKED /'
}

# interrupts: what was counted, and how often the kernel had to complain of one that no driver wanted.
interrupts() {
    grep -e CPU -e PCI-MSI -e IO-APIC /proc/interrupts
    echo "UNHANDLED $(dmesg | grep -c 'nobod[y] cared')"
}
