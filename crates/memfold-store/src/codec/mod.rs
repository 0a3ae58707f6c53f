//! Codecs by name.
//!
//! To add one: write its file with an [`Encoder`] and a [`Decoder`], give it a free id in [`crate::format`], and add its line to
//! [`CODECS`]. Every stored object records the id of its codec, so an id must never be given to another format.
mod canned;
mod deflate;
mod lz4;
mod lz4hc;
mod none;
mod spec;
mod zstd;
pub(crate) mod bare;

pub(crate) use canned::{Canned, Digest};
pub use spec::{CodecSpec, SpecError};

use crate::format;
use alloc::boxed::Box;
use core::ops::RangeInclusive;

/// All codecs that a [`CodecSpec`] can name.
pub static CODECS: &[Codec] = &[
    Codec {
        name: "none",
        help: "store blocks as they are",
        format: format::NONE,
        levels: 0..=0,
        level_default: 0,
        encoder: none::encoder,
        decoder: none::decoder,
    },
    Codec {
        name: "lz4",
        help: "lz4; the level is its acceleration, larger is faster and weaker",
        format: format::LZ4,
        levels: 1..=65537,
        level_default: 1,
        encoder: lz4::encoder,
        decoder: lz4::decoder,
    },
    // Levels above 9 would allocate while they compress, with C's malloc.
    Codec {
        name: "lz4hc",
        help: "lz4's format, compressed slower and stronger; read as fast",
        format: format::LZ4,
        levels: 2..=9,
        level_default: 9,
        encoder: lz4hc::encoder,
        decoder: lz4::decoder,
    },
    Codec {
        name: "zstd",
        help: "zstd; negative levels are faster, higher levels stronger",
        format: format::ZSTD,
        levels: -7..=19,
        level_default: 1,
        encoder: zstd::encoder,
        decoder: zstd::decoder,
    },
    Codec {
        name: "deflate",
        help: "deflate, as hardware speaks it; higher levels are stronger; 1 takes 199 KiB a thread, 2 to 9 take 653 KiB, 10 to 12 8.6 MiB",
        format: format::DEFLATE,
        levels: 1..=12,
        level_default: 1,
        encoder: deflate::encoder,
        decoder: deflate::decoder,
    },
];

/// One line of the table [`CODECS`].
pub struct Codec {
    /// What a user writes.
    pub name: &'static str,
    /// One line about it.
    pub help: &'static str,
    /// Levels that may follow the name after a colon.
    pub levels: RangeInclusive<i32>,
    /// The level when none is given.
    pub level_default: i32,
    pub(crate) format: u8,
    pub(crate) encoder: fn(level: i32, block_bytes_max: usize) -> Box<dyn Encoder>,
    pub(crate) decoder: fn() -> Box<dyn Decoder>,
}

/// A codec said something impossible; the number is its own code.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CodecError(pub i64);

/// Compresses one block at a time. All memory it needs was taken when it was made.
pub(crate) trait Encoder: Send {
    /// Compresses `len` bytes at `src` into at most `room` bytes at `dst`. `Ok(None)`: it does not fit.
    ///
    /// A `canned` dictionary was made for this codec at this level; a codec without dictionaries is never given one.
    ///
    /// # Safety
    /// - `src` is readable for `len` bytes, and nobody writes there during the call.
    /// - `dst` is writable for `room` bytes, does not overlap `src`, and nobody else touches it during the call.
    /// - `len` is not above the `block_bytes_max` that the encoder was made with.
    unsafe fn encode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        room: usize,
        canned: Option<&Canned>,
    ) -> Result<Option<usize>, CodecError>;

    /// Whether it gives up on a block that does not shrink as fast as a look at the block would tell.
    fn gives_up_fast(&self) -> bool {
        false
    }
}

/// Decompresses one block at a time. All memory it needs was taken when it was made.
pub(crate) trait Decoder: Send {
    /// Decompresses `len` bytes at `src` to exactly `raw_len` bytes at `dst`; any other length is an error.
    ///
    /// `canned` is the dictionary that it was compressed with. Any bytes at `src` are allowed: at worst the result is an error or wrong bytes within `dst`.
    ///
    /// # Safety
    /// - `src` is readable for `len` bytes, and nobody writes there during the call.
    /// - `dst` is writable for `raw_len` bytes, does not overlap `src`, and nobody else touches it during the call.
    unsafe fn decode(
        &mut self,
        src: *const u8,
        len: usize,
        dst: *mut u8,
        raw_len: usize,
        canned: Option<&Canned>,
    ) -> Result<(), CodecError>;
}

/// One decoder for each stored format, dictionaries apart.
pub(crate) fn decoders() -> [Box<dyn Decoder>; format::DECODERS] {
    core::array::from_fn(|format| {
        let codec = CODECS.iter().find(|c| c.format as usize == format);
        (codec.expect("every format id has a codec").decoder)()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 1 << 21;

    /// Text-like bytes that compress, from a small generator.
    fn words(len: usize) -> Vec<u8> {
        let mut state = 1u32;
        let mut out = Vec::new();
        while out.len() < len {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            out.extend_from_slice(format!("key{} = {};\n", state >> 24, state >> 18 & 0xff).as_bytes());
        }
        out.truncate(len);
        out
    }

    fn specs() -> Vec<CodecSpec> {
        let names = ["none", "lz4", "lz4:8", "lz4:65537", "zstd", "zstd:-7", "zstd:-1", "zstd:3", "zstd:6", "zstd:19"];
        let more = ["lz4hc", "lz4hc:2", "lz4hc:3", "deflate", "deflate:6", "deflate:9", "deflate:12"];
        names.iter().chain(&more).map(|n| CodecSpec::parse(n).unwrap()).collect()
    }

    #[test]
    fn every_codec_gives_back_its_input_at_every_page_multiple() {
        let raw = words(BLOCK);
        let mut decoders = decoders();
        let mut packed = vec![0; BLOCK];
        let mut back = vec![0; BLOCK];
        for spec in specs() {
            let mut encoder = spec.encoder(BLOCK);
            for pages in [1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 64, 65, 128, 511, 512] {
                if pages > 64 && (spec.level() == 19 || spec.level() == 12) {
                    continue; // slow in debug builds
                }
                let len = pages * 4096;
                // SAFETY: the three buffers are distinct and BLOCK bytes long, and len <= BLOCK.
                let size = unsafe { encoder.encode(raw.as_ptr(), len, packed.as_mut_ptr(), len, None) };
                let Some(size) = size.unwrap() else {
                    assert!(spec.format() == format::NONE || spec.level() > 1000, "{spec} {pages} pages");
                    continue;
                };
                if pages > 1 && spec.level() < 1000 {
                    assert!(size < len * 3 / 4, "{spec} {pages} pages: {size}");
                }
                back.fill(0);
                let decoder = &mut decoders[spec.format() as usize];
                // SAFETY: as above; size <= BLOCK.
                unsafe { decoder.decode(packed.as_ptr(), size, back.as_mut_ptr(), len, None) }.unwrap();
                assert!(back[..len] == raw[..len], "{spec} {pages} pages");
                // SAFETY: as above.
                let short = unsafe { decoder.decode(packed.as_ptr(), size - 1, back.as_mut_ptr(), len, None) };
                assert!(short.is_err(), "{spec}: a truncated input was accepted");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_without_an_error() {
        let mut state = 1u64;
        let random: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(16384)
        .collect();
        let mut packed = vec![0xaa; 16384];
        for spec in specs() {
            let mut encoder = spec.encoder(16384);
            // SAFETY: distinct buffers of 16384 bytes; room is smaller.
            let size = unsafe { encoder.encode(random.as_ptr(), 16384, packed.as_mut_ptr(), 15360, None) };
            assert_eq!(size, Ok(None), "{spec}");
            assert!(packed[15360..].iter().all(|b| *b == 0xaa), "{spec} wrote past its room");
            let text = words(16384);
            // SAFETY: as above.
            let size = unsafe { encoder.encode(text.as_ptr(), 16384, packed.as_mut_ptr(), 15360, None) };
            let shrinks = spec.format() != format::NONE && spec.level() < 1000;
            assert!(size.is_ok_and(|size| size.is_some() == shrinks), "{spec}: the next block: {size:?}");
        }
    }

    #[test]
    fn garbage_is_an_error_or_wrong_bytes_but_stays_in_bounds() {
        let mut state = 7u64;
        let mut decoders = decoders();
        let mut out = vec![0xaau8; 4096 + 64];
        for round in 0..2000 {
            let garbage: Vec<u8> = (0..200)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(round);
                    (state >> 56) as u8
                })
                .collect();
            for decoder in &mut decoders {
                // SAFETY: `out` has more than 4096 bytes and does not overlap `garbage`.
                let _ = unsafe { decoder.decode(garbage.as_ptr(), 200, out.as_mut_ptr(), 4096, None) };
            }
            assert!(out[4096..].iter().all(|b| *b == 0xaa));
        }
    }
}
