//! The machines that tests need.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::cli::MachineArgs;
use crate::error::Error;
use crate::paths;
use crate::setup;

const SECTOR: usize = 512;

/// A machine and the disks in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    machine: MachineArgs,
    disks: Vec<Disk>,
}

/// A disk image, made afresh for each boot.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Disk {
    name: &'static str,
    sectors: usize,
}

impl Config {
    /// GPUs with a BAR of that size.
    pub fn gpus(mut self, count: u32, size: &str) -> Self {
        self.machine.gpus = count;
        self.machine.bar_size = size.to_owned();
        self
    }

    /// A device to assign; with `id=NAME` its address is in LAB_BDF_NAME.
    pub fn device(mut self, argument: &str) -> Self {
        self.machine.device.push(argument.to_owned());
        self
    }

    /// A card (LAB_BDF_card) and, as another function of its device, one that stores 16 GiB (LAB_BDF_beside), behind a root port.
    /// A port faster than 5 GT/s would be waited for after a reset until its link reports to be up, which the emulated one never
    /// does.
    pub fn storing_beside_a_card(self) -> Self {
        self.qemu("-object memory-backend-memfd,id=beside,size=16G,share=on")
            .qemu("-device pcie-root-port,id=rp9,chassis=9,addr=19,x-speed=5")
            .device("e1000e,id=card,bus=rp9,multifunction=on,addr=0.0")
            .device("ivshmem-plain,id=beside,memdev=beside,bus=rp9,addr=0.1")
    }

    /// A device that stays with L1's drivers.
    pub fn host_device(mut self, argument: &str) -> Self {
        self.machine.host_device.push(argument.to_owned());
        self
    }

    /// An argument for QEMU.
    pub fn qemu(mut self, argument: &str) -> Self {
        self.machine.qemu_arg.push(argument.to_owned());
        self
    }

    /// More for the command line of L1's kernel.
    pub fn append(mut self, argument: &str) -> Self {
        self.machine.host_append.push(argument.to_owned());
        self
    }

    /// Address bits of the IOMMU.
    pub fn iommu_bits(mut self, bits: u32) -> Self {
        self.machine.iommu_bits = bits;
        self
    }

    /// L1's memory.
    pub fn memory(mut self, size: &str) -> Self {
        self.machine.memory = Some(size.to_owned());
        self
    }

    /// A disk of `mib` MiB for `drive=NAME`; its image is named by LAB_DISK_NAME. Every sector differs from every other.
    pub fn disk(mut self, name: &'static str, mib: usize) -> Self {
        self.disks.push(Disk {
            name,
            sectors: (mib << 20) / SECTOR,
        });
        self
    }

    /// The kernel that L1 runs, whatever the tests are run on.
    pub fn on(mut self, kernel: &str) -> Self {
        self.machine.host_kernel = kernel.to_owned();
        self
    }

    /// The kernel that L1 runs, where the test does not ask for one.
    pub fn by_default_on(&mut self, kernel: &str) {
        if self.machine.host_kernel == setup::DEFAULT_KERNEL {
            self.machine.host_kernel = kernel.to_owned();
        }
    }

    /// The kernel that L1 runs.
    pub fn host_kernel(&self) -> &str {
        &self.machine.host_kernel
    }

    /// Makes the disks; returns the machine's arguments, shell assignments that name the images, and the images.
    pub fn prepare(&self) -> Result<(MachineArgs, String, Images), Error> {
        let mut machine = self.machine.clone();
        let mut variables = String::new();
        let directory = paths::repository().join("target/lab/disks");
        fs::create_dir_all(&directory).map_err(Error::file("create", &directory))?;
        let mut images = Images(Vec::new());
        for disk in &self.disks {
            let (process, number) = (std::process::id(), IMAGES.fetch_add(1, Ordering::Relaxed));
            let path = directory.join(format!("{}-{process}-{number}.img", disk.name));
            fs::write(&path, disk.content()).map_err(Error::file("write", &path))?;
            images.0.push(path.clone());
            let quoted = path.display().to_string().replace(',', ",,");
            machine.qemu_arg.push(format!(
                "-drive if=none,id={},format=raw,file={quoted}",
                disk.name
            ));
            let value = crate::machine::job::quote(&path.display().to_string());
            variables.push_str(&format!("export LAB_DISK_{}={value}\n", disk.name));
        }
        Ok((machine, variables, images))
    }
}

/// Images made so far: each has a name of its own.
static IMAGES: AtomicU32 = AtomicU32::new(0);

/// Disk images, removed when dropped.
pub struct Images(Vec<PathBuf>);

impl Drop for Images {
    fn drop(&mut self) {
        for path in &self.0 {
            // What cannot be removed is overwritten by a later run of the same number.
            let _ = fs::remove_file(path);
        }
    }
}

impl Disk {
    fn content(&self) -> Vec<u8> {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        let mut bytes = Vec::with_capacity(self.sectors * SECTOR);
        for sector in 0..self.sectors {
            let text = format!(
                "mini-vmm lab disk {} sector {sector} made at {now}\n",
                self.name
            );
            bytes.extend(text.bytes().cycle().take(SECTOR));
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sectors_differ() {
        let disk = Disk {
            name: "d",
            sectors: 3,
        };
        let content = disk.content();
        assert_eq!(content.len(), 3 * SECTOR);
        assert_ne!(content[..SECTOR], content[SECTOR..2 * SECTOR]);
    }

    #[test]
    fn equal_machines_are_equal() {
        let machine = || Config::default().gpus(2, "16G").disk("d0", 1);
        assert_eq!(machine(), machine());
        assert_ne!(machine(), machine().device("edu"));
    }
}
