//! Which backend serves the devices: what the user says, or what the host offers.

use std::io;
use std::sync::Arc;

use super::iommufd::{Files, Iommufd};
use super::iommufd_error::IommufdError;
use super::type1::{Type1, Type1Error};
use crate::assign::ports::IommuBackend;
use crate::host::Sysfs;
use crate::pci::address::Bdf;
use crate::range::Range;
use crate::remedy::Remedy;

/// The first kernel in which a BAR can be mapped through iommufd.
pub const DMABUF_SINCE: (u32, u32) = (6, 19);

/// What the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// iommufd where the host offers it for all devices and it does all that type1 does.
    #[default]
    Auto,
    /// VFIO container with type1, or an error.
    Type1,
    /// iommufd, or an error.
    Iommufd,
}

/// Why no backend serves the devices.
#[derive(Debug, thiserror::Error)]
pub enum IommuError {
    /// type1 was asked for, or is all that is left.
    #[error(transparent)]
    Type1(#[from] Type1Error),
    /// iommufd was asked for, or chosen.
    #[error(transparent)]
    Iommufd(#[from] IommufdError),
    /// Neither.
    #[error("iommufd cannot be used ({iommufd}), nor can type1")]
    Neither {
        /// What iommufd lacks.
        iommufd: IommufdError,
        /// What type1 lacks.
        source: Type1Error,
    },
}

impl IommuError {
    /// What mends it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::Type1(error) => error.remedy(),
            Self::Iommufd(error) => error.remedy(),
            Self::Neither { iommufd, .. } => iommufd.remedy(),
        }
    }
}

/// The backend, and in a few words why it was taken.
pub struct Chosen {
    /// What maps for the devices.
    pub backend: Arc<dyn IommuBackend>,
    /// What is known not to be mappable before devices are open; then the backend knows better.
    /// `None`: it knows already.
    pub reserved: Option<Vec<Range>>,
    /// For the profile, behind its name.
    pub why: &'static str,
}

/// A backend that nothing is attached to yet.
pub enum Decision {
    /// VFIO container with type1.
    Type1 {
        /// In a few words.
        why: &'static str,
        /// What iommufd lacks, where it was looked for.
        lack: Option<IommufdError>,
    },
    /// iommufd.
    Iommufd {
        /// In a few words.
        why: &'static str,
        /// What it needs, opened.
        files: Files,
    },
}

/// Decides for the backend that is `wanted`: opens files of iommufd, which does nothing to the
/// devices. `peers`: some of them are to reach each other.
pub fn decide(
    wanted: Wanted,
    sysfs: &Sysfs,
    devices: &[Bdf],
    peers: bool,
) -> Result<Decision, IommufdError> {
    let type1 = |why, lack| Decision::Type1 { why, lack };
    Ok(match wanted {
        Wanted::Type1 => type1("as asked for", None),
        Wanted::Iommufd => Decision::Iommufd {
            why: "as asked for",
            files: Files::open(sysfs, devices)?,
        },
        Wanted::Auto if peers && sysfs.is_older_than(DMABUF_SINCE) => {
            type1("since iommufd has no peer-to-peer before Linux 6.19", None)
        }
        Wanted::Auto => match Files::open(sysfs, devices) {
            Ok(files) => Decision::Iommufd {
                why: "since the host offers it for all devices",
                files,
            },
            Err(lack) => type1(why_not(&lack), Some(lack)),
        },
    })
}

/// Takes the backend that is `wanted` for `devices`, each with its IOMMU group. `peers`: some of
/// them are to reach each other.
pub fn choose(
    wanted: Wanted,
    sysfs: &Sysfs,
    devices: &[(Bdf, u32)],
    peers: bool,
) -> Result<Chosen, IommuError> {
    let bdfs: Vec<Bdf> = devices.iter().map(|(bdf, _)| *bdf).collect();
    match decide(wanted, sysfs, &bdfs, peers)? {
        Decision::Iommufd { why, files } => {
            let groups = devices.iter().map(|(_, group)| *group);
            Ok(Chosen {
                backend: Arc::new(Iommufd::new(files)?),
                // What is not told is found out when the devices are attached.
                reserved: Some(sysfs.unmappable(groups)),
                why,
            })
        }
        Decision::Type1 { why, lack } => match Type1::new(devices) {
            Ok(backend) => Ok(Chosen {
                backend: Arc::new(backend),
                reserved: None,
                why,
            }),
            Err(source) => Err(without_type1(lack, source)),
        },
    }
}

/// In a few words, for the profile.
fn why_not(lack: &IommufdError) -> &'static str {
    match lack {
        IommufdError::OpenIommu(error) if error.kind() == io::ErrorKind::NotFound => {
            "since there is no /dev/iommu"
        }
        IommufdError::NoCdev { .. } => "since a device has no file in /dev/vfio/devices",
        _ => "since iommufd's files cannot be opened",
    }
}

/// Why no backend serves the devices when type1 was decided for and does not, for want of iommufd (`lack`)
/// or otherwise. A host without iommufd is told of type1 only; so is one whose type1 is there and refuses.
pub fn without_type1(lack: Option<IommufdError>, source: Type1Error) -> IommuError {
    let Some(iommufd) = lack else {
        return source.into();
    };
    let absent =
        matches!(&iommufd, IommufdError::OpenIommu(e) if e.kind() == io::ErrorKind::NotFound);
    match source {
        Type1Error::OpenContainer(_) | Type1Error::NoType1 if !absent => {
            IommuError::Neither { iommufd, source }
        }
        source => source.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn kernels_are_told_apart_by_release() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        assert!(!sysfs.is_older_than(DMABUF_SINCE));
        let path = root.path().join("proc/sys/kernel");
        fs::create_dir_all(&path).unwrap();
        for (release, older) in [
            ("6.12.0-1-amd64\n", true),
            ("6.18.9\n", true),
            ("6.19.0-rc1\n", false),
            ("7.3.4+deb14-amd64\n", false),
            ("nonsense\n", false),
        ] {
            fs::write(path.join("osrelease"), release).unwrap();
            assert_eq!(sysfs.is_older_than(DMABUF_SINCE), older, "{release}");
        }
    }

    #[test]
    fn what_is_asked_for_and_cannot_be_had_is_an_error_of_its_own() {
        let root = tempfile::tempdir().unwrap();
        let sysfs = Sysfs::below(root.path());
        let devices = [("41:00.0".parse().unwrap(), 3)];
        let error = choose(Wanted::Iommufd, &sysfs, &devices, true)
            .err()
            .unwrap();
        assert!(error.to_string().contains("modprobe iommufd"), "{error}");
    }

    #[test]
    fn both_lacks_are_told_only_where_iommufd_is_there() {
        let no_type1 = || Type1Error::OpenContainer(io::ErrorKind::NotFound.into());
        let absent = IommufdError::OpenIommu(io::Error::from_raw_os_error(libc::ENOENT));
        assert!(matches!(
            without_type1(Some(absent), no_type1()),
            IommuError::Type1(_)
        ));
        let denied = IommufdError::OpenIommu(io::Error::from_raw_os_error(libc::EACCES));
        let text = without_type1(Some(denied), no_type1()).to_string();
        assert!(text.contains("chown"), "{text}");
    }
}
