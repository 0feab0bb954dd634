//! When guest RAM is populated and mapped: what the options say of it.

use std::sync::Arc;

use devices::assign::ports::{DmaGate, IommuBackend, OpenGate};
use devices::assign::ram::{Populate, RamWork};

use crate::config::{Config, DmaMap, Switch};
use crate::error::Error;
use crate::memory::{Backing, GuestRam};
use crate::profile::{ProfiledIommu, Subject};
use crate::ram_mapping::{Priority, RamGate, RamMapping, Surroundings};

/// Guest RAM that waits for BARs to be mapped.
pub struct RamMaps(Option<Arc<RamMapping>>);

impl RamMaps {
    /// BARs are mapped: RAM may be, too.
    pub fn allow(&self) {
        if let Some(mapping) = &self.0 {
            mapping.allow_maps();
        }
    }
}

/// Guest RAM on its way.
pub struct RamPreparation {
    /// What devices pass before they master the bus.
    pub gate: Arc<dyn DmaGate>,
    /// `None`: pages are allocated as the guest touches them.
    mapping: Option<Arc<RamMapping>>,
    before_start: bool,
}

impl RamPreparation {
    /// Begins what `config` asks for: with devices (`iommu`) all RAM is populated and mapped for
    /// them, without them it is populated on request.
    pub fn begin(
        config: &Config,
        ram: &GuestRam,
        backing: Backing,
        iommu: Option<&Arc<ProfiledIommu>>,
        around: Surroundings,
    ) -> Result<Self, Error> {
        let before_start = match iommu {
            Some(_) => config.dma_map == DmaMap::Eager || config.prefault == Switch::On,
            None if config.prefault == Switch::On => true,
            None => {
                return Ok(Self {
                    gate: Arc::new(OpenGate),
                    mapping: None,
                    before_start: false,
                });
            }
        };
        let priority = match before_start {
            true => Priority::Normal,
            false => Priority::Low,
        };
        let blocks = ram.ranges().iter();
        let blocks: Vec<_> = blocks.map(|r| (r.gpa, r.memory.clone())).collect();
        let profile = Arc::clone(&around.profile);
        let populate: Populate = Box::new(move |_, memory| {
            let advise = || memory.advise(libc::MADV_POPULATE_WRITE);
            profile.call("populate", Subject::Ram, advise)
        });
        let iommu = iommu.map(|iommu| Arc::clone(iommu) as Arc<dyn IommuBackend>);
        let work = RamWork::new(&blocks, backing.granule(), iommu, populate);
        let mapping = RamMapping::begin(work, priority, around)?;
        Ok(Self {
            gate: Arc::new(RamGate::new(&mapping, priority)),
            mapping: Some(mapping),
            before_start,
        })
    }

    /// What lets RAM be mapped.
    pub fn maps(&self) -> RamMaps {
        RamMaps(self.mapping.clone())
    }

    /// What the first vCPU passes before it enters the guest.
    pub fn start_gate(&self) -> Option<Arc<dyn DmaGate>> {
        self.before_start.then(|| Arc::clone(&self.gate))
    }

    /// The run has ended.
    pub fn cancel(&self) {
        if let Some(mapping) = &self.mapping {
            mapping.cancel();
        }
    }
}
