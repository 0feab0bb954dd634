//! The entries of docs/troubleshooting.md.

use std::fs;

use super::repository;

/// What an entry of the document is headed by, with … for what varies, and the lines below it.
pub struct Entry {
    /// The heading.
    pub pattern: String,
    /// What is below it.
    pub remedy: String,
}

impl Entry {
    /// Whether `message` is what the entry is about.
    pub fn explains(&self, message: &str) -> bool {
        let mut rest = message;
        let mut pieces = self.pattern.split('…').peekable();
        let first = pieces.next().unwrap_or_default();
        let Some(behind) = rest.strip_prefix(first) else {
            return false;
        };
        rest = behind;
        while let Some(piece) = pieces.next() {
            if pieces.peek().is_none() && !piece.is_empty() {
                return rest.ends_with(piece);
            }
            match rest.find(piece) {
                Some(at) => rest = rest.get(at + piece.len()..).unwrap_or_default(),
                None => return false,
            }
        }
        self.pattern.ends_with('…') || rest.is_empty()
    }
}

/// All of them.
pub fn entries() -> Vec<Entry> {
    let text = fs::read_to_string(repository().join("docs/troubleshooting.md")).unwrap();
    let mut entries: Vec<Entry> = Vec::new();
    for line in text.lines() {
        if let Some(heading) = line
            .strip_prefix("### `` ")
            .and_then(|h| h.strip_suffix(" ``"))
        {
            entries.push(Entry {
                pattern: heading.to_owned(),
                remedy: String::new(),
            });
        } else if line.starts_with('#') {
            // The text below it belongs to no message.
            entries.push(Entry {
                pattern: String::new(),
                remedy: "a heading".to_owned(),
            });
        } else if let Some(last) = entries.last_mut() {
            last.remedy.push_str(line);
        }
    }
    // Headings that follow each other share what is below the last.
    for at in (1..entries.len()).rev() {
        if entries[at - 1].remedy.is_empty() {
            entries[at - 1].remedy = entries[at].remedy.clone();
        }
    }
    entries.retain(|entry| !entry.pattern.is_empty());
    entries
}

#[test]
fn entries_match_by_their_pieces_in_order() {
    let entry = |pattern: &str| Entry {
        pattern: pattern.to_owned(),
        remedy: String::new(),
    };
    assert!(entry("…: no such device: …").explains("0000:41:00.0: no such device: list them"));
    assert!(entry("all of it").explains("all of it"));
    for (pattern, message) in [
        ("…: b", "a: b c"),
        ("a … b", "x a 1 b"),
        ("a … b … c", "a 1 c 2 b"),
        ("all of it", "all of it and more"),
    ] {
        assert!(!entry(pattern).explains(message), "{pattern}");
    }
}
