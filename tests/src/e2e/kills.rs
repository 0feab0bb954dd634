//! A monitor that is killed leaves nothing behind.

use crate::e2e::{Outcome, Test, Verdict, demo, iommufd};

const TIMES: usize = 20;

/// Kills the monitor 0.05 s to 1.95 s after its start: while it opens devices, maps, boots the guest. Then a guest uses all.
fn script(interface: &str) -> String {
    format!(
        r#"
set -- $LAB_BDFS
devices="--iommu {interface} --vfio $1 --vfio $LAB_BDF_nvme"
for n in $(seq 5 10 195); do
    guest 'probe gpus; sleep 600' $devices >$TMPDIR/out 2>&1 &
    sleep $(printf '%d.%02d' $((n / 100)) $((n % 100)))
    until pkill -KILL -x "$(basename $LAB_VMM)"; do sleep 0.01; done
    wait
    grep -a 'VMM EXIT' $TMPDIR/out
    grep -aq 'VMM EXIT 137' $TMPDIR/out || cat $TMPDIR/out
done
echo "IMAGE $(head -c 1048576 $LAB_DISK_d0 | sha256sum)"
guest 'probe gpus; probe wait /dev/nvme0n1; echo DISK $(head -c 1048576 /dev/nvme0n1 | sha256sum)' $devices"#
    )
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "kills::twenty_in_mid_boot_and_a_clean_start_on_type1",
            demo::config(),
            script("type1"),
            killed_and_clean,
        )
        .within(300),
        Test::new(
            "kills::twenty_in_mid_boot_and_a_clean_start_on_iommufd",
            iommufd::machine(),
            script("iommufd"),
            killed_and_clean,
        )
        .within(300),
    ]
}

fn killed_and_clean(outcome: &Outcome) -> Verdict {
    let mut expected = vec!["137"; TIMES];
    expected.push("0");
    let ends: Vec<_> = outcome.values("VMM EXIT").collect();
    if ends != expected {
        return Err(format!("the exits are {ends:?}"));
    }
    outcome.expect("MARK 0x42")?;
    outcome.same_checksum("IMAGE", "DISK").map(drop)
}
