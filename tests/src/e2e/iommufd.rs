//! The host's kernel with iommufd: a choice of the other subjects' tests in one boot of it, and what is iommufd's own.

use crate::e2e::{Config, Outcome, Test, Verdict, bars, demo, resets};
use crate::setup::IOMMUFD_KERNEL;

/// Everything that the tests of this file use, and those that they take from other files.
pub fn machine() -> Config {
    Config::default()
        .on(IOMMUFD_KERNEL)
        .gpus(2, "16G")
        .qemu("-object memory-backend-memfd,id=store,size=16G,share=on")
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10")
        .disk("d0", 16)
        .device("edu,id=edu,dma_mask=0xffffffffffffffff")
        .device("ivshmem-plain,id=store,memdev=store")
        .device("nvme,id=nvme,serial=lab,drive=d0,bus=rp1")
        .storing_beside_a_card()
}

/// Tests of other subjects, by the names that they have there and here.
const CHOICE: [(&str, &str); 4] = [
    ("demo::two_gpus_and_a_disk", "iommufd::two_gpus_and_a_disk"),
    (
        "bars::dma_reaches_another_device_before_and_after_its_bar_moved",
        "iommufd::dma_reaches_another_device_before_and_after_its_bar_moved",
    ),
    (
        "bars::a_device_that_the_host_takes_back_ends_the_run",
        "iommufd::a_device_that_the_host_takes_back_ends_the_run",
    ),
    (
        "resets::dma_reaches_a_function_before_and_after_its_bar_moved_and_its_bus_was_reset",
        "iommufd::dma_reaches_a_function_before_and_after_its_bar_moved_and_its_bus_was_reset",
    ),
];

/// The disk's function is reset by the guest's kernel. edu copies the disk's CAP register into the storing device before
/// and after that: the reset has revoked the dma-buf by which the IOMMU reaches the register. The profile says what
/// `--iommu auto` has decided.
const RESET: &str = r#"
guest 'E=0000:00:01.0; V=0000:00:02.0; D=0000:00:03.0; N=/sys/bus/pci/devices/$D; probe enable $V;
    bar() { sed -n $2p /sys/bus/pci/devices/$1/resource | cut -d\  -f1; };
    at() { probe read $1 8 | sed s/.*value=//; };
    sum() { echo 3 >/proc/sys/vm/drop_caches; head -c 1048576 /dev/nvme0n1 | sha256sum; };
    A=$(bar $V 3); probe wait /dev/nvme0n1; echo BEFORE $(sum);
    probe edu $E copy $(bar $D 1) $A 8; echo COPIED $(at $A);
    cat $N/reset_method; echo 1 >$N/reset && echo RESET done;
    probe edu $E copy $(bar $D 1) $((A + 0x1000)) 8; echo COPIED $(at $((A + 0x1000)));
    probe wait /dev/nvme0n1; echo AFTER $(sum)' \
    --vfio $LAB_BDF_edu --vfio $LAB_BDF_store --vfio $LAB_BDF_nvme --iommu auto --boot-profile json 2>$TMPDIR/profile
grep -ao 'IOMMU backend: [^"]*' $TMPDIR/profile"#;

/// As an ordinary user, who may use one file after the other.
const ACCESS: &str = r#"
chown root /dev/iommu /dev/vfio/[0-9]* /dev/vfio/devices/*
chmod 600 /dev/iommu /dev/vfio/[0-9]* /dev/vfio/devices/*
chown 1000 /dev/kvm
chmod 755 $TMPDIR
install -m 644 $LAB_KERNEL $TMPDIR/kernel
install -m 644 $LAB_INITRD $TMPDIR/initrd
cdev=/dev/vfio/devices/$(ls /sys/bus/pci/devices/$LAB_BDF_edu/vfio-dev)
group=/dev/vfio/$(basename $(readlink /sys/bus/pci/devices/$LAB_BDF_edu/iommu_group))
as_user() { # name, limit of locked memory, options
    local name=$1 limit=$2; shift 2
    prlimit --memlock=$limit:$limit setpriv --reuid 1000 --regid 1000 --clear-groups \
        $LAB_VMM --kernel $TMPDIR/kernel --initrd $TMPDIR/initrd --memory 256M --vfio $LAB_BDF_edu \
        --cmdline "$LAB_CMDLINE RUN=true" "$@" >$TMPDIR/said 2>&1
    local status=$?
    echo "CASE $name status=$status said=$(grep -a mini-vmm: $TMPDIR/said | tr '\n' ' ')"
}
echo "CDEV $cdev"
echo "GROUP $group"
as_user neither unlimited --iommu iommufd
as_user auto-without-both unlimited --iommu auto
chown 1000 /dev/iommu
as_user no-cdev unlimited --iommu iommufd
chown 1000 $cdev
as_user low-limit 65536 --iommu iommufd
as_user all unlimited --iommu iommufd
chown root /dev/iommu $cdev
chown 1000 $group /dev/vfio/vfio
as_user auto-with-group unlimited --iommu auto"#;

/// Two devices on a kernel that exports no dma-buf (VFIO_DEVICE_FEATURE is known for nothing else here).
const NO_DMABUF: &str = r#"
export REFUSED_IOCTL=0x3b75
both="--iommu auto --vfio $LAB_BDF_edu --vfio $LAB_BDF_nvme"
guest 'probe wait /dev/nvme0n1; probe mark 0x42' $both >$TMPDIR/said 2>&1
echo "CASE by-itself status=$(sed -n 's/^VMM EXIT //p' $TMPDIR/said) said=$(grep -a mini-vmm: $TMPDIR/said | tr '\n' ' ')"
echo "MESSAGES $(grep -ac mini-vmm: $TMPDIR/said)"
vmm --kernel $LAB_KERNEL $both,p2p=on >$TMPDIR/said 2>&1
echo "CASE p2p=on status=$(sed -n 's/^VMM EXIT //p' $TMPDIR/said) said=$(grep -a mini-vmm: $TMPDIR/said | tr '\n' ' ')"
echo "DEVICES $LAB_BDF_edu $LAB_BDF_nvme""#;

/// While a guest has the device, on either interface, another gets it on neither.
const IN_USE: &str = r#"
for holder in iommufd type1; do
    guest 'sleep 600' --vfio $LAB_BDF_edu --iommu $holder >$TMPDIR/out 2>&1 &
    until ls -l /proc/$(pgrep -x "$(basename $LAB_VMM)")/fd 2>/dev/null | grep -q kvm-vcpu; do sleep 0.1; done
    sleep 1
    for interface in iommufd type1; do
        "$LAB_VMM" --kernel $LAB_KERNEL --vfio $LAB_BDF_edu --iommu $interface >$TMPDIR/said 2>&1
        echo "CASE $holder-$interface status=$? said=$(tr '\n' ' ' <$TMPDIR/said)"
    done
    pkill -KILL -x "$(basename $LAB_VMM)"
    wait
done"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let mut tests = chosen();
    tests.extend([
        Test::new(
            "iommufd::auto_takes_it_and_dma_reaches_a_device_before_and_after_its_reset",
            machine(),
            RESET,
            after_reset,
        ),
        Test::new(
            "iommufd::files_that_may_not_be_used_are_told_with_the_command",
            machine(),
            ACCESS,
            access,
        ),
        Test::new(
            "iommufd::without_dma_buf_peers_are_off_and_that_is_said_once",
            machine(),
            NO_DMABUF,
            without_dmabuf,
        ),
        Test::new(
            "iommufd::a_device_in_use_is_told_on_both_interfaces",
            machine(),
            IN_USE,
            in_use,
        ),
    ]);
    tests
}

fn chosen() -> Vec<Test> {
    let all = [bars::tests(), demo::tests(), resets::tests()];
    let all = all.into_iter().flatten();
    all.filter_map(|test| {
        let (_, name) = CHOICE.iter().find(|(there, _)| *there == test.name)?;
        Some(Test {
            name,
            config: machine(),
            ..test
        })
    })
    .collect()
}

fn after_reset(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    outcome.expect("IOMMU backend: iommufd, since")?;
    outcome.expect("flr")?;
    outcome.expect("RESET done")?;
    outcome.same_checksum("BEFORE", "AFTER")?;
    // Its driver keeps others from reading the register, but it is known to say that queues have up to 2048 entries.
    let copies: Vec<_> = outcome.values("COPIED").collect();
    match copies.as_slice() {
        [before, after] if before == after && before.ends_with("07ff") => Ok(()),
        _ => Err(format!("copied by DMA, CAP was {copies:?}")),
    }
}

/// Each case, in this order, ended with the status and said the words (`CDEV` and `GROUP` are the device's files).
fn cases(outcome: &Outcome, expected: &[(&str, u8, &[&str])]) -> Verdict {
    outcome.reject("panicked")?;
    let cases: Vec<&str> = outcome.values("CASE").collect();
    if cases.len() != expected.len() {
        return Err(format!("{} cases ran, not {}", cases.len(), expected.len()));
    }
    let file = |key| outcome.value(key).unwrap_or_default();
    for (case, (name, status, words)) in cases.iter().zip(expected) {
        if !case.starts_with(&format!("{name} status={status} ")) {
            return Err(format!("{name} is to end with {status}: {case}"));
        }
        for word in *words {
            let word = word
                .replace("CDEV", &file("CDEV"))
                .replace("GROUP", &file("GROUP"));
            if !case.contains(&word) {
                return Err(format!("{name} does not say `{word}`: {case}"));
            }
        }
    }
    Ok(())
}

fn access(outcome: &Outcome) -> Verdict {
    cases(
        outcome,
        &[
            ("neither", 3, &["chown 1000 /dev/iommu"]),
            ("auto-without-both", 3, &["chown 1000 GROUP"]),
            ("no-cdev", 3, &["cannot open CDEV", "chown 1000 CDEV"]),
            (
                "low-limit",
                3,
                &["256 MiB", "64 KiB", "here PID", "ulimit -l 262144"],
            ),
            ("all", 0, &[]),
            ("auto-with-group", 0, &[]),
        ],
    )
}

fn without_dmabuf(outcome: &Outcome) -> Verdict {
    let devices = outcome.value("DEVICES")?;
    let off: Vec<&str> = ["peer-to-peer is off for"]
        .into_iter()
        .chain(devices.split(' '))
        .collect();
    let refused: &[&str] = &["cannot be exported as dma-buf", "--iommu type1 or p2p=off"];
    outcome.expect_number("MESSAGES", 1..=1)?;
    cases(outcome, &[("by-itself", 0, &off), ("p2p=on", 3, refused)])
}

fn in_use(outcome: &Outcome) -> Verdict {
    let told: &[&str] = &["in use by another process", "fuser -v"];
    cases(
        outcome,
        &[
            ("iommufd-iommufd", 3, told),
            ("iommufd-type1", 3, told),
            ("type1-iommufd", 3, told),
            ("type1-type1", 3, told),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_that_is_chosen_exists() {
        assert_eq!(chosen().len(), CHOICE.len());
    }
}
