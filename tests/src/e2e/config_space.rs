//! Configuration space in the guest against the same on the host: each difference has a rule here, and each rule a row in
//! docs/assignment.md.

use crate::e2e::lspci::{Function, parse};
use crate::e2e::{Outcome, Verdict};

/// A difference that is meant to be.
struct Rule {
    /// First column of the row in docs/assignment.md.
    register: &'static str,
    /// Whether it explains that the byte at the offset differs.
    explains: fn(&Pair, usize) -> bool,
}

/// A function on the host and in the guest.
struct Pair {
    host: Function,
    guest: Function,
}

const COMMAND: usize = 0x04;
const CACHE_LINE: usize = 0x0c;
const LATENCY: usize = 0x0d;
const HEADER_TYPE: usize = 0x0e;
const BIST: usize = 0x0f;
const BARS: usize = 0x10;
const CARDBUS: usize = 0x28;
const ROM: usize = 0x30;
const POINTER: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const EXTENDED: usize = 0x100;

const PM: u16 = 1;
const MSI: u16 = 5;
const EXPRESS: u16 = 0x10;
const MSIX: u16 = 0x11;

const RULES: [Rule; 13] = [
    Rule {
        register: "vendor, device id",
        explains: |pair, at| at < 4 && pair.host.byte(at) == 0xff,
    },
    Rule {
        register: "COMMAND",
        explains: |_, at| (COMMAND..COMMAND + 2).contains(&at),
    },
    Rule {
        register: "BARs",
        explains: |_, at| (BARS..CARDBUS).contains(&at),
    },
    Rule {
        register: "interrupt line",
        explains: |_, at| at == INTERRUPT_LINE,
    },
    Rule {
        register: "cache line size, latency timer",
        explains: |_, at| at == CACHE_LINE || at == LATENCY,
    },
    Rule {
        register: "multi-function bit",
        explains: |pair, at| at == HEADER_TYPE && pair.changed(at) == 0x80,
    },
    Rule {
        register: "BIST, CardBus CIS",
        explains: |pair, at| {
            (at == BIST || (CARDBUS..CARDBUS + 4).contains(&at)) && pair.guest.byte(at) == 0
        },
    },
    Rule {
        register: "expansion ROM",
        explains: |pair, at| (ROM..ROM + 4).contains(&at) && pair.guest.byte(at) == 0,
    },
    Rule {
        register: "MSI, MSI-X control, address, data",
        explains: |pair, at| match pair.place(at) {
            // Enable and the number of enabled vectors; the rest of control tells what the device can.
            Some((MSI, 2)) => pair.changed(at) & !0x71 == 0,
            Some((MSI, 3)) => false,
            Some((MSI, 4..)) => true,
            Some((MSIX, 3)) => pair.changed(at) & !0xc0 == 0,
            _ => false,
        },
    },
    Rule {
        register: "capability pointers",
        explains: |pair, at| {
            let standard = pair.guest.standard();
            let extended = pair.guest.extended();
            at == POINTER
                || standard.iter().any(|(_, offset)| at == offset + 1)
                || extended.iter().any(|(_, offset)| {
                    (at == offset + 2 && pair.changed(at) & 0xf == 0) || at == offset + 3
                })
        },
    },
    Rule {
        register: "hidden capabilities",
        explains: |pair, at| pair.is_hidden(at) && pair.is_blank(at),
    },
    Rule {
        register: "PMCSR power state",
        explains: |pair, at| pair.place(at) == Some((PM, 4)) && pair.changed(at) & !3 == 0,
    },
    Rule {
        register: "PCIe function-level reset",
        explains: |pair, at| {
            pair.place(at) == Some((EXPRESS, 7))
                && pair.changed(at) == 0x10
                && pair.guest.byte(at) & 0x10 == 0
        },
    },
];

impl Pair {
    /// Bits that differ.
    fn changed(&self, at: usize) -> u8 {
        self.host.byte(at) ^ self.guest.byte(at)
    }

    /// The standard capability of the guest that the byte lies in, and how far; the next one ends it.
    fn place(&self, at: usize) -> Option<(u16, usize)> {
        let mut starts = self.guest.standard();
        // A hidden one ends it as well.
        starts.extend(self.host.standard());
        let before = starts.iter().filter(|(_, offset)| *offset <= at);
        let (id, offset) = before.max_by_key(|(_, offset)| *offset)?;
        (at < EXTENDED).then_some((*id, at - offset))
    }

    /// Whether the byte lies in a capability, or behind one before the next, that only the host has.
    fn is_hidden(&self, at: usize) -> bool {
        let (host, guest) = match at < EXTENDED {
            true => (self.host.standard(), self.guest.standard()),
            false => (self.host.extended(), self.guest.extended()),
        };
        let before = host.iter().filter(|(_, offset)| *offset <= at);
        let nearest = before.max_by_key(|(_, offset)| *offset);
        nearest.is_some_and(|capability| !guest.contains(capability))
    }

    /// Zero, or part of the null capability that keeps the extended list at its place.
    fn is_blank(&self, at: usize) -> bool {
        self.guest.byte(at) == 0
            || ((EXTENDED + 2..EXTENDED + 4).contains(&at)
                && self.guest.byte(EXTENDED) == 0
                && self.guest.byte(EXTENDED + 1) == 0)
    }

    /// The documented row that explains why the byte differs.
    fn explanation(&self, at: usize) -> Option<&'static str> {
        let rule = RULES.iter().find(|rule| (rule.explains)(self, at))?;
        Some(rule.register)
    }

    fn check(&self) -> Verdict {
        let (host, guest) = (&self.host, &self.guest);
        let name = format!("{} (in the guest {})", host.bdf, guest.bdf);
        if host.bytes.is_empty() || host.bytes.len() != guest.bytes.len() {
            let (there, here) = (host.bytes.len(), guest.bytes.len());
            return Err(format!(
                "{name}: {there} bytes on the host, {here} in the guest"
            ));
        }
        if host.regions != guest.regions {
            return Err(format!(
                "{name}: BARs differ in more than their addresses: {:?} and {:?}",
                host.regions, guest.regions
            ));
        }
        for at in (0..host.bytes.len()).filter(|at| self.changed(*at) != 0) {
            if self.explanation(at).is_none() {
                return Err(format!(
                    "{name}: byte {at:#x} is {:#04x} on the host and {:#04x} in the guest, which docs/assignment.md does not explain",
                    host.byte(at),
                    guest.byte(at)
                ));
            }
        }
        Ok(())
    }
}

/// Compares what `lspci_of` printed with what the guest saw of the same devices, in the same order.
pub fn check(outcome: &Outcome) -> Verdict {
    outcome.expect_clean()?;
    let (host, guest) = outcome
        .output
        .split_once("LSPCI end")
        .ok_or("the host's lspci did not run")?;
    let (host, mut guest) = (parse(host), parse(guest));
    // The host bridge, which is emulated.
    guest.retain(|function| function.bdf != "0000:00:00.0");
    if host.is_empty() || host.len() != guest.len() {
        let (there, here) = (host.len(), guest.len());
        return Err(format!(
            "{there} functions were assigned, the guest sees {here}"
        ));
    }
    for (host, guest) in host.into_iter().zip(guest) {
        Pair { host, guest }.check()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of the table in the documentation.
    fn documented() -> Vec<String> {
        let text = include_str!("../../../docs/assignment.md");
        let (_, table) = text
            .split_once("| register | in the guest | why |")
            .unwrap();
        let rows = table
            .lines()
            .skip(2)
            .take_while(|line| line.starts_with('|'));
        rows.map(|row| row.split('|').nth(1).unwrap().trim().to_owned())
            .collect()
    }

    #[test]
    fn every_rule_is_documented_and_every_row_has_a_rule() {
        let mut rules: Vec<_> = RULES.iter().map(|rule| rule.register.to_owned()).collect();
        let mut rows = documented();
        rules.sort_unstable();
        rows.sort_unstable();
        assert_eq!(rules, rows);
    }

    /// A function with power management at 0x40 and, on the host, AF at 0x50.
    fn pair() -> Pair {
        let mut host = Function {
            bytes: vec![0; 256],
            ..Function::default()
        };
        host.bytes[6] = 0x10;
        host.bytes[POINTER] = 0x40;
        host.bytes[0x40..0x46].copy_from_slice(&[1, 0x50, 3, 0, 3, 0]);
        host.bytes[0x50..0x54].copy_from_slice(&[0x13, 0, 6, 3]);
        let mut guest = host.clone();
        guest.bytes[0x41] = 0;
        guest.bytes[0x44] = 0;
        guest.bytes[0x50..0x54].fill(0);
        Pair { host, guest }
    }

    #[test]
    fn what_is_documented_may_differ_and_nothing_else() {
        assert_eq!(pair().check(), Ok(()));
        for (at, value) in [
            (0x00, 1),
            (0x42, 4),
            (0x44, 8),
            (0x52, 5),
            (0x60, 1),
            (0x0e, 1),
        ] {
            let mut pair = pair();
            pair.guest.bytes[at] ^= value;
            assert!(pair.check().is_err(), "{at:#x}");
        }
        let mut shorter = pair();
        shorter.guest.bytes.truncate(64);
        assert!(shorter.check().is_err());
        let mut regions = pair();
        regions.host.regions.push("Region 0: x".to_owned());
        assert!(regions.check().is_err());
    }
}
