//! Shuffle: splits blocks of numbers into planes of bytes before a codec compresses them.
//!
//! Numbers of one width have bytes that hardly change, such as the upper bytes of row numbers, and
//! bytes that do. A codec for strings of bytes sees them mixed. So the block is split into planes,
//! one for each byte of a word. A plane of one byte is noted, a plane that looks dense is stored as
//! it is, and only the others go to the codec. This is smaller, and several times faster to read,
//! because most bytes bypass the codec. The planes are of the words themselves (`Words::Plain`), of
//! their differences (sorted or slowly changing numbers), or, with at most 256 different words, of
//! their positions in a table. A sample of the block decides (`look.rs`). Array formats do this too
//! (shuffle of blosc and HDF5, byte stream split and dictionaries of Parquet), but they know the
//! width.
//!
//! ```text
//! plan 1 byte | first word, or table: its length less one, its words | kinds, 2 bits a plane
//! | constants, 1 byte each | dense planes | the others, as one, by the codec
//! ```
pub(super) mod plan;
mod kernel;
mod steps;
mod look;
#[cfg(test)]
mod tests;

use crate::block::error::DecodeError;
use crate::codec::{CodecError, CodecInput, CodecOutput, Decoder, Encoder};
use kernel::PlaneSource;
use plan::{PlaneWords, ShufflePlan, TABLE_MAX, WIDTH_MAX};

const CONSTANT: u16 = 0;
const DENSE: u16 = 1;
const CODED: u16 = 2;
/// Bytes of a plane that are examined.
const SAMPLE: usize = 256;
/// A plane whose sample has this many equal pairs has some 5.5 bits of entropy a byte, and a codec
/// makes at most three quarters of it.
const PAIRS_CODED: u32 = (SAMPLE * SAMPLE / 2) as u32 / 45;

/// Returns how to split a block, if that looks as if it made it smaller.
///
/// # Safety
/// - `src` is readable, at least a page, and no thread writes there meanwhile.
pub(super) unsafe fn plan(src: CodecInput) -> Option<ShufflePlan> {
    // SAFETY: as the caller says.
    look::look(unsafe { core::slice::from_raw_parts(src.at, src.len) })
}

/// Writes a block's planes to the front of `dst`. Returns `None` if they don't fit, or if the plan
/// was wrong. Uses the encoder only if it `codes`.
///
/// # Safety
/// - `src` is readable, whole pages, and no thread writes there meanwhile.
/// - `planes` and the encoder were made for blocks of that size.
pub(super) unsafe fn encode(
    encoder: &mut dyn Encoder,
    codes: bool,
    plan: ShufflePlan,
    src: CodecInput,
    planes: &mut [u8],
    dst: &mut [u8],
) -> Result<Option<usize>, CodecError> {
    // SAFETY: as the caller says.
    let block = unsafe { core::slice::from_raw_parts(src.at, src.len) };
    let count = src.len / plan.width;
    let planes = &mut planes[..plan.planes() * count];
    let mut out = PayloadOut { dst, at: 0 };
    if out.put(&[plan.pack()]).is_none() || take_apart(plan, block, planes, &mut out).is_none() {
        return Ok(None);
    }
    let mut kinds = 0u16;
    let mut constants = ([0; WIDTH_MAX], 0);
    for (i, plane) in planes.chunks_exact(count).enumerate() {
        let kind = kind_of(plane, codes);
        kinds |= kind << (2 * i);
        if kind == CONSTANT {
            constants.0[constants.1] = plane[0];
            constants.1 += 1;
        }
    }
    let kind = |i: usize| kinds >> (2 * i) & 3;
    let outcome = out.put(&kinds.to_le_bytes()).and_then(|()| out.put(&constants.0[..constants.1]));
    let outcome = outcome.and_then(|()| {
        let mut dense = planes.chunks_exact(count).enumerate().filter(|(i, _)| kind(*i) == DENSE);
        dense.try_for_each(|(_, plane)| out.put(plane))
    });
    if outcome.is_none() {
        return Ok(None);
    }
    let mut coded_bytes = 0;
    for i in (0..plan.planes()).filter(|i| kind(*i) == CODED) {
        planes.copy_within(i * count..(i + 1) * count, coded_bytes);
        coded_bytes += count;
    }
    if coded_bytes == 0 {
        return Ok(Some(out.at));
    }
    let (from, to) = (
        CodecInput { at: planes.as_ptr(), len: coded_bytes },
        CodecOutput::of(&mut out.dst[out.at..]),
    );
    // SAFETY: both are borrowed, and no more than a block.
    let size = unsafe { encoder.encode(from, to, None)? };
    Ok(size.map(|size| out.at + size))
}

/// The destination of a payload.
struct PayloadOut<'a> {
    dst: &'a mut [u8],
    at: usize,
}

impl PayloadOut<'_> {
    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        self.dst.get_mut(self.at..self.at + bytes.len())?.copy_from_slice(bytes);
        self.at += bytes.len();
        Some(())
    }
}

/// Fills `planes`, and writes what decoding needs.
fn take_apart(
    plan: ShufflePlan,
    block: &[u8],
    planes: &mut [u8],
    out: &mut PayloadOut<'_>,
) -> Option<()> {
    match (plan.words, plan.width) {
        (PlaneWords::Plain, width) => {
            kernel::split(block, width, false, planes);
            Some(())
        }
        (PlaneWords::Deltas, width) => {
            kernel::split(block, width, true, planes);
            out.put(&block[..width])
        }
        (PlaneWords::Table, 4) => tabulate::<4>(block, planes, out),
        (PlaneWords::Table, _) => tabulate::<8>(block, planes, out),
    }
}

/// Slots of the hash table that finds words; at least half of it is free.
const SLOTS: usize = 2 * TABLE_MAX;

/// Writes a table of the block's words and fills `places`. Returns `None` if there are too many.
fn tabulate<const W: usize>(
    block: &[u8],
    places: &mut [u8],
    out: &mut PayloadOut<'_>,
) -> Option<()> {
    let mut words = [0u64; TABLE_MAX];
    // 0: free; else the position of a word, plus one.
    let mut slots = [0u16; SLOTS];
    let mut len = 0;
    for (nth, place) in places.iter_mut().enumerate() {
        let word = kernel::word::<W>(block, nth);
        let mut slot = (word.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 55) as usize;
        *place = loop {
            match slots[slot] {
                0 if len == TABLE_MAX => return None,
                0 => {
                    (words[len], slots[slot]) = (word, len as u16 + 1);
                    len += 1;
                    break (len - 1) as u8;
                }
                found if words[found as usize - 1] == word => break (found - 1) as u8,
                _ => slot = (slot + 1) % SLOTS,
            }
        };
    }
    out.put(&[(len - 1) as u8])?;
    words[..len].iter().try_for_each(|word| out.put(&word.to_le_bytes()[..W]))
}

const _: () = assert!(SLOTS == 1 << (64 - 55));

fn kind_of(plane: &[u8], may_code: bool) -> u16 {
    if plane[1..] == plane[..plane.len() - 1] {
        CONSTANT
    } else if may_code && pairs(plane) >= PAIRS_CODED {
        CODED
    } else {
        DENSE
    }
}

/// Counts pairs of equal bytes in a sample of runs of 8.
fn pairs(plane: &[u8]) -> u32 {
    let mut counts = [0u8; 256];
    let mut pairs = 0;
    for run in plane.chunks_exact(plane.len() / (SAMPLE / 8)) {
        for byte in &run[..8] {
            let count = &mut counts[*byte as usize];
            pairs += *count as u32;
            *count = count.saturating_add(1);
        }
    }
    pairs
}

/// Decodes a block from its payload. After an error the bytes at `dst` are undefined.
///
/// # Safety
/// - `dst` is writable, whole pages, does not overlap `payload` or `buffer`, and no other thread
///   touches it meanwhile.
pub(super) unsafe fn decode(
    decoder: &mut dyn Decoder,
    payload: &[u8],
    buffer: &mut [u8],
    dst: CodecOutput,
) -> Result<(), DecodeError> {
    let mut rest = payload;
    let mut take = |len: usize| -> Result<&[u8], DecodeError> {
        let (head, others) = rest.split_at_checked(len).ok_or(DecodeError::Layout)?;
        rest = others;
        Ok(head)
    };
    let plan = ShufflePlan::unpack(take(1)?[0]).ok_or(DecodeError::Layout)?;
    let count = dst.len / plan.width;
    let own = match plan.words {
        PlaneWords::Plain => &[],
        PlaneWords::Deltas => take(plan.width)?,
        PlaneWords::Table => {
            let len = take(1)?[0] as usize + 1;
            take(len * plan.width)?
        }
    };
    let kinds = u16::from_le_bytes(take(2)?.try_into().expect("2 bytes"));
    let kinds: [u16; WIDTH_MAX] = core::array::from_fn(|i| kinds >> (2 * i) & 3);
    let kinds = &kinds[..plan.planes()];
    if kinds.iter().any(|kind| *kind > CODED) {
        return Err(DecodeError::Layout);
    }
    let mut planes = [PlaneSource::Constant(0); WIDTH_MAX];
    for (plane, _) in planes.iter_mut().zip(kinds).filter(|(_, kind)| **kind == CONSTANT) {
        *plane = PlaneSource::Constant(take(1)?[0]);
    }
    for (plane, _) in planes.iter_mut().zip(kinds).filter(|(_, kind)| **kind == DENSE) {
        *plane = PlaneSource::Bytes(take(count)?.as_ptr());
    }
    let coded_bytes = kinds.iter().filter(|kind| **kind == CODED).count() * count;
    let buffer = buffer.get_mut(..coded_bytes).ok_or(DecodeError::Layout)?;
    if coded_bytes > 0 {
        let from = CodecInput { at: rest.as_ptr(), len: rest.len() };
        // SAFETY: both are borrowed.
        unsafe { decoder.decode(from, CodecOutput::of(buffer), None) }
            .map_err(DecodeError::Codec)?;
    } else if !rest.is_empty() {
        return Err(DecodeError::Layout);
    }
    let others = planes.iter_mut().zip(kinds).filter(|(_, kind)| **kind == CODED);
    for ((plane, _), bytes) in others.zip(buffer.chunks_exact(count)) {
        *plane = PlaneSource::Bytes(bytes.as_ptr());
    }
    // SAFETY: the planes have `count` bytes each, of the payload or the buffer; the caller vouches
    // for `dst`, which has room for as many words.
    unsafe {
        match plan.words {
            PlaneWords::Plain => kernel::join(&planes, plan.width, count, None, dst.at),
            PlaneWords::Deltas => join_deltas(&planes, plan.width, count, number(own), dst.at),
            PlaneWords::Table if plan.width == 4 => look_up::<4>(planes[0], own, count, dst.at),
            PlaneWords::Table => look_up::<8>(planes[0], own, count, dst.at),
        }
    }
    Ok(())
}

/// Decodes words from their differences.
///
/// # Safety
/// - As for [`kernel::join`].
unsafe fn join_deltas(
    planes: &[PlaneSource; WIDTH_MAX],
    width: usize,
    count: usize,
    first: u64,
    to: *mut u8,
) {
    // SAFETY: as the caller says; `only_plane` has found that the processor has AVX2.
    unsafe {
        if let (8, Some(plane)) = (width, steps::only_plane(planes)) {
            return steps::join(plane, count, first, to);
        }
        kernel::join(planes, width, count, Some(first), to);
    }
}

fn number(word: &[u8]) -> u64 {
    let mut bytes = [0; WIDTH_MAX];
    bytes[..word.len()].copy_from_slice(word);
    u64::from_le_bytes(bytes)
}

/// Decodes words from their positions in a table. A position past its end is a word of zeros.
///
/// # Safety
/// - As for [`kernel::join`], of one plane.
unsafe fn look_up<const W: usize>(places: PlaneSource, table: &[u8], count: usize, to: *mut u8) {
    let mut words = [[0; W]; TABLE_MAX];
    for (to, from) in words.iter_mut().zip(table.chunks_exact(W)) {
        to.copy_from_slice(from);
    }
    for nth in 0..count {
        let place = match places {
            // SAFETY: the plane has a byte for each word.
            PlaneSource::Bytes(at) => unsafe { *at.add(nth) },
            PlaneSource::Constant(place) => place,
        };
        // SAFETY: word `nth` lies in what the caller vouches for.
        unsafe { to.add(nth * W).cast::<[u8; W]>().write(words[place as usize]) };
    }
}
