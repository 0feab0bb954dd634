//! Booting without devices, and every way in which a guest can end.

use crate::e2e::{Config, Test};

/// Every fourth with two CPUs, which take the emulator twice as long.
const TWENTY_BOOTS: &str = r#"
for i in $(seq 20); do
    GUEST_MEMORY=256M GUEST_CPUS=$((i % 4 ? 1 : 2)) guest true || break
done"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    let plain = Config::default;
    vec![
        Test::new(
            "boot::two_cpus_and_memory",
            plain(),
            "GUEST_KERNEL=$LAB_KERNEL GUEST_CPUS=2 guest 'echo CPUS $(nproc); grep MemTotal /proc/meminfo'",
            |outcome| {
                outcome.expect_clean()?;
                outcome.expect_number("CPUS", 2..=2)?;
                memory_is(outcome, 512)
            },
        ),
        Test::new(
            "boot::memory_around_the_32_bit_hole",
            plain(),
            "GUEST_KERNEL=$LAB_KERNEL GUEST_MEMORY=4608M guest 'grep MemTotal /proc/meminfo'",
            |outcome| {
                outcome.expect_clean()?;
                memory_is(outcome, 4608)
            },
        ),
        Test::new(
            "boot::elf_kernel",
            plain(),
            "GUEST_KERNEL=$LAB_VMLINUX guest 'uname -r'",
            |outcome| outcome.expect_clean(),
        ),
        Test::new(
            "boot::reset_is_status_32",
            plain(),
            "GUEST_KERNEL=$LAB_KERNEL guest 'reboot -f'",
            |outcome| outcome.expect_vmm("32"),
        ),
        Test::new(
            "boot::triple_fault_is_status_33",
            plain(),
            "GUEST_APPEND=reboot=triple guest 'reboot -f'",
            |outcome| outcome.expect_vmm("33"),
        ),
        Test::new(
            "boot::kernel_panic_ends_the_monitor",
            plain(),
            "guest 'echo c >/proc/sysrq-trigger'",
            |outcome| {
                // The guest resets itself after a panic, unless it can tell the monitor that it crashed.
                outcome
                    .expect_vmm("32")
                    .or_else(|_| outcome.expect_vmm("33"))
            },
        ),
        Test::new(
            "boot::status_of_the_command",
            plain(),
            "GUEST_KERNEL=$LAB_KERNEL guest 'exit 7'",
            |outcome| {
                outcome.expect_vmm("0")?;
                outcome.expect_number("GUEST EXIT", 7..=7)
            },
        ),
        Test::new(
            "boot::without_input",
            plain(),
            "guest 'echo alive' </dev/null >$TMPDIR/out 2>&1; cat $TMPDIR/out",
            |outcome| {
                outcome.expect_clean()?;
                outcome.expect("alive")
            },
        ),
        Test::new(
            "boot::output_into_a_pipe_that_closes",
            plain(),
            "guest 'yes | head -c 4000; echo done' | head -n 1; echo STATUS ${PIPESTATUS[0]}",
            |outcome| outcome.expect("STATUS"),
        ),
        Test::new("boot::shell_on_stdin", plain(), SHELL, |outcome| {
            outcome.expect("TYPED 42")?;
            outcome.expect_clean()
        }),
        Test::new(
            "boot::mark_reaches_the_port",
            plain(),
            "guest 'probe mark 0x42'",
            |outcome| {
                outcome.expect("MARK 0x41")?;
                outcome.expect("MARK 0x42")?;
                outcome.expect_clean()
            },
        ),
        Test::new("boot::twenty_in_a_row", plain(), TWENTY_BOOTS, |outcome| {
            let count = outcome.values("GUEST EXIT").count();
            if count != 20 {
                return Err(format!("{count} of 20 guests ended"));
            }
            outcome.expect_clean()
        })
        .within(400),
    ]
}

/// Types once the guest asks for it.
const SHELL: &str = r#"
mkfifo $TMPDIR/keys
guest '' <$TMPDIR/keys >$TMPDIR/out 2>&1 &
exec 5>$TMPDIR/keys
for i in $(seq 600); do grep -q "powers off" $TMPDIR/out && break; sleep 0.1; done
printf 'echo TYPED $((6*7))\nexit\n' >&5
wait
cat $TMPDIR/out"#;

/// The guest sees its memory but for what its kernel takes.
fn memory_is(outcome: &crate::e2e::Outcome, mib: u64) -> crate::e2e::Verdict {
    let line = outcome.value("MemTotal:")?;
    let kib = line.split_whitespace().next().unwrap_or_default();
    let seen = kib
        .parse::<u64>()
        .map_err(|_| format!("MemTotal is {line}"))?
        / 1024;
    if (mib * 7 / 8 - 64..=mib).contains(&seen) {
        return Ok(());
    }
    Err(format!("the guest sees {seen} MiB of {mib}"))
}
