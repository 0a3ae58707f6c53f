//! Codec specifications: `lz4`, `lz4:8`, `zstd:-1`, `zstd+shuffle`.
use super::coder::Encoder;
use super::dictionary::DigestedDictionary;
use super::{CODECS, Codec};
use crate::dictionary::Dictionary;
use crate::format;
use alloc::boxed::Box;
use alloc::string::{String, ToString};
use core::fmt;
use core::str::FromStr;

/// A codec and its level, as users name them. Always one of [`CODECS`] at a level it has.
#[derive(Copy, Clone, PartialEq, Eq)]
pub struct CodecSpec {
    codec: usize,
    level: i32,
    shuffles: bool,
}

/// The suffix of a codec that splits blocks of numbers into planes first.
const SHUFFLE: &str = "+shuffle";

/// A specification names no codec, or no level of that codec. Its text lists what is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    given: String,
    codec: Option<usize>,
}

impl CodecSpec {
    /// Parses `name` or `name:level`, optionally with `+shuffle` at the end.
    ///
    /// # Errors
    /// An unknown name, or a level that the codec does not have; the error lists the valid ones.
    pub fn parse(text: &str) -> Result<CodecSpec, SpecError> {
        let base = text.strip_suffix(SHUFFLE);
        let (name, level) = match base.unwrap_or(text).split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (base.unwrap_or(text), None),
        };
        let unknown = |codec| SpecError { given: text.to_string(), codec };
        let index = CODECS.iter().position(|c| c.name == name).ok_or(unknown(None))?;
        let codec = &CODECS[index];
        let level = match level {
            None => codec.level_default,
            Some(level) => level.parse().map_err(|_| unknown(Some(index)))?,
        };
        if !codec.levels.contains(&level) {
            return Err(unknown(Some(index)));
        }
        Ok(CodecSpec { codec: index, level, shuffles: base.is_some() })
    }

    /// Returns the codec's name.
    pub fn name(&self) -> &'static str {
        self.codec().name
    }

    /// Returns the level.
    pub fn level(&self) -> i32 {
        self.level
    }

    /// Returns whether blocks of numbers are split into planes of bytes before they are compressed
    /// (`block/shuffle/`).
    pub fn shuffles(&self) -> bool {
        self.shuffles
    }

    /// Returns whether it can compress with a dictionary: lz4 and zstd can, and delta by lz4.
    pub fn takes_dictionaries(&self) -> bool {
        matches!(self.name(), "lz4" | "zstd" | "delta")
    }

    /// Returns whether the start of a block can be loaded without decompressing all of it
    /// ([`crate::Store::load_in_place`]).
    pub fn stops_early(&self) -> bool {
        format::stops_early(self.format()) && !self.shuffles
    }

    pub(crate) fn format(&self) -> u8 {
        self.codec().format
    }

    /// Makes an encoder for inputs of up to `block_bytes_max` bytes. It allocates all memory that
    /// it will ever need.
    pub(crate) fn encoder(&self, block_bytes_max: usize) -> Box<dyn Encoder> {
        (self.codec().encoder)(self.level, block_bytes_max)
    }

    /// Prepares a dictionary for the codec at this level. Returns `None` if it can't use that kind
    /// of dictionary, or finds it damaged. Allocates.
    pub(crate) fn digest(
        &self,
        dictionary: &Dictionary,
        block_bytes_max: usize,
    ) -> Option<DigestedDictionary> {
        DigestedDictionary::new(self.name(), self.level, dictionary, block_bytes_max)
    }

    fn codec(&self) -> &'static Codec {
        &CODECS[self.codec]
    }
}

impl Default for CodecSpec {
    /// Returns delta.
    fn default() -> CodecSpec {
        CodecSpec::parse("delta").expect("delta is in the table")
    }
}

impl FromStr for CodecSpec {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<CodecSpec, SpecError> {
        CodecSpec::parse(text)
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        if self.level != self.codec().level_default {
            write!(f, ":{}", self.level)?;
        }
        f.write_str(if self.shuffles { SHUFFLE } else { "" })
    }
}

impl fmt::Debug for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CodecSpec({self})")
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(codec) = self.codec.map(|i| &CODECS[i]) {
            let (low, high) = (codec.levels.start(), codec.levels.end());
            return write!(
                f,
                "codec `{}`: {} has levels from {low} to {high}",
                self.given, codec.name
            );
        }
        write!(f, "unknown codec `{}`. Valid are", self.given)?;
        for (i, codec) in CODECS.iter().enumerate() {
            write!(f, "{} {}", if i == 0 { "" } else { "," }, codec.name)?;
            if codec.levels.start() != codec.levels.end() {
                write!(f, "[:{}..{}]", codec.levels.start(), codec.levels.end())?;
            }
        }
        write!(f, ", each also with {SHUFFLE} for arrays of numbers")
    }
}

impl core::error::Error for SpecError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_levels_are_read_and_printed() {
        for text in [
            "lz4",
            "lz4:8",
            "lz4hc",
            "lz4hc:4",
            "zstd",
            "zstd:-1",
            "zstd:19",
            "deflate",
            "deflate:12",
            "delta",
            "delta+shuffle",
            "none",
            "none+shuffle",
            "lz4+shuffle",
            "zstd:3+shuffle",
        ] {
            assert_eq!(CodecSpec::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(CodecSpec::parse("lz4:1"), CodecSpec::parse("lz4"));
        assert_eq!(CodecSpec::parse("delta").unwrap(), CodecSpec::default());
    }

    #[test]
    fn errors_list_what_is_valid() {
        let text = CodecSpec::parse("lzma").unwrap_err().to_string();
        assert_eq!(
            text,
            "unknown codec `lzma`. Valid are none, lz4[:1..65537], lz4hc[:2..9], zstd[:-7..19], deflate[:1..12], delta, each also with +shuffle for arrays of numbers"
        );
        let text = CodecSpec::parse("zstd:20").unwrap_err().to_string();
        assert_eq!(text, "codec `zstd:20`: zstd has levels from -7 to 19");
        for bad in [
            "",
            ":",
            "lz4:",
            "lz4:0",
            "lz4:x",
            "none:1",
            "LZ4",
            "zstd:-8",
            "lz4:99999999999",
            "lz4hc:1",
            "lz4hc:10",
            "deflate:0",
            "deflate:13",
            "+shuffle",
            "zstd+",
            "zstd+shuffle:3",
            "zstd+shuffle+shuffle",
        ] {
            assert!(CodecSpec::parse(bad).is_err(), "{bad}");
        }
    }
}
