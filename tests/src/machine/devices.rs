//! Where devices go on L1's root bus, and what they are called.

use std::collections::BTreeSet;

use crate::error::Error;

/// The first slot for devices that name none; those before are left to QEMU.
const FIRST_SLOT: u32 = 3;
/// The lab's own devices sit in the slot below the chipset's.
pub const LAB_SLOT: u32 = 0x1e;

/// A `-device` argument with an id and, on the root bus, an address.
#[derive(Debug, PartialEq, Eq)]
pub struct Device {
    /// The value for QEMU.
    pub argument: String,
    /// By which QEMU's monitor knows it.
    pub id: String,
}

/// The value of one property of a `-device` argument.
fn property<'a>(argument: &'a str, key: &str) -> Option<&'a str> {
    argument
        .split(',')
        .find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
}

/// The slot that an argument takes on the root bus, if it names one.
fn slot(argument: &str) -> Option<u32> {
    match property(argument, "bus") {
        None | Some("pcie.0") => {}
        Some(_) => return None,
    }
    let address = property(argument, "addr")?;
    let slot = address.split('.').next()?;
    u32::from_str_radix(slot.trim_start_matches("0x"), 16).ok()
}

/// Gives every device an id and those on the root bus without an address the next free slot.
///
/// `others` are arguments whose slots are taken. Devices on a bus of their own (`bus=…`) keep what they have.
pub fn place(
    devices: &[String],
    prefix: &str,
    taken: &mut BTreeSet<u32>,
) -> Result<Vec<Device>, Error> {
    let mut placed = Vec::new();
    for (number, device) in devices.iter().enumerate() {
        let mut argument = device.clone();
        if property(device, "addr").is_none() && property(device, "bus").is_none() {
            let free = (FIRST_SLOT..LAB_SLOT).find(|slot| !taken.contains(slot));
            let Some(free) = free else {
                return Err(Error::Option {
                    option: "--device",
                    value: device.clone(),
                    problem: "no slot is free on the root bus".to_owned(),
                });
            };
            taken.insert(free);
            argument.push_str(&format!(",addr={free:02x}"));
        }
        let id = match property(device, "id") {
            Some(id) => id.to_owned(),
            None => {
                let id = format!("{prefix}{number}");
                argument.push_str(&format!(",id={id}"));
                id
            }
        };
        placed.push(Device { argument, id });
    }
    Ok(placed)
}

/// The slots of the root bus that these arguments name.
pub fn named_slots<'a>(arguments: impl Iterator<Item = &'a String>) -> BTreeSet<u32> {
    arguments.filter_map(|argument| slot(argument)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|&text| text.to_owned()).collect()
    }

    #[test]
    fn free_slots_avoid_those_named() {
        let devices = strings(&[
            "edu",
            "nvme,addr=03.0,id=disk",
            "e1000e,bus=rp1,addr=0.1",
            "edu",
        ]);
        let mut taken = named_slots(devices.iter());
        taken.extend(named_slots(
            strings(&["pcie-root-port,id=rp1,addr=5"]).iter(),
        ));
        let placed: Vec<_> = place(&devices, "dev", &mut taken)
            .unwrap()
            .into_iter()
            .map(|device| (device.argument, device.id))
            .collect();
        let expected = [
            ("edu,addr=04,id=dev0", "dev0"),
            ("nvme,addr=03.0,id=disk", "disk"),
            ("e1000e,bus=rp1,addr=0.1,id=dev2", "dev2"),
            ("edu,addr=06,id=dev3", "dev3"),
        ];
        assert_eq!(placed.len(), expected.len());
        for ((argument, id), (expected_argument, expected_id)) in placed.iter().zip(expected) {
            assert_eq!(
                (argument.as_str(), id.as_str()),
                (expected_argument, expected_id)
            );
        }
    }

    #[test]
    fn a_full_bus_is_an_error() {
        let devices = vec!["edu".to_owned(); 40];
        let error = place(&devices, "dev", &mut BTreeSet::new()).unwrap_err();
        assert!(error.to_string().contains("no slot"), "{error}");
    }
}
