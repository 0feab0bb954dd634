//! The tables in docs/performance.md, between markers.

use std::fs;
use std::path::PathBuf;

use super::cell::{Iommu, Scenario};
use super::interfaces;
use super::results::{Measured, Results};
use super::table;
use crate::error::Error;
use crate::paths;
use crate::setup;

/// Of the tables with everything.
const BEGIN: &str = "<!-- begin: cargo lab bench --saved --write-docs -->\n";
/// Of the comparison of type1 and iommufd.
const BEGIN_INTERFACES: &str =
    "<!-- begin: type1 and iommufd, cargo lab bench --saved --write-docs -->\n";
const END: &str = "<!-- end -->\n";

/// Puts the tables of all results into the file.
pub fn write(results: &Results) -> Result<PathBuf, Error> {
    let path = paths::repository().join("docs/performance.md");
    let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    let text = renew(&text, results).map_err(|begin| Error::Content {
        path: path.clone(),
        problem: format!("it has no lines `{}` and `{}`", begin.trim(), END.trim()),
    })?;
    fs::write(&path, text).map_err(Error::file("write", &path))?;
    Ok(path)
}

/// The text with the tables of these results; the error is the marker that is missing.
fn renew(text: &str, results: &Results) -> Result<String, &'static str> {
    let interfaces = interfaces::table(results).markdown();
    let text = replace(text, BEGIN, &tables(results)).ok_or(BEGIN)?;
    replace(&text, BEGIN_INTERFACES, &interfaces).ok_or(BEGIN_INTERFACES)
}

/// The text with something else between a marker and the next end.
fn replace(text: &str, begin: &str, new: &str) -> Option<String> {
    let (before, rest) = text.split_once(begin)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!(
        "{before}{begin}\n{}\n\n{END}{after}",
        new.trim_end()
    ))
}

fn tables(results: &Results) -> String {
    let measured: Vec<&Measured> = results.cells().iter().collect();
    let mut text = table::cells(&measured).markdown();
    let ratios = table::ratios(results, &measured);
    if !ratios.is_empty() {
        text.push_str("\nmini-vmm's times as shares of another's:\n\n");
        text.push_str(&ratios.markdown());
    }
    text.push_str("\nWhat a GiB of BAR costs mini-vmm, in ms. Hosts before 6.15 map BARs beside the guest, so that their mappings \
         contain its share of the one CPU:\n\n",
    );
    text.push_str(&table::mappings(&measured).markdown());
    for row in measured.iter().filter(|row| is_typical(row)) {
        text.push_str(&format!("\nIoctls, {}:\n\n", row.cell));
        text.push_str(&table::ioctls(row).markdown());
    }
    text.push_str("\nMeasured with:\n\n");
    for line in versions(&measured) {
        text.push_str(&format!("* {line}\n"));
    }
    text
}

/// The cells whose ioctls are shown: each interface on the kernel where it is usual.
fn is_typical(row: &Measured) -> bool {
    let cell = &row.cell;
    let kernel = match cell.iommu {
        Iommu::Type1 => setup::DEFAULT_KERNEL,
        Iommu::Iommufd => setup::IOMMUFD_KERNEL,
    };
    cell.scenario == Scenario::A && cell.ram_mib == 512 && cell.host_kernel == kernel
}

/// Each combination of versions once, with the scenarios and hosts that it was used in.
fn versions(measured: &[&Measured]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for row in measured {
        let versions = &row.versions;
        let commit = match row.cell.vmm {
            super::cell::Vmm::MiniVmm => format!(" at {}", versions.commit),
            super::cell::Vmm::Qemu => String::new(),
        };
        let line = format!(
            "{}{commit}: host {}, guest {}",
            versions.vmm, versions.host_kernel, versions.guest_kernel
        );
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines.sort();
    lines
}

#[cfg(test)]
mod tests {
    use super::super::cell::Vmm;
    use super::super::results::tests::measured;
    use super::*;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let text = format!("before\n{BEGIN}old\n{END}after\n");
        let new = replace(&text, BEGIN, "new\n").unwrap();
        assert_eq!(new, format!("before\n{BEGIN}\nnew\n\n{END}after\n"));
        assert_eq!(replace(&new, BEGIN, "new").unwrap(), new);
        assert_eq!(replace("nothing", BEGIN, "new"), None);
    }

    #[test]
    fn the_document_has_its_markers() {
        let path = paths::repository().join("docs/performance.md");
        let text = fs::read_to_string(path).unwrap();
        assert!(renew(&text, &Results::default()).is_ok());
    }

    #[test]
    fn tables_name_versions_once() {
        let mut results = Results::default();
        results.put(measured(Scenario::A, Vmm::MiniVmm, 512, 1000));
        results.put(measured(Scenario::B, Vmm::MiniVmm, 512, 1000));
        let text = tables(&results);
        assert_eq!(text.matches("mini-vmm 1 at abc1234").count(), 1, "{text}");
        assert_eq!(text.matches("Ioctls, A").count(), 1);
        assert!(!text.contains("shares of another's"));
    }
}
