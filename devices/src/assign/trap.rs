//! Accesses to BARs that reach the VMM: which BAR answers, and which part of the access is its.

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
}

impl BusDevice for BarWindow {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut at = 0;
        while let Some(rest) = data.get_mut(at..).filter(|rest| !rest.is_empty()) {
            let here = offset.saturating_add(at as u64);
            let Some((function, key, in_bar)) = self.find(here) else {
                at += 1;
                continue;
            };
            let run = self.run(key, here, rest.len());
            if let Some(bytes) = rest.get_mut(..run) {
                function.read_bar(key.bar, in_bar, bytes);
            }
            at += run;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut at = 0;
        while let Some(rest) = data.get(at..).filter(|rest| !rest.is_empty()) {
            let here = offset.saturating_add(at as u64);
            let Some((function, key, in_bar)) = self.find(here) else {
                at += 1;
                continue;
            };
            let run = self.run(key, here, rest.len());
            if let Some(bytes) = rest.get(..run) {
                function.write_bar(key.bar, in_bar, bytes);
            }
            at += run;
        }
    }
}
