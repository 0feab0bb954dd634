//! The main job: two GPUs with huge BARs and a disk, assigned to a guest that uses them.

use std::fmt;

use crate::e2e::outcome::hex;
use crate::e2e::{Config, Outcome, Test};

const GIB: u64 = 1 << 30;
const BAR_SIZE: u64 = 16 * GIB;
const FOUR_GIB: u64 = 4 * GIB;

/// The machine of the demo, which other subjects use as well.
pub fn config() -> Config {
    Config::default()
        .gpus(2, "16G")
        .disk("d0", 16)
        .disk("d1", 16)
        .device("nvme,id=nvme,serial=lab,drive=d0")
        .device("ich9-ahci,id=ahci")
        .host_device("ide-hd,id=sata,bus=ahci.0,drive=d1")
}

const SCRIPT: &str = r#"
set -- $LAB_BDFS
echo "IMAGE $(head -c 512 $LAB_DISK_d0 | sha256sum)"
GUEST_KERNEL=$LAB_KERNEL guest 'probe list; probe gpus; grep PCI.Bus /proc/iomem; probe wait /dev/nvme0n1; echo DISK $(head -c 512 /dev/nvme0n1 | sha256sum); grep nvme /proc/interrupts' \
    --vfio $1 --vfio $2 --vfio $LAB_BDF_nvme"#;

/// The demo as a test.
pub fn test() -> Test {
    Test::new("demo::two_gpus_and_a_disk", config(), SCRIPT, |outcome| {
        Summary::of(outcome).map(drop)
    })
}

/// The tests of this subject.
pub fn tests() -> Vec<Test> {
    vec![test()]
}

/// What the guest saw, when all is as it should be.
pub struct Summary {
    gpus: Vec<Gpu>,
    window: Window,
    disk: String,
    interrupts: u64,
}

struct Gpu {
    bdf: String,
    address: u64,
}

/// A window of the guest's host bridge, both ends included.
#[derive(Clone, Copy)]
struct Window {
    first: u64,
    last: u64,
}

impl Summary {
    /// Reads what the script printed, or tells what is wrong.
    pub fn of(outcome: &Outcome) -> Result<Self, String> {
        outcome.expect_clean()?;
        let window = window(outcome)?;
        let mut gpus = Vec::new();
        for bar in outcome.probe("touched") {
            if bar.get("bar") != Some(&"2") {
                continue;
            }
            let (address, size) = (hex(&bar, "address")?, hex(&bar, "size")?);
            let bdf = bar.get("bdf").copied().unwrap_or_default().to_owned();
            if size != BAR_SIZE {
                return Err(format!("{bdf}: BAR2 has {size:#x} bytes, not 16 GiB"));
            }
            if address < window.first || address + (size - 1) > window.last {
                return Err(format!(
                    "{bdf}: BAR2 at {address:#x} is outside the 64-bit window"
                ));
            }
            gpus.push(Gpu { bdf, address });
        }
        if gpus.len() != 2 {
            return Err(format!("the guest used {} GPUs, not 2", gpus.len()));
        }
        outcome.expect("MARK 0x42")?;
        let disk = outcome.same_checksum("IMAGE", "DISK")?;
        let interrupts = outcome.interrupts("MSIX", "nvme");
        if interrupts == 0 {
            return Err("no MSI-X interrupt of the disk was counted".to_owned());
        }
        Ok(Self {
            gpus,
            window,
            disk,
            interrupts,
        })
    }
}

/// The host bridge's window above 4 GiB, from /proc/iomem.
fn window(outcome: &Outcome) -> Result<Window, String> {
    outcome
        .output
        .lines()
        .filter(|line| line.contains("PCI Bus 0000:00"))
        .filter_map(|line| line.trim().split_once(" : ")?.0.split_once('-'))
        .filter_map(|(first, last)| {
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some(Window {
                first: number(first)?,
                last: number(last)?,
            })
        })
        .find(|window| window.first >= FOUR_GIB)
        .ok_or_else(|| "the guest has no PCI window above 4 GiB".to_owned())
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "As the guest sees it (64-bit PCI window {:#x}-{:#x}):",
            self.window.first, self.window.last
        )?;
        for gpu in &self.gpus {
            writeln!(
                f,
                "  GPU {}: BAR2 of 16 GiB at {:#x}, both ends read and written",
                gpu.bdf, gpu.address
            )?;
        }
        writeln!(
            f,
            "  NVMe: first block equals the image's (sha256 {}), {} MSI-X interrupts",
            self.disk, self.interrupts
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(address: &str, disk: &str) -> Outcome {
        Outcome {
            output: format!(
                "IMAGE aa  -\nPROBE touched bdf=0000:00:01.0 bar=2 address={address} size=0x400000000\n\
                 PROBE touched bdf=0000:00:02.0 bar=2 address=0x4400000000 size=0x400000000\n\
                 PROBE touched bdf=0000:00:02.0 bar=0 address=0xc0000000 size=0x1000\nMARK 0x42\n\
                 c0000000-dfffffff : PCI Bus 0000:00\n4000000000-4fffffffff : PCI Bus 0000:00\n\
                 DISK {disk} -\n 24:  3  PCI-MSIX-0000:00:03.0  0-edge  nvme0q0\nGUEST EXIT 0\nVMM EXIT 0\n"
            ),
            ..Outcome::default()
        }
    }

    #[test]
    fn the_summary_holds_only_when_all_is_right() {
        let good = Summary::of(&outcome("0x4000000000", "aa")).map(|summary| summary.to_string());
        assert!(good.unwrap().contains("BAR2 of 16 GiB at 0x4000000000"));
        let error = |address, disk| Summary::of(&outcome(address, disk)).err().unwrap();
        assert!(error("0x3000000000", "aa").contains("outside"));
        assert!(error("0x4000000000", "bb").contains("the image holds"));
    }
}
