#!/bin/bash
# Prints what mini-vmm reads of a host, as a tree for tests: capture.sh BDF… >NAME.tree (see README.md).
# Run it as root: others do not see all of configuration space. Read it before you publish it: serial numbers of
# devices are in configuration space.
set -u
declare -A seen=()

at() { # the directory of the lines that follow
    printf '@%s\n' "$1"
    cd "$1" || exit 1
}

text() { # files of the directory
    local file line
    for file; do
        [ -f "$file" ] && [ -r "$file" ] || continue
        head -n 7 "$file" 2>/dev/null | while IFS= read -r line; do printf '%s: %s\n' "$file" "$line"; done
    done
}

link() { # symbolic links
    local file
    for file; do [ ! -L "$file" ] || printf '%s -> %s\n' "$file" "$(readlink "$file")"; done
}

hex() { # a binary file, without the rows that are zero
    local row bytes
    od -An -v -tx1 -w16 "$1" | grep -n . | sed 's/:/ /' | while read -r row bytes; do
        case $bytes in *[1-9a-f]*) printf '%s = %x: %s\n' "$1" $(((row - 1) * 16)) "$bytes" ;; esac
    done
}

there() { # files of which only the existence counts
    local file
    for file; do [ ! -e "$file" ] || printf '%s:\n' "$file"; done
}

iommu() { # of the function in the directory
    local path
    path=$(readlink -f iommu) || return
    [ -d "$path/intel-iommu" ] && [ -z "${seen[$path]-}" ] || return
    seen[$path]=1
    at "$path/intel-iommu"
    text cap ecap
}

function_() { # a PCI function
    local path name
    path=$(readlink -f "/sys/bus/pci/devices/$1")
    link "/sys/bus/pci/devices/$1"
    at "$path"
    text class vendor device resource numa_node reset_method current_link_speed current_link_width \
        max_link_speed max_link_width sriov_totalvfs sriov_numvfs
    hex config
    link driver iommu_group iommu physfn virtfn*
    for name in vfio-dev/vfio*; do
        [ -e "$name" ] || continue
        echo "$name/"
        there "/dev/vfio/devices/${name#*/}"
    done
    iommu
}

group() { # an IOMMU group
    at "/sys/kernel/iommu_groups/$1"
    link devices/*
    text reserved_regions type
    there "/dev/vfio/$1"
}

functions=()
add() { # a function and the bridges above it
    local part
    for part in $(readlink -f "/sys/bus/pci/devices/$1" | tr / '\n' | grep -E '^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$'); do
        case " ${functions[*]-} " in *" $part "*) ;; *) functions+=("$part") ;; esac
    done
}
group_of() {
    local link
    link=$(readlink "/sys/bus/pci/devices/$1/iommu_group") && echo "${link##*/}"
}
for bdf; do
    add "$bdf"
    group=$(group_of "$bdf") || continue
    for member in /sys/kernel/iommu_groups/"$group"/devices/*; do add "${member##*/}"; done
done
for bdf in "${functions[@]}"; do function_ "$bdf"; done
for bdf in "${functions[@]}"; do group_of "$bdf"; done | sort -nu | while read -r number; do group "$number"; done

there /dev/vfio/vfio /dev/iommu /dev/kvm
at /proc
text sys/kernel/osrelease
for line in meminfo:^MemTotal meminfo:^MemAvailable cpuinfo:^vendor_id 'cpuinfo:^address sizes' 'interrupts: IR-'; do
    grep -m1 -- "${line#*:}" "${line%%:*}" | sed "s/^/${line%%:*}: /"
done
at /sys
text module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
text kernel/mm/hugepages/*/{nr,free,resv}_hugepages kernel/mm/transparent_hugepage/{enabled,shmem_enabled}
text devices/system/node/online devices/system/node/node*/hugepages/*/{nr,free}_hugepages
