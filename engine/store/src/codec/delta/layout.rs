//! The layout of a page, and the decoder that needs no vector instructions.
//!
//! A page is 64 *lines* of 8 words of 8 bytes. A line is predicted by an earlier run of 8 words, at one
//! of up to 15 *distances* that the page chooses, or by zeros. The *residual* is line xor prediction.
//! Only bytes of residuals that are not 0 are stored:
//!
//! ```text
//! bytes | masks, 1 byte for each residual word that is not 0 | words 64 B | predictors 32 B | distances 15 B
//! ```
//!
//! - *distances*: in words, 8 to 255. Other values are no prediction.
//! - *predictors*: 4 bits for each line, the even one lower: 0 for none, else 1 + the index of a
//!   distance. A distance that reaches before the page is no prediction.
//! - *words*: for each line, which words of its residual are not 0, the first in the lowest bit.
//! - *masks*: for each of these words, which of its bytes are not 0.
//!
//! The length of the whole gives the length of each part, so a damaged payload is refused before a byte
//! is written, or is as long as its parts say. All vector loads of the decoders begin in front of the
//! last [`TAIL`] bytes or in fixed places of them, and therefore lie within the payload.
use memfold_os::units::PAGE_SIZE;

/// Bytes of a line.
pub(super) const LINE: usize = 64;
/// Lines of a page.
pub(super) const LINES: usize = PAGE_SIZE / LINE;
/// Words of a line.
pub(super) const LINE_WORDS: usize = LINE / 8;
/// Distances that a page may choose.
pub(super) const DISTANCES: usize = 15;
/// The least distance, in words: a prediction ends where its line begins.
pub(super) const DISTANCE_MIN: u8 = LINE_WORDS as u8;
/// Bytes of words, predictors and distances.
pub(super) const TAIL: usize = LINES + LINES / 2 + DISTANCES;
/// The most bytes of an encoded page. Above, an encoder gives up.
pub(super) const PACKED_MAX: usize = 3072;
/// The most residual bytes of a line on average before an encoder gives up.
pub(super) const DENSE_LINE: usize = 60;
/// Lines between two looks whether to give up.
pub(super) const LOOK_LINES: usize = 16;
/// Room that an encoder needs. Vector stores write past what they add, and 16 lines are added between
/// two looks.
pub(super) const ROOM: usize = 4608;
const _: () = assert!(PACKED_MAX + LOOK_LINES * LINE + LINES * LINE_WORDS <= ROOM);
const _: () = assert!(TAIL >= LINE);

/// A distance in bytes that reaches before any page: no prediction.
pub(super) const NO_PREDICTION: u32 = 1 << 20;

/// The prediction of a line that has none.
#[repr(align(64))]
pub(super) struct ZeroLine(pub [u8; LINE]);
pub(super) static ZERO_LINE: ZeroLine = ZeroLine([0; LINE]);

/// Returns, for each predictor, its distance in bytes.
#[inline]
pub(super) fn distances_of(tail: &[u8; DISTANCES]) -> [u32; DISTANCES + 1] {
    let mut bytes = [NO_PREDICTION; DISTANCES + 1];
    for (to, words) in bytes[1..].iter_mut().zip(tail) {
        if *words >= DISTANCE_MIN {
            *to = *words as u32 * 8;
        }
    }
    bytes
}

/// The parts of a payload whose lengths fit together.
struct PackedPage<'a> {
    bytes: &'a [u8],
    masks: &'a [u8],
    words: &'a [u8; LINES],
    predictors: &'a [u8; LINES / 2],
    distances: &'a [u8; DISTANCES],
}

impl PackedPage<'_> {
    fn of(payload: &[u8]) -> Option<PackedPage<'_>> {
        let (front, tail) = payload.split_last_chunk::<TAIL>()?;
        let (words, rest) = tail.split_first_chunk::<LINES>()?;
        let (predictors, distances) = rest.split_first_chunk::<{ LINES / 2 }>()?;
        let word_count = words.iter().map(|w| w.count_ones() as usize).sum();
        let (bytes, masks) = front.split_at_checked(front.len().checked_sub(word_count)?)?;
        let byte_count: usize = masks.iter().map(|m| m.count_ones() as usize).sum();
        let distances = distances.first_chunk()?;
        (byte_count == bytes.len()).then_some(PackedPage {
            bytes,
            masks,
            words,
            predictors,
            distances,
        })
    }
}

/// Decodes a page without vector instructions. Returns `false` if the payload is damaged; then nothing
/// was written.
pub(super) fn decode(payload: &[u8], page: &mut [u8; PAGE_SIZE]) -> bool {
    let Some(packed) = PackedPage::of(payload) else { return false };
    let distances = distances_of(packed.distances);
    let (mut bytes, mut masks) = (packed.bytes.iter(), packed.masks.iter());
    for line in 0..LINES {
        let predictor = packed.predictors[line / 2] >> (4 * (line % 2)) & 15;
        let distance = distances[predictor as usize] as usize;
        let (before, rest) = page.split_at_mut(line * LINE);
        let mut prediction = [0; LINE];
        if let Some(from) = before.len().checked_sub(distance) {
            prediction.copy_from_slice(&before[from..][..LINE]);
        }
        for word in 0..LINE_WORDS {
            if packed.words[line] >> word & 1 == 0 {
                continue;
            }
            let mask = masks.next().copied().unwrap_or(0);
            for byte in (0..8).filter(|byte| mask >> byte & 1 != 0) {
                prediction[8 * word + byte] ^= bytes.next().copied().unwrap_or(0);
            }
        }
        rest[..LINE].copy_from_slice(&prediction);
    }
    true
}
