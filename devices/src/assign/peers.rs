//! Which devices' BARs other devices reach by DMA, and what becomes of those that cannot be
//! reached: fatal where it was asked for, otherwise one warning for all of them.

use std::os::fd::OwnedFd;

use super::error::{AssignError, chain};
use super::ports::IommuNature;
use super::size::{SizedBar, SizedDevice};
use super::{DeviceOptions, PeerToPeer, map};
use crate::pci::address::Bdf;

/// The devices' wishes, and what came of them.
pub struct Peers {
    wishes: Vec<PeerToPeer>,
    by_dmabuf: bool,
    lost: Vec<(Bdf, AssignError)>,
}

impl Peers {
    /// What `options` ask for, by device; `Auto` is nothing where there is no peer.
    pub fn new(devices: usize, options: &[DeviceOptions], nature: IommuNature) -> Self {
        let wish = |number: usize| {
            let option = options.get(number).copied().unwrap_or_default();
            match option.peer_to_peer {
                PeerToPeer::Auto if devices < 2 => PeerToPeer::Off,
                wish => wish,
            }
        };
        Self {
            wishes: (0..devices).map(wish).collect(),
            by_dmabuf: nature.bars_by_dmabuf,
            lost: Vec::new(),
        }
    }

    /// Whether device `number` is to be reached, as far as is known.
    pub fn wanted(&self, number: usize) -> bool {
        let wish = self.wishes.get(number).copied();
        wish.is_some_and(|wish| wish != PeerToPeer::Off)
    }

    /// The dma-bufs of a BAR of device `number`, where it is to be reached through them; none where
    /// it cannot be.
    pub fn export(
        &mut self,
        number: usize,
        device: &SizedDevice,
        bar: &SizedBar,
    ) -> Result<Vec<OwnedFd>, AssignError> {
        if !self.by_dmabuf || !self.wanted(number) {
            return Ok(Vec::new());
        }
        let bdf = device.bdf;
        map::export_bar(device, bar).or_else(|source| {
            let reason = AssignError::Export { bdf, source };
            self.give_up(number, bdf, reason).map(|()| Vec::new())
        })
    }

    /// Device `number` cannot be reached. An error where it was asked for.
    pub fn give_up(
        &mut self,
        number: usize,
        bdf: Bdf,
        reason: AssignError,
    ) -> Result<(), AssignError> {
        if let Some(wish) = self.wishes.get_mut(number) {
            if *wish == PeerToPeer::On {
                return Err(reason);
            }
            *wish = PeerToPeer::Off;
        }
        self.lost.push((bdf, reason));
        Ok(())
    }

    /// What there is to say of the devices that were given up.
    pub fn warning(&self) -> Option<String> {
        let (_, reason) = self.lost.first()?;
        let names: Vec<String> = self.lost.iter().map(|(bdf, _)| bdf.to_string()).collect();
        Some(format!(
            "peer-to-peer is off for {}: other devices cannot reach BARs there by DMA: {}",
            names.join(", "),
            chain(reason)
        ))
    }
}
