//! A host whose sysfs says anything at all: each file and link of each tree is damaged in turn, in
//! every way, and whatever `check`, `--dry-run` and `devices` make of it, they live and keep to
//! their form (a line for each finding, a remedy for all that is wrong).

use std::cell::Cell;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use super::tests::Lab;
use crate::devices_list;

/// Trees, each with the devices to look at.
const TREES: [(&str, &[&str]); 3] = [
    ("gpu-with-audio", &["41:00.0", "41:00.1"]),
    ("iommu-39-bits", &["00:03.0"]),
    ("virtual-functions", &["01:10.0", "01:00.0"]),
];

/// What a file holds instead.
const TEXTS: [&[u8]; 12] = [
    b"",
    b"\n",
    b"-1\n",
    b"18446744073709551615\n",
    b"99999999999999999999999999\n",
    b"0xffffffffffffffffffff 0x 0x0\n",
    b"0x0000000000000000 0xffffffffffffffff 0xffffffffffffffff\n",
    b"0xffffffffffffffff 0x0000000000000000 0x000000000014220c direct\n",
    b"0x8000000000000000 0xfffffffffffffffe 0x000000000014220c\n\
      0x8000000000000000 0xfffffffffffffffe 0x000000000014220c\n\
      0x0000000000000000 0x7fffffffffffffff 0x000000000014220c\n\
      0x0000000000000001 0x0000000000000002 0x000000000014220c\n",
    b"0xfee00000 0xffffffffffffffff msi\n0xffffffffffffffff 0xffffffffffffffff direct\n",
    b"MemTotal: 18446744073709551615 kB\nMemAvailable: x kB\n",
    b"\xff\xfe\x80 \xf0\x28\x8c\x28\n",
];

/// Where a link leads instead.
const TARGETS: [&str; 5] = ["..", "/", ".", "nowhere/\u{fffd}", "4294967296"];

/// All files, links and directories below `path`.
fn all_below(path: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(path).unwrap() {
        let path = entry.unwrap().path();
        found.push(path.clone());
        if path.is_dir() && !path.is_symlink() {
            all_below(&path, found);
        }
    }
}

/// Damages `path` in every way; after each `look`s. At the end it is as it was.
fn damage(path: &Path, look: &mut dyn FnMut(&str)) {
    let aside = path.with_file_name("\u{1}aside");
    fs::rename(path, &aside).unwrap();
    look("missing");
    symlink(path.file_name().unwrap(), path).unwrap();
    look("a loop");
    fs::remove_file(path).unwrap();
    fs::create_dir(path).unwrap();
    look("an empty directory");
    fs::remove_dir(path).unwrap();
    if aside.is_symlink() {
        for target in TARGETS {
            symlink(target, path).unwrap();
            look(target);
            fs::remove_file(path).unwrap();
        }
    } else if aside.is_file() {
        let mut texts: Vec<Vec<u8>> = TEXTS.iter().map(|text| text.to_vec()).collect();
        // Of configuration space: nothing answers, capabilities that go round and leave it.
        texts.extend([0xff, 0x00, 0x40, 0x34, 0x11].map(|byte| vec![byte; 4096]));
        // Only a part of it.
        let whole = fs::read(&aside).unwrap();
        texts.push(whole.iter().take(whole.len() / 2).copied().collect());
        texts.push(whole.repeat(3));
        for text in texts {
            fs::write(path, &text).unwrap();
            look(&format!("{} bytes: {:?}", text.len(), text.get(..16)));
        }
        fs::remove_file(path).unwrap();
    }
    fs::rename(&aside, path).unwrap();
}

#[test]
fn whatever_sysfs_says_the_preflight_lives_and_keeps_to_its_form() {
    let mut failed = Vec::new();
    let looks = Cell::new(0);
    for (tree, functions) in TREES {
        let lab = Lab::new(tree);
        let root = lab.root.path();
        let mut paths = Vec::new();
        all_below(root, &mut paths);
        for path in paths {
            damage(&path, &mut |how| {
                looks.set(looks.get() + 1);
                let huge = looks.get() % 2 == 0;
                let looked = catch_unwind(AssertUnwindSafe(|| look(&lab, functions, huge)));
                if looked.is_err() {
                    failed.push(format!("{tree}: {}: {how}", path.display()));
                }
            });
        }
    }
    assert!(looks.get() > 1000);
    assert!(failed.is_empty(), "{failed:#?}");
}

fn look(lab: &Lab, functions: &[&str], huge: bool) {
    let options: &[&str] = match huge {
        true => &["--memory", "8G,hugepages=1G,node=auto"],
        false => &[],
    };
    let examined = lab.check(&[functions, options].concat());
    let text = examined.report.text();
    assert!(!text.contains('\0'), "{text}");
    assert!(examined.json().ends_with("}\n"));
    devices_list::list(&lab.host.sysfs, huge);
}

#[test]
fn names_that_are_no_text_are_passed_over() {
    let lab = Lab::new("iommu-39-bits");
    for directory in ["sys/bus/pci/devices", "sys/kernel/iommu_groups/1/devices"] {
        for name in [&b"\xff\xfe"[..], b"0000:00:03.0x", b"10000:e1:00.0"] {
            let name = std::ffi::OsStr::from_bytes(name);
            fs::create_dir(lab.root.path().join(directory).join(name)).unwrap();
        }
    }
    assert_eq!(lab.check(&["00:03.0"]).failures(), [""; 0]);
}

/// Values of options that somebody might give.
const ODD: &[&[&str]] = &[
    &["00:03.0,"],
    &["00:03.0,,p2p=off"],
    &["00:03.0,p2p"],
    &["00:03.0,p2p=ON"],
    &["00:03.0,bar2"],
    &["00:03.0,bar2="],
    &["00:03.0,bar2=0x"],
    &["00:03.0,bar2=0x0"],
    &["00:03.0,bar2=0xffffffffffffffff"],
    &["00:03.0,bar2=0xffffffff00000000"],
    &["00:03.0,bar2=0x8000000000000000"],
    &["00:03.0,bar2=0x100000000,bar0=0x100000000"],
    &["00:03.0,bar18446744073709551616=host"],
    &["00:03.0,no-mmap="],
    &["00:03.0,no-mmap=-1"],
    &["00:03.0,rom=/"],
    &["00:03.0,rom=/dev/null"],
    &["00:03.0,rom=/dev/zero"],
    &["00:03.0,gpudirect-clique=-1"],
    &["00:03.0,gpudirect-clique=4294967296"],
    &[""],
    &[","],
    &["."],
    &[":."],
    &["/"],
    &["host="],
    &["0000:00:03"],
    &["0000:00:03.00"],
    &["00000:00:03.0"],
    &["10000:00:03.0"],
    &["0x00:03.0"],
    &["00:03.0 "],
    &["\u{661}0:03.0"],
    &[
        "00:03.0",
        "00:03.0,p2p=off",
        "/sys/bus/pci/devices/0000:00:03.0",
    ],
    &["--memory", "0G"],
    &["--memory", "1K"],
    &["--memory", "16777215T"],
    &["--memory", "18014398509481983K"],
    &["--memory", "8388608T,hugepages=1G,node=4294967295"],
    &["--memory", "1G,node=4294967296"],
    &["--cpus", "4294967296"],
    &["--cpus", "-1"],
    &["--kernel", "/dev/zero"],
];

#[test]
fn whatever_the_options_say_there_is_one_line_or_a_report() {
    let lab = Lab::new("iommu-39-bits");
    let sizes = ["0G", "1K", "1M", "4G", "9000000T", "16777215T"];
    for odd in ODD.iter().copied() {
        for size in sizes {
            let more = ["00:03.0", "--mmio64-size", size, "--iommu", "type1"];
            let arguments = [&["mini-vmm", "check"], odd, &more].concat();
            match crate::config::parse(arguments) {
                Ok(_) => drop(lab.check(&[odd, &more].concat())),
                Err(error) => assert!(!error.to_string().contains('\n'), "{odd:?}: {error}"),
            }
        }
    }
}
