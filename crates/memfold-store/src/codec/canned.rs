//! Dictionaries made ready for a codec: what all threads share.
use super::{CodecSpec, lz4, zstd};
use crate::dictionary::{Dictionary, DictionaryKind};
use crate::format;
use alloc::boxed::Box;

/// A dictionary digested for one codec at one level.
pub(crate) struct Canned {
    /// Format of what is compressed with it, but for the dictionary.
    pub format: u8,
    pub digest: Digest,
    /// Bytes of memory that it takes.
    pub bytes: usize,
}

pub(crate) enum Digest {
    Lz4(lz4::Digest),
    Zstd(zstd::Digest),
}

impl Canned {
    /// `None` if the codec can't use that kind of dictionary, or finds the dictionary damaged. Allocates.
    pub fn new(spec: CodecSpec, dictionary: &Dictionary, block_bytes_max: usize) -> Option<Canned> {
        let content: Box<[u8]> = dictionary.content().into();
        let len = content.len();
        let (digest, more) = match (spec.name(), dictionary.kind()) {
            ("lz4", DictionaryKind::Raw) => {
                let digest = lz4::Digest::new(content);
                let bytes = digest.bytes();
                (Digest::Lz4(digest), bytes)
            }
            ("zstd", kind) => {
                let digest = zstd::Digest::new(content, kind, spec.level(), block_bytes_max)?;
                let bytes = digest.bytes();
                (Digest::Zstd(digest), bytes)
            }
            _ => return None,
        };
        let format = if matches!(digest, Digest::Lz4(_)) { format::LZ4 } else { format::ZSTD };
        Some(Canned { format, digest, bytes: len + more })
    }
}
