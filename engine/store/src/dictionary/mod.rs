//! Dictionaries as bytes and as files.
//!
//! ```text
//! magic 8 bytes | version u32 | kind u32 | length of the content u32 | 0 u32 | XXH3-128 of all before and after 16 bytes | content
//! ```
//!
//! Numbers are little-endian. The hash covers the file without the hash itself.
pub(crate) mod trainer;
pub(crate) mod cover;
pub(crate) mod sampler;

use crate::hash::xxh3_128;
use alloc::vec::Vec;
use core::fmt;

const MAGIC: [u8; 8] = *b"mfcanned";
const VERSION: u32 = 1;
const HASH_AT: usize = 24;
const HEAD: usize = HASH_AT + 16;
/// The magic of zstd's trained dictionaries.
const ZSTD_MAGIC: [u8; 4] = 0xEC30_A437u32.to_le_bytes();

/// Least and most bytes of a dictionary's content. lz4 can't refer back any farther.
pub const DICTIONARY_BYTES_MIN: usize = 256;
/// The most bytes of a dictionary's content.
pub const DICTIONARY_BYTES_MAX: usize = 64 << 10;

/// Most bytes of a dictionary's file.
pub const DICTIONARY_FILE_BYTES_MAX: usize = HEAD + DICTIONARY_BYTES_MAX;

/// The kind of a dictionary's content.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum DictionaryKind {
    /// Bytes that blocks are likely to repeat. For lz4 and zstd.
    Raw,
    /// Made by zstd's trainer: tables of frequencies, then bytes. For zstd only.
    Zstd,
}

/// Bytes that blocks are compressed against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dictionary {
    kind: DictionaryKind,
    content: Vec<u8>,
}

/// Why bytes are not a dictionary.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum DictionaryError {
    /// The file is something else.
    Magic,
    /// Another version of memfold wrote it; holds the file's version.
    Version(u32),
    /// The kind is unknown, or does not match the content.
    Kind,
    /// The file is longer or shorter than its header states.
    Length {
        /// The length in the header.
        expected: usize,
        /// The real length.
        found: usize,
    },
    /// The content is shorter than 256 bytes or longer than 64 KiB; holds its length.
    Size(usize),
    /// The checksum is wrong: the file is damaged.
    Checksum,
}

impl Dictionary {
    /// Makes a dictionary of this content.
    ///
    /// # Errors
    /// [`DictionaryError::Size`], or [`DictionaryError::Kind`] for a zstd dictionary that does not
    /// start as one.
    pub fn new(kind: DictionaryKind, content: Vec<u8>) -> Result<Dictionary, DictionaryError> {
        if !(DICTIONARY_BYTES_MIN..=DICTIONARY_BYTES_MAX).contains(&content.len()) {
            return Err(DictionaryError::Size(content.len()));
        }
        if kind == DictionaryKind::Zstd && !content.starts_with(&ZSTD_MAGIC) {
            return Err(DictionaryError::Kind);
        }
        Ok(Dictionary { kind, content })
    }

    /// Parses the bytes of a file that [`Dictionary::to_file`] made.
    ///
    /// # Errors
    /// Whatever is wrong with them, magic and version first.
    pub fn from_file(bytes: &[u8]) -> Result<Dictionary, DictionaryError> {
        let number = |at: usize| {
            bytes.get(at..at + 4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")))
        };
        if !bytes.starts_with(&MAGIC) {
            return Err(DictionaryError::Magic);
        }
        let short = DictionaryError::Length { expected: HEAD, found: bytes.len() };
        match number(8) {
            Some(VERSION) => {}
            Some(version) => return Err(DictionaryError::Version(version)),
            None => return Err(short),
        }
        if bytes.len() < HEAD {
            return Err(short);
        }
        let len = number(16).expect("the head is there") as usize;
        if bytes.len() - HEAD != len {
            return Err(DictionaryError::Length {
                expected: HEAD.saturating_add(len),
                found: bytes.len(),
            });
        }
        if hash_of(bytes) != bytes[HASH_AT..HEAD] {
            return Err(DictionaryError::Checksum);
        }
        let kind = match number(12) {
            Some(0) => DictionaryKind::Raw,
            Some(1) => DictionaryKind::Zstd,
            _ => return Err(DictionaryError::Kind),
        };
        Dictionary::new(kind, bytes[HEAD..].to_vec())
    }

    /// Returns the bytes of a file.
    pub fn to_file(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.content.len());
        bytes.extend(MAGIC);
        for number in [VERSION, self.kind as u32, self.content.len() as u32, 0] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([0; 16]);
        bytes.extend(&self.content);
        let hash = hash_of(&bytes);
        bytes[HASH_AT..HEAD].copy_from_slice(&hash);
        bytes
    }

    /// Returns the kind of the content.
    pub fn kind(&self) -> DictionaryKind {
        self.kind
    }

    /// Returns the content.
    pub fn content(&self) -> &[u8] {
        &self.content
    }
}

/// Returns the hash of a file of at least `HEAD` bytes.
fn hash_of(bytes: &[u8]) -> [u8; 16] {
    let bytes_covered = [&bytes[..HASH_AT], &bytes[HEAD..]].concat();
    let [low, high] = xxh3_128(&bytes_covered);
    let mut hash = [0; 16];
    hash[..8].copy_from_slice(&low.to_le_bytes());
    hash[8..].copy_from_slice(&high.to_le_bytes());
    hash
}

impl fmt::Display for DictionaryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DictionaryError::Magic => {
                write!(f, "not a dictionary of memfold. Make one with `memfold dict train`.")
            }
            DictionaryError::Version(found) => {
                write!(
                    f,
                    "the dictionary has version {found}, but this memfold reads only version {VERSION}. Make a new one."
                )
            }
            DictionaryError::Kind => {
                write!(f, "the dictionary is of an unknown kind. Make a new one.")
            }
            DictionaryError::Length { expected, found } => {
                write!(f, "the dictionary is damaged: it has {found} bytes instead of {expected}")
            }
            DictionaryError::Size(bytes) => {
                write!(
                    f,
                    "a dictionary of {bytes} bytes: {DICTIONARY_BYTES_MIN} to {DICTIONARY_BYTES_MAX} are allowed"
                )
            }
            DictionaryError::Checksum => {
                write!(f, "the dictionary is damaged: its checksum is wrong")
            }
        }
    }
}

impl core::error::Error for DictionaryError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        Dictionary::new(DictionaryKind::Raw, (0..1000u32).map(|i| i as u8).collect())
            .unwrap()
            .to_file()
    }

    #[test]
    fn dictionary_file_round_trips_and_damage_is_refused() {
        let file = sample();
        let dictionary = Dictionary::from_file(&file).unwrap();
        assert_eq!((dictionary.kind(), dictionary.content().len()), (DictionaryKind::Raw, 1000));
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Dictionary::from_file(&bad).is_err(), "bit {bit}");
        }
        for len in 0..file.len() {
            assert!(Dictionary::from_file(&file[..len]).is_err(), "{len} bytes");
        }
        assert!(Dictionary::from_file(&[&file[..], &[0]].concat()).is_err());
    }

    #[test]
    fn foreign_files_and_other_versions_are_told_apart() {
        assert_eq!(Dictionary::from_file(b""), Err(DictionaryError::Magic));
        assert_eq!(
            Dictionary::from_file(&[0x37, 0xa4, 0x30, 0xec, 1, 2, 3, 4]),
            Err(DictionaryError::Magic)
        );
        let mut file = sample();
        file[8] = 2;
        assert_eq!(Dictionary::from_file(&file), Err(DictionaryError::Version(2)));
        file[8] = 1;
        *file.last_mut().unwrap() ^= 1;
        assert_eq!(Dictionary::from_file(&file), Err(DictionaryError::Checksum));
        assert_eq!(
            Dictionary::new(DictionaryKind::Raw, vec![0; 255]),
            Err(DictionaryError::Size(255))
        );
        assert_eq!(
            Dictionary::new(DictionaryKind::Raw, vec![0; 65537]),
            Err(DictionaryError::Size(65537))
        );
        assert_eq!(Dictionary::new(DictionaryKind::Zstd, vec![0; 999]), Err(DictionaryError::Kind));
    }
}
