//! The script that L1 runs.

use std::path::Path;

use crate::paths;
use crate::setup::Bootable;

/// A kernel command line for guests that boots fast in an emulated machine, whose clocks need no calibration.
const GUEST_CMDLINE: &str = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check tsc=reliable \
    random.trust_cpu=on cryptomgr.notests initcall_blacklist=load_system_certificate_list";
/// Variables of the lab's own environment that the command gets as well.
const PASSED: [&str; 3] = ["TERM", "USER", "LANG"];
const PASSED_PREFIXES: [&str; 2] = ["RUST_", "MINI_VMM_"];

/// Quotes a word for a shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Quotes the words of a command.
pub fn quote_all(words: &[String]) -> String {
    let quoted: Vec<_> = words.iter().map(|word| quote(word)).collect();
    quoted.join(" ")
}

/// The script: environment, working directory, and `body`.
///
/// `guest` is the kernel that LAB_KERNEL and LAB_INITRD name.
pub fn script(repository: &Path, kernels: &[Bootable], guest: &str, body: &str) -> String {
    let mut text = String::new();
    let mut export = |name: &str, value: &str| {
        text.push_str(&format!("export {name}={}\n", quote(value)));
    };
    for (name, value) in std::env::vars() {
        if PASSED.contains(&name.as_str())
            || PASSED_PREFIXES
                .iter()
                .any(|prefix| name.starts_with(prefix))
        {
            export(&name, &value);
        }
    }
    for kernel in kernels {
        let suffix = kernel.name.replace('.', "_");
        let (image, elf) = (kernel.image.display(), kernel.elf.display());
        let initrd = kernel.guest_initrd.display();
        export(&format!("LAB_KERNEL_{suffix}"), &image.to_string());
        export(&format!("LAB_INITRD_{suffix}"), &initrd.to_string());
        export(&format!("LAB_VMLINUX_{suffix}"), &elf.to_string());
        if kernel.name == guest {
            export("LAB_KERNEL", &image.to_string());
            export("LAB_INITRD", &initrd.to_string());
            export("LAB_VMLINUX", &elf.to_string());
        }
    }
    let vmm = paths::vmm(repository);
    export("LAB_VMM", &vmm.display().to_string());
    if let Ok(program) = std::env::current_exe() {
        export("LAB_TOOL", &program.display().to_string());
    }
    export("LAB_CMDLINE", GUEST_CMDLINE);
    // So that the program can be called by its name, as the documents do.
    if let Some(directory) = vmm.parent() {
        let path = std::env::var("PATH").unwrap_or_default();
        export("PATH", &format!("{}:{path}", directory.display()));
    }
    export("LAB_REPO", &repository.display().to_string());
    let directory = quote(&repository.display().to_string());
    text.push_str(&format!("cd {directory} || exit 125\n{body}\n"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let words = ["it's", "a b", "$HOME", ""].map(str::to_owned);
        let output = crate::command::output(
            std::process::Command::new("sh")
                .arg("-c")
                .arg(format!("printf '%s|' {}", quote_all(&words))),
        );
        assert_eq!(output.unwrap(), "it's|a b|$HOME||");
    }

    #[test]
    fn every_kernel_has_its_variable() {
        let kernel = |name| Bootable {
            name,
            release: String::new(),
            image: format!("/k/{name}").into(),
            elf: format!("/e/{name}").into(),
            host_initrd: "/h".into(),
            guest_initrd: format!("/g/{name}").into(),
        };
        let text = script(
            Path::new("/repo"),
            &[kernel("7.3"), kernel("6.1")],
            "7.3",
            "true",
        );
        for line in [
            "LAB_KERNEL='/k/7.3'",
            "LAB_KERNEL_6_1='/k/6.1'",
            "LAB_INITRD_7_3='/g/7.3'",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
        assert!(text.ends_with("cd '/repo' || exit 125\ntrue\n"));
    }
}
