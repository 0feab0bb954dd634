//! Functions that the host cannot reset alone: two of one device behind a root port, with no reset of their own. (The emulated
//! card has power management's; L1 is told not to use it.)

use crate::e2e::bars::{EMULATED, MOVING};
use crate::e2e::{Config, Outcome, Test, Verdict};

/// A faster port than 5 GT/s would be waited for until its link reports to be up, which the emulated one never does.
fn config() -> Config {
    Config::default()
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10,x-speed=5")
        .qemu("-netdev user,id=n0")
        .qemu("-netdev user,id=n1")
        .device("e1000e,id=first,netdev=n0,bus=rp1,multifunction=on,addr=0.0")
        .device("e1000e,id=second,netdev=n1,bus=rp1,addr=0.1")
        .device("edu,id=edu,dma_mask=0xffffffffffffffff")
        .storing_beside_a_card()
}

/// `regs F` prints COMMAND, BAR 0 and power state of a function; `ping_all` sends packets through each card.
const PRELUDE: &str = "F=0000:00:01.0; G=0000:00:01.1; D=/sys/bus/pci/devices; \
     get() { probe config read $1 $2 $3 | sed s/.*value=//; }; \
     regs() { echo $(get $1 4 2) $(get $1 0x10 4) $(get $1 0xcc 2); }; \
     ping_all() { for N in $(ls /sys/class/net | grep -v lo); do ip link set $N up; ip addr add 10.0.2.15/24 dev $N; \
         for i in $(seq 50); do ping -c 1 -W 1 10.0.2.2 >/dev/null && break; done; \
         echo PINGED $(ping -c 10 -i 0.1 10.0.2.2 | grep -c from); ip addr flush dev $N; ip link set $N down; done; }; ";

/// The sibling has a driver at first: it is left alone. Then it sleeps, and is reset as well; the guest's kernel finds it anew.
const RESETS: &str = "for i in 1 2; do echo 1 >$D/$F/reset && echo RESET done; done; ping_all; \
     echo $G >/sys/bus/pci/drivers/e1000e/unbind; probe config write $G 0xcc 2 3; echo ASLEEP $(regs $G); \
     echo 1 >$D/$F/reset && echo RESET done; echo SIBLING $(regs $G); \
     echo 1 >$D/$G/remove; echo 1 >/sys/bus/pci/rescan; ping_all";

fn script() -> String {
    without_resets(
        "$LAB_BDF_first $LAB_BDF_second",
        &format!(
            "guest '{PRELUDE}{RESETS}' --vfio $LAB_BDF_first --vfio $LAB_BDF_second --boot-profile json,at=exit"
        ),
    )
}

/// The script run while the host does not reset these functions alone.
fn without_resets(functions: &str, script: &str) -> String {
    format!(
        "for bdf in {functions}; do echo >/sys/bus/pci/devices/$bdf/reset_method; done
         {script}
         for bdf in {functions}; do echo default >/sys/bus/pci/devices/$bdf/reset_method; done"
    )
}

/// V, which stores, has no reset that a guest could ask for; C, beside it, is reset with all that is on its bus. E copies 4 KiB
/// within V, of which the first and the last word are looked at.
const STORING: &str = "E=0000:00:01.0; C=0000:00:02.0; V=0000:00:02.1; ";
const COPIES: &str = "probe write $V:2:0 8 0x1122334455667788; probe write $V:2:0xff8 8 0x1122334455667788; \
     copied() { probe edu $E copy $1 $(($1 + $2)) 4096; echo COPIED $(at $(($1 + $2))) $(at $(($1 + $2 + 0xff8))); }; \
     copied $A 0x1000; put $N; copied $N 0x2000; mem 0; \
     echo 1 >/sys/bus/pci/devices/$C/reset && echo RESET done; \
     for R in 4 0x18 0x1c; do echo SHOWN $(probe config read $V $R 4 | sed s/.*value=//); done; \
     put $A; copied $A 0x3000; put $N; copied $N 0x4000";

fn storing() -> String {
    without_resets(
        "$LAB_BDF_card $LAB_BDF_beside",
        &format!(
            "{EMULATED}emulated '{STORING}{MOVING}{COPIES}' --vfio $LAB_BDF_edu --vfio $LAB_BDF_card --vfio $LAB_BDF_beside"
        ),
    )
}

fn reaches_it(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    outcome.expect("RESET done")?;
    outcome.reject("would be reset with it")?;
    let shown: Vec<_> = outcome.values("SHOWN").collect();
    // COMMAND is off (STATUS above it is the device's), and a 64-bit prefetchable BAR is at 0.
    match shown[..] {
        [command, "0xc", "0x0"] if command.ends_with("0000") || command == "0x0" => {}
        _ => return Err(format!("after its reset it shows {shown:?}")),
    }
    let copied: Vec<_> = outcome.values("COPIED").collect();
    match copied[..] == ["0x1122334455667788 0x1122334455667788"; 4] {
        true => Ok(()),
        false => Err(format!(
            "before and after move and reset there was {copied:?}"
        )),
    }
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![
        Test::new(
            "resets::a_function_without_a_reset_of_its_own_is_reset_with_its_sleeping_sibling_only",
            config(),
            script(),
            |outcome| {
                outcome.expect_clean()?;
                let resets = outcome.values("RESET").count();
                if resets != 3 {
                    return Err(format!("{resets} resets of 3 returned"));
                }
                let pings: Vec<_> = outcome.values("PINGED").collect();
                if pings != ["10"; 4] {
                    return Err(format!("both cards did not ping twice: {pings:?}"));
                }
                outcome.expect(r#"{"class":"hot reset","subject":"0000:01:00.0","count":1,"#)?;
                let said = outcome.output.matches("mini-vmm:").count();
                if said != 1
                    || !outcome.has("0000:01:00.1 would be reset with it, and the guest uses them")
                {
                    return Err(format!(
                        "the sibling in use was not the one thing told: {said} lines"
                    ));
                }
                // Asleep with decode on, its BAR where it was.
                match outcome.value("ASLEEP")?.split(' ').collect::<Vec<_>>()[..] {
                    ["0x2", bar, state] if bar != "0x0" && state.ends_with('3') => {}
                    _ => return Err("the sibling did not sleep".to_owned()),
                }
                match outcome.value("SIBLING")?.as_str() {
                    "0x0 0x0 0x0" => Ok(()),
                    other => Err(format!("the sibling shows {other} after the reset")),
                }
            },
        )
        .within(240),
        Test::new(
            "resets::dma_reaches_a_function_before_and_after_its_bar_moved_and_its_bus_was_reset",
            config(),
            storing(),
            reaches_it,
        )
        .within(240),
    ]
}
