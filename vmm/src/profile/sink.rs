//! Reports that were asked for: when each is due and where it goes.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::{Record, html, report, trace};
use crate::config::UsageError;
use crate::options::{BootProfile, ProfileForm, ProfileMoment};
use crate::output;

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
        let create = |path: &Path| {
            File::create(path).map_err(UsageError::output("create the boot profile", path))
        };
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
