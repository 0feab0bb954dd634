//! Kernel modules, what they need, and which devices ask for them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::setup::initramfs::Initramfs;
use crate::setup::kernels::Unpacked;

/// Ends a signed module; see `struct module_signature` of the kernel.
const SIGNATURE_MARKER: &[u8] = b"~Module signature appended~\n";
const SIGNATURE_INFORMATION: usize = 12;

/// The modules of one kernel, as depmod describes them.
pub struct Modules<'a> {
    kernel: &'a Unpacked,
    /// File and, nearest first, the files of the modules it needs.
    files: HashMap<String, Vec<String>>,
    builtin: HashSet<String>,
    /// Pattern of modaliases and module.
    aliases: Vec<(String, String)>,
}

impl<'a> Modules<'a> {
    /// Reads `modules.dep`, `modules.builtin` and `modules.alias`.
    pub fn read(kernel: &'a Unpacked) -> Result<Self, Error> {
        let text = |name: &str| {
            let path = kernel.modules.join(name);
            fs::read_to_string(&path).map_err(Error::file("read", &path))
        };
        Ok(Self {
            kernel,
            files: parse_dependencies(&text("modules.dep")?),
            builtin: text("modules.builtin")?.lines().map(name_of).collect(),
            aliases: parse_aliases(&text("modules.alias")?),
        })
    }

    /// Whether the kernel has the module, as a file or built in.
    fn has(&self, module: &str) -> bool {
        self.files.contains_key(module) || self.builtin.contains(module)
    }

    /// The files to load for a module, in order; none if it is built in or absent.
    fn closure(&self, module: &str) -> Vec<&str> {
        let mut files: Vec<&str> = self
            .files
            .get(module)
            .map(|files| files.iter().map(String::as_str).collect())
            .unwrap_or_default();
        files.reverse();
        files
    }

    /// Puts modules that are always loaded, and the list of their files in order, into `/modules` of the image.
    pub fn add_required(&self, image: &mut Initramfs, modules: &[&str]) -> Result<(), Error> {
        let mut order = Vec::new();
        for module in modules.iter().map(|module| normal(module)) {
            if !self.has(&module) {
                return Err(Error::KernelLacks {
                    kernel: self.kernel.name.to_owned(),
                    what: format!("module {module}"),
                });
            }
            for file in self.closure(&module) {
                let short = self.add_file(image, file)?;
                if !order.contains(&short) {
                    order.push(short);
                }
            }
        }
        image.file("modules/order", 0o644, order.join(" ").as_bytes());
        Ok(())
    }

    /// Puts modules that present devices may ask for, and the index by modalias, into `/modules` of the image.
    ///
    /// What this kernel does not have is left out: a device then has no driver, as on any machine.
    pub fn add_on_demand(&self, image: &mut Initramfs, modules: &[&str]) -> Result<(), Error> {
        let mut index = String::new();
        for module in modules.iter().map(|module| normal(module)) {
            let mut files = Vec::new();
            for file in self.closure(&module) {
                files.push(self.add_file(image, file)?);
            }
            if files.is_empty() {
                continue;
            }
            let files = files.join(" ");
            // By name, for those that no device asks for.
            index.push_str(&format!("module:{module} {files}\n"));
            for (pattern, _) in self.aliases.iter().filter(|(_, name)| *name == module) {
                index.push_str(&format!("{pattern} {files}\n"));
            }
        }
        image.file("modules/index", 0o644, index.as_bytes());
        Ok(())
    }

    /// Adds one module, decompressed, and returns its name in `/modules`.
    fn add_file(&self, image: &mut Initramfs, file: &str) -> Result<String, Error> {
        let name = format!("{}.ko", name_of(file));
        let path = format!("modules/{name}");
        if !image.contains(&path) {
            image.file(
                &path,
                0o644,
                &decompressed(&self.kernel.modules.join(file))?,
            );
        }
        Ok(name)
    }
}

/// The content of a module file, which Debian compresses.
fn decompressed(path: &Path) -> Result<Vec<u8>, Error> {
    let program = match path.extension().and_then(|ext| ext.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(path).map_err(Error::file("read", path)),
    };
    command::bytes(Command::new(program).arg("-dc").arg(path)).map(without_signature)
}

/// Cuts a module's signature off: to check it is most of the time that loading takes in an emulated machine.
///
/// At the end stand the signature, a structure whose last four bytes are the signature's length, and the marker.
fn without_signature(mut module: Vec<u8>) -> Vec<u8> {
    let Some(signed) = module.strip_suffix(SIGNATURE_MARKER) else {
        return module;
    };
    let Some((rest, information)) = signed.split_last_chunk::<SIGNATURE_INFORMATION>() else {
        return module;
    };
    let Some(length) = information.last_chunk::<4>() else {
        return module;
    };
    let length = u32::from_be_bytes(*length) as usize;
    if let Some(code) = rest.len().checked_sub(length) {
        module.truncate(code);
    }
    module
}

/// `kernel/drivers/nvme/host/nvme-core.ko.xz` → `nvme_core`
fn name_of(file: &str) -> String {
    let name = PathBuf::from(file);
    let name = name.file_name().unwrap_or_default().to_string_lossy();
    normal(name.split('.').next().unwrap_or_default())
}

/// The kernel takes `-` and `_` in module names for the same.
fn normal(module: &str) -> String {
    module.replace('-', "_")
}

fn parse_dependencies(text: &str) -> HashMap<String, Vec<String>> {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| {
            let mut files = vec![file.to_owned()];
            files.extend(needs.split_whitespace().map(str::to_owned));
            (name_of(file), files)
        })
        .collect()
}

fn parse_aliases(text: &str) -> Vec<(String, String)> {
    text.lines()
        .filter_map(|line| line.strip_prefix("alias "))
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(pattern, module)| (pattern.to_owned(), normal(module)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_comes_before_it() {
        let kernel = Unpacked {
            name: "test",
            image: PathBuf::new(),
            elf: PathBuf::new(),
            release: String::new(),
            modules: PathBuf::new(),
        };
        let modules = Modules {
            kernel: &kernel,
            files: parse_dependencies(
                "k/nvme.ko.xz: k/nvme-core.ko.xz k/auth.ko.xz\nk/auth.ko.xz:\n",
            ),
            builtin: HashSet::from(["vfat".to_owned()]),
            aliases: Vec::new(),
        };
        assert_eq!(
            modules.closure("nvme"),
            ["k/auth.ko.xz", "k/nvme-core.ko.xz", "k/nvme.ko.xz"]
        );
        assert!(modules.has("vfat") && modules.closure("vfat").is_empty());
        assert!(!modules.has("zfs"));
    }

    #[test]
    fn a_signature_is_cut_off() {
        let mut module = b"code".to_vec();
        module.extend_from_slice(b"signature");
        module.extend_from_slice(&[0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        module.extend_from_slice(SIGNATURE_MARKER);
        assert_eq!(without_signature(module), b"code");
        assert_eq!(without_signature(b"plain".to_vec()), b"plain");
        let lying = [&[0xff; 12], SIGNATURE_MARKER].concat();
        assert_eq!(without_signature(lying.clone()), lying);
    }

    #[test]
    fn aliases_name_modules_in_normal_form() {
        assert_eq!(
            parse_aliases("# comment\nalias pci:v*d* snd-hda-intel\n"),
            [("pci:v*d*".to_owned(), "snd_hda_intel".to_owned())]
        );
    }
}
