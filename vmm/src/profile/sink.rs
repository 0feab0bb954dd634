//! Reports that were asked for: when each is due and where it goes.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::{AccessFlags, eaccess};
use parking_lot::Mutex;

use super::{Record, html, report, trace};
use crate::config::UsageError;
use crate::options::{BootProfile, ProfileForm, ProfileMoment};
use crate::output;

fn cannot_create(path: &Path) -> impl FnOnce(io::Error) -> UsageError {
    UsageError::output("create the boot profile", path)
}

/// Whether a report could be written to `path`, as far as names and permissions tell: nothing is
/// created, and nothing that is there is emptied.
pub fn can_create(path: &Path) -> Result<(), UsageError> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let may = |path: &Path, what| eaccess(path, what).map_err(io::Error::from);
    let is_directory = || Err(io::Error::from_raw_os_error(libc::EISDIR));
    let possible = match path.metadata() {
        Ok(metadata) if metadata.is_dir() => is_directory(),
        Ok(_) => may(path, AccessFlags::W_OK),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Err(_) if path.as_os_str().as_bytes().ends_with(b"/") => is_directory(),
        Err(_) => may(directory, AccessFlags::W_OK | AccessFlags::X_OK),
    };
    possible.map_err(cannot_create(path))
}

/// One report.
pub struct Report {
    wanted: BootProfile,
    /// What it is written to; `None`: standard error.
    file: Mutex<Option<File>>,
    made: AtomicBool,
}

impl Report {
    /// Creates the file at once: that it cannot be had is to be known before the guest runs.
    pub fn open(wanted: &BootProfile) -> Result<Self, UsageError> {
        let create = |path: &Path| File::create(path).map_err(cannot_create(path));
        let file = wanted.form.file().map(create).transpose()?;
        Ok(Self {
            wanted: wanted.clone(),
            file: Mutex::new(file),
            made: AtomicBool::new(false),
        })
    }

    /// When it is due.
    pub fn moment(&self) -> ProfileMoment {
        self.wanted.moment
    }

    /// Makes the report of what `snapshot` returns, the first time only.
    pub fn make(&self, snapshot: impl FnOnce() -> Record) {
        if self.made.swap(true, Ordering::Relaxed) {
            return;
        }
        let record = snapshot();
        match &self.wanted.form {
            ProfileForm::Table => output::message(&report::table(&record)),
            ProfileForm::Json => output::message(&report::json(&record)),
            ProfileForm::Trace(path) => self.write(path, &trace::trace(&record)),
            ProfileForm::Html(path) => self.write(path, &html::page(&record)),
        }
    }

    fn write(&self, path: &Path, text: &str) {
        let Some(mut file) = self.file.lock().take() else {
            return;
        };
        if let Err(error) = file.write_all(text.as_bytes()) {
            tracing::warn!(
                "cannot write the boot profile to {}: {error}",
                path.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    #[test]
    fn a_file_is_written_once_at_its_moment() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let wanted = BootProfile {
            form: ProfileForm::Trace(path.clone()),
            moment: ProfileMoment::Mark(0x42),
        };
        let report = Report::open(&wanted).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"");
        report.make(Record::default);
        let first = std::fs::read(&path).unwrap();
        assert!(!first.is_empty());
        report.make(|| panic!("made twice"));
        assert_eq!(std::fs::read(&path).unwrap(), first);
    }

    #[test]
    fn whether_a_file_can_be_created_is_told_as_by_creating_it() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        let there = directory.join("there");
        std::fs::write(&there, "kept").unwrap();
        for path in [
            directory.join("new"),
            there.clone(),
            directory.to_owned(),
            directory.join("nodir/page"),
            directory.join("there/page"),
            directory.join("new/"),
            "page-of-a-test".into(),
        ] {
            let is_new = !path.exists();
            let told = can_create(&path).map_err(|error| chain(&error));
            assert_eq!(std::fs::read(&there).unwrap(), b"kept");
            assert_eq!(!path.exists(), is_new, "{path:?}");
            let wanted = BootProfile {
                form: ProfileForm::Html(path.clone()),
                moment: ProfileMoment::Exit,
            };
            let made = Report::open(&wanted).map(drop);
            let made = made.map_err(|error| chain(&error));
            assert_eq!(told.is_ok(), made.is_ok(), "{told:?}, {made:?}");
            if is_new && made.is_ok() {
                std::fs::remove_file(&path).unwrap();
            }
            std::fs::write(&there, "kept").unwrap();
        }
    }

    #[test]
    fn a_file_that_cannot_be_created_is_refused_at_once() {
        let wanted = BootProfile {
            form: ProfileForm::Html("/nowhere/page".into()),
            moment: ProfileMoment::Exit,
        };
        let error = Report::open(&wanted).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("cannot create the boot profile /nowhere/page"),
            "{}",
            error
        );
    }
}
