//! What a test's script printed, and questions about it.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::e2e::Verdict;
use crate::error;
use crate::outside::{self, IoctlCounts};

/// The result of one script.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Standard output and error.
    pub output: String,
    /// The script's exit status; 124 when it took too long.
    pub status: Option<u8>,
    /// Complaints of L1's kernel.
    pub host: Vec<String>,
    /// The run's directory.
    pub log: PathBuf,
}

/// One `PROBE` line.
pub type Fields<'a> = HashMap<&'a str, &'a str>;

impl Outcome {
    /// Whether a line contains the text.
    pub fn has(&self, text: &str) -> bool {
        self.output.lines().any(|line| line.contains(text))
    }

    /// Whether the guest fell over an interrupt at the first instruction of an interrupt's entry, where a CPU has them off: an
    /// error of the emulated one (docs/lab.md).
    pub fn has_impossible_interrupt(&self) -> bool {
        // The kernel's entries of interrupts: of devices, and of the local APIC.
        const ENTRIES: [&str; 2] = ["asm_common_interrupt+", "asm_sysvec_"];
        const STARTS: [&str; 2] = ["RIP: 0010:irq_entries_start+", "RIP: 0010:asm_sysvec_"];
        let is_entry = |line: &str| ENTRIES.iter().any(|entry| line.contains(entry));
        let is_start = |line: &str| STARTS.iter().any(|start| line.contains(start));
        let mut lines = self.output.lines().zip(self.output.lines().skip(1));
        lines.any(|(line, next)| is_entry(line) && is_start(next))
    }

    /// Fails unless a line contains the text.
    pub fn expect(&self, text: &str) -> Verdict {
        if self.has(text) {
            return Ok(());
        }
        Err(format!("no line contains `{text}`"))
    }

    /// Fails unless some line contains one of the texts, in whatever case.
    pub fn expect_any(&self, texts: &[&str]) -> Verdict {
        let output = self.output.to_lowercase();
        if texts
            .iter()
            .any(|text| output.contains(&text.to_lowercase()))
        {
            return Ok(());
        }
        Err(format!("no line contains one of {texts:?}"))
    }

    /// Fails if a line contains the text.
    pub fn reject(&self, text: &str) -> Verdict {
        match self.output.lines().find(|line| line.contains(text)) {
            Some(line) => Err(format!("`{}` should not be there", line.trim())),
            None => Ok(()),
        }
    }

    /// The values after a word at the beginning of lines: `values("VMM EXIT")`.
    pub fn values<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.output
            .lines()
            .filter_map(move |line| line.trim().strip_prefix(key)?.strip_prefix(' '))
            .map(str::trim)
    }

    /// The one value after a word.
    pub fn value(&self, key: &str) -> Result<String, String> {
        let found: Vec<_> = self.values(key).collect();
        match found.as_slice() {
            [value] => Ok((*value).to_owned()),
            _ => Err(format!("{} lines begin with `{key}`, not one", found.len())),
        }
    }

    /// The checksum that both words are followed by.
    pub fn same_checksum(&self, image: &str, disk: &str) -> Result<String, String> {
        let checksum = |key| -> Result<String, String> {
            let value = self.value(key)?;
            Ok(value
                .split_whitespace()
                .next()
                .unwrap_or_default()
                .to_owned())
        };
        let (written, read) = (checksum(image)?, checksum(disk)?);
        if written.is_empty() || written != read {
            return Err(format!(
                "the guest read {read:?}, the image holds {written:?}"
            ));
        }
        Ok(read)
    }

    /// The one number after a word.
    pub fn number(&self, key: &str) -> Result<u64, String> {
        let value = self.value(key)?;
        value
            .parse()
            .map_err(|_| format!("`{key} {value}` is not a number"))
    }

    /// Fails unless the number after the word lies in the range.
    pub fn expect_number(&self, key: &str, range: RangeInclusive<u64>) -> Verdict {
        let value = self.number(key)?;
        if range.contains(&value) {
            return Ok(());
        }
        Err(format!(
            "{key} is {value}, not {} to {}",
            range.start(),
            range.end()
        ))
    }

    /// Fails unless every guest powered off after its command succeeded, and the monitor with 0.
    pub fn expect_clean(&self) -> Verdict {
        self.expect_exits("GUEST EXIT", "0")?;
        self.expect_exits("VMM EXIT", "0")
    }

    /// Fails unless the monitor ended at least once and each time with that status, and without a panic.
    pub fn expect_vmm(&self, status: &str) -> Verdict {
        self.reject("panicked")?;
        self.reject("RUST_BACKTRACE")?;
        self.expect_exits("VMM EXIT", status)
    }

    fn expect_exits(&self, key: &str, status: &str) -> Verdict {
        let found: Vec<_> = self.values(key).collect();
        if !found.is_empty() && found.iter().all(|value| *value == status) {
            return Ok(());
        }
        Err(format!("`{key}` is {found:?}, expected {status}"))
    }

    /// The `PROBE` lines of one kind.
    pub fn probe(&self, kind: &str) -> Vec<Fields<'_>> {
        let prefix = format!("PROBE {kind} ");
        self.output
            .lines()
            .filter_map(|line| line.trim().strip_prefix(&prefix))
            .map(|rest| {
                rest.split_whitespace()
                    .filter_map(|field| field.split_once('='))
                    .collect()
            })
            .collect()
    }

    /// What was counted in the script's `counted NAME …`.
    pub fn counted(&self, name: &str) -> Result<IoctlCounts, String> {
        let directory = self.log.join(format!("counted-{name}"));
        outside::read(&directory).map_err(|error| error::chain(&error))
    }

    /// Calls of a class, over all subjects, in the table of the monitor's profile (`--boot-profile table`): lines of count, two
    /// times, `class: subject`.
    pub fn calls(&self, class: &str) -> u64 {
        self.output
            .lines()
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let count = words.next()?.parse::<u64>().ok()?;
                let (name, _) = line.split_once(": ")?;
                let times = words.by_ref().take(2);
                let times = times.filter(|word| word.parse::<f64>().is_ok()).count();
                let name: Vec<_> = name.split_whitespace().skip(3).collect();
                (times == 2 && name.join(" ") == class).then_some(count)
            })
            .sum()
    }

    /// Interrupts counted, over all CPUs, in the lines of /proc/interrupts that contain both texts.
    pub fn interrupts(&self, kind: &str, name: &str) -> u64 {
        self.output
            .lines()
            .filter(|line| line.contains(kind) && line.contains(name))
            .filter_map(|line| line.split_once(':'))
            .flat_map(|(_, rest)| {
                rest.split_whitespace()
                    .map_while(|word| word.parse::<u64>().ok())
            })
            .sum()
    }
}

/// A hexadecimal field of a `PROBE` line.
pub fn hex(fields: &Fields, key: &str) -> Result<u64, String> {
    let text = fields.get(key).copied().unwrap_or_default();
    u64::from_str_radix(text.trim_start_matches("0x"), 16)
        .map_err(|_| format!("`{key}={text}` is not a hexadecimal number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(output: &str) -> Outcome {
        Outcome {
            output: output.to_owned(),
            ..Outcome::default()
        }
    }

    #[test]
    fn an_interrupt_within_the_entry_of_another_is_no_cpus_of_this_world() {
        let twice = "[  107.6]  common_interrupt+0xf/0xa0\r\n[  107.6]  asm_common_interrupt+0x22/0x40\r\n[  107.6] RIP: 0010:irq_entries_start+0x0/0x660\r\n";
        assert!(outcome(twice).has_impossible_interrupt());
        let timer = "[   21.6]  asm_sysvec_apic_timer_interrupt+0x1a/0x20\r\n[   21.6] RIP: 0010:asm_sysvec_apic_timer_interrupt+0x0/0x20\r\n";
        assert!(outcome(timer).has_impossible_interrupt());
        let user = twice.replace("irq_entries_start", "delay_tsc");
        assert!(!outcome(&user).has_impossible_interrupt());
        let elsewhere = twice.replace("asm_common_interrupt", "asm_exc_page_fault");
        assert!(!outcome(&elsewhere).has_impossible_interrupt());
    }

    #[test]
    fn values_and_probe_lines() {
        let outcome = outcome("CPUS 2\r\nPROBE bar bdf=0000:00:01.0 address=0x4000000000\r\n");
        assert_eq!(outcome.number("CPUS"), Ok(2));
        assert!(outcome.expect_number("CPUS", 3..=4).is_err());
        let bars = outcome.probe("bar");
        assert_eq!(bars[0]["bdf"], "0000:00:01.0");
        assert_eq!(hex(&bars[0], "address"), Ok(0x40_0000_0000));
        assert!(hex(&bars[0], "size").is_err());
    }

    #[test]
    fn every_exit_counts() {
        let good = outcome("GUEST EXIT 0\nVMM EXIT 0\nVMM EXIT 0\n");
        assert_eq!(good.expect_clean(), Ok(()));
        assert!(
            outcome("GUEST EXIT 0\nVMM EXIT 0\nVMM EXIT 1\n")
                .expect_clean()
                .is_err()
        );
        assert!(outcome("").expect_vmm("3").is_err());
        assert!(
            outcome("thread 'main' panicked\nVMM EXIT 3\n")
                .expect_vmm("3")
                .is_err()
        );
    }

    #[test]
    fn calls_are_summed_over_subjects() {
        let outcome = outcome(
            "  calls   total ms  longest ms\n     25      3.753       1.228  config read: 0000:00:03.0\n      \
             7      0.100       0.050  config read: 0000:00:04.0\n      9     15.734       6.928  config read for the guest: RAM\n",
        );
        assert_eq!(outcome.calls("config read"), 32);
        assert_eq!(outcome.calls("config read for the guest"), 9);
        assert_eq!(outcome.calls("read"), 0);
    }

    #[test]
    fn interrupts_are_summed_over_lines_and_cpus() {
        let outcome = outcome(
            " 24:  3  1  PCI-MSIX-0000:00:05.0  0-edge  nvme0q0\n 25: 10  0  PCI-MSIX-0000:00:05.0  1-edge  nvme0q1\n 4: 99 0 IO-APIC ttyS0\n",
        );
        assert_eq!(outcome.interrupts("MSIX", "nvme"), 14);
        assert_eq!(outcome.interrupts("MSIX", "e1000e"), 0);
    }
}
