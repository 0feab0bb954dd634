//! What the monitor itself takes.

use crate::e2e::{Test, demo};

const KIB: u64 = 1 << 10;

/// Sums what is resident in mappings that are neither guest RAM nor a device's: those are shared memory, device files, or
/// as big as guest RAM.
const SCRIPT: &str = r#"
echo "SIZE $(stat -L -c %s $LAB_VMM)"
set -- $LAB_BDFS
guest 'probe gpus; echo UP; sleep 60' --vfio $1 --vfio $2 --vfio $LAB_BDF_nvme >$TMPDIR/out 2>&1 &
for i in $(seq 600); do grep -q '^UP' $TMPDIR/out && break; sleep 0.1; done
pid=$(pgrep -x "$(basename $LAB_VMM)")
awk '
    /^[0-9a-f]+-[0-9a-f]+ / { name = $6; next }
    /^Size:/ { size = $2; next }
    /^Rss:/ {
        guest = name ~ /memfd|vfio|\/dev\/(shm|hugepages)/ || size >= 131072
        if (!guest) sum += $2
    }
    END { print "OVERHEAD", sum }' /proc/$pid/smaps
grep -E '^Rss' /proc/$pid/status
kill $pid
wait
grep -E 'PROBE gpus|^UP' $TMPDIR/out"#;

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![Test::new(
        "memory::overhead_and_size",
        demo::config(),
        SCRIPT,
        |outcome| {
            outcome.expect("UP")?;
            outcome.expect_number("SIZE", 1..=6 * KIB * KIB)?;
            outcome.expect_number("OVERHEAD", 1..=16 * KIB)
        },
    )]
}
