//! Where assigned devices sit on the guest's root bus.
//!
//! Functions of one host slot share a guest slot with their function numbers, so that a driver
//! finds its companion (a GPU's audio function); they need function 0 among them, without which a
//! guest does not look for the others. Everything else gets a slot of its own, as function 0.

use devices::pci::address::Bdf;

/// Slots of the root bus; 0 is the host bridge's.
const SLOTS: u8 = 32;

/// Device and function number of each of `devices` on the root bus, in the form `slot << 3 |
/// function`; `None` when there are more than it has slots for.
pub fn guest_addresses(devices: &[Bdf]) -> Option<Vec<u8>> {
    let mut next = 1;
    let mut taken: Vec<(Bdf, u8)> = Vec::with_capacity(devices.len());
    for bdf in devices {
        let shared = taken
            .iter()
            .find(|(other, _)| grouped(devices, bdf) && same_slot(other, bdf))
            .map(|(_, devfn)| devfn >> 3);
        let slot = match shared {
            Some(slot) => slot,
            None if next < SLOTS => {
                next += 1;
                next - 1
            }
            None => return None,
        };
        let function = if grouped(devices, bdf) {
            bdf.function
        } else {
            0
        };
        taken.push((*bdf, slot << 3 | function));
    }
    Some(taken.into_iter().map(|(_, devfn)| devfn).collect())
}

fn same_slot(a: &Bdf, b: &Bdf) -> bool {
    (a.segment, a.bus, a.device) == (b.segment, b.bus, b.device)
}

/// Whether function 0 of the device's slot is assigned as well.
fn grouped(devices: &[Bdf], bdf: &Bdf) -> bool {
    let mut siblings = devices.iter().filter(|other| same_slot(other, bdf));
    siblings.any(|other| other.function == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(devices: &[&str]) -> Vec<String> {
        let devices: Vec<Bdf> = devices.iter().map(|text| text.parse().unwrap()).collect();
        let found = guest_addresses(&devices).unwrap();
        found
            .iter()
            .map(|devfn| format!("{}.{}", devfn >> 3, devfn & 7))
            .collect()
    }

    #[test]
    fn functions_of_one_slot_stay_together_in_any_order() {
        assert_eq!(
            addresses(&["41:00.1", "42:00.0", "41:00.0"]),
            ["1.1", "2.0", "1.0"]
        );
    }

    #[test]
    fn without_function_0_each_has_a_slot_of_its_own() {
        assert_eq!(addresses(&["41:00.1", "41:00.2"]), ["1.0", "2.0"]);
    }

    #[test]
    fn the_same_device_number_on_another_bus_is_another_slot() {
        assert_eq!(addresses(&["41:00.0", "42:00.0"]), ["1.0", "2.0"]);
    }

    #[test]
    fn a_full_bus_is_told() {
        let mut devices: Vec<Bdf> = (0..32)
            .map(|bus| Bdf {
                bus,
                ..Bdf::default()
            })
            .collect();
        assert!(guest_addresses(&devices).is_none());
        devices.pop();
        assert_eq!(guest_addresses(&devices).unwrap().last(), Some(&(31 << 3)));
    }
}
