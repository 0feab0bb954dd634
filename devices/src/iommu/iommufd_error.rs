//! Why iommufd cannot be used. Every message names the remedy.

use std::io;
use std::path::{Path, PathBuf};

use crate::assign::ports::CallError;
use crate::host::Sysfs;
use crate::pci::address::Bdf;
use crate::remedy::Remedy;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub enum IommufdError {
    /// /dev/iommu cannot be opened.
    #[error("cannot open /dev/iommu ({})", iommu_remedy(.0))]
    OpenIommu(#[source] io::Error),
    /// The device has no character device of its own.
    #[error(
        "{bdf}: it has no file under /dev/vfio/devices: the host kernel is built without VFIO_DEVICE_CDEV (--iommu type1 does without)"
    )]
    NoCdev {
        /// The device.
        bdf: Bdf,
    },
    /// Its character device cannot be opened.
    #[error("{bdf}: cannot open {}{}", path.display(), cdev_remedy(path, source))]
    OpenCdev {
        /// The device.
        bdf: Bdf,
        /// Its character device.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// No IO address space is to be had.
    #[error("an IO address space cannot be made")]
    Ioas(#[source] CallError),
    /// The device is not handed out.
    #[error("{bdf}: cannot be bound to iommufd{}", bind_remedy(*bdf, path, source))]
    Bind {
        /// The device.
        bdf: Bdf,
        /// Its character device.
        path: PathBuf,
        /// The kernel's reason.
        source: CallError,
    },
    /// The device does not go into the IO address space.
    #[error(
        "{bdf}: cannot be attached to the IO address space{}",
        attach_remedy(source)
    )]
    Attach {
        /// The device.
        bdf: Bdf,
        /// The kernel's reason.
        source: CallError,
    },
}

impl IommufdError {
    /// The device that it is about, if it is about one.
    pub fn device(&self) -> Option<Bdf> {
        match self {
            Self::NoCdev { bdf }
            | Self::OpenCdev { bdf, .. }
            | Self::Bind { bdf, .. }
            | Self::Attach { bdf, .. } => Some(*bdf),
            Self::OpenIommu(_) | Self::Ioas(_) => None,
        }
    }

    /// What mends it. The message holds it as well, before the kernel's reason.
    pub fn remedy(&self) -> Remedy {
        let denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        match self {
            Self::OpenIommu(error) if error.kind() == io::ErrorKind::NotFound => {
                Remedy::run("modprobe iommufd")
            }
            Self::OpenIommu(error) if denied(error) => Remedy::Run(take(Path::new("/dev/iommu"))),
            Self::OpenCdev { path, source, .. } if denied(source) => Remedy::Run(take(path)),
            _ => Remedy::advice("--iommu type1 does without"),
        }
    }
}

/// Gives `file` to the user who runs this.
fn take(file: &Path) -> String {
    format!("chown {} {}", Sysfs::own_user(), file.display())
}

fn iommu_remedy(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::NotFound => "the host kernel has no IOMMUFD, or its module is not loaded: run `modprobe iommufd` as root, or use --iommu type1".to_owned(),
        io::ErrorKind::PermissionDenied => {
            let command = take(Path::new("/dev/iommu"));
            format!("you may not use it: {}", Remedy::Run(command))
        }
        _ => "--iommu type1 does without".to_owned(),
    }
}

fn cdev_remedy(path: &Path, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::PermissionDenied => {
            format!(" (you may not use it: {})", Remedy::Run(take(path)))
        }
        _ => String::new(),
    }
}

fn bind_remedy(bdf: Bdf, path: &Path, source: &CallError) -> String {
    match source.errno() {
        Some(libc::EBUSY | libc::EINVAL) => format!(
            ": it, or a device of its IOMMU group, is in use by another process (find it with `fuser -v {} /dev/vfio/*`)",
            path.display()
        ),
        Some(libc::EPERM) => format!(
            ": a member of its IOMMU group is bound to a host driver (list them with `ls /sys/bus/pci/devices/{bdf}/iommu_group/devices`, bind each to vfio-pci), or the host cannot isolate its interrupts (see `dmesg`; interrupt remapping is a firmware setting)"
        ),
        Some(libc::EACCES) => ": it is a VF whose PF wants a token".to_owned(),
        _ => String::new(),
    }
}

fn attach_remedy(source: &CallError) -> &'static str {
    match source.errno() {
        Some(libc::EBUSY) => ": a device of its IOMMU group is being reset",
        Some(libc::EINVAL) => ": its IOMMU is not compatible with that of the other devices",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(errno: i32) -> String {
        let bdf = "41:00.0".parse().unwrap();
        let path = PathBuf::from("/dev/vfio/devices/vfio3");
        let source = CallError {
            call: "VFIO_DEVICE_BIND_IOMMUFD",
            source: io::Error::from_raw_os_error(errno),
        };
        IommufdError::Bind { bdf, path, source }.to_string()
    }

    #[test]
    fn each_refusal_names_the_device_and_a_command() {
        for errno in [libc::EBUSY, libc::EINVAL] {
            let text = bind(errno);
            assert!(text.starts_with("0000:41:00.0:"), "{text}");
            assert!(text.contains("fuser -v /dev/vfio/devices/vfio3"), "{text}");
        }
        assert!(bind(libc::EPERM).contains("iommu_group/devices"));
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        let text = IommufdError::OpenIommu(denied).to_string();
        let command = format!("chown {} /dev/iommu", Sysfs::own_user());
        assert!(text.contains(&command), "{text}");
        let missing = io::Error::from_raw_os_error(libc::ENOENT);
        let text = IommufdError::OpenIommu(missing).to_string();
        assert!(text.contains("--iommu type1"), "{text}");
    }
}
