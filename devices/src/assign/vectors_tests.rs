//! The vectors of one kind on the fake kernel.

use super::*;
use crate::assign::ports::IommuBackend;
use crate::fake::{Event, FakeDeviceSpec, FakeKernel, Tally};
use crate::pci::address::Bdf;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

struct Rig {
    kernel: Arc<FakeKernel>,
    device: Box<dyn VfioDevice>,
    set: VectorSet,
    unmasked: BTreeSet<u16>,
}

fn rig(count: u16, noresize: bool) -> Rig {
    let info = IrqInfo {
        count: count.into(),
        noresize,
    };
    let kernel = FakeKernel::new(vec![FakeDeviceSpec {
        bdf: Bdf::default(),
        config: vec![0; 256],
        bars: Default::default(),
        irqs: BTreeMap::from([(IrqIndex::Msix, info)]),
        can_reset: false,
        on_bus: Vec::new(),
        can_export: false,
    }]);
    Rig {
        device: kernel.open(Bdf::default()).unwrap(),
        set: VectorSet::new(0, IrqIndex::Msix, info, count),
        kernel,
        unmasked: BTreeSet::new(),
    }
}

impl Rig {
    fn run(
        &mut self,
        action: impl FnOnce(&mut VectorSet, &VectorPorts<'_>, Wanted<'_>) -> Result<(), CallError>,
    ) -> Result<Tally, CallError> {
        self.kernel.take_log();
        let ports = VectorPorts {
            device: self.device.as_ref(),
            routes: self.kernel.as_ref(),
        };
        let unmasked = &self.unmasked;
        let wanted = |v: u16| {
            unmasked.contains(&v).then_some(MsiMessage {
                address: 0xfee0_0000,
                data: v.into(),
            })
        };
        action(&mut self.set, &ports, &wanted)?;
        Ok(self.kernel.take_tally())
    }

    fn device_refuses_above(&self, vectors: u32) {
        let device = self.kernel.device(Bdf::default()).unwrap();
        device.set_vector_limit(vectors);
    }

    fn armed(&self) -> Vec<bool> {
        let device = self.kernel.device(Bdf::default()).unwrap();
        device.armed(IrqIndex::Msix)
    }
}

#[test]
fn sixty_four_unmasked_entries_are_enabled_with_one_call_each() {
    let mut rig = rig(2048, false);
    rig.unmasked = (0..64).collect();
    let tally = rig.run(|set, ports, wanted| set.enable(ports, wanted, 1));
    let tally = tally.unwrap();
    assert_eq!((tally.irqs, tally.routes), (1, 1));
    assert_eq!(rig.armed(), [true; 64]);
}

#[test]
fn enabling_with_all_masked_arms_one_vector_without_eventfd() {
    let mut rig = rig(2048, false);
    let tally = rig.run(|set, ports, wanted| set.enable(ports, wanted, 1));
    let tally = tally.unwrap();
    assert_eq!((tally.irqs, tally.routes), (1, 0));
    assert_eq!(rig.armed(), [false]);
}

#[test]
fn a_vector_unmasked_later_costs_one_route_and_arms_itself_only() {
    let mut rig = rig(2048, false);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.unmasked.insert(1000);
    let ports_log = |rig: &mut Rig| {
        rig.kernel.take_log();
        let unmasked = rig.unmasked.clone();
        let ports = VectorPorts {
            device: rig.device.as_ref(),
            routes: rig.kernel.as_ref(),
        };
        let message = MsiMessage::default();
        let wanted = |v: u16| unmasked.contains(&v).then_some(message);
        rig.set.update(&ports, &[1000], &wanted).unwrap();
        rig.kernel.take_log()
    };
    assert_eq!(
        ports_log(&mut rig),
        [
            Event::Routes {
                connected: 1,
                disconnected: 0
            },
            Event::SetIrqs(Bdf::default(), "trigger", 1000, vec![true]),
        ]
    );
}

#[test]
fn a_set_that_cannot_grow_is_armed_ahead_and_rearmed_beyond_that() {
    let mut rig = rig(128, true);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.unmasked.insert(63);
    let tally = rig.run(|set, ports, wanted| set.update(ports, &[63], wanted));
    assert_eq!(tally.unwrap().irqs, 1);
    rig.unmasked.insert(100);
    rig.run(|set, ports, wanted| set.update(ports, &[100], wanted))
        .unwrap();
    let armed = rig.armed();
    let on: Vec<usize> = (0..armed.len()).filter(|i| armed[*i]).collect();
    assert_eq!(on, [63, 100]);
}

#[test]
fn a_refused_growth_keeps_the_vectors_that_were_armed_and_tries_again_later() {
    let mut rig = rig(128, true);
    rig.unmasked.insert(3);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.unmasked.insert(100);
    // The routing update and the disarming succeed; both sizes are refused.
    rig.kernel.fail_after(2, libc::ENOSPC);
    rig.device_refuses_above(64);
    let refused = rig.run(|set, ports, wanted| set.update(ports, &[100], wanted));
    assert!(refused.is_err());
    assert!(rig.armed()[3], "vector 3 stays armed");
    assert!(
        rig.set.vectors[3]
            .trigger
            .as_ref()
            .is_some_and(is_signalled)
    );
    rig.device_refuses_above(u32::MAX);
    rig.unmasked.insert(4);
    rig.run(|set, ports, wanted| set.update(ports, &[4], wanted))
        .unwrap();
    let armed = rig.armed();
    assert!(armed[3] && armed[4] && armed[100]);
}

#[test]
fn a_growth_whose_disarming_is_refused_leaves_the_set_armed_and_is_made_up_for_later() {
    let mut rig = rig(128, true);
    rig.unmasked.insert(3);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.unmasked.insert(100);
    rig.kernel.fail_after(1, libc::EIO);
    let refused = rig.run(|set, ports, wanted| set.update(ports, &[100], wanted));
    assert!(refused.is_err() && rig.set.is_enabled() && rig.armed()[3]);
    rig.run(|set, ports, wanted| set.update(ports, &[], wanted))
        .unwrap();
    let armed = rig.armed();
    assert!(armed[3] && armed[100]);
    rig.run(|set, ports, _| set.disable(ports)).unwrap();
    assert!(rig.armed().is_empty());
}

#[test]
fn a_vector_that_could_not_be_connected_is_by_the_next_change() {
    let mut rig = rig(16, false);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.unmasked.insert(5);
    rig.kernel.fail_after(0, libc::ENOMEM);
    let refused = rig.run(|set, ports, wanted| set.update(ports, &[5], wanted));
    assert!(refused.is_err());
    rig.unmasked.insert(6);
    rig.run(|set, ports, wanted| set.update(ports, &[6], wanted))
        .unwrap();
    assert_eq!(rig.kernel.route_count(), 2);
}

#[test]
fn masking_disconnects_and_keeps_what_arrives_until_unmasked() {
    let mut rig = rig(4, false);
    rig.unmasked.insert(2);
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    assert_eq!(rig.kernel.route_count(), 1);
    rig.unmasked.clear();
    let tally = rig.run(|set, ports, wanted| set.update(ports, &[2], wanted));
    assert_eq!(tally.unwrap().irqs, 0);
    assert_eq!(rig.kernel.route_count(), 0);
    assert!(!rig.set.is_pending(2));
    rig.set.vectors[2]
        .trigger
        .as_ref()
        .unwrap()
        .write(1)
        .unwrap();
    assert!(rig.set.is_pending(2));
    rig.unmasked.insert(2);
    rig.run(|set, ports, wanted| set.update(ports, &[2], wanted))
        .unwrap();
    assert_eq!(rig.kernel.route_count(), 1);
}

#[test]
fn disabling_leaves_no_route_and_nothing_armed() {
    let mut rig = rig(16, false);
    rig.unmasked = (0..16).collect();
    rig.run(|set, ports, wanted| set.enable(ports, wanted, 1))
        .unwrap();
    rig.run(|set, ports, _| set.disable(ports)).unwrap();
    assert_eq!(rig.kernel.route_count(), 0);
    assert!(rig.armed().is_empty());
    assert!(!rig.set.is_enabled());
}

#[test]
fn a_refused_arming_connects_nothing() {
    let mut rig = rig(4, false);
    rig.unmasked.insert(0);
    rig.kernel.fail_after(1, libc::ENOSPC);
    let result = rig.run(|set, ports, wanted| set.enable(ports, wanted, 1));
    assert_eq!(result.unwrap_err().errno(), Some(libc::ENOSPC));
    assert_eq!(rig.kernel.route_count(), 0);
    assert!(!rig.set.is_enabled());
}
