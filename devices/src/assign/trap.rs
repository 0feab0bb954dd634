//! Accesses to BARs that reach the VMM: which BAR answers, and which part of the access is its.

use std::ops::Range;
use std::sync::Arc;

use super::commit::{BarEngine, BarKey};
use super::function::AssignedFunction;
use crate::bus::BusDevice;

/// Which address space a window is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Guest-physical memory.
    Memory,
    /// I/O ports.
    Io,
}

impl Space {
    /// Bytes of the smallest BAR that there can be, which is aligned to its size (PCI 3.0, 6.2.5.1).
    fn smallest_bar(self) -> usize {
        match self {
            Self::Memory => 16,
            Self::Io => 4,
        }
    }
}

/// A window of one address space in which BARs may answer.
pub struct BarWindow {
    space: Space,
    start: u64,
    engine: Arc<BarEngine>,
    functions: Vec<Arc<AssignedFunction>>,
}

impl BarWindow {
    /// The window that begins at `start`.
    pub fn new(
        space: Space,
        start: u64,
        engine: Arc<BarEngine>,
        functions: Vec<Arc<AssignedFunction>>,
    ) -> Self {
        Self {
            space,
            start,
            engine,
            functions,
        }
    }

    fn find(&self, offset: u64) -> Option<(&AssignedFunction, BarKey, u64)> {
        let address = self.start.checked_add(offset)?;
        let (key, at) = match self.space {
            Space::Memory => self.engine.find_memory(address)?,
            Space::Io => self.engine.find_io(address)?,
        };
        Some((self.functions.get(key.device)?, key, at))
    }

    /// How many of `len` bytes at `offset` fall into the same BAR as the first.
    fn run(&self, key: BarKey, offset: u64, len: usize) -> usize {
        let same = |i: &usize| {
            let at = offset.saturating_add(*i as u64);
            self.find(at).is_some_and(|(_, other, _)| other == key)
        };
        (1..len).take_while(same).count() + 1
    }

    /// Calls `access` for each part of an access of `len` bytes that one BAR answers: the part, the
    /// function, BAR index and offset in the BAR.
    fn for_each_part(
        &self,
        offset: u64,
        len: usize,
        mut access: impl FnMut(Range<usize>, &AssignedFunction, u8, u64),
    ) {
        // No BAR begins or ends within an aligned access, so one look is enough; several could see
        // different states while another vCPU moves the BAR, and tear the access.
        let address = self.start.saturating_add(offset);
        if len.is_power_of_two()
            && len <= self.space.smallest_bar()
            && address.is_multiple_of(len as u64)
        {
            if let Some((function, key, in_bar)) = self.find(offset) {
                access(0..len, function, key.bar, in_bar);
            }
            return;
        }
        let mut at = 0;
        while at < len {
            let here = offset.saturating_add(at as u64);
            let Some((function, key, in_bar)) = self.find(here) else {
                at += 1;
                continue;
            };
            let run = self.run(key, here, len - at);
            access(at..at + run, function, key.bar, in_bar);
            at += run;
        }
    }
}

impl BusDevice for BarWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.for_each_part(offset, data.len(), |part, function, bar, at| {
            if let Some(bytes) = data.get_mut(part) {
                function.read_bar(bar, at, bytes);
            }
        });
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.for_each_part(offset, data.len(), |part, function, bar, at| {
            if let Some(bytes) = data.get(part) {
                function.write_bar(bar, at, bytes);
            }
        });
    }
}
