//! Formats of stored payloads: how to read an object's bytes, from its header.
//!
//! Two codecs that write the same format share its id (lz4 and lz4hc). An id is never given to
//! another format.

/// Stored as it is.
pub const NONE: u8 = 0;
/// LZ4 block format.
pub const LZ4: u8 = 1;
/// Zstandard frame.
pub const ZSTD: u8 = 2;
/// DEFLATE stream without a wrapper.
pub const DEFLATE: u8 = 3;
/// Lines of pages as differences (`codec/delta/`).
pub const DELTA: u8 = 4;
/// One past the last id of a decoder.
pub const DECODERS: usize = 5;
/// The first of [`CANNED_SLOTS`] formats of objects compressed with a dictionary, one for each
/// dictionary in use.
pub const CANNED: u8 = 8;
/// Dictionaries that can be in use at once.
pub const CANNED_SLOTS: usize = 8;
/// The first of [`DECODERS`] formats of shuffled blocks (`block/shuffle/`), one for each format of
/// their compressed planes.
pub const SHUFFLED: u8 = 16;
/// A block that is one 8-byte pattern.
pub const SAME: u8 = 30;
/// An object that is still being written.
pub const BUILDING: u8 = 31;

const _: () = assert!(DECODERS <= CANNED as usize);
const _: () = assert!(CANNED as usize + CANNED_SLOTS <= SHUFFLED as usize);
const _: () = assert!(SHUFFLED as usize + DECODERS <= SAME as usize);

/// Returns the most bytes that a block may compress to; above, it is stored raw ("huge"): 15/16 of
/// its size.
pub const fn huge_threshold(block_bytes: usize) -> usize {
    block_bytes / 16 * 15
}

/// Returns whether a page of a block can be had without decompressing all of it: with the pages before
/// it, or alone.
pub fn stops_early(format: u8) -> bool {
    matches!(format, NONE | LZ4 | SAME) || loads_alone(format)
}

/// Returns whether a page of a block can mostly be had without any other.
pub fn loads_alone(format: u8) -> bool {
    format == DELTA
}

/// Returns the slot of the dictionary of a format, if it has one.
pub fn dictionary_slot(format: u8) -> Option<usize> {
    let slot = format.checked_sub(CANNED)? as usize;
    (slot < CANNED_SLOTS).then_some(slot)
}

/// Returns the format of a shuffled block's planes.
pub fn shuffled(format: u8) -> Option<u8> {
    let planes = format.checked_sub(SHUFFLED)?;
    ((planes as usize) < DECODERS).then_some(planes)
}
