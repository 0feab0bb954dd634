//! BARs that a guest moves, DMA between devices, resets from inside the guest, and a device that the
//! host takes back.

use crate::e2e::{Config, Outcome, Test, Verdict};

/// A device that stores what is written into its BAR of 16 GiB, one that copies by DMA, and a disk
/// whose function can be reset.
fn config() -> Config {
    Config::default()
        .qemu("-object memory-backend-memfd,id=store,size=16G,share=on")
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10")
        .disk("d0", 16)
        .device("edu,id=edu,dma_mask=0xffffffffffffffff")
        .device("ivshmem-plain,id=store,memdev=store")
        .device("nvme,id=nvme,serial=lab,drive=d0,bus=rp1")
}

/// Functions of the guest: V is the storing device, E the copying one, A where V's BAR 2 was placed.
/// `at ADDRESS` reads a bus address, `put ADDRESS` moves BAR 2 with decode off meanwhile.
const PRELUDE: &str = "E=0000:00:01.0; V=0000:00:02.0; probe enable $V; \
     A=$(sed -n 3p /sys/bus/pci/devices/$V/resource | cut -d\\  -f1); N=$((A + 0x400000000)); \
     at() { probe read $1 8 | sed s/.*value=//; }; \
     high() { probe config write $V 0x1c 4 $(($1 >> 32 & 0xffffffff)); }; \
     low() { probe config write $V 0x18 4 $(($1 & 0xffffffff)); }; \
     mem() { probe config write $V 4 2 $1; }; \
     put() { mem 0; low $1; high $1; mem 6; }; ";

/// A guest whose accesses are emulated from user space: the lab's emulated processor makes KVM give
/// up on one now and then (see the probe's mmio.rs), so such a run is repeated, and says so.
const EMULATED: &str = r#"
emulated() {
    for i in 1 2 3 4 5; do
        guest "$@" >$TMPDIR/out 2>&1
        grep -aq "KVM internal error 3" $TMPDIR/out || break
        echo "again: the emulated processor left an old exception in EXITINTINFO"
    done
    cat $TMPDIR/out
}
"#;

const ONES: &str = "0xffffffffffffffff";
const WORD: &str = "0x1122334455667788";

const PEERS: &str = "probe write $V:2:0 8 0x1122334455667788; \
     probe edu $E copy $A $((A + 0x1000)) 8; echo FIRST $(at $((A + 0x1000))); \
     put $N; echo MOVED $(at $((N + 0x1000))); echo LEFT $(at $A); \
     probe edu $E copy $N $((N + 0x3fffff000)) 8; echo SECOND $(at $((N + 0x3fffff000)))";

const ILLEGAL: &str = "probe write $V:2:0 8 0x1122334455667788; \
     for W in 0 0x1000000 0xc0000000 0x7ffffc00000000 0xffffffffffffffff; do \
         put $W; echo GONE $(at $A); mem 0; high $A; low $A; mem 6; echo BACK $(at $A); \
         high $W; low $W; echo GONE $(at $A); low $A; high $A; echo BACK $(at $A); \
     done; mem 0; echo OFF $(at $A); mem 6; echo ON $(at $A)";

const RESET: &str = "N=/sys/bus/pci/devices/0000:00:01.0; \
     sum() { echo 3 >/proc/sys/vm/drop_caches; head -c 1048576 /dev/nvme0n1 | sha256sum; }; \
     probe wait /dev/nvme0n1; echo BEFORE $(sum); cat $N/reset_method; echo 1 >$N/reset && echo RESET done; \
     probe wait /dev/nvme0n1; echo AFTER $(sum)";

const UNBIND: &str = r#"
guest 'probe wait /dev/nvme0n1; echo READY; sleep 300' --vfio $LAB_BDF_nvme >$TMPDIR/out 2>&1 &
for i in $(seq 900); do grep -q READY $TMPDIR/out && break; sleep 0.1; done
start=$(date +%s%N)
echo $LAB_BDF_nvme >/sys/bus/pci/drivers/vfio-pci/unbind
echo UNBOUND $((($(date +%s%N) - start) / 1000000))
wait
grep -a -e "VMM EXIT" -e "mini-vmm:" $TMPDIR/out
echo $LAB_BDF_nvme >/sys/bus/pci/drivers/vfio-pci/bind"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let both = "--vfio $LAB_BDF_edu --vfio $LAB_BDF_store";
    vec![
        Test::new(
            "bars::dma_reaches_another_device_before_and_after_its_bar_moved",
            config(),
            format!("{EMULATED}emulated '{PRELUDE}{PEERS}' {both}"),
            |outcome| {
                outcome.expect_clean()?;
                all_are(outcome, &["FIRST", "MOVED", "SECOND"], 1, WORD)?;
                all_are(outcome, &["LEFT"], 1, ONES)
            },
        )
        .within(240),
        Test::new(
            "bars::an_illegal_address_answers_nowhere_and_the_old_one_works_again",
            config(),
            format!("{EMULATED}emulated '{PRELUDE}{ILLEGAL}' {both},decode=strict"),
            |outcome| {
                outcome.expect_clean()?;
                all_are(outcome, &["GONE"], 10, ONES)?;
                all_are(outcome, &["BACK"], 10, WORD)?;
                all_are(outcome, &["OFF"], 1, ONES)?;
                all_are(outcome, &["ON"], 1, WORD)
            },
        )
        .within(240),
        Test::new(
            "bars::a_disk_works_after_the_guest_reset_its_function",
            config(),
            format!("guest '{RESET}' --vfio $LAB_BDF_nvme"),
            |outcome| {
                outcome.expect_clean()?;
                outcome.expect("flr")?;
                outcome.expect("RESET done")?;
                outcome.same_checksum("BEFORE", "AFTER").map(drop)
            },
        ),
        Test::new(
            "bars::a_device_that_the_host_takes_back_ends_the_run",
            config(),
            UNBIND,
            |outcome| {
                outcome.expect_vmm("1")?;
                outcome.expect("asked for the device back")?;
                // Milliseconds.
                outcome.expect_number("UNBOUND", 0..=5000)
            },
        ),
    ]
}

/// The lines that begin with one of `names`: so many each, and all with that value.
fn all_are(outcome: &Outcome, names: &[&str], count: usize, value: &str) -> Verdict {
    for name in names {
        let values: Vec<&str> = outcome.values(name).collect();
        if values.len() != count || values.iter().any(|found| found.trim() != value) {
            return Err(format!("{name} is not {count} times {value}: {values:?}"));
        }
    }
    Ok(())
}
