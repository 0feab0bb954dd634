//! What `check` and `--dry-run` print and end with, beyond what they find of a host.

use std::path::Path;

use super::report::Status;
use super::tests::{GPU, Lab};
use super::*;
use crate::config::{Command, parse};

#[test]
fn whatever_is_in_the_way_a_check_and_a_dry_run_end_with_3() {
    let lab = Lab::new("iommu-39-bits");
    for (kernel, device, topic) in [
        ("/nonexistent/bzImage", "00:03.0", "image"),
        ("/dev/null", "00:03.0", "image"),
        ("k", "7f:1f.7", "devices"),
    ] {
        let boot = &["--kernel", kernel, "--vfio", device];
        let examined = lab.check(boot);
        assert!(examined.failures().contains(&topic), "{boot:?}");
        assert_eq!(examined.code(), 3, "{boot:?}");
        let (text, code) = lab.dry_run(boot);
        assert_eq!(code, 3, "{text}");
        assert_eq!(text, examined.report.text());
    }
    assert_eq!(lab.check(&["00:03.0"]).code(), 0);
}

#[test]
fn files_that_a_boot_could_not_use_are_told_whether_a_kernel_is_named_or_not() {
    let lab = Lab::new("iommu-39-bits");
    let kernel = ["--kernel", "/nonexistent/bzImage"];
    let initrd = ["--initrd", "/nonexistent/initrd"];
    assert_eq!(lab.check(&initrd).failures(), ["initrd"]);
    let both = lab.check(&[kernel, initrd].concat());
    assert_eq!(both.failures(), ["image", "initrd"]);
    let readable = lab.check(&["--initrd", "/proc/self/exe"]);
    assert_eq!(readable.failures(), [""; 0]);
    for form in ["html", "trace"] {
        let path = |path: &Path| format!("{form}={}", path.display());
        let nowhere = path(&lab.root.path().join("nodir/page"));
        let examined = lab.check(&["--boot-profile", &nowhere]);
        assert_eq!(examined.failures(), ["profile"]);
        let failure = examined.one(Status::Fail, "profile");
        assert!(failure.text.contains("/nodir/page"), "{failure:?}");
        let page = lab.root.path().join("page");
        let examined = lab.check(&["--boot-profile", &path(&page)]);
        assert_eq!(examined.failures(), [""; 0]);
        assert!(!page.exists());
    }
}

#[test]
fn a_dry_run_tells_the_warnings_of_the_check_behind_the_plan() {
    let lab = Lab::new("gpu-with-audio");
    lab.bind("0000:41:00.1", None);
    let examined = lab.check(&[GPU]);
    let Ok(Command::Run(config)) = parse(["mini-vmm", "--kernel", "bzImage"]) else {
        panic!();
    };
    let text = examined.dry_run(&config);
    let (plan, warnings) = text.split_once("WARN  ").unwrap();
    assert!(plan.contains("BAR 1, 32 GiB"), "{text}");
    assert!(!text.contains("OK  "), "{text}");
    let remedy = "\n                do: `--vfio 0000:41:00.1` gives it to the guest as well\n";
    for part in ["group     0000:41:00.1 is not assigned though", remedy] {
        assert!(warnings.contains(part), "{text}");
    }
    let warned = examined.report.findings.iter();
    let warned = warned.filter(|finding| finding.status == Status::Warn);
    assert_eq!(warned.count(), text.matches("WARN  ").count());
}

#[test]
fn a_plan_shows_memory_and_bars() {
    let lab = Lab::new("iommu-39-bits");
    let examined = lab.check(&["00:03.0"]);
    let Ok(Command::Run(config)) = parse(["mini-vmm", "--kernel", "bzImage"]) else {
        panic!();
    };
    let text = show(examined.plan.as_ref().unwrap(), &config);
    for part in [
        "RAM        0x0-0x3fffffff",
        "BAR 2, 4 GiB 64-bit prefetchable, at 0x",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_check_that_no_device_is_named_to_says_that_it_looked_at_none() {
    let lab = Lab::new("iommu-39-bits");
    let examined = lab.check(&[]);
    let warning = examined.one(Status::Warn, "devices");
    assert!(warning.text.contains("no device is named"), "{warning:?}");
    assert_eq!(examined.code(), 0);
    let named = lab.check(&["00:03.0"]);
    let mut topics = named.report.findings.iter().map(|finding| finding.topic);
    assert!(!topics.any(|topic| topic == "devices"));
    // A guest without devices can be wanted.
    let boot = ["--kernel", "/nonexistent/bzImage"];
    assert!(!lab.dry_run(&boot).0.contains("no device is named"));
}
