//! The command line, word by word.

use crate::error::Error;

/// The words not yet used.
pub struct Args {
    words: std::vec::IntoIter<String>,
}

impl Args {
    /// Takes the words after the program's name.
    pub fn new(words: impl Iterator<Item = String>) -> Self {
        Self {
            words: words.collect::<Vec<_>>().into_iter(),
        }
    }

    /// The next word, which must be there.
    pub fn word(&mut self, what: &'static str) -> Result<String, Error> {
        self.optional()
            .ok_or_else(|| Error::Usage(format!("{what} is missing")))
    }

    /// The next word, if there is one.
    pub fn optional(&mut self) -> Option<String> {
        self.words.next()
    }

    /// The next word as a number.
    pub fn number(&mut self, what: &'static str) -> Result<u64, Error> {
        let text = self.word(what)?;
        number(what, &text)
    }

    /// The next word as a number, or `default` when there is none.
    pub fn number_or(&mut self, what: &'static str, default: u64) -> Result<u64, Error> {
        match self.optional() {
            Some(text) => number(what, &text),
            None => Ok(default),
        }
    }

    /// The next word as an access width.
    pub fn width(&mut self, default: Option<u64>) -> Result<u64, Error> {
        let width = match default {
            Some(default) => self.number_or("WIDTH", default)?,
            None => self.number("WIDTH")?,
        };
        if matches!(width, 1 | 2 | 4 | 8) {
            return Ok(width);
        }
        Err(Error::Usage(format!("WIDTH is {width}, not 1, 2, 4 or 8")))
    }

    /// Fails if a word is left over.
    pub fn end(&mut self) -> Result<(), Error> {
        match self.optional() {
            None => Ok(()),
            Some(extra) => Err(Error::Usage(format!("`{extra}` is one argument too many"))),
        }
    }
}

/// Reads a decimal number, or a hexadecimal one with 0x in front.
pub fn number(what: &'static str, text: &str) -> Result<u64, Error> {
    let parsed = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| Error::Number {
        what,
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_both_notations() {
        assert_eq!(number("N", "42").unwrap(), 42);
        assert_eq!(number("N", "0xffffffffffffffff").unwrap(), u64::MAX);
        for bad in ["", "0x", "-1", "12k", "0x10000000000000000"] {
            assert!(number("N", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_missing_word_and_one_too_many_are_named() {
        let mut args = Args::new(["one".to_owned()].into_iter());
        assert!(args.end().unwrap_err().to_string().contains("`one`"));
        assert!(args.word("BDF").unwrap_err().to_string().contains("BDF"));
    }

    #[test]
    fn widths_are_powers_of_two_up_to_eight() {
        let mut args = Args::new(["3".to_owned(), "8".to_owned()].into_iter());
        assert!(args.width(None).is_err());
        assert_eq!(args.width(None).unwrap(), 8);
        assert_eq!(args.width(Some(4)).unwrap(), 4);
    }
}
