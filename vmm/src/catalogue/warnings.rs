//! What is told without ending a run.

use std::fs;
use std::path::{Path, PathBuf};

use devices::assign::preflight::LeftOut;
use devices::pci::address::Bdf;

use super::repository;
use crate::limits::FewFiles;
use crate::memory_check;
use crate::plan::LITTLE_ROOM;

/// The texts of warnings and errors that do not end a run, from the sources, `x` in place of what
/// varies; and those that are put together elsewhere.
pub fn warnings() -> Vec<String> {
    let bdf = Bdf::default();
    let left_out = LeftOut {
        bdf,
        group: 1,
        member: bdf,
    };
    let mut texts = vec![
        left_out.to_string(),
        FewFiles::check(2048, 1024).unwrap_err().to_string(),
        format!("{}: {}", LITTLE_ROOM.0, LITTLE_ROOM.1),
        memory_check::little_memory(1 << 40, 1 << 30),
        "peer-to-peer is off for 0000:41:00.0: other devices cannot reach BARs there by DMA: x"
            .to_owned(),
    ];
    let mut files = Vec::new();
    for sources in ["vmm/src", "devices/src", "arch/src"] {
        collect(&repository().join(sources), &mut files);
    }
    let catalogue = repository().join("vmm/src/catalogue");
    files.retain(|file| !file.starts_with(&catalogue));
    for file in files {
        let source = fs::read_to_string(&file).unwrap();
        let calls = source.split("tracing::").skip(1);
        let calls = calls.filter(|call| call.starts_with("warn!(") || call.starts_with("error!("));
        texts.extend(calls.filter_map(literal));
        let failures = source.split("Error::system(").skip(1).filter_map(literal);
        texts.extend(failures.map(|what| format!("cannot {what}: x")));
    }
    // What is left of a text that is put together elsewhere says nothing.
    texts.retain(|text| {
        text.chars()
            .filter(|c| c.is_alphabetic() && *c != 'x')
            .count()
            > 8
    });
    texts
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The first string literal of `code`, with `x` for each placeholder.
fn literal(code: &str) -> Option<String> {
    let (_, rest) = code.split_once('"')?;
    let (text, _) = rest.split_once('"')?;
    let mut plain = String::new();
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => {
                depth -= 1;
                plain.push('x');
            }
            c if depth == 0 => plain.push(c),
            _ => {}
        }
    }
    Some(plain)
}
