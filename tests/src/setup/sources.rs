//! The machine's own package sources, from which other suites of the same mirror are derived.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// One archive that the machine uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Archive {
    uri: String,
    suites: Vec<String>,
    /// The value of `Signed-By`, which may be a key of several lines.
    signed_by: Option<String>,
    trusted: bool,
}

/// The archives of Debian that the machine uses.
pub struct Mirror {
    main: Archive,
    security: Option<Archive>,
    /// The machine's release, for instance `bookworm`.
    pub codename: String,
}

impl Mirror {
    /// Reads the machine's configuration.
    pub fn of_this_machine() -> Result<Self, Error> {
        let path = Path::new("/etc/os-release");
        let release = fs::read_to_string(path).map_err(Error::file("read", path))?;
        let codename = codename(&release)?;
        let mut archives = Vec::new();
        for path in source_files(Path::new("/etc/apt")) {
            let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
            if path.extension().is_some_and(|ext| ext == "sources") {
                archives.extend(parse_deb822(&text));
            } else {
                archives.extend(text.lines().filter_map(parse_line));
            }
        }
        Self::choose(codename, &archives)
    }

    fn choose(codename: String, archives: &[Archive]) -> Result<Self, Error> {
        let with_suite = |suite: &str| {
            archives
                .iter()
                .find(|archive| archive.suites.iter().any(|known| known == suite))
                .cloned()
        };
        let Some(main) = with_suite(&codename) else {
            return Err(Error::Sources(format!(
                "no package source in /etc/apt offers the suite {codename}; the lab takes its kernels from the same mirror"
            )));
        };
        let security = with_suite(&format!("{codename}-security"));
        Ok(Self {
            main,
            security,
            codename,
        })
    }

    /// A sources file in deb822 format for these suites; security suites are left out on a machine that uses none.
    pub fn sources(&self, suites: &[&str]) -> String {
        let (security, main): (Vec<&str>, Vec<&str>) = suites
            .iter()
            .partition(|suite| suite.ends_with("-security"));
        let mut text = stanza(&self.main, &main);
        if let Some(archive) = &self.security {
            text.push('\n');
            text.push_str(&stanza(archive, &security));
        }
        text
    }
}

fn stanza(archive: &Archive, suites: &[&str]) -> String {
    if suites.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "Types: deb\nURIs: {}\nSuites: {}\nComponents: main\n",
        archive.uri,
        suites.join(" ")
    );
    if let Some(key) = &archive.signed_by {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "Signed-By: {key}");
    }
    if archive.trusted {
        text.push_str("Trusted: yes\n");
    }
    text
}

fn codename(release: &str) -> Result<String, Error> {
    let value = |key: &str| {
        release
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches('"').to_owned())
    };
    match (value("ID").as_deref(), value("VERSION_CODENAME")) {
        (Some("debian"), Some(codename)) => Ok(codename),
        (id, _) => Err(Error::Sources(format!(
            "this system is `{}`; the lab takes QEMU and its kernels from the package sources of Debian 12 or 13",
            id.unwrap_or("unknown")
        ))),
    }
}

/// The files that apt reads, in its order.
fn source_files(apt: &Path) -> Vec<PathBuf> {
    let mut parts: Vec<PathBuf> = fs::read_dir(apt.join("sources.list.d"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|ext| ext == "list" || ext == "sources")
        })
        .collect();
    parts.sort();
    let list = apt.join("sources.list");
    if list.is_file() {
        parts.insert(0, list);
    }
    parts
}

/// Reads `deb [signed-by=FILE trusted=yes] URI SUITE COMPONENT…`.
fn parse_line(line: &str) -> Option<Archive> {
    let rest = line.trim().strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    if !words.any(|component| component == "main") {
        return None;
    }
    let option = |key: &str| {
        options
            .split_whitespace()
            .find_map(|option| option.strip_prefix(key)?.strip_prefix('='))
            .map(str::to_owned)
    };
    Some(Archive {
        uri: uri.to_owned(),
        suites: vec![suite.to_owned()],
        signed_by: option("signed-by"),
        trusted: option("trusted").as_deref() == Some("yes"),
    })
}

/// Reads the stanzas of a `.sources` file.
fn parse_deb822(text: &str) -> Vec<Archive> {
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{}\n", line.trim_end()))
        .collect();
    text.split("\n\n").flat_map(parse_stanza).collect()
}

/// One stanza gives an archive for each of its URIs.
fn parse_stanza(stanza: &str) -> Vec<Archive> {
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in stanza.lines() {
        if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((key, value)) = line.split_once(':') {
            fields.push((key.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    let field = |key: &str| {
        fields
            .iter()
            .find(|(known, _)| known == key)
            .map(|(_, value)| value.as_str())
    };
    let has = |key: &str, wanted: &str| {
        field(key).is_some_and(|value| value.split_whitespace().any(|word| word == wanted))
    };
    let off = field("enabled").is_some_and(|value| value.eq_ignore_ascii_case("no"));
    if off || !has("types", "deb") || !has("components", "main") {
        return Vec::new();
    }
    let words = |key: &str| -> Vec<String> {
        let value = field(key).unwrap_or_default();
        value.split_whitespace().map(str::to_owned).collect()
    };
    words("uris")
        .into_iter()
        .map(|uri| Archive {
            uri,
            suites: words("suites"),
            signed_by: field("signed-by").map(str::to_owned),
            trusted: has("trusted", "yes"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
Types: deb
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/key.gpg

Types: deb
URIs: http://mirror.example/security
Suites: bookworm-security
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Enabled: no
Types: deb
URIs: http://other.example/debian
Suites: bookworm
Components: main
";

    #[test]
    fn both_formats_give_the_same_archive() {
        let line = parse_line(
            "deb [arch=amd64 signed-by=/usr/share/keyrings/key.gpg] http://mirror.example/debian bookworm main",
        )
        .unwrap();
        let stanza = &parse_deb822(DEB822)[0];
        assert_eq!(line.uri, stanza.uri);
        assert_eq!(line.signed_by, stanza.signed_by);
        assert_eq!(stanza.suites, ["bookworm", "bookworm-updates"]);
    }

    #[test]
    fn lines_that_are_no_binary_source_are_left_out() {
        for line in [
            "",
            "# deb http://a b main",
            "deb-src http://a b main",
            "deb http://a b contrib",
        ] {
            assert_eq!(parse_line(line), None, "{line}");
        }
    }

    #[test]
    fn other_suites_are_asked_of_the_same_mirror() {
        let mirror = Mirror::choose("bookworm".to_owned(), &parse_deb822(DEB822)).unwrap();
        let text = mirror.sources(&["trixie", "trixie-backports", "bookworm-security"]);
        assert!(
            text.contains("URIs: http://mirror.example/debian\nSuites: trixie trixie-backports\n")
        );
        assert!(text.contains("URIs: http://mirror.example/security\nSuites: bookworm-security\n"));
        assert!(text.contains("Signed-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n"));
        assert!(!text.contains("other.example"));
    }

    #[test]
    fn a_machine_without_the_suite_is_told_so() {
        let error = Mirror::choose("trixie".to_owned(), &[]).err().unwrap();
        assert!(error.to_string().contains("trixie"));
        assert!(
            codename("ID=fedora\n")
                .unwrap_err()
                .to_string()
                .contains("fedora")
        );
        assert_eq!(
            codename("ID=debian\nVERSION_CODENAME=\"trixie\"\n").unwrap(),
            "trixie"
        );
    }
}
