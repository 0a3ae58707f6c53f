//! Dictionaries prepared for a codec, shared by all threads.
use super::lz4_dictionary::Lz4Dictionary;
use super::zstd_dictionary::ZstdDictionary;
use crate::dictionary::{Dictionary, DictionaryKind};
use crate::format;
use alloc::boxed::Box;

/// A dictionary prepared for one codec at one level.
pub(crate) struct DigestedDictionary {
    /// Format of objects compressed with it, apart from the dictionary.
    pub format: u8,
    pub digest: CodecDigest,
    /// Bytes of its memory.
    pub bytes: usize,
}

pub(crate) enum CodecDigest {
    Lz4(Lz4Dictionary),
    Zstd(ZstdDictionary),
}

impl DigestedDictionary {
    /// Prepares a dictionary. Returns `None` if the codec can't use that kind of dictionary, or
    /// finds it damaged. Allocates.
    pub fn new(
        codec: &str,
        level: i32,
        dictionary: &Dictionary,
        block_bytes_max: usize,
    ) -> Option<DigestedDictionary> {
        let content: Box<[u8]> = dictionary.content().into();
        let len = content.len();
        let (digest, more) = match (codec, dictionary.kind()) {
            ("lz4" | "delta", DictionaryKind::Raw) => {
                let digest = Lz4Dictionary::new(content);
                let bytes = digest.bytes();
                (CodecDigest::Lz4(digest), bytes)
            }
            ("zstd", kind) => {
                let digest = ZstdDictionary::new(content, kind, level, block_bytes_max)?;
                let bytes = digest.bytes();
                (CodecDigest::Zstd(digest), bytes)
            }
            _ => return None,
        };
        let format = if matches!(digest, CodecDigest::Lz4(_)) { format::LZ4 } else { format::ZSTD };
        Some(DigestedDictionary { format, digest, bytes: len + more })
    }
}
