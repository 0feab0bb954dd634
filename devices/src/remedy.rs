//! What mends an error: a command, or something that no command does.
//!
//! An error that has one ends its message with it, so that a boot says all in one line; a preflight
//! prints the two on lines of their own. What a command is put together from is [`quoted`].

use std::fmt;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// A command for a shell of root.
    Run(String),
    /// Something for a person.
    Do(String),
}

impl Remedy {
    /// A command.
    pub fn run(command: impl Into<String>) -> Self {
        Self::Run(command.into())
    }

    /// Advice.
    pub fn advice(text: impl Into<String>) -> Self {
        Self::Do(text.into())
    }

    /// `message` without this remedy at its end, where it ends so.
    pub fn cut_from<'a>(&self, message: &'a str) -> &'a str {
        let end = format!(": {self}");
        message.strip_suffix(end.as_str()).unwrap_or(message)
    }
}

/// As it stands at the end of a message.
impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(command) => write!(f, "run `{command}` as root"),
            Self::Do(advice) => f.write_str(advice),
        }
    }
}

/// `word` as a shell takes it for one word, whatever it holds.
pub fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@=%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_a_quoted_word_as_it_was() {
        assert_eq!(quoted("/srv/a-b_1.2"), "/srv/a-b_1.2");
        for word in ["", "/my disk", "it's", "$(id) `id` \\ \" ~ * # !", "ä;&|<>"] {
            let command = format!("printf %s {}", quoted(word));
            let shell = std::process::Command::new("sh")
                .args(["-c", &command])
                .output();
            assert_eq!(String::from_utf8(shell.unwrap().stdout).unwrap(), word);
        }
    }

    #[test]
    fn a_remedy_is_cut_from_the_end_of_its_message_only() {
        let remedy = Remedy::run("modprobe vfio-pci");
        let message = format!("no driver: {remedy}");
        assert_eq!(remedy.cut_from(&message), "no driver");
        assert_eq!(remedy.cut_from("no driver"), "no driver");
    }
}
