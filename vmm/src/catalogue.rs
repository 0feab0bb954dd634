//! Every message for a user, and whether docs/troubleshooting.md knows it and what to do.
//!
//! The [`samples`] of errors are what the document must explain; an entry that explains nothing is an
//! error as well. [`warnings`] are found in the sources.

mod entries;
mod samples;
mod warnings;

use std::path::{Path, PathBuf};

use devices::remedy::Remedy;

use self::entries::entries;
use self::samples::all;
use self::warnings::warnings;
use crate::error::{Error, chain};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn every_message_is_explained_in_the_document_and_nothing_else_is() {
    let entries = entries();
    let mut messages: Vec<String> = all().iter().map(|error| chain(error)).collect();
    messages.extend(warnings());
    let explained = |message: &&String| entries.iter().any(|entry| entry.explains(message));
    let missing: Vec<&String> = messages
        .iter()
        .filter(|message| !explained(message))
        .collect();
    assert!(
        missing.is_empty(),
        "not in docs/troubleshooting.md:\n{missing:#?}"
    );
    for entry in &entries {
        let about = messages.iter().any(|message| entry.explains(message));
        assert!(about, "no message is like this entry: {}", entry.pattern);
        assert!(entry.remedy.len() > 20, "no remedy: {}", entry.pattern);
        // One that explains everything explains nothing.
        let letters = entry.pattern.chars().filter(|c| c.is_alphabetic()).count();
        assert!(letters > 8, "too vague: {}", entry.pattern);
    }
}

#[test]
fn a_message_holds_the_command_that_mends_it() {
    for error in all() {
        let (message, remedy) = (chain(&error), error.remedy());
        if let Remedy::Run(command) = &remedy {
            assert!(
                message.contains(&format!("`{command}`")),
                "{message}: {command}"
            );
        }
        // What is told apart is not told twice.
        let apart = matches!(
            error,
            Error::Device(_) | Error::MemoryCheck(_) | Error::Host(_) | Error::Place { .. }
        );
        assert!(!apart || remedy.cut_from(&message) != message, "{message}");
    }
}
