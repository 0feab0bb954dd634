//! What `check` tells of a device that the host uses, and of one in its group.

use super::report::Status;
use super::tests::Lab;

#[test]
fn what_the_host_uses_is_not_taken_by_a_command() {
    let lab = Lab::new("group-with-a-network-card");
    let root = lab.root.path();
    let nic = root.join("sys/bus/pci/devices/0000:01:00.0/net/eth0");
    std::fs::create_dir_all(&nic).unwrap();
    std::fs::create_dir_all(root.join("sys/class/net")).unwrap();
    std::fs::write(nic.join("flags"), "0x1002\n").unwrap();
    std::os::unix::fs::symlink(&nic, root.join("sys/class/net/eth0")).unwrap();
    let down = lab.check(&["01:00.0"]);
    assert!(down.one(Status::Fail, "driver").fix.is_some());
    std::fs::write(nic.join("flags"), "0x1003\n").unwrap();
    for (device, topic) in [("01:00.0", "driver"), ("01:00.1", "group")] {
        let up = lab.check(&[device]);
        let failure = up.one(Status::Fail, topic);
        assert!(failure.text.contains("(eth0 is up)"), "{failure:?}");
        let advice = failure.advice.as_ref().unwrap();
        assert!(advice.contains("`ip link set eth0 down`"), "{advice}");
    }
    let listed = crate::devices_list::list(&lab.host.sysfs, false);
    assert!(listed.contains("driver e1000e, eth0 is up"), "{listed}");
}

#[test]
fn the_boot_display_is_taken_by_a_person_wherever_it_is_in_the_way() {
    let lab = Lab::new("gpu-with-audio");
    lab.bind("0000:41:00.0", Some("i915"));
    lab.write("sys/bus/pci/devices/0000:41:00.0/boot_vga", "1\n");
    for (device, topic) in [("41:00.0", "driver"), ("41:00.1", "group")] {
        let examined = lab.check(&[device]);
        let mut findings = examined.report.findings.iter();
        let failure = findings.find(|finding| finding.topic == topic).unwrap();
        let told = "the host uses it (it is the display that the host was booted on)";
        assert!(failure.text.contains(told), "{failure:?}");
        // It stays that: the command is not left to a later check.
        let advice = failure.advice.as_ref().unwrap();
        assert!(advice.contains("another way to the host"), "{advice}");
        let command = "echo 0000:41:00.0 > /sys/bus/pci/drivers_probe` as root";
        assert!(advice.ends_with(command), "{advice}");
    }
    lab.bind("0000:41:00.0", Some("vfio-pci"));
    let listed = crate::devices_list::list(&lab.host.sysfs, false);
    assert!(!listed.contains("booted on"), "{listed}");
}
