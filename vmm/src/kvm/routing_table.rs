//! The table of interrupt routes, without KVM: which GSI carries which message, and what has to be
//! done to get from one state to the next.
//!
//! GSIs 0 to 23 belong to the IOAPIC (and 0 to 15 to the PIC): they are in every table, because an
//! update replaces the whole of it. Vectors get GSIs from 24 on when they are first connected.

use std::collections::BTreeMap;

use arch::layout::IOAPIC_GSIS;
use devices::assign::ports::{MsiMessage, VectorId};

/// KVM_MAX_IRQ_ROUTES (include/linux/kvm_host.h), an upper bound of GSIs as well.
const ROUTES_MAX: usize = 4096;
/// GSIs that are also pins of the two 8259.
const PIC_GSIS: u32 = 16;
/// Routes of GSIs 0 to 23.
const LEGACY_ROUTES: usize = (IOAPIC_GSIS + PIC_GSIS) as usize;

/// One entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// A pin of an in-kernel interrupt controller.
    Chip {
        /// The GSI.
        gsi: u32,
        /// Which controller.
        chip: Chip,
        /// Its pin.
        pin: u32,
    },
    /// A message.
    Msi {
        /// The GSI.
        gsi: u32,
        /// Where it goes.
        message: MsiMessage,
    },
}

/// An in-kernel interrupt controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chip {
    /// The first 8259.
    PicMaster,
    /// The second 8259.
    PicSlave,
    /// The IOAPIC.
    IoApic,
}

/// More vectors than GSIs.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {} interrupt routes of the VM are in use", ROUTES_MAX)]
pub struct NoFreeGsi;

/// What a change of one vector means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its irqfd is to be connected to the GSI.
    Connect(u32),
    /// Its irqfd is to be disconnected from the GSI.
    Disconnect(u32),
    /// It stays connected, or unconnected.
    Keep,
}

/// Which vector has which GSI, and what the kernel's table says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutingTable {
    vectors: BTreeMap<VectorId, u32>,
    /// What each GSI is to carry.
    wanted: BTreeMap<u32, MsiMessage>,
    /// What the kernel has; entries of GSIs that nobody uses any more may linger.
    installed: BTreeMap<u32, MsiMessage>,
}

/// Where the changes of one update find free GSIs: looked up once, however many vectors there are.
struct Free {
    /// Those that still carry a message (no update of the table is needed for it then).
    lingering: BTreeMap<MsiMessage, Vec<u32>>,
    /// Below it no GSI was free, or it was given away.
    next: u32,
}

impl RoutingTable {
    /// Changes vectors; what each change means, in order. The work is linear in the number of
    /// routes, not its product with the number of changes.
    pub fn change(
        &mut self,
        changes: impl IntoIterator<Item = (VectorId, Option<MsiMessage>)>,
    ) -> Result<Vec<Step>, NoFreeGsi> {
        let mut free = self.free();
        let changes = changes.into_iter();
        let steps = changes.map(|(id, message)| self.change_one(id, message, &mut free));
        steps.collect()
    }

    fn free(&self) -> Free {
        let mut lingering: BTreeMap<MsiMessage, Vec<u32>> = BTreeMap::new();
        // The lowest is to be taken first, from the end.
        for (gsi, message) in self.installed.iter().rev() {
            if !self.wanted.contains_key(gsi) {
                lingering.entry(*message).or_default().push(*gsi);
            }
        }
        Free {
            lingering,
            next: IOAPIC_GSIS,
        }
    }

    fn change_one(
        &mut self,
        id: VectorId,
        message: Option<MsiMessage>,
        free: &mut Free,
    ) -> Result<Step, NoFreeGsi> {
        match (self.vectors.get(&id).copied(), message) {
            (Some(gsi), Some(message)) => {
                self.wanted.insert(gsi, message);
                Ok(Step::Keep)
            }
            (None, Some(message)) => {
                let gsi = self.allocate(message, free)?;
                self.vectors.insert(id, gsi);
                self.wanted.insert(gsi, message);
                Ok(Step::Connect(gsi))
            }
            (Some(gsi), None) => {
                self.vectors.remove(&id);
                self.wanted.remove(&gsi);
                free.next = free.next.min(gsi);
                Ok(Step::Disconnect(gsi))
            }
            (None, None) => Ok(Step::Keep),
        }
    }

    /// A free GSI: one that still carries the very message, else the lowest.
    fn allocate(&self, message: MsiMessage, free: &mut Free) -> Result<u32, NoFreeGsi> {
        let is_free = |gsi: &u32| !self.wanted.contains_key(gsi);
        let lingering = free.lingering.get_mut(&message);
        // Another change may have taken it meanwhile.
        if let Some(gsi) = lingering.and_then(|gsis| gsis.pop()).filter(is_free) {
            return Ok(gsi);
        }
        if LEGACY_ROUTES + self.wanted.len() >= ROUTES_MAX {
            return Err(NoFreeGsi);
        }
        let lowest = (free.next..ROUTES_MAX as u32).find(is_free);
        let gsi = lowest.ok_or(NoFreeGsi)?;
        free.next = gsi + 1;
        Ok(gsi)
    }

    /// Whether the kernel's table must be replaced: something wanted is not in it.
    pub fn is_stale(&self) -> bool {
        self.wanted
            .iter()
            .any(|(gsi, message)| self.installed.get(gsi) != Some(message))
    }

    /// The whole table.
    pub fn routes(&self) -> Vec<Route> {
        let mut routes = Vec::with_capacity(LEGACY_ROUTES + self.wanted.len());
        for gsi in 0..IOAPIC_GSIS {
            routes.push(Route::Chip {
                gsi,
                chip: Chip::IoApic,
                pin: gsi,
            });
            if gsi < PIC_GSIS {
                let chip = if gsi < 8 {
                    Chip::PicMaster
                } else {
                    Chip::PicSlave
                };
                let pin = gsi % 8;
                routes.push(Route::Chip { gsi, chip, pin });
            }
        }
        for (gsi, message) in &self.wanted {
            routes.push(Route::Msi {
                gsi: *gsi,
                message: *message,
            });
        }
        routes
    }

    /// The kernel has taken [`RoutingTable::routes`].
    pub fn set_installed(&mut self) {
        self.installed = self.wanted.clone();
    }

    /// The kernel has what `other` says that it has.
    pub fn has_installed(&mut self, other: &Self) {
        self.installed = other.installed.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(vector: u16) -> VectorId {
        VectorId { device: 0, vector }
    }

    fn message(data: u32) -> Option<MsiMessage> {
        let address = 0xfee0_0000;
        Some(MsiMessage { address, data })
    }

    impl RoutingTable {
        fn one(&mut self, id: VectorId, message: Option<MsiMessage>) -> Result<Step, NoFreeGsi> {
            self.change([(id, message)]).map(|steps| steps[0])
        }
    }

    fn messages(table: &RoutingTable) -> Vec<(u32, u32)> {
        let routes = table.routes();
        let messages = routes.iter().filter_map(|route| match route {
            Route::Msi { gsi, message } => Some((*gsi, message.data)),
            Route::Chip { .. } => None,
        });
        messages.collect()
    }

    #[test]
    fn every_table_keeps_the_controllers_pins() {
        let mut table = RoutingTable::default();
        table.one(id(0), message(1)).unwrap();
        let routes = table.routes();
        for gsi in 0..IOAPIC_GSIS {
            let count = routes
                .iter()
                .filter(|route| matches!(route, Route::Chip { gsi: g, .. } if *g == gsi))
                .count();
            assert_eq!(count, if gsi < 16 { 2 } else { 1 });
        }
        assert_eq!(messages(&table), [(24, 1)]);
    }

    #[test]
    fn gsis_are_taken_at_the_first_connection_and_given_back() {
        let mut table = RoutingTable::default();
        assert_eq!(table.one(id(9), None), Ok(Step::Keep));
        assert_eq!(table.one(id(0), message(1)), Ok(Step::Connect(24)));
        assert_eq!(table.one(id(1), message(2)), Ok(Step::Connect(25)));
        assert_eq!(table.one(id(0), message(3)), Ok(Step::Keep));
        assert_eq!(table.one(id(0), None), Ok(Step::Disconnect(24)));
        assert_eq!(table.one(id(2), message(4)), Ok(Step::Connect(24)));
        assert_eq!(messages(&table), [(24, 4), (25, 2)]);
    }

    #[test]
    fn disconnecting_and_reconnecting_the_same_message_needs_no_update() {
        let mut table = RoutingTable::default();
        table.one(id(0), message(1)).unwrap();
        table.one(id(1), message(2)).unwrap();
        assert!(table.is_stale());
        table.set_installed();
        assert!(!table.is_stale());
        table.one(id(1), None).unwrap();
        assert!(!table.is_stale());
        assert_eq!(table.one(id(1), message(2)), Ok(Step::Connect(25)));
        assert!(!table.is_stale());
        table.one(id(1), message(5)).unwrap();
        assert!(table.is_stale());
    }

    #[test]
    fn the_table_ends_at_the_kernels_limit() {
        let mut table = RoutingTable::default();
        let room = (ROUTES_MAX - LEGACY_ROUTES) as u16;
        for vector in 0..room {
            assert!(table.one(id(vector), message(vector.into())).is_ok());
        }
        assert_eq!(table.one(id(room), message(0)), Err(NoFreeGsi));
        assert_eq!(table.routes().len(), ROUTES_MAX);
    }

    #[test]
    fn many_vectors_at_once_take_the_lowest_gsis_and_those_that_carry_their_message() {
        let mut table = RoutingTable::default();
        let batch = |on: bool, range: std::ops::Range<u16>| {
            range.map(move |v| (id(v), message(v.into()).filter(|_| on)))
        };
        let steps = table.change(batch(true, 0..2048)).unwrap();
        let expected: Vec<_> = (24..24 + 2048).map(Step::Connect).collect();
        assert_eq!(steps, expected);
        table.set_installed();
        table.change(batch(false, 0..2048)).unwrap();
        // Those of 1000 and more find their old messages; the others are given in order.
        let steps = table.change(batch(true, 1000..2048)).unwrap();
        assert_eq!(steps, expected[1000..]);
        assert!(!table.is_stale());
        let steps = table
            .change((3000..3004).map(|v| (id(v), message(9999))))
            .unwrap();
        assert_eq!(steps, expected[..4]);
        // What a batch itself frees can be taken again.
        let swap = [(id(3001), None), (id(4000), message(7))];
        let steps = table.change(swap).unwrap();
        assert_eq!(steps, [Step::Disconnect(25), Step::Connect(31)]);
    }
}
