//! Preflights on trees of sysfs (resources/sysfs-trees).

use std::path::{Path, PathBuf};

use devices::assign::preflight;
use devices::host::tree;
use devices::pci::address::Bdf;
use tempfile::TempDir;

use super::process::KvmFacts;
use super::report::Status;
use super::*;
use crate::config::{Command, parse};
use crate::plan::to_arch;

fn trees() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/sysfs-trees")
}

/// A host as a tree has it, with KVM, unlimited memory to lock, and no IOMMU to attach to.
pub struct Lab {
    pub root: TempDir,
    pub host: Host,
}

impl Lab {
    pub fn new(name: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let text = tree::read(&trees(), name).unwrap();
        let sysfs = tree::expand(&text, root.path()).unwrap();
        let kvm = KvmFacts {
            phys_bits: 46,
            guest_phys_bits: 46,
        };
        let process = Process {
            locked: None,
            files: Some(1 << 19),
            kvm: Ok(kvm),
        };
        let attach = false;
        let host = Host {
            sysfs,
            process,
            attach,
        };
        Self { root, host }
    }

    pub fn check(&self, arguments: &[&str]) -> Examination {
        let command = parse([&["mini-vmm", "check"], arguments].concat()).unwrap();
        let Command::Check(command) = command else {
            panic!("{arguments:?}");
        };
        let examined = check_on(&command, &self.host);
        // What every preflight must hold to.
        for finding in &examined.report.findings {
            let remedies = finding.fix.iter().chain(&finding.advice).count();
            let wanted = usize::from(finding.status != Status::Ok);
            assert_eq!(remedies, wanted, "{finding:?}");
            assert!(!finding.text.contains('\n'), "{finding:?}");
        }
        examined
    }

    pub fn dry_run(&self, arguments: &[&str]) -> (String, u8) {
        let Ok(Command::Run(config)) = parse([&["mini-vmm"], arguments].concat()) else {
            panic!("{arguments:?}");
        };
        dry_run_on(&config, &self.host)
    }

    pub fn bind(&self, function: &str, driver: Option<&str>) {
        let link = format!("sys/bus/pci/devices/{function}/driver");
        let driver = driver.map(|driver| format!("../../../../bus/pci/drivers/{driver}"));
        tree::relink(self.root.path(), &link, driver.as_deref()).unwrap();
    }

    pub fn write(&self, file: &str, text: &str) {
        tree::rewrite(self.root.path(), file, text).unwrap();
    }
}

impl Examination {
    /// The one finding of a topic that has this status.
    pub fn one(&self, status: Status, topic: &str) -> &Finding {
        let all = self.report.findings.iter();
        let found: Vec<_> = all
            .filter(|finding| (finding.status, finding.topic) == (status, topic))
            .collect();
        let [one] = found.as_slice() else {
            panic!("{topic}: {found:?} in\n{}", self.report.text());
        };
        one
    }

    pub fn failures(&self) -> Vec<&'static str> {
        let all = self.report.findings.iter();
        let failed = all.filter(|finding| finding.status == Status::Fail);
        failed.map(|finding| finding.topic).collect()
    }
}

pub const GPU: &str = "41:00.0";

#[test]
fn a_gpu_whose_audio_function_has_a_driver_fails_until_that_is_bound() {
    let lab = Lab::new("gpu-with-audio");
    let examined = lab.check(&[GPU]);
    assert_eq!(examined.failures(), ["group"]);
    let finding = examined.one(Status::Fail, "group");
    assert!(finding.text.contains("0000:41:00.1"), "{finding:?}");
    assert!(finding.text.contains("snd_hda_intel"), "{finding:?}");
    let fix = finding.fix.as_ref().unwrap();
    assert!(
        fix.contains("echo 0000:41:00.1 > /sys/bus/pci/drivers_probe"),
        "{fix}"
    );
    // What the fix does.
    lab.bind("0000:41:00.1", Some("vfio-pci"));
    let examined = lab.check(&[GPU]);
    assert_eq!(examined.failures(), [""; 0]);
    let group = examined.one(Status::Ok, "group");
    assert_eq!(
        group.text,
        "0000:41:00.0: in IOMMU group 31 with 0000:41:00.1 (vfio-pci)"
    );
    let vectors = examined.one(Status::Ok, "vectors");
    assert_eq!(vectors.text, "0000:41:00.0: MSI-X, vectors: 6");
    let reset = examined.one(Status::Ok, "reset");
    assert!(reset.text.ends_with("flr, bus"), "{reset:?}");
}

#[test]
fn all_bars_get_the_place_and_the_pages_of_a_boot() {
    let lab = Lab::new("gpu-with-audio");
    lab.bind("0000:41:00.1", None);
    let examined = lab.check(&[GPU, "--memory", "16G", "--iommu", "type1"]);
    let plan = examined.plan.as_ref().unwrap();
    let bars: Vec<_> = plan
        .bars
        .iter()
        .map(|bar| (bar.bar.as_str(), bar.size >> 20, bar.page))
        .collect();
    let expected = [
        ("0", 16, Some("2 MiB")),
        ("1", 32 << 10, Some("1 GiB")),
        ("3", 32, Some("2 MiB")),
        ("5", 0, None),
    ];
    assert_eq!(bars, expected);
    assert_eq!(plan.bars[1].address, "0x800000000");
    assert_eq!(plan.ram, ["0x0-0xbfffffff", "0x100000000-0x43fffffff"]);
    assert_eq!(plan.iommu.as_deref(), Some("type1, as asked for"));
    let json: serde_json::Value = serde_json::from_str(&examined.json()).unwrap();
    assert_eq!(json["ready"], true);
    assert_eq!(json["plan"]["bars"][1]["address"], "0x800000000");
}

#[test]
fn memory_away_from_the_device_is_a_warning_with_the_command_of_its_pool() {
    let lab = Lab::new("gpu-with-audio");
    lab.bind("0000:41:00.1", None);
    let numa = lab.check(&[GPU, "--memory", "8G"]);
    assert!(numa.one(Status::Warn, "numa").text.contains("NUMA node 1"));
    // The eight huge pages that there are lie on the other node.
    let far = lab.check(&[GPU, "--memory", "8G,hugepages=1G,node=auto"]);
    let warning = far.one(Status::Warn, "hugepages");
    let fix = warning.fix.as_ref().unwrap();
    assert!(
        fix.starts_with("echo 8 > ") && fix.contains("/node1/hugepages/"),
        "{fix}"
    );
    let strict = lab.check(&[GPU, "--memory", "8G,hugepages=1G,node=1"]);
    assert_eq!(strict.failures(), ["hugepages"]);
    let near = lab.check(&[GPU, "--memory", "8G,hugepages=1G,node=0"]);
    assert_eq!(near.failures(), [""; 0]);
    let absent = lab.check(&[GPU, "--memory", "8G,node=5"]);
    assert_eq!(absent.failures(), ["numa"]);
}

#[test]
fn a_host_without_huge_pages_is_a_warning_with_the_setting() {
    let lab = Lab::new("gpu-with-audio");
    let setting = "/sys/kernel/mm/transparent_hugepage/enabled";
    lab.write(setting, "always madvise [never]\n");
    let examined = lab.check(&[]);
    let fix = examined.one(Status::Warn, "memory").fix.as_ref().unwrap();
    assert_eq!(fix, &format!("echo madvise > {setting}"));
}

#[test]
fn limits_of_the_process_are_told_with_the_command_that_raises_them() {
    let mut lab = Lab::new("gpu-with-audio");
    lab.bind("0000:41:00.1", None);
    lab.host.process.locked = Some(64 << 10);
    lab.host.process.files = Some(256);
    let examined = lab.check(&[GPU]);
    assert_eq!(examined.failures(), ["memlock"]);
    let fix = examined.one(Status::Fail, "memlock").fix.as_ref().unwrap();
    assert!(fix.starts_with("prlimit --pid "), "{fix}");
    assert!(fix.ends_with(" --memlock=1073741824"), "{fix}");
    let files = examined.one(Status::Warn, "files").fix.as_ref().unwrap();
    assert!(files.contains("--nofile="), "{files}");
    // Without devices nothing is locked.
    assert_eq!(lab.check(&[]).failures(), [""; 0]);
}

#[test]
fn a_bridge_of_the_group_is_harmless_and_a_network_card_is_not() {
    let lab = Lab::new("group-with-bridge");
    let examined = lab.check(&["03:01.0"]);
    assert_eq!(examined.failures(), [""; 0]);
    let group = examined.one(Status::Ok, "group");
    assert!(group.text.contains("0000:02:00.0"), "{group:?}");
    // The bridge itself, and one that the host drives: no command takes it from the host.
    for bridge in ["02:00.0", "00:11.0"] {
        let examined = lab.check(&[bridge]);
        assert_eq!(examined.failures(), ["devices"]);
        let failure = examined.one(Status::Fail, "devices");
        assert!(failure.text.contains("(header type 1)"), "{failure:?}");
        assert_eq!(failure.advice.as_deref(), Some("assign what is behind it"));
        let told = &examined.report.findings;
        let of_it = told.iter().filter(|finding| finding.device.is_some());
        assert_eq!(of_it.count(), 1, "{}", examined.report.text());
        let boot = preflight::check(&lab.host.sysfs, &[bridge.parse().unwrap()]);
        assert!(boot.unwrap_err().to_string().contains("only endpoints"));
    }

    let lab = Lab::new("group-with-a-network-card");
    let examined = lab.check(&["01:00.1", "00:03.0"]);
    assert_eq!(examined.failures(), ["group"]);
    assert!(examined.one(Status::Fail, "group").text.contains("e1000e"));
    let both = lab.check(&["01:00.0"]);
    assert_eq!(both.failures(), ["driver"]);
}

#[test]
fn the_addresses_of_the_iommu_are_those_of_its_registers() {
    let lab = Lab::new("iommu-39-bits");
    let alone = lab.check(&["00:03.0"]);
    let iova = alone.one(Status::Ok, "iova");
    let told = "the IOMMU maps 0x0-0xfedfffff, 0xfef00000-0x7fffffffff by its registers";
    assert!(iova.text.starts_with(told), "{iova:?}");
    assert_eq!(alone.failures(), [""; 0]);
    assert!(alone.one(Status::Warn, "reset").advice.is_some());
    // Another BAR size than that of the tree.
    let resource = "0x00000000fea00000 0x00000000fea00fff 0x0000000000040200\n\
        0x000000000000e000 0x000000000000e0ff 0x0000000000040101\n\
        0x0000380000000000 0x0000387fffffffff 0x000000000014220c\n";
    lab.write("sys/bus/pci/devices/0000:00:03.0/resource", resource);
    let big = lab.check(&["00:03.0"]);
    let failure = big.one(Status::Fail, "bar");
    for part in ["0000:00:03.0", "BAR 2 (512 GiB)", "2^39"] {
        assert!(failure.text.contains(part), "{failure:?}");
    }
    assert!(failure.advice.as_ref().unwrap().contains("p2p=off"));
    assert_eq!(lab.check(&["00:03.0,p2p=off"]).failures(), [""; 0]);
}

#[test]
fn memory_that_firmware_shares_with_a_device_is_a_warning() {
    let lab = Lab::new("iommu-39-bits");
    let regions = "0x0000000000100000 0x00000000001fffff direct\n\
        0x00000000fee00000 0x00000000feefffff msi\n";
    lab.write("sys/kernel/iommu_groups/1/reserved_regions", regions);
    let examined = lab.check(&["00:03.0", "--memory", "2M"]);
    assert!(examined.one(Status::Warn, "iommu").text.contains("RMRR"));
    // RAM is not put there either.
    let more = lab.check(&["00:03.0", "--memory", "4M"]);
    assert_eq!(more.plan.unwrap().ram, ["0x200000-0x5fffff"]);
}

#[test]
fn where_sysfs_does_not_tell_how_far_the_iommu_reaches_ram_lies_as_in_the_boot() {
    let lab = Lab::new("virtual-functions");
    let device: Bdf = "01:10.0".parse().unwrap();
    let sysfs = &lab.host.sysfs;
    let group = sysfs.device(device).unwrap().group.unwrap();
    // AMD's IOMMUs have no such registers, and HyperTransport has the last of 40 bits.
    let cap = sysfs.path(&format!(
        "sys/bus/pci/devices/{device}/iommu/intel-iommu/cap"
    ));
    std::fs::remove_file(cap).unwrap();
    let regions = "0x0000000000100000 0x00000000001fffff reserved\n\
        0x000000fd00000000 0x000000ffffffffff reserved\n";
    let file = format!("sys/kernel/iommu_groups/{group}/reserved_regions");
    lab.write(&file, regions);
    let size = 1 << 40;
    let examined = lab.check(&["01:10.0", "--iommu", "iommufd", "--memory", "1T"]);
    // As `Opening::begin` and `lay_out_ram` do it.
    let holes: Vec<_> = sysfs.unmappable([group]).iter().map(to_arch).collect();
    let boot = arch::layout::ram_ranges(size, 2 << 20, &holes, 1 << 46).unwrap();
    let boot: Vec<String> = boot.iter().map(ToString::to_string).collect();
    let plan = examined.plan.as_ref();
    assert_eq!(plan.unwrap().ram, boot, "{}", examined.report.text());
    assert!(boot.len() == 3, "{boot:?}");
    let told = "the IOMMU does not map 0x100000-0x1fffff, 0xfd00000000-0xffffffffff; how far";
    let iova = examined.one(Status::Ok, "iova");
    assert!(iova.text.starts_with(told), "{iova:?}");
}

#[test]
fn a_host_without_iommu_says_so_for_every_device_and_how_to_turn_it_on() {
    let lab = Lab::new("no-iommu");
    let examined = lab.check(&["00:03.0", "00:04.0"]);
    assert_eq!(examined.failures(), ["iommu", "iommu"]);
    lab.write("sys/firmware/acpi/tables/DMAR", "");
    let examined = lab.check(&["00:03.0"]);
    let fix = examined.one(Status::Fail, "iommu").fix.as_ref().unwrap();
    assert!(
        fix.contains("intel_iommu=on") && !fix.contains("reboot"),
        "{fix}"
    );
    // The driver comes after it, and there is nothing to say of addresses.
    let driver = examined.one(Status::Warn, "driver");
    assert!(driver.text.contains("not bound to vfio-pci"), "{driver:?}");
    assert!(!examined.report.findings.iter().any(|f| f.topic == "iova"));
    lab.write("proc/cmdline", "quiet intel_iommu=off\n");
    let examined = lab.check(&["00:03.0"]);
    let failure = examined.one(Status::Fail, "iommu");
    assert!(failure.text.contains("`intel_iommu=off`") && failure.fix.is_none());
}

#[test]
fn vectors_that_an_ordinary_user_cannot_see_are_unknown() {
    let lab = Lab::new("iommu-39-bits");
    let config = "sys/bus/pci/devices/0000:00:03.0/config";
    let whole = std::fs::read(lab.root.path().join(config)).unwrap();
    std::fs::write(lab.root.path().join(config), &whole[..64]).unwrap();
    let examined = lab.check(&["00:03.0"]);
    let files = examined.one(Status::Ok, "files");
    assert!(files.text.ends_with("is known at boot"), "{files:?}");
}

#[test]
fn a_virtual_function_is_checked_like_any_other() {
    let lab = Lab::new("virtual-functions");
    let examined = lab.check(&["01:10.0", "--iommu", "auto"]);
    assert_eq!(examined.failures(), [""; 0]);
    let plan = examined.plan.as_ref().unwrap();
    let sizes: Vec<u64> = plan.bars.iter().map(|bar| bar.size).collect();
    assert_eq!(sizes, [16 << 10, 16 << 10]);
    let iommu = plan.iommu.as_ref().unwrap();
    assert!(iommu.starts_with("iommufd"), "{iommu}");
    // The physical one is bound to its driver, with which they go, and what they serve with them.
    let root = lab.root.path();
    let nic = "sys/bus/pci/devices/0000:01:10.0/net/eth9";
    lab.write(&format!("{nic}/flags"), "0x1003\n");
    std::fs::create_dir_all(root.join("sys/class/net")).unwrap();
    std::os::unix::fs::symlink(root.join(nic), root.join("sys/class/net/eth9")).unwrap();
    let physical = lab.check(&["01:00.0"]);
    assert_eq!(physical.failures(), ["driver"]);
    let failure = physical.one(Status::Fail, "driver");
    let told = "(2 virtual functions go with its driver, eth9 is up)";
    assert!(failure.text.contains(told), "{failure:?}");
    let advice = failure.advice.as_ref().unwrap();
    let none = "`echo 0 > /sys/bus/pci/devices/0000:01:00.0/sriov_numvfs`";
    assert!(advice.contains(none), "{advice}");
}

#[test]
fn files_that_are_missing_are_told_with_what_brings_them() {
    let lab = Lab::new("iommu-39-bits");
    let root = lab.root.path();
    std::fs::remove_file(root.join("dev/vfio/vfio")).unwrap();
    let examined = lab.check(&["00:03.0"]);
    let access = examined.one(Status::Fail, "access");
    assert_eq!(access.fix.as_deref(), Some("modprobe vfio-pci"));
    // With iommufd there and no file of the device's, both are told, as by the boot.
    lab.write("dev/iommu", "");
    let neither = lab.check(&["00:03.0"]);
    let access = neither.one(Status::Fail, "access");
    assert!(access.text.contains("nor can type1"), "{access:?}");
    std::fs::remove_file(root.join("dev/iommu")).unwrap();
    let iommufd = lab.check(&["00:03.0", "--iommu", "iommufd"]);
    // Both at once.
    assert_eq!(iommufd.failures(), ["access", "access"]);
    let mut failed = iommufd.report.findings.iter().filter(|f| f.fix.is_some());
    assert_eq!(
        failed.next().unwrap().fix.as_deref(),
        Some("modprobe iommufd")
    );
}

#[test]
fn an_old_kernel_is_a_warning_only_where_it_costs_something() {
    let lab = Lab::new("group-with-bridge");
    lab.write("proc/sys/kernel/osrelease", "6.1.0-40-amd64\n");
    let both = ["03:01.0", "03:02.0"];
    let examined = lab.check(&both);
    let advice = examined
        .one(Status::Warn, "kernel")
        .advice
        .as_ref()
        .unwrap();
    assert!(advice.contains("p2p=off"), "{advice}");
    for devices in [&both[..1], &both[..]] {
        let examined = lab.check(devices);
        let pages = &examined.one(Status::Ok, "kernel").text;
        assert!(pages.starts_with("Linux 6.1:"), "{pages}");
    }
}

#[test]
fn a_bar_without_an_address_on_the_host_is_told() {
    let lab = Lab::new("iommu-39-bits");
    let resource = "0x00000000fea00000 0x00000000fea00fff 0x0000000000040200\n\
        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
        0x0000000000000000 0x00000000ffffffff 0x000000002014220c\n";
    lab.write("sys/bus/pci/devices/0000:00:03.0/resource", resource);
    let examined = lab.check(&["00:03.0"]);
    let warning = examined.one(Status::Warn, "bar");
    assert!(warning.advice.as_ref().unwrap().contains("pci=realloc"));
}

#[test]
fn devices_named_twice_absent_or_too_many_fail() {
    let lab = Lab::new("iommu-39-bits");
    let twice = lab.check(&["00:03.0", "--vfio", "0000:00:03.0"]);
    assert_eq!(twice.failures(), ["devices"]);
    assert_eq!(lab.check(&["7f:1f.7"]).failures(), ["devices"]);
    let many: Vec<String> = (1..=32).map(|bus| format!("{bus:x}:00.0")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let examined = lab.check(&many);
    assert!(
        examined
            .report
            .findings
            .iter()
            .any(|f| f.text.contains("32 devices"))
    );
}

/// Two devices below a switch whose downstream ports have that ACS control register.
fn below_a_switch(acs: &str) -> String {
    let up = "pci0000:00/0000:00:01.0/0000:01:00.0";
    let mut text = String::from("/dev/vfio/vfio:\n/proc/interrupts:  0:  IR-IO-APIC timer\n");
    for (n, port, device) in [
        (1, "0000:02:00.0", "0000:03:00.0"),
        (2, "0000:02:01.0", "0000:04:00.0"),
    ] {
        text.push_str(&format!(
            "/sys/bus/pci/devices/{port} -> ../../../devices/{up}/{port}
@/sys/devices/{up}/{port}
class: 0x060400
config = 0: 22 10 ab 14 07 04 10 00 00 00 04 06 00 00 01 00
config = 100: 0d 00 01 00 5f 00 {acs} 00
/sys/bus/pci/devices/{device} -> ../../../devices/{up}/{port}/{device}
@/sys/devices/{up}/{port}/{device}
class: 0x030200
config = 0: de 10 30 23 07 04 00 00 00 00 02 03 00 00 00 00
driver -> ../../bus/pci/drivers/vfio-pci
iommu_group -> ../../kernel/iommu_groups/{n}
/sys/kernel/iommu_groups/{n}/devices/{device}/
/dev/vfio/{n}:
"
        ));
    }
    text
}

#[test]
fn devices_below_one_switch_are_told_which_way_they_talk() {
    for (acs, up) in [("1d", true), ("00", false)] {
        let root = tempfile::tempdir().unwrap();
        let sysfs = tree::expand(&below_a_switch(acs), root.path()).unwrap();
        let mut lab = Lab::new("no-iommu");
        lab.host.sysfs = sysfs;
        let examined = lab.check(&["03:00.0", "04:00.0"]);
        assert_eq!(examined.failures(), [""; 0], "{}", examined.report.text());
        let told = examined.report.text();
        let way = "below 0000:01:00.0 with 0000:04:00.0, and 0000:02:00.0 sends";
        assert_eq!(told.contains(way), up, "{told}");
    }
}

#[test]
fn options_of_a_device_are_checked_as_by_the_boot() {
    let lab = Lab::new("iommu-39-bits");
    for (option, topic) in [
        ("gpudirect-clique=0", "p2p"),
        ("rom=/nonexistent/rom", "rom"),
        ("no-mmap=5", "bar"),
        ("bar3=host", "bar"),
        ("bar2=0x1000", "bar"),
    ] {
        let device = format!("00:03.0,{option}");
        assert_eq!(lab.check(&[&device]).failures(), [topic], "{option}");
    }
}
