//! Guest RAM: mapped for devices while the guest runs, from huge pages, within the host's limits.

use crate::e2e::{Config, Outcome, Test, Verdict};
use crate::setup::IOMMUFD_KERNEL;

/// All tests of the subject share it: a disk, and room for a guest of 4 GiB.
pub(super) fn config() -> Config {
    Config::default()
        .memory("8G")
        .disk("d0", 16)
        .device("nvme,id=nvme,serial=lab,drive=d0")
}

/// What the guest runs to read the disk: DISK with its checksum.
const READ_DISK: &str =
    "probe wait /dev/nvme0n1; echo DISK $(head -c 1048576 /dev/nvme0n1 | sha256sum)";
const IMAGE: &str = "echo \"IMAGE $(head -c 1048576 $LAB_DISK_d0 | sha256sum)\"\n";

/// The profile's event of a vCPU whose guest was told by KVM_KVMCLOCK_CTRL.
const HELD_UP: &str = "guest: told that a vCPU was held up";

/// Guest and RAM's threads share a CPU of the host: the guest comes to the gate while RAM is far from being populated.
const ONE_CPU: &str = "taskset -pc 0 $$ >/dev/null";

/// Prints the profile's events in order of time, each as "EVENT name".
const EVENTS: &str = r#"
events() { # file with a profile in JSON
    grep -o '"events":.*"calls"' "$1" | grep -o '"name":"[^"]*"' | sed 's/"name":"\(.*\)"/EVENT \1/'
}
"#;

const NO_NODES: &str = "it is built without NUMA, so that it has no nodes";

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let mut tests = mapping();
    tests.extend(backing());
    tests.extend(limits());
    tests
}

/// Guests that wait for the gate before their first instruction until they are ended, with a terminal and without one.
const TERMINAL: &str = r#"
mkfifo $TMPDIR/silent
exec 4<>$TMPDIR/silent
waits="timeout --foreground 10 $LAB_VMM --kernel $LAB_KERNEL --memory 512M --prefault on --test-hold-dma-gate 3600"
on_terminal() { # options
    script -qec "$waits $*" $TMPDIR/typescript <&4 >/dev/null
    tr '\r\033' '\n ' <$TMPDIR/typescript | grep -a -m1 'GiB allocated'
}
echo "ALONE $(on_terminal)"
echo "DEVICES $(on_terminal --vfio $LAB_BDF_nvme)"
$waits --boot-profile table 2>$TMPDIR/said <&4
echo "WAITED $(grep -c 'wait for guest RAM' $TMPDIR/said)"
echo "REDIRECTED $(grep -c 'GiB allocated' $TMPDIR/said)"
"#;

fn mapping() -> Vec<Test> {
    vec![
        Test::new(
            "ram::a_disk_is_read_right_when_its_driver_waited_for_4_gib_to_be_mapped",
            config(),
            format!(
                "{IMAGE}{EVENTS}{ONE_CPU}
                 GUEST_MEMORY=4G guest '{READ_DISK}' --vfio $LAB_BDF_nvme \\
                     --boot-profile json 2>$TMPDIR/profile
                 events $TMPDIR/profile"
            ),
            |outcome| {
                reads_the_disk(outcome)?;
                // The guest did not wait for its RAM before it started, and its driver came to the gate before RAM was
                // mapped.
                in_order(outcome, "first guest instruction", "wait for guest RAM")?;
                in_order(outcome, "wait for guest RAM", "RAM mapped for DMA")
            },
        )
        .within(180),
        Test::new(
            "ram::eager_maps_before_the_first_instruction",
            config(),
            format!(
                "{IMAGE}{EVENTS}
                 guest '{READ_DISK}' --vfio $LAB_BDF_nvme --dma-map eager \\
                     --boot-profile json 2>$TMPDIR/profile
                 events $TMPDIR/profile"
            ),
            |outcome| {
                reads_the_disk(outcome)?;
                in_order(outcome, "RAM mapped for DMA", "first guest instruction")
            },
        ),
        Test::new(
            "ram::a_minute_at_the_gate_is_not_noticed_by_the_guest",
            config(),
            format!(
                "{IMAGE}{EVENTS}
                 GUEST_APPEND=watchdog_thresh=5
                 GUEST_CPUS=2 guest '{READ_DISK}; echo UPTIME $(cut -d. -f1 /proc/uptime);
                     dmesg | grep -iw -e stal[l] -e stal[l]s -e locku[p] -e hun[g] -e blocke[d] | sed s/^/NOTICED./' \\
                     --vfio $LAB_BDF_nvme --test-hold-dma-gate 60 --boot-profile json 2>$TMPDIR/profile
                 events $TMPDIR/profile"
            ),
            |outcome| {
                reads_the_disk(outcome)?;
                outcome.expect_number("UPTIME", 60..=3600)?;
                outcome.reject("NOTICED")?;
                // Each of the vCPUs.
                match outcome.values("EVENT").filter(|name| *name == HELD_UP).count() {
                    0 | 1 => Err(format!("`{HELD_UP}` is not in the profile for both vCPUs")),
                    _ => Ok(()),
                }
            },
        )
        .within(240),
        Test::new(
            "ram::a_signal_ends_a_guest_that_waits_at_the_gate",
            config(),
            "guest 'probe wait /dev/nvme0n1' --vfio $LAB_BDF_nvme --test-hold-dma-gate 3600 >$TMPDIR/out 2>&1 &
             for i in $(seq 600); do grep -q 'MARK 0x41' $TMPDIR/out && break; sleep 0.1; done
             sleep 5
             kill $(pgrep -x $(basename $LAB_VMM)); wait; cat $TMPDIR/out",
            |outcome| outcome.expect_vmm("143"),
        ),
        Test::new(
            "ram::a_wait_of_more_than_a_second_is_told_on_a_terminal_alone",
            config(),
            TERMINAL,
            |outcome| {
                outcome.reject("panicked")?;
                for (key, end) in [("ALONE", " of 0.5 GiB allocated"), ("DEVICES", " mapped for DMA")] {
                    let line = outcome.value(key)?;
                    if !line.contains("mini-vmm: guest RAM: 0.") || !line.contains(end) {
                        return Err(format!("{key}: on the terminal: {line:?}"));
                    }
                }
                // The profile names it, and nothing else does.
                outcome.expect_number("WAITED", 1..=9)?;
                outcome.expect_number("REDIRECTED", 0..=0)
            },
        ),
        Test::new(
            "ram::prefault_populates_before_the_first_instruction",
            config(),
            format!(
                "{EVENTS} guest true --prefault on --boot-profile json 2>$TMPDIR/profile
                 events $TMPDIR/profile"
            ),
            |outcome| {
                outcome.expect_clean()?;
                in_order(outcome, "RAM populated", "first guest instruction")
            },
        ),
    ]
}

/// Sums what the IOMMU was given, and how much of it in whole leaves of the size in $1 (2 MiB or 1 GiB).
const LEAVES: &str = r#"
trace=/sys/kernel/tracing
leaves() {
    local size=$1 iova paddr bytes all=0 whole=0 first
    sed -n 's/.*map: IOMMU: iova=\(0x[0-9a-f]*\) - 0x[0-9a-f]* paddr=\(0x[0-9a-f]*\) size=\([0-9]*\).*/\1 \2 \3/p' \
        $trace/trace >$TMPDIR/maps
    while read -r iova paddr bytes; do
        all=$((all + bytes))
        (( (iova - paddr) % size )) && continue
        first=$(( (iova + size - 1) / size * size ))
        (( iova + bytes > first )) && whole=$((whole + (iova + bytes - first) / size * size))
    done <$TMPDIR/maps
    echo "LEAVES $((all ? whole * 100 / all : 0))"
    echo "BYTES $((all >> 20))"
}
echo >$trace/trace
echo 1 >$trace/events/iommu/map/enable
"#;

fn backing() -> Vec<Test> {
    let huge = |pool: &str, pages: u32, memory: &str, leaf: u64| {
        format!(
            "{IMAGE}{LEAVES}
             echo {pages} >/sys/kernel/mm/hugepages/hugepages-{pool}kB/nr_hugepages
             GUEST_MEMORY={memory} guest '{READ_DISK}' --vfio $LAB_BDF_nvme
             echo 0 >$trace/events/iommu/map/enable
             echo 0 >/sys/kernel/mm/hugepages/hugepages-{pool}kB/nr_hugepages
             leaves {leaf}"
        )
    };
    vec![
        Test::new(
            "ram::huge_pages_of_2_mib_reach_the_iommu_whole",
            config(),
            huge("2048", 256, "512M,hugepages=2M", 2 << 20),
            |outcome| in_leaves(outcome, 512, 95),
        ),
        Test::new(
            "ram::huge_pages_of_1_gib_reach_the_iommu_whole",
            config(),
            huge("1048576", 1, "1G,hugepages=1G", 1 << 30),
            |outcome| in_leaves(outcome, 1024, 95),
        ),
        Test::new(
            "ram::transparent_huge_pages_reach_the_iommu_whole",
            config(),
            format!(
                "{IMAGE}{LEAVES}
                 guest '{READ_DISK}' --vfio $LAB_BDF_nvme
                 echo 0 >$trace/events/iommu/map/enable
                 leaves $((2 << 20))"
            ),
            |outcome| in_leaves(outcome, 512, 90),
        ),
        Test::new(
            "ram::more_than_the_host_has_boots_a_guest_that_uses_little",
            config(),
            "GUEST_MEMORY=1228G GUEST_APPEND=mem=2G guest 'grep MemTotal /proc/meminfo'",
            |outcome| outcome.expect_clean(),
        ),
    ]
}

fn limits() -> Vec<Test> {
    // As an ordinary user who may use the device.
    const UNPRIVILEGED: &str = r#"
group=$(basename $(readlink /sys/bus/pci/devices/$LAB_BDF_nvme/iommu_group))
chown 1000 /dev/vfio/$group /dev/vfio/vfio /dev/kvm
[ ! -e /dev/iommu ] || chown 1000 /dev/iommu /dev/vfio/devices/*
chmod 755 $TMPDIR
install -m 644 $LAB_KERNEL $TMPDIR/kernel
install -m 644 $LAB_INITRD $TMPDIR/initrd
unprivileged() { # hard limit of locked memory, options
    local limit=$1; shift
    prlimit --memlock=65536:$limit setpriv --reuid 1000 --regid 1000 --clear-groups \
        $LAB_VMM --kernel $TMPDIR/kernel --initrd $TMPDIR/initrd --vfio $LAB_BDF_nvme "$@" $LAB_VMM_OPTIONS
    echo "VMM EXIT $?"
}
"#;
    vec![
        Test::new(
            "ram::a_low_limit_of_locked_memory_is_told_before_the_start",
            config(),
            format!("{UNPRIVILEGED} unprivileged 65536 --memory 1G"),
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect("1 GiB")?;
                outcome.expect("64 KiB")?;
                outcome.expect("ulimit -l 1048576")
            },
        ),
        Test::new(
            "ram::the_soft_limit_of_locked_memory_is_raised",
            config(),
            format!(
                "{IMAGE}{UNPRIVILEGED} unprivileged unlimited --memory 256M \\
                     --cmdline \"$LAB_CMDLINE RUN=\\\"\"'{READ_DISK}\"'"
            ),
            reads_the_disk,
        ),
        Test::new(
            "ram::too_few_huge_pages_are_told_before_the_start",
            config(),
            "vmm --kernel $LAB_KERNEL --memory 512M,hugepages=2M
             vmm --kernel $LAB_KERNEL --memory 512M,hugepages=2M,node=0",
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect("needs 256 huge pages of 2M")?;
                outcome.expect("NUMA node 0")?;
                outcome.expect("nr_hugepages")
            },
        )
        .not_on(IOMMUFD_KERNEL, NO_NODES),
        Test::new(
            "ram::a_node_can_be_chosen",
            config(),
            "GUEST_MEMORY=256M,node=0 guest true; GUEST_MEMORY=256M,node=auto guest true --vfio $LAB_BDF_nvme
             vmm --kernel $LAB_KERNEL --memory 512M,node=7",
            |outcome| {
                outcome.expect("node=7")?;
                let ends: Vec<_> = outcome.values("VMM EXIT").collect();
                match ends.as_slice() {
                    ["0", "0", "3"] => Ok(()),
                    _ => Err(format!("the exits are {ends:?}")),
                }
            },
        )
        .within(240)
        .not_on(IOMMUFD_KERNEL, NO_NODES),
    ]
}

fn reads_the_disk(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    outcome.same_checksum("IMAGE", "DISK").map(drop)
}

/// The guest read its disk, and of so many MiB the IOMMU got at least that percentage in whole leaves.
fn in_leaves(outcome: &Outcome, mib: u64, percentage: u64) -> Verdict {
    reads_the_disk(outcome)?;
    outcome.expect_number("BYTES", mib..=mib + mib / 8)?;
    outcome.expect_number("LEAVES", percentage..=100)
}

/// One of the profile's events came before the other.
fn in_order(outcome: &Outcome, first: &str, second: &str) -> Verdict {
    let place = |wanted: &str| {
        let mut events = outcome.values("EVENT");
        events.position(|name| name == wanted)
    };
    match (place(first), place(second)) {
        (Some(a), Some(b)) if a < b => Ok(()),
        (Some(_), Some(_)) => Err(format!("`{second}` came before `{first}`")),
        _ => Err(format!("`{first}` or `{second}` is not in the profile")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_compared_by_their_order() {
        let outcome = Outcome {
            output: "EVENT a b\nEVENT c\n".to_owned(),
            ..Outcome::default()
        };
        assert_eq!(in_order(&outcome, "a b", "c"), Ok(()));
        assert!(in_order(&outcome, "c", "a b").is_err());
        assert!(in_order(&outcome, "c", "d").is_err());
    }
}
