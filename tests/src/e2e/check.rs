//! `mini-vmm check` on hosts that are not ready: it says what the boot says, and when its printed
//! command has been run, it passes and the guest starts.

use crate::e2e::{Outcome, Test, Verdict, demo, errors, gpus, interrupts, iommufd, ram};

/// Shell functions of these tests.
const FUNCTIONS: &str = r#"
check() { # devices and options
    "$LAB_VMM" check "$@" >$TMPDIR/check
    echo "CHECK EXIT $?"
    cat $TMPDIR/check
}
boot() { # options
    local said
    said=$("$LAB_VMM" --kernel $LAB_KERNEL "$@" 2>&1 </dev/null)
    echo "VMM EXIT $?"
    echo "SAID ${said//$'\n'/ | }"
}
mend() { # runs the commands that the last check printed
    sed -n 's/^ *fix: //p' $TMPDIR/check >$TMPDIR/fixes
    echo "MENDED $(grep -c . $TMPDIR/fixes)"
    sh -e $TMPDIR/fixes || echo "a command failed"
}
rebind() { # device, driver: gives it back
    echo >/sys/bus/pci/devices/$1/driver_override
    echo $1 >/sys/bus/pci/devices/$1/driver/unbind
    echo $1 >/sys/bus/pci/drivers/$2/bind
}
"#;

/// What an ordinary user does, who may use KVM and nothing else, while root mends. OPTIONS are more of the user's.
const USER: &str = r#"
group=$(basename $(readlink /sys/bus/pci/devices/$LAB_BDF_nvme/iommu_group))
chown 0 /dev/vfio/$group
[ ! -e /dev/iommu ] || chown 0 /dev/iommu /dev/vfio/devices/*
chown 1000 /dev/kvm
chmod 755 $TMPDIR
install -m 644 $LAB_KERNEL $TMPDIR/kernel
install -m 644 $LAB_INITRD $TMPDIR/initrd
mkfifo $TMPDIR/first $TMPDIR/second
chmod 666 $TMPDIR/first $TMPDIR/second
options="--vfio $LAB_BDF_nvme --memory 256M $OPTIONS"
export options
prlimit --memlock=65536:65536 setpriv --reuid 1000 --regid 1000 --clear-groups bash -c '
    "$LAB_VMM" check $options >$TMPDIR/first
    "$LAB_VMM" --kernel $TMPDIR/kernel $options 2>$TMPDIR/second
    read -r <$TMPDIR/first
    "$LAB_VMM" check $options >$TMPDIR/second
    "$LAB_VMM" --kernel $TMPDIR/kernel --initrd $TMPDIR/initrd --cmdline "$LAB_CMDLINE RUN=true" $options
    echo "VMM EXIT $?"' &
cat $TMPDIR/first | tee $TMPDIR/check
echo "SAID $(cat $TMPDIR/second)"
mend
echo go >$TMPDIR/first
cat $TMPDIR/second
wait
"#;

/// A network card of the host's whose driver has made two virtual functions, and one of them.
const VIRTUAL_FUNCTION: &str = r#"
pf=/sys/bus/pci/devices/$LAB_BDF_shared
echo 0 >$pf/sriov_drivers_autoprobe
echo 2 >$pf/sriov_numvfs
vf=$(basename $(readlink $pf/virtfn0))
echo "PF $LAB_BDF_shared"
echo "VF $vf"
echo "BEFORE $($LAB_VMM devices --json)"
check $vf; boot --vfio $vf; mend; check $vf
echo "AFTER $($LAB_VMM devices --json)"
"$LAB_VMM" devices
guest true --vfio $vf >$TMPDIR/out; cat $TMPDIR/out
check $LAB_BDF_shared
echo 0 >$pf/sriov_numvfs"#;

/// What is told of the host's kernel to one device, to two that reach each other, and to two that do not.
const GENERATIONS: &str = r#"
echo "RELEASE $(uname -r)"
generation() { # name, devices
    local name=$1
    shift
    "$LAB_VMM" check "$@" --iommu type1 | sed -n "s/^\(OK\|WARN\) *kernel */$name \1 /p"
}
generation ALONE $LAB_BDF_nvme
generation PEERS $LAB_BDF_nvme $LAB_BDF_ahci
generation APART $LAB_BDF_nvme,p2p=off $LAB_BDF_ahci,p2p=off"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let script = |body: &str| format!("{FUNCTIONS}{body}");
    let mut tests = devices(&script);
    tests.extend([
        Test::new(
            "check::an_iommu_that_is_off",
            errors::without_iommu(),
            script("check $LAB_BDF_edu; boot --vfio $LAB_BDF_edu"),
            |outcome| {
                expect_checks(outcome, &["3"])?;
                outcome.expect_vmm("3")?;
                let failure = told_alike(outcome, "iommu")?;
                expect_in(&failure.remedy, "intel_iommu=on")
            },
        ),
        Test::new(
            "check::a_bar_beyond_the_iommu",
            gpus::narrow("512G"),
            script(
                "check $LAB_BDFS --memory 256M; boot --vfio $LAB_BDFS --memory 256M
                 check $LAB_BDFS,p2p=off --memory 256M",
            ),
            |outcome| {
                expect_checks(outcome, &["3", "0"])?;
                outcome.expect_vmm("3")?;
                let failure = told_alike(outcome, "bar")?;
                expect_in(&failure.text, "2^39")?;
                expect_in(&failure.remedy, "p2p=off")
            },
        ),
        Test::new(
            "check::a_bar_below_the_limit_of_the_iommu",
            gpus::narrow("16G"),
            script(
                "check $LAB_BDFS --memory 256M
                 GUEST_MEMORY=256M guest 'probe gpus' --vfio $LAB_BDFS",
            ),
            |outcome| {
                expect_checks(outcome, &["0"])?;
                outcome.expect_clean()?;
                // The address that was told beforehand is the one that the guest sees.
                let told = outcome.output.lines().find_map(|line| {
                    let (_, rest) = line.split_once("BAR 2, 16 GiB 64-bit prefetchable, at ")?;
                    rest.split(',').next()
                });
                let told = told.ok_or("no address was told")?;
                let bars = outcome.probe("touched");
                let seen = bars.iter().any(|bar| bar.get("address") == Some(&told));
                match seen {
                    true => Ok(()),
                    false => Err(format!("the guest has no BAR at {told}: {bars:?}")),
                }
            },
        ),
        Test::new(
            "check::too_few_huge_pages",
            ram::config(),
            script(
                "options='--memory 256M,hugepages=2M'
                 check $LAB_BDF_nvme $options; boot --vfio $LAB_BDF_nvme $options
                 mend; check $LAB_BDF_nvme $options
                 GUEST_MEMORY=256M,hugepages=2M guest true --vfio $LAB_BDF_nvme >$TMPDIR/out; cat $TMPDIR/out
                 echo 0 >/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            ),
            |outcome| mended(outcome, "hugepages", 1),
        ),
        Test::new(
            "check::an_ordinary_user_who_may_lock_64_kib",
            ram::config(),
            script(USER),
            |outcome| {
                // The check tells both obstacles at once, the boot the first.
                let failures = failures(outcome);
                let topics: Vec<&str> = failures.iter().map(|f| f.topic.as_str()).collect();
                if topics != ["memlock", "access"] {
                    return Err(format!("the failures are {topics:?}"));
                }
                let failure = told_alike(outcome, "memlock")?;
                expect_in(&failure.text, "64 KiB")?;
                outcome.expect("MENDED 2")?;
                outcome.reject("a command failed")?;
                outcome.expect("A guest can be started")?;
                outcome.expect_clean()
            },
        ),
        Test::new(
            "check::an_ordinary_user_of_iommufd",
            iommufd::machine(),
            script(&format!("OPTIONS='--iommu iommufd'{USER}")),
            |outcome| {
                let failures = failures(outcome);
                let topics: Vec<&str> = failures.iter().map(|f| f.topic.as_str()).collect();
                if topics != ["memlock", "access", "access"] {
                    return Err(format!("the failures are {topics:?}"));
                }
                told_alike(outcome, "memlock")?;
                // One command for each file.
                outcome.expect("fix: chown 1000 /dev/iommu")?;
                outcome.expect("fix: chown 1000 /dev/vfio/devices/vfio")?;
                outcome.expect("MENDED 3")?;
                outcome.reject("a command failed")?;
                outcome.expect("backend   iommufd, as asked for: its files may be used")?;
                outcome.expect("A guest can be started")?;
                outcome.expect_clean()
            },
        ),
        Test::new(
            "check::a_dry_run_shows_where_everything_will_be",
            ram::config(),
            script(
                "\"$LAB_VMM\" --kernel $LAB_KERNEL --memory 4G --vfio $LAB_BDF_nvme --dry-run; echo \"VMM EXIT $?\"
                 \"$LAB_VMM\" --kernel $LAB_KERNEL --memory 4G --vfio 7f:1f.7 --dry-run; echo \"SECOND $?\"",
            ),
            |outcome| {
                outcome.expect_vmm("0")?;
                outcome.expect("RAM        0x100000000-0x13fffffff")?;
                outcome.expect("BAR 0, 16 KiB 64-bit, at 0xd0000000")?;
                outcome.expect("SECOND 3")
            },
        ),
        Test::new(
            "check::all_that_is_told_can_be_read_by_a_program",
            ram::config(),
            "echo \"DEVICES $($LAB_VMM devices --json)\"; echo \"CHECK $($LAB_VMM check $LAB_BDF_nvme --json)\"
             echo BDF $LAB_BDF_nvme",
            |outcome| {
                let json = |key| -> Result<serde_json::Value, String> {
                    let text = outcome.value(key)?;
                    serde_json::from_str(&text).map_err(|error| format!("{key}: {error}"))
                };
                let bdf = outcome.value("BDF")?;
                let devices = json("DEVICES")?;
                let mut listed = devices.as_array().into_iter().flatten();
                let ready = listed.any(|device| device["bdf"] == bdf && device["state"] == "ready");
                let check = json("CHECK")?;
                match ready && check["ready"] == true && check["plan"]["bars"][0]["device"] == bdf {
                    true => Ok(()),
                    false => Err(format!("not ready: {check}")),
                }
            },
        ),
    ]);
    tests
}

fn devices(script: &impl Fn(&str) -> String) -> Vec<Test> {
    vec![
        Test::new(
            "check::a_device_on_its_host_driver",
            errors::pair(),
            script(
                "check $LAB_BDF_disk; boot --vfio $LAB_BDF_disk; mend; check $LAB_BDF_disk
                 guest true --vfio $LAB_BDF_disk >$TMPDIR/out; cat $TMPDIR/out
                 rebind $LAB_BDF_disk nvme",
            ),
            |outcome| {
                mended(outcome, "driver", 1)?;
                let failure = told_alike(outcome, "driver")?;
                expect_in(&failure.text, "nvme")
            },
        ),
        Test::new(
            "check::a_group_member_on_its_host_driver",
            errors::pair(),
            script(
                "echo MEMBER $LAB_BDF_nic; check $LAB_BDF_edu; boot --vfio $LAB_BDF_edu; mend; check $LAB_BDF_edu
                 guest true --vfio $LAB_BDF_edu >$TMPDIR/out; cat $TMPDIR/out
                 rebind $LAB_BDF_nic e1000e",
            ),
            |outcome| {
                mended(outcome, "group", 1)?;
                let failure = told_alike(outcome, "group")?;
                expect_in(&failure.text, &outcome.value("MEMBER")?)
            },
        ),
        Test::new(
            "check::a_virtual_function_and_the_card_that_it_is_of",
            interrupts::sr_iov(),
            script(VIRTUAL_FUNCTION),
            virtual_function,
        ),
        Test::new(
            "check::what_the_hosts_kernel_costs",
            demo::config(),
            GENERATIONS,
            generation,
        ),
    ]
}

/// The virtual function is told apart from its card, and is assigned like any device; whoever wants the card itself is told
/// what goes with it.
fn virtual_function(outcome: &Outcome) -> Verdict {
    expect_checks(outcome, &["3", "0", "3"])?;
    let (pf, vf) = (outcome.value("PF")?, outcome.value("VF")?);
    for (key, state) in [("BEFORE", "unbound"), ("AFTER", "ready")] {
        let text = outcome.value(key)?;
        let list: serde_json::Value =
            serde_json::from_str(&text).map_err(|error| format!("{key}: {error}"))?;
        let field = |bdf: &str, name: &str| {
            let mut devices = list.as_array().into_iter().flatten();
            let device = devices.find(|device| device["bdf"] == bdf);
            device.map(|device| device[name].clone())
        };
        let told = [
            field(&pf, "state"),
            field(&pf, "virtual_functions"),
            field(&vf, "state"),
            field(&vf, "physical_function"),
            field(&vf, "virtual_functions"),
        ];
        let expected = [
            "in-use".into(),
            "2 of 7".into(),
            state.into(),
            pf.as_str().into(),
            serde_json::Value::Null,
        ];
        if told != expected.map(Some) {
            return Err(format!("{key}: {told:?}"));
        }
    }
    outcome.expect("virtual functions 2 of 7")?;
    outcome.expect(&format!("virtual function of {pf}"))?;
    let failure = told_alike(outcome, "driver")?;
    expect_in(&failure.text, &format!("{vf}: it is not bound to vfio-pci"))?;
    outcome.expect("MENDED 1")?;
    outcome.reject("a command failed")?;
    // Its network is up as well where another test had used it.
    let used = format!(
        "{pf}: it is bound to the host driver igb, not to vfio-pci, and the host uses it ("
    );
    let uses = outcome.output.lines().find(|line| line.contains(&used));
    if !uses.is_some_and(|uses| uses.contains("2 virtual functions go with its driver")) {
        return Err(format!("what the host uses {pf} for is told as {uses:?}"));
    }
    let ends: Vec<&str> = outcome.values("VMM EXIT").collect();
    match ends.as_slice() {
        ["3", "0"] => outcome.expect("GUEST EXIT 0"),
        _ => Err(format!("the exits are {ends:?}")),
    }
}

/// Two lines of the user guide's table: with what pages a guest reaches BARs, and what peer-to-peer costs.
fn generation(outcome: &Outcome) -> Verdict {
    let release = outcome.value("RELEASE")?;
    let mut numbers = release.split(['.', '-']).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return Err(format!("{release} is no release"));
    };
    let name = format!("Linux {major}.{minor}");
    let pages = match (major, minor) < (6, 12) {
        true => format!(
            "OK {name}: the guest reaches BARs through pages of 4 KiB (1 GiB since Linux 6.12)"
        ),
        false => format!("OK {name}: BARs are mapped with pages of up to 1 GiB"),
    };
    let page_by_page = format!(
        "WARN {name} maps each 4 KiB page of a BAR on its own for other devices to reach: seconds for each 16 GiB"
    );
    let both = [pages.as_str(), page_by_page.as_str()];
    let (alone, peers) = match (major, minor) < (6, 15) {
        true => (&both[..1], &both[..]),
        false => (&both[..1], &both[..1]),
    };
    for (key, expected) in [("ALONE", alone), ("PEERS", peers), ("APART", alone)] {
        let told: Vec<&str> = outcome.values(key).collect();
        if told != expected {
            return Err(format!("{key}: {told:?}, not {expected:?}"));
        }
    }
    Ok(())
}

/// One FAIL of the output.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    topic: String,
    text: String,
    remedy: String,
}

fn failures(outcome: &Outcome) -> Vec<Failure> {
    let lines: Vec<&str> = outcome.output.lines().collect();
    let pairs = lines.windows(2).filter_map(|pair| match pair {
        [first, second] => {
            let (topic, text) = first.strip_prefix("FAIL")?.trim().split_once(' ')?;
            let (_, remedy) = second.trim().split_once(": ")?;
            Some(Failure {
                topic: topic.to_owned(),
                text: text.trim().to_owned(),
                remedy: remedy.to_owned(),
            })
        }
        _ => None,
    });
    pairs.collect()
}

/// The failure of that topic, when the boot said the same, with the remedy.
fn told_alike(outcome: &Outcome, topic: &str) -> Result<Failure, String> {
    let said = outcome.value("SAID")?;
    let failure = failures(outcome)
        .into_iter()
        .find(|failure| failure.topic == topic);
    let failure = failure.ok_or_else(|| format!("nothing failed in {topic}"))?;
    let message = said.strip_prefix("mini-vmm: ").unwrap_or_default();
    match message.starts_with(&failure.text) && message.contains(&failure.remedy) {
        true => Ok(failure),
        false => Err(format!("the check said {failure:?}, the boot {said:?}")),
    }
}

/// The check failed in `topic`, said what the boot said and printed that many commands; once they
/// had been run it passed, and the guest started.
fn mended(outcome: &Outcome, topic: &str, commands: u32) -> Verdict {
    expect_checks(outcome, &["3", "0"])?;
    told_alike(outcome, topic)?;
    outcome.expect(&format!("MENDED {commands}"))?;
    outcome.reject("a command failed")?;
    let ends: Vec<&str> = outcome.values("VMM EXIT").collect();
    match ends.as_slice() {
        ["3", "0"] => outcome.expect("GUEST EXIT 0"),
        _ => Err(format!("the exits are {ends:?}")),
    }
}

fn expect_checks(outcome: &Outcome, statuses: &[&str]) -> Verdict {
    outcome.reject("panicked")?;
    let found: Vec<&str> = outcome.values("CHECK EXIT").collect();
    match found == statuses {
        true => Ok(()),
        false => Err(format!("the checks ended with {found:?}, not {statuses:?}")),
    }
}

fn expect_in(text: &str, part: &str) -> Verdict {
    match text.contains(part) {
        true => Ok(()),
        false => Err(format!("`{part}` is not in `{text}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_that_says_something_else_is_noticed() {
        let outcome = |said: &str| Outcome {
            output: format!(
                "CHECK EXIT 3\nFAIL  driver    0000:00:03.0: bound to nvme\n                fix: bind it\nSAID mini-vmm: {said}\n"
            ),
            ..Outcome::default()
        };
        let same = outcome("0000:00:03.0: bound to nvme: run `bind it` as root");
        assert_eq!(told_alike(&same, "driver").unwrap().remedy, "bind it");
        assert!(told_alike(&same, "group").is_err());
        for other in [
            "0000:00:03.0: bound to nvme",
            "0000:00:04.0: bound to nvme: run `bind it` as root",
        ] {
            assert!(told_alike(&outcome(other), "driver").is_err());
        }
    }
}
