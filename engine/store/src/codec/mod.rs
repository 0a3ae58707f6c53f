//! Codecs by name.
//!
//! To add one: write its file with an [`Encoder`] and a [`Decoder`], give it a free id in
//! [`crate::format`], and add its line to [`CODECS`]. Every stored object records the id of its
//! codec, so an id must never be given to another format.
mod lz4_dictionary;
mod zstd_dictionary;
mod dictionary;
mod coder;
mod none;
mod lz4;
mod lz4hc;
mod zstd;
mod deflate;
pub(crate) mod delta;
mod spec;
pub(crate) mod bare;
#[cfg(test)]
mod tests;

pub use coder::CodecError;
pub(crate) use coder::{CodecInput, CodecOutput, Decoder, Encoder};
pub(crate) use dictionary::DigestedDictionary;
pub use spec::{CodecSpec, SpecError};

use crate::format;
use alloc::boxed::Box;
use core::ops::RangeInclusive;

/// All codecs that a [`CodecSpec`] can name.
pub static CODECS: &[Codec] = &[
    Codec {
        name: "none",
        help: "No compression",
        format: format::NONE,
        levels: 0..=0,
        level_default: 0,
        encoder: none::encoder,
        decoder: none::decoder,
    },
    Codec {
        name: "lz4",
        help: "LZ4. The level is its acceleration: a higher level is faster and compresses less",
        format: format::LZ4,
        levels: 1..=65537,
        level_default: 1,
        encoder: lz4::encoder,
        decoder: lz4::decoder,
    },
    // Levels above 9 would allocate with malloc while they compress.
    Codec {
        name: "lz4hc",
        help: "LZ4 HC. It compresses more than lz4 and is slower at that; decompression is as fast",
        format: format::LZ4,
        levels: 2..=9,
        level_default: 9,
        encoder: lz4hc::encoder,
        decoder: lz4::decoder,
    },
    Codec {
        name: "zstd",
        help: "Zstandard. A higher level compresses more; negative levels are the fastest",
        format: format::ZSTD,
        levels: -7..=19,
        level_default: 1,
        encoder: zstd::encoder,
        decoder: zstd::decoder,
    },
    Codec {
        name: "deflate",
        help: "Deflate, the format of hardware accelerators. A higher level compresses more. Level 1 takes 199 KiB a thread, 2 to 9 take 653 KiB, 10 to 12 8.6 MiB",
        format: format::DEFLATE,
        levels: 1..=12,
        level_default: 1,
        encoder: deflate::encoder,
        decoder: deflate::decoder,
    },
    Codec {
        name: "delta",
        help: "Differences of 64-byte lines, for objects and pointers: 4 times as fast as lz4, and smaller. Text is left to lz4. Pages load one by one",
        format: format::DELTA,
        levels: 0..=0,
        level_default: 0,
        encoder: delta::encoder,
        decoder: delta::decoder,
    },
];

/// One line of the table [`CODECS`].
pub struct Codec {
    /// The name that users write.
    pub name: &'static str,
    /// One sentence about it.
    pub help: &'static str,
    /// Levels that may follow the name after a colon.
    pub levels: RangeInclusive<i32>,
    /// The level when none is given.
    pub level_default: i32,
    pub(crate) format: u8,
    pub(crate) encoder: fn(level: i32, block_bytes_max: usize) -> Box<dyn Encoder>,
    pub(crate) decoder: fn() -> Box<dyn Decoder>,
}

/// Makes one decoder for each stored format, without dictionaries.
pub(crate) fn decoders() -> [Box<dyn Decoder>; format::DECODERS] {
    core::array::from_fn(|format| {
        let codec = CODECS.iter().find(|c| c.format as usize == format);
        (codec.expect("every format id has a codec").decoder)()
    })
}
