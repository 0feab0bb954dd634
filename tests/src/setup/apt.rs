//! apt with package sources of the lab's own, beside the machine's.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command;
use crate::error::Error;
use crate::setup::sources::Mirror;

/// What apt takes for installed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Installed {
    /// The machine's packages: to install more.
    Machine,
    /// Nothing: to download only, whatever the machine has.
    Nothing,
}

/// An apt that reads its own sources and keeps its own lists.
pub struct Apt {
    configuration: PathBuf,
    /// Where it keeps packages.
    archives: PathBuf,
    /// The suites it reads, for messages.
    pub suites: String,
}

impl Apt {
    /// Writes the configuration below `root` and fetches the lists.
    pub fn prepare(
        root: &Path,
        mirror: &Mirror,
        suites: &[&str],
        installed: Installed,
    ) -> Result<Self, Error> {
        for directory in ["lists/partial", "cache/archives/partial", "sources"] {
            let path = root.join(directory);
            fs::create_dir_all(&path).map_err(Error::file("create", &path))?;
        }
        write(&root.join("sources/lab.sources"), &mirror.sources(suites))?;
        let configuration = root.join("apt.conf");
        write(&configuration, &configuration_text(root, installed))?;
        if installed == Installed::Nothing {
            write(&root.join("status"), "")?;
        }
        let apt = Self {
            configuration,
            archives: root.join("cache/archives"),
            suites: suites.join(", "),
        };
        command::run(apt.command("apt-get").arg("update").arg("--error-on=any"))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", &self.configuration)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// The packages whose names match a regular expression.
    pub fn search(&self, pattern: &str) -> Result<Vec<String>, Error> {
        let text =
            command::output(
                self.command("apt-cache")
                    .args(["search", "--names-only", pattern]),
            )?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(name, _)| name.to_owned())
            .collect())
    }

    /// The names of the packages that a package needs.
    pub fn dependencies(&self, package: &str) -> Result<Vec<String>, Error> {
        let text = command::output(self.command("apt-cache").args([
            "depends",
            "--no-recommends",
            "--no-suggests",
            "--no-conflicts",
            "--no-breaks",
            "--no-replaces",
            "--no-enhances",
            package,
        ]))?;
        Ok(text
            .lines()
            .filter_map(|line| line.split_once("Depends: "))
            .map(|(_, name)| name.trim().to_owned())
            .collect())
    }

    /// Downloads packages into `directory` and unpacks them below `root`.
    pub fn unpack(&self, packages: &[String], directory: &Path, root: &Path) -> Result<(), Error> {
        for path in [directory, root] {
            fs::create_dir_all(path).map_err(Error::file("create", path))?;
        }
        command::run(
            self.command("apt-get")
                .arg("download")
                .args(packages)
                .current_dir(directory),
        )?;
        unpack_all(directory, root)
    }

    /// The same with all packages that these need, preferring `suite`, for an apt that takes nothing for installed.
    pub fn unpack_with_dependencies(
        &self,
        packages: &[&str],
        suite: &str,
        root: &Path,
    ) -> Result<(), Error> {
        fs::create_dir_all(root).map_err(Error::file("create", root))?;
        command::run(
            self.command("apt-get")
                .args(["install", "--download-only", "--yes"])
                .args(["--no-install-recommends", "--target-release", suite])
                .args(packages),
        )?;
        unpack_all(&self.archives, root)
    }

    /// Installs packages on the machine, preferring the suite if one is given.
    pub fn install(&self, packages: &[&str], suite: Option<&str>) -> Result<(), Error> {
        let mut command = self.command("apt-get");
        command.args(["install", "--yes", "--no-install-recommends"]);
        if let Some(suite) = suite {
            command.args(["--target-release", suite]);
        }
        command::run(command.args(packages))
    }
}

/// Unpacks the packages in `directory` below `root`.
fn unpack_all(directory: &Path, root: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(directory).map_err(Error::file("list", directory))? {
        let path = entry.map_err(Error::file("list", directory))?.path();
        if path.extension().is_some_and(|ext| ext == "deb") {
            command::run(Command::new("dpkg-deb").arg("-x").arg(path).arg(root))?;
        }
    }
    Ok(())
}

/// The machine's own configuration (proxies and the like) is read first; this overrides where things are kept.
fn configuration_text(root: &Path, installed: Installed) -> String {
    let root = root.display();
    let mut text = format!(
        "Dir::State::lists \"{root}/lists\";\n\
         Dir::Cache \"{root}/cache\";\n\
         Dir::Etc::sourcelist \"/dev/null\";\n\
         Dir::Etc::sourceparts \"{root}/sources\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"-\";\n\
         Acquire::Languages \"none\";\n\
         APT::Architecture \"amd64\";\n\
         APT::Sandbox::User \"root\";\n"
    );
    if installed == Installed::Nothing {
        text.push_str(&format!(
            "Dir::State \"{root}\";\nDir::State::status \"{root}/status\";\n"
        ));
    }
    text
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::file("write", path))
}
