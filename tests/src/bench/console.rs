//! The guest's console, each line with the time at which L1 had it whole.

/// Before the devices are used: user space.
const INIT: &str = "MARK 0x41";
/// Every GPU has MEM and MASTER, and both ends of its BARs were touched.
const IN_USE: &str = "MARK 0x42";
/// The guest's last line but for its kernel's, with its status.
const EXIT: &str = "GUEST EXIT ";

/// What the guest said when, in nanoseconds of L1's CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moments {
    /// The guest's init began.
    pub init: u64,
    /// Its GPUs were in use.
    pub in_use: u64,
}

impl Moments {
    /// Reads lines of the form `nanoseconds text`; the error says what the guest did not say.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lines: Vec<(u64, &str)> = text
            .lines()
            .filter_map(|line| {
                let (at, line) = line.split_once(' ').unwrap_or((line, ""));
                Some((at.parse().ok()?, line))
            })
            .collect();
        let find = |wanted: &str| {
            let found = lines.iter().find(|(_, line)| *line == wanted);
            found
                .map(|(at, _)| *at)
                .ok_or_else(|| format!("the guest did not say `{wanted}`"))
        };
        let moments = Self {
            init: find(INIT)?,
            in_use: find(IN_USE)?,
        };
        match lines.iter().find_map(|(_, line)| line.strip_prefix(EXIT)) {
            Some("0") => Ok(moments),
            Some(status) => Err(format!("the guest ended with {status}")),
            None => Err("the guest did not say how it ended".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "10 MARK 0x41\n15 \n20 PROBE gpus count=4\n30 MARK 0x42\n40 GUEST EXIT 0\n";

    #[test]
    fn marks_have_the_times_of_their_lines() {
        let moments = Moments::parse(GOOD);
        assert_eq!(
            moments,
            Ok(Moments {
                init: 10,
                in_use: 30
            })
        );
    }

    #[test]
    fn a_guest_that_failed_is_no_measurement() {
        for (from, to) in [
            ("MARK 0x42", "MARK 0x43"),
            ("EXIT 0", "EXIT 1"),
            ("GUEST EXIT 0", ""),
        ] {
            let text = GOOD.replace(from, to);
            assert!(Moments::parse(&text).is_err(), "{text}");
        }
    }
}
