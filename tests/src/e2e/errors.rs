//! What the monitor says when it cannot start: each message names the thing and the remedy.

use crate::e2e::{Config, Outcome, Test, Verdict};

const BAD_FILES: &str = r#"
cd $TMPDIR
: >empty
head -c 100000 $LAB_KERNEL >truncated
head -c 100000 /dev/zero >zeros
mkdir -p directory
try() { # name, options
    local name=$1; shift
    "$LAB_VMM" "$@" >said 2>&1
    echo "CASE $name status=$? lines=$(grep -c . said) said=$(tr '\n' ' ' <said)"
}
for kernel in empty truncated zeros directory missing; do
    try $kernel --kernel $TMPDIR/$kernel --memory 256M
done
try no-initrd --kernel $LAB_KERNEL --initrd $TMPDIR/no-initrd --memory 256M
try directory-initrd --kernel $LAB_KERNEL --initrd $TMPDIR/directory --memory 256M"#;

/// Both functions of the slot belong to vfio-pci. A wrong option ends the second run after the check of the group.
const TOGETHER: &str = r#"
N=/sys/bus/pci/devices/$LAB_BDF_nic
echo $LAB_BDF_nic >$N/driver/unbind
echo vfio-pci >$N/driver_override
echo $LAB_BDF_nic >/sys/bus/pci/drivers_probe
echo "TWICE $("$LAB_VMM" --kernel $LAB_KERNEL --vfio $LAB_BDF_edu --vfio $LAB_BDF_edu 2>&1; echo status $?)"
echo "ALONE $("$LAB_VMM" --kernel $LAB_KERNEL --vfio $LAB_BDF_edu,no-mmap=3 2>&1 | tr '\n' ' ')"
guest 'lspci -Dn; probe edu 0000:00:01.1 factorial 5; nic e1000e | sed s/^/CARD./' --vfio $LAB_BDF_edu --vfio $LAB_BDF_nic
echo $LAB_BDF_nic >$N/driver/unbind
echo >$N/driver_override
echo $LAB_BDF_nic >/sys/bus/pci/drivers_probe"#;

/// One named twice is refused, one left out is named, and both together keep their function numbers.
fn functions_of_one_group(outcome: &Outcome) -> Verdict {
    let (twice, alone) = (outcome.value("TWICE")?, outcome.value("ALONE")?);
    if !twice.contains("named twice") || !outcome.has("status 3") {
        return Err(format!("a device named twice is not refused: {twice}"));
    }
    if !alone.contains("0.0 is not assigned") || !alone.contains("IOMMU group") {
        return Err(format!(
            "the function that is left out is not named: {alone}"
        ));
    }
    outcome.expect_clean()?;
    // Only the run that leaves it out says so.
    let told = outcome.output.matches("is not assigned though").count();
    if told != 1 {
        return Err(format!("{told} times a function is said to be left out"));
    }
    for function in [
        "0000:00:01.0 0200: 8086:10d3",
        "0000:00:01.1 00ff: 1234:11e8",
    ] {
        outcome.expect(function)?;
    }
    outcome.expect("CARD.eth")
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let mut tests = inputs();
    tests.extend(devices());
    tests
}

fn inputs() -> Vec<Test> {
    vec![
        Test::new(
            "errors::unusable_files",
            Config::default(),
            BAD_FILES,
            unusable_files,
        ),
        Test::new(
            "errors::malformed_address",
            Config::default(),
            "vmm --kernel $LAB_KERNEL --vfio 0000:zz:00.0; vmm --kernel $LAB_KERNEL --vfio 00:08.9",
            |outcome| {
                outcome.expect_vmm("2")?;
                outcome.expect("0000:zz:00.0")?;
                outcome.expect("00:08.9")
            },
        ),
        Test::new(
            "errors::absent_device",
            Config::default(),
            "vmm --kernel $LAB_KERNEL --vfio 0000:7f:1f.7",
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect("0000:7f:1f.7")?;
                outcome.expect("no such PCI device")
            },
        ),
        Test::new(
            "errors::unknown_option",
            Config::default(),
            "vmm --kernel $LAB_KERNEL --no-such-option; vmm",
            |outcome| outcome.expect_vmm("2"),
        ),
    ]
}

/// A disk on the host's driver, and a group of a device and a network card on the host's driver.
pub(super) fn pair() -> Config {
    Config::default()
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10")
        .disk("d0", 1)
        .host_device("nvme,id=disk,serial=lab,drive=d0")
        .host_device("e1000e,id=nic,bus=rp1,multifunction=on,addr=0.0")
        .device("edu,id=edu,bus=rp1,addr=0.1")
}

/// A host whose kernel does not use its IOMMU.
pub(super) fn without_iommu() -> Config {
    let machine = Config::default().device("edu,id=edu");
    machine.append("intel_iommu=off")
}

fn devices() -> Vec<Test> {
    vec![
        Test::new(
            "errors::bound_to_a_host_driver",
            pair(),
            "vmm --kernel $LAB_KERNEL --vfio $LAB_BDF_disk; echo DEVICE $LAB_BDF_disk",
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect(&outcome.value("DEVICE")?)?;
                // The driver and the one to bind instead, with a command that does it.
                outcome.expect("nvme")?;
                outcome.expect("vfio-pci")?;
                outcome.expect_any(&["driver_override", "driverctl", "bind"])
            },
        ),
        Test::new(
            "errors::group_member_with_a_host_driver",
            pair(),
            "vmm --kernel $LAB_KERNEL --vfio $LAB_BDF_edu; echo DEVICE $LAB_BDF_edu; echo MEMBER $LAB_BDF_nic",
            |outcome| {
                outcome.expect_vmm("3")?;
                let member = outcome.value("MEMBER")?;
                let told = outcome.output.matches(&member).count();
                // Once by the script itself.
                if told < 2 {
                    return Err(format!("the message does not name {member}"));
                }
                outcome.expect("e1000e")?;
                outcome.expect("vfio-pci")
            },
        ),
        Test::new(
            "errors::functions_of_one_group",
            pair(),
            TOGETHER,
            functions_of_one_group,
        ),
        Test::new(
            "errors::without_iommu",
            without_iommu(),
            "vmm --kernel $LAB_KERNEL --vfio $LAB_BDF_edu; echo DEVICE $LAB_BDF_edu",
            |outcome| {
                outcome.expect_vmm("3")?;
                outcome.expect(&outcome.value("DEVICE")?)?;
                outcome.expect_any(&["intel_iommu=on"])
            },
        ),
    ]
}

fn unusable_files(outcome: &Outcome) -> Verdict {
    outcome.reject("panicked")?;
    let cases: Vec<&str> = outcome.values("CASE").collect();
    if cases.len() != 7 {
        return Err(format!("{} cases ran, not 7", cases.len()));
    }
    for case in cases {
        let name = case.split(' ').next().unwrap_or_default();
        let said = case.split_once("said=").map_or("", |(_, said)| said);
        let file = name
            .strip_prefix("directory-initrd")
            .map_or(name, |_| "directory");
        if !case.contains(" status=2 ") {
            return Err(format!("{name}: the status is not 2: {case}"));
        }
        if !case.contains(" lines=1 ") {
            return Err(format!("{name}: the message is not one line: {case}"));
        }
        if !said.contains(&format!("/{file}")) {
            return Err(format!(
                "{name}: the message does not name the file: {said}"
            ));
        }
    }
    Ok(())
}
