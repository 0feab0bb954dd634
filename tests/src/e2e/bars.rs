//! BARs that a guest moves, DMA between devices, resets from inside the guest, and a device that the
//! host takes back.

use crate::e2e::{Config, Outcome, Test, Verdict};

/// Three devices that store what is written into their BARs (two of 16 GiB, one of 1 GiB), one that copies by DMA, and a
/// disk whose function can be reset.
fn config() -> Config {
    Config::default()
        .qemu("-object memory-backend-memfd,id=store,size=16G,share=on")
        .qemu("-object memory-backend-memfd,id=other,size=16G,share=on")
        .qemu("-object memory-backend-memfd,id=small,size=1G,share=on")
        .qemu("-device pcie-root-port,id=rp1,chassis=1,addr=10")
        .disk("d0", 16)
        .device("edu,id=edu,dma_mask=0xffffffffffffffff")
        .device("ivshmem-plain,id=store,memdev=store")
        .device("ivshmem-plain,id=other,memdev=other")
        .device("ivshmem-plain,id=small,memdev=small")
        .device("nvme,id=nvme,serial=lab,drive=d0,bus=rp1")
}

/// Functions of the guest: E is the copying one, V and W are the storing ones.
const DEVICES: &str = "E=0000:00:01.0; V=0000:00:02.0; W=0000:00:03.0; ";

/// A is where V's BAR 2 was placed, N another place for it. `at ADDRESS` reads a bus address, `put ADDRESS` moves V's BAR 2 with
/// decode off meanwhile.
pub(super) const MOVING: &str = "probe enable $V; \
     bar2() { sed -n 3p /sys/bus/pci/devices/$1/resource | cut -d\\  -f1; }; \
     A=$(bar2 $V); N=$((A + 0x400000000)); F=$V; \
     at() { probe read $1 8 | sed s/.*value=//; }; \
     high() { probe config write $F 0x1c 4 $(($1 >> 32 & 0xffffffff)); }; \
     low() { probe config write $F 0x18 4 $(($1 & 0xffffffff)); }; \
     mem() { probe config write $F 4 2 $1; }; \
     put() { mem 0; low $1; high $1; mem 6; }; ";

/// A guest whose accesses are emulated from user space: the lab's emulated processor makes KVM give
/// up on one now and then (see the probe's mmio.rs), so such a run is repeated, and says so.
pub(super) const EMULATED: &str = r#"
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

/// 4 KiB by DMA, of which the first and the last word are looked at.
const PEERS: &str = "probe write $V:2:0 8 0x1122334455667788; probe write $V:2:0xff8 8 0x1122334455667788; \
     probe edu $E copy $A $((A + 0x1000)) 4096; echo FIRST $(at $((A + 0x1000))) $(at $((A + 0x1ff8))); \
     put $N; echo MOVED $(at $((N + 0x1000))) $(at $((N + 0x1ff8))); echo LEFT $(at $A); \
     probe edu $E copy $N $((N + 0x3fffff000)) 4096; \
     echo SECOND $(at $((N + 0x3fffff000))) $(at $((N + 0x3fffffff8)))";

/// Neither copy reaches the BAR: the word that was there stays.
const NO_PEERS: &str = "probe write $V:2:0 8 1; probe write $V:2:0x1000 8 0x1122334455667788; \
     probe edu $E copy $A $((A + 0x1000)) 8; echo KEPT $(at $((A + 0x1000)))";

/// Addresses are exchanged and exchanged back, with decode off on both meanwhile.
const SWAP: &str = "probe enable $W; B=$(bar2 $W); \
     probe write $V:2:0 8 0x1122334455667788; probe write $W:2:0 8 0x99; \
     swap() { mem 0; F=$W; mem 0; F=$V; low $1; high $1; F=$W; high $2; low $2; mem 6; F=$V; mem 6; }; \
     swap $B $A; echo V.AT.B $(at $B); echo W.AT.A $(at $A); \
     probe edu $E copy $B $((B + 0x1000)) 8; echo COPIED $(at $((B + 0x1000))); \
     swap $A $B; echo V.AT.A $(at $A); echo W.AT.B $(at $B); echo KEPT $(at $((A + 0x1000)))";

/// While one CPU moves V's BAR about and another accesses it, the other device keeps what it holds.
const CHURN: &str = "probe enable $W; probe write $W:2:0x8 8 0x99; probe write $W:2:0x10 8 0x99; \
     probe churn $V 2 $((A + 0x40000000)) 400; echo OTHER $(at $(($(bar2 $W) + 8))) $(at $(($(bar2 $W) + 16)))";

const ILLEGAL: &str = "probe write $V:2:0 8 0x1122334455667788; \
     for W in 0 0x1000000 0xc0000000 0x7ffffc00000000 0xffffffffffffffff; do \
         put $W; echo GONE $(at $A); mem 0; high $A; low $A; mem 6; echo BACK $(at $A); \
         high $W; low $W; echo GONE $(at $A); low $A; high $A; echo BACK $(at $A); \
     done; mem 0; echo OFF $(at $A); mem 6; echo ON $(at $A)";

const RESET: &str = "N=/sys/bus/pci/devices/0000:00:01.0; \
     sum() { echo 3 >/proc/sys/vm/drop_caches; head -c 1048576 /dev/nvme0n1 | sha256sum; }; \
     probe wait /dev/nvme0n1; echo BEFORE $(sum); cat $N/reset_method; echo 1 >$N/reset && echo RESET done; \
     probe wait /dev/nvme0n1; echo AFTER $(sum)";

/// The kernel asks for the device when the unbind begins and every 10 s from then on. How long the rest takes is the kernel's and
/// the machine's affair: what counts is that the first time suffices. Between markers, the timeline shows where time went.
const UNBIND: &str = r#"
t=/sys/kernel/tracing
printf '%s\n' 'p:lab/asked vfio_pci_core_request' 'p:lab/closed vfio_pci_core_close_device' >$t/kprobe_events
echo mono >$t/trace_clock
echo >$t/trace
echo 1 >$t/events/lab/enable
answers() {
    while IFS= read -r line; do
        case $line in *"note: "*"the host asked for it back"*) echo answered >$t/trace_marker ;; esac
        printf '%s\n' "$line"
    done
}
guest 'probe wait /dev/nvme0n1; echo READY; sleep 300' --vfio $LAB_BDF_nvme --log-level debug 2>&1 | answers >$TMPDIR/out &
for i in $(seq 900); do grep -q READY $TMPDIR/out && break; sleep 0.1; done
echo unbind >$t/trace_marker
echo $LAB_BDF_nvme >/sys/bus/pci/drivers/vfio-pci/unbind && echo UNBOUND
echo unbound >$t/trace_marker
wait
echo 0 >$t/events/lab/enable
grep -v '^#' $t/trace >$TMPDIR/timeline
echo >$t/kprobe_events
cat $TMPDIR/timeline
echo ASKED $(sed '/: answered/q' $TMPDIR/timeline | grep -c 'asked: ')
grep -a -e "VMM EXIT" -e "mini-vmm: $LAB_BDF_nvme" $TMPDIR/out
echo $LAB_BDF_nvme >/sys/bus/pci/drivers/vfio-pci/bind"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let both = "--vfio $LAB_BDF_edu --vfio $LAB_BDF_store";
    let three = "--vfio $LAB_BDF_edu --vfio $LAB_BDF_store --vfio $LAB_BDF_other";
    vec![
        Test::new(
            "bars::dma_reaches_another_device_before_and_after_its_bar_moved",
            config(),
            format!("{EMULATED}emulated '{DEVICES}{MOVING}{PEERS}' {both}"),
            |outcome| {
                outcome.expect_clean()?;
                let words = format!("{WORD} {WORD}");
                all_are(outcome, &["FIRST", "MOVED", "SECOND"], 1, &words)?;
                all_are(outcome, &["LEFT"], 1, ONES)
            },
        )
        .within(240),
        Test::new(
            "bars::without_peer_to_peer_dma_to_another_device_faults_and_nothing_is_said",
            config(),
            format!(
                "guest '{DEVICES}{MOVING}{NO_PEERS}' --vfio $LAB_BDF_edu,p2p=off --vfio $LAB_BDF_store,p2p=off"
            ),
            |outcome| {
                outcome.expect_clean()?;
                outcome.reject("mini-vmm:")?;
                all_are(outcome, &["KEPT"], 1, WORD)
            },
        )
        .with_iommu_faults(),
        Test::new(
            "bars::two_devices_exchange_their_addresses",
            config(),
            format!("guest '{DEVICES}{MOVING}{SWAP}' {three}"),
            |outcome| {
                outcome.expect_clean()?;
                all_are(outcome, &["V.AT.B", "COPIED", "V.AT.A", "KEPT"], 1, WORD)?;
                all_are(outcome, &["W.AT.A", "W.AT.B"], 1, "0x99")
            },
        )
        .within(240),
        Test::new(
            "bars::one_cpu_moves_a_bar_while_another_accesses_it",
            config(),
            format!("{EMULATED}GUEST_CPUS=2 emulated '{DEVICES}{MOVING}{CHURN}' \\
                     --vfio $LAB_BDF_edu --vfio $LAB_BDF_small --vfio $LAB_BDF_store"),
            |outcome| {
                outcome.expect_clean()?;
                let churn = outcome.probe("churn");
                let number = |key| churn.first().and_then(|f| f.get(key)?.parse::<u64>().ok());
                if number("changes") != Some(400) || number("answered").is_none_or(|n| n < 100) {
                    return Err(format!("not 400 changes with accesses meanwhile: {churn:?}"));
                }
                all_are(outcome, &["OTHER"], 1, "0x99 0x99")
            },
        )
        .within(600),
        Test::new(
            // With 1 GiB, because the host's kernel takes 45 ms to unmap each at the end.
            "bars::a_bar_that_moves_100_times_keeps_its_data_and_only_iommufd_unmaps_it",
            config(),
            "guest 'probe moves 0000:00:02.0 2 100' --vfio $LAB_BDF_edu --vfio $LAB_BDF_small --mmio64-size 2T \\
                 --boot-profile table,at=exit >$TMPDIR/out 2>&1
             cat $TMPDIR/out
             calls() { echo $(($(grep -a \" $1: $LAB_BDF_small BAR 2\" $TMPDIR/out | cut -c1-7))); }
             echo MAPPED $(calls ' map DMA'); echo SLOTS $(calls memslot)
             echo UNMAPPED $(calls 'unmap DMA')",
            |outcome| {
                outcome.expect_clean()?;
                outcome.expect("PROBE moves bdf=0000:00:02.0 count=100")?;
                // One where it was placed, 100 moves, and back, where type1 has it mapped still.
                outcome.expect_number("SLOTS", 102..=102)?;
                let (mapped, unmapped) = match outcome.has("IOMMU backend: iommufd") {
                    true => (102, 101),
                    false => (101, 0),
                };
                outcome.expect_number("MAPPED", mapped..=mapped)?;
                outcome.expect_number("UNMAPPED", unmapped..=unmapped)
            },
        )
        .within(300),
        Test::new(
            "bars::an_illegal_address_answers_nowhere_and_the_old_one_works_again",
            config(),
            format!("{EMULATED}emulated '{DEVICES}{MOVING}{ILLEGAL}' {both},decode=strict"),
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
                outcome.expect("UNBOUND")?;
                outcome.expect_number("ASKED", 1..=1)
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
