//! The initramfs images of the host and of the guest, for each kernel.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::paths::{self, Cache};
use crate::setup::initramfs::Initramfs;
use crate::setup::kernels::Unpacked;
use crate::setup::modules::Modules;
use crate::setup::tools;

const HOST_INIT: &str = include_str!("../../../resources/lab/host-init.sh");
const GUEST_INIT: &str = include_str!("../../../resources/lab/guest-init.sh");
const GUEST_FUNCTIONS: &str = include_str!("../../../resources/lab/guest-functions.sh");

/// What the host loads before anything else.
const HOST_MODULES: [&str; 7] = [
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "kvm-amd",
    "vfio-pci",
    "vfio_iommu_type1",
];

/// Drivers for the devices that QEMU can emulate: loaded when such a device is there, or by name with `probe modprobe`.
const DRIVERS: [&str; 20] = [
    "nvme",
    "ahci",
    "sd_mod",
    "sr_mod",
    "e1000e",
    "e1000",
    "igb",
    "igbvf",
    "8139cp",
    "8250_pci",
    "snd-hda-intel",
    "snd-hda-codec-generic",
    "snd-pcm-oss",
    "xhci-pci",
    "usbhid",
    "hid-generic",
    "virtio_pci",
    "virtio_net",
    "virtio_blk",
    "vfio-pci",
];

/// Programs of the guest that busybox does not have as good.
const GUEST_PROGRAMS: [&str; 2] = ["/usr/bin/lspci", "/usr/bin/setpci"];
/// Images not used for so long are removed.
const KEEP: std::time::Duration = std::time::Duration::from_secs(7 * 24 * 3600);

/// The images of one kernel.
pub struct Images {
    /// For L1.
    pub host: PathBuf,
    /// For L2.
    pub guest: PathBuf,
}

/// Builds the images of a kernel, unless the cache has them.
///
/// An image's name tells what went into it, so that several checkouts share a cache and an image in use is never replaced.
pub fn ensure(cache: &Cache, kernel: &Unpacked, probe: &Path) -> Result<Images, Error> {
    let directory = cache.path("images");
    fs::create_dir_all(&directory).map_err(Error::file("create", &directory))?;
    let probe = fs::read(probe).map_err(Error::file("read", probe))?;
    let busybox = Path::new(tools::BUSYBOX);
    let busybox = fs::read(busybox).map_err(Error::file("read", busybox))?;
    let parts = Parts {
        kernel,
        probe,
        busybox,
    };
    let image = |role: &str, init: &str, build: fn(&Parts) -> Result<Vec<u8>, Error>| {
        let name = format!(
            "{role}-{}-{:016x}.cpio",
            kernel.name,
            parts.fingerprint(init)
        );
        let path = directory.join(name);
        if path.exists() {
            touch(&path);
        } else {
            eprintln!("lab: building the {role} image for kernel {}", kernel.name);
            store(&path, &build(&parts)?)?;
        }
        Ok(path)
    };
    let images = Images {
        host: image("host", HOST_INIT, host)?,
        guest: image("guest", GUEST_INIT, guest)?,
    };
    remove_old(&directory);
    Ok(images)
}

/// What images are made of.
struct Parts<'a> {
    kernel: &'a Unpacked,
    probe: Vec<u8>,
    busybox: Vec<u8>,
}

impl Parts<'_> {
    fn fingerprint(&self, init: &str) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.kernel.release, &self.probe, &self.busybox, init).hash(&mut hasher);
        (
            HOST_MODULES,
            DRIVERS,
            GUEST_PROGRAMS,
            GUEST_FUNCTIONS,
            include_str!("images.rs"),
        )
            .hash(&mut hasher);
        hasher.finish()
    }

    /// What both images share: busybox under all its names, the probe, and the mount points.
    fn base(&self, init: &str) -> Result<Initramfs, Error> {
        let mut image = Initramfs::default();
        for directory in ["proc", "sys", "dev", "root", "tmp", "run"] {
            image.directory(directory);
        }
        image.device("dev/console", 5, 1);
        image.device("dev/null", 1, 3);
        image.file("init", 0o755, init.as_bytes());
        image.file("bin/busybox", 0o755, &self.busybox);
        image.file("bin/probe", 0o755, &self.probe);
        for applet in command::output(Command::new(tools::BUSYBOX).arg("--list"))?.lines() {
            if applet != "busybox" && applet != "lspci" && applet != "setpci" {
                image.symlink(&format!("bin/{applet}"), "busybox");
            }
        }
        Ok(image)
    }
}

fn host(parts: &Parts) -> Result<Vec<u8>, Error> {
    let mut image = parts.base(HOST_INIT)?;
    let modules = Modules::read(parts.kernel)?;
    modules.add_required(&mut image, &HOST_MODULES)?;
    modules.add_on_demand(&mut image, &DRIVERS)?;
    Ok(image.finish())
}

fn guest(parts: &Parts) -> Result<Vec<u8>, Error> {
    let mut image = parts.base(GUEST_INIT)?;
    image.file("functions", 0o644, GUEST_FUNCTIONS.as_bytes());
    Modules::read(parts.kernel)?.add_on_demand(&mut image, &DRIVERS)?;
    for program in GUEST_PROGRAMS {
        add_program(&mut image, program)?;
    }
    Ok(image.finish())
}

/// Adds a program under /bin and the shared libraries that it names.
fn add_program(image: &mut Initramfs, program: &str) -> Result<(), Error> {
    let path = Path::new(program);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let content = fs::read(path).map_err(Error::file("read", path))?;
    image.file(&format!("bin/{name}"), 0o755, &content);
    for library in libraries(&command::output(Command::new("ldd").arg(program))?) {
        let target = library.trim_start_matches('/');
        if !image.contains(target) {
            let path = Path::new(&library);
            let content = fs::read(path).map_err(Error::file("read", path))?;
            image.file(target, 0o755, &content);
        }
    }
    Ok(())
}

/// The files that `ldd` names.
fn libraries(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(str::to_owned)
        .collect()
}

/// Builds the probe: statically linked, since the guest has no libraries for it.
pub fn build_probe() -> Result<PathBuf, Error> {
    let repository = paths::repository();
    let target = repository.join("target/lab/probe");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    command::run(
        Command::new(cargo)
            .current_dir(&repository)
            .args([
                "rustc",
                "--quiet",
                "--package",
                "probe",
                "--release",
                "--target-dir",
            ])
            .arg(&target)
            .args([
                "--",
                "-C",
                "target-feature=+crt-static",
                "-C",
                "relocation-model=static",
            ]),
    )?;
    Ok(target.join("release/probe"))
}

/// Writes a file under another name first, so that a half-written one is never taken for whole.
fn store(path: &Path, content: &[u8]) -> Result<(), Error> {
    let temporary = path.with_extension("partial");
    fs::write(&temporary, content).map_err(Error::file("write", &temporary))?;
    fs::rename(&temporary, path).map_err(Error::file("rename into place", path))
}

/// Notes that an image is in use; if that fails, it may be rebuilt a week later.
fn touch(path: &Path) {
    if let Ok(file) = fs::File::options().append(true).open(path) {
        let _ = file.set_modified(std::time::SystemTime::now());
    }
}

fn remove_old(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let age = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .map(|modified| modified.elapsed().unwrap_or_default());
        if age.is_ok_and(|age| age > KEEP) {
            // Another set-up may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_a_program() {
        let text = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x7f)\n\t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        assert_eq!(
            libraries(text),
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }
}
