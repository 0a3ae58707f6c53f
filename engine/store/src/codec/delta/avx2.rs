//! The encoder and the decoder with AVX2 and BMI2.
use super::layout::*;
use super::votes::{SHIFTS, Scratch, WEIGHTS, WORDS};
use core::arch::x86_64::*;

/// Words of a vector.
const VECTOR_WORDS: usize = 4;
/// Vectors of 32 hashes that are compared at a time: half of a page.
const VECTORS: usize = 8;
/// Multiplier of 32-bit hashes.
const MULTIPLIER: i64 = 0x9E37_79B1;

/// For each set of bytes of a word, all bits of these bytes.
static SPREAD: [u64; 256] = {
    let mut table = [0u64; 256];
    let mut set = 0;
    while set < 256 {
        let mut byte = 0;
        while byte < 8 {
            if set >> byte & 1 != 0 {
                table[set] |= 0xff << (8 * byte);
            }
            byte += 1;
        }
        set += 1;
    }
    table
};
/// The lower half of each byte.
const NIBBLES: u64 = 0x0f0f_0f0f_0f0f_0f0f;

/// Encodes the page at `page` to `to`. Returns the length, or `None` if it is above
/// [`PACKED_MAX`].
///
/// # Safety
/// - The processor has what [`memfold_os::vectors::have_fast_bmi2`] names.
/// - `page` is readable for a page, and no thread writes there meanwhile.
/// - `to` is writable for [`ROOM`] bytes, does not overlap the page, and no other thread touches it
///   meanwhile.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn encode(scratch: &mut Scratch, page: *const u8, to: *mut u8) -> Option<usize> {
    // SAFETY: the caller vouches for the page.
    unsafe { hash(scratch, page) };
    let distances = scratch.choose();
    let predictors = predict(scratch, &distances.words[..distances.count]);
    let offsets = distances_of(&distances.words);
    let mut masks = [0u64; LINES];
    let mut words = [0u8; LINES];
    let mut len = 0;
    for line in 0..LINES {
        let distance = offsets[(predictors[line] & 15) as usize] as usize;
        // SAFETY: the line lies in the page; a prediction lies in the page before its line, or is the
        // line of zeros.
        let residual = unsafe {
            let from = match (line * LINE).checked_sub(distance) {
                Some(offset) => page.add(offset),
                None => ZERO_LINE.0.as_ptr(),
            };
            xor(page.add(line * LINE), from)
        };
        (masks[line], words[line]) = used(residual);
        if masks[line] != 0 {
            // SAFETY: a line adds at most 64 bytes to `len`, which is below `PACKED_MAX` and 16
            // lines, and its last store writes 8 bytes.
            len += unsafe { put_line(residual, masks[line], to.add(len)) };
        }
        if line % LOOK_LINES == LOOK_LINES - 1
            && (len > PACKED_MAX - TAIL || len > (line + 1) * DENSE_LINE)
        {
            return None;
        }
    }
    for (mask, words) in masks.iter().zip(&words) {
        let bytes = _pext_u64(*mask, SPREAD[*words as usize]);
        // SAFETY: 8 bytes behind `len`, which is below `PACKED_MAX` and the 512 masks.
        unsafe { to.add(len).cast::<u64>().write_unaligned(bytes) };
        len += words.count_ones() as usize;
    }
    if len > PACKED_MAX - TAIL {
        return None;
    }
    // SAFETY: there is room for the tail behind `len`.
    unsafe {
        let tail = to.add(len);
        core::ptr::copy_nonoverlapping(words.as_ptr(), tail, LINES);
        for (nth, eight) in predictors.as_chunks::<8>().0.iter().enumerate() {
            let four = _pext_u64(u64::from_le_bytes(*eight), NIBBLES) as u32;
            tail.add(LINES + 4 * nth).cast::<u32>().write_unaligned(four);
        }
        let at = tail.add(LINES + LINES / 2);
        core::ptr::copy_nonoverlapping(distances.words.as_ptr(), at, DISTANCES);
    }
    Some(len + TAIL)
}

/// Returns the line at `at` xor that at `from`.
///
/// # Safety
/// - Both are readable for a line.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn xor(at: *const u8, from: *const u8) -> [__m256i; 2] {
    // SAFETY: both halves of both lines are readable.
    let half = |offset| unsafe {
        _mm256_xor_si256(
            _mm256_loadu_si256(at.add(offset).cast()),
            _mm256_loadu_si256(from.add(offset).cast()),
        )
    };
    [half(0), half(LINE / 2)]
}

/// Returns which bytes of a line are not 0, and which words.
#[target_feature(enable = "avx2")]
#[inline]
fn used(line: [__m256i; 2]) -> (u64, u8) {
    let zero = _mm256_setzero_si256();
    let [low, high] = line.map(|half| _mm256_movemask_epi8(_mm256_cmpeq_epi8(half, zero)) as u32);
    let words = line
        .map(|half| _mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(half, zero))) as u8);
    (!(low as u64 | (high as u64) << 32), !(words[0] | words[1] << 4))
}

/// Writes the bytes of a line that are in its mask. Returns how many.
///
/// # Safety
/// - `to` is writable for 8 bytes more than the mask has bits.
#[target_feature(enable = "avx2,bmi2,popcnt")]
#[inline]
unsafe fn put_line(line: [__m256i; 2], mask: u64, to: *mut u8) -> usize {
    // SAFETY: both are 64 bytes without padding, and any bytes are valid numbers.
    let words = unsafe { core::mem::transmute::<[__m256i; 2], [u64; LINE_WORDS]>(line) };
    let mut len = 0;
    for (word, set) in words.iter().zip(mask.to_le_bytes()) {
        // SAFETY: `len` bytes of the mask were written; 8 bytes more are writable.
        unsafe {
            to.add(len).cast::<u64>().write_unaligned(_pext_u64(*word, SPREAD[set as usize]));
        }
        len += set.count_ones() as usize;
    }
    len
}

/// # Safety
/// - As for [`encode`].
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn hash(scratch: &mut Scratch, page: *const u8) {
    const STEP: usize = 4 * VECTOR_WORDS;
    for first in (0..WORDS).step_by(STEP) {
        // SAFETY: words `first` to `first` + 15 lie in the page.
        let values: [__m256i; 4] = core::array::from_fn(|nth| unsafe {
            _mm256_loadu_si256(page.add(8 * (first + VECTOR_WORDS * nth)).cast())
        });
        let hashes = [
            hashes_of(values),
            hashes_of(values.map(|value| _mm256_srli_epi64::<{ SHIFTS[1] as i32 }>(value))),
            hashes_of(values.map(|value| _mm256_srli_epi64::<{ SHIFTS[2] as i32 }>(value))),
        ];
        for (to, hashes) in scratch.hashes.iter_mut().zip(hashes) {
            let to = &mut to.words[first..][..STEP];
            // SAFETY: the slice has 16 bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), hashes) };
        }
    }
}

/// Returns the hashes of 16 words, 0 only for words that are 0.
#[target_feature(enable = "avx2")]
#[inline]
fn hashes_of(words: [__m256i; 4]) -> __m128i {
    let multiplier = _mm256_set1_epi64x(MULTIPLIER);
    let low = _mm256_set1_epi64x(255);
    let one = _mm256_set1_epi64x(1);
    let first_four = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    let [a, b, c, d] = words.map(|words| {
        let mixed = _mm256_xor_si256(words, _mm256_srli_epi64::<29>(words));
        let product = _mm256_srli_epi64::<24>(_mm256_mul_epu32(mixed, multiplier));
        let hash = _mm256_max_epu8(_mm256_and_si256(product, low), one);
        let is_zero = _mm256_cmpeq_epi64(words, _mm256_setzero_si256());
        let hash = _mm256_andnot_si256(is_zero, hash);
        _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(hash, first_four))
    });
    _mm_packus_epi16(_mm_packus_epi32(a, b), _mm_packus_epi32(c, d))
}

/// Chooses for each line the distance at which most of its hashes are equal, or 0 if more of its words
/// are 0. Equal hashes of more bits count more.
#[target_feature(enable = "avx2")]
#[inline]
fn predict(scratch: &Scratch, distances: &[u8]) -> [u8; LINES] {
    let zero = _mm256_setzero_si256();
    let last = _mm256_set1_epi64x(DISTANCES as i64);
    let mut predictors = [0; LINES];
    for (half, predictors) in predictors.as_chunks_mut::<{ LINES / 2 }>().0.iter_mut().enumerate() {
        let at = |vector: usize| WORDS / 2 * half + 32 * vector;
        let mut best = [zero; VECTORS];
        for (vector, best) in best.iter_mut().enumerate() {
            let mut sum = zero;
            for (hashes, weight) in scratch.hashes.iter().zip(WEIGHTS) {
                // SAFETY: 32 hashes from a multiple of 32 below 512 on.
                let hashes = unsafe { _mm256_loadu_si256(hashes.at(at(vector)).cast()) };
                let is_zero = _mm256_cmpeq_epi8(hashes, zero);
                let weights = _mm256_and_si256(is_zero, _mm256_set1_epi8(weight));
                sum = _mm256_add_epi64(sum, _mm256_sad_epu8(weights, zero));
            }
            *best = _mm256_or_si256(sum, last);
        }
        for (nth, distance) in distances.iter().enumerate() {
            let rank = _mm256_set1_epi64x((DISTANCES - 1 - nth) as i64);
            for (vector, best) in best.iter_mut().enumerate() {
                let mut weights = zero;
                for (hashes, weight) in scratch.hashes.iter().zip(WEIGHTS) {
                    // SAFETY: 32 hashes from there on, and from up to 255 bytes before, where `Hashes` has
                    // 256.
                    let (now, then) = unsafe {
                        let at = hashes.at(at(vector));
                        (
                            _mm256_loadu_si256(at.cast()),
                            _mm256_loadu_si256(at.sub(*distance as usize).cast()),
                        )
                    };
                    let is_equal = _mm256_cmpeq_epi8(now, then);
                    let more = _mm256_and_si256(is_equal, _mm256_set1_epi8(weight));
                    weights = _mm256_add_epi8(weights, more);
                }
                let score = _mm256_or_si256(_mm256_sad_epu8(weights, zero), rank);
                *best = _mm256_max_epi16(*best, score);
            }
        }
        for (vector, best) in best.iter().enumerate() {
            let chosen = _mm256_sub_epi64(last, _mm256_and_si256(*best, last));
            // SAFETY: both are 32 bytes without padding, and any bytes are valid numbers.
            let chosen = unsafe { core::mem::transmute::<__m256i, [u64; VECTOR_WORDS]>(chosen) };
            for (to, chosen) in predictors[4 * vector..][..4].iter_mut().zip(chosen) {
                *to = chosen as u8;
            }
        }
    }
    predictors
}

/// Decodes a page. Returns `false` if the payload is damaged; then nothing was written.
///
/// # Safety
/// - As for [`encode`], of the processor.
/// - `payload` is readable for `len` bytes, and no thread writes there meanwhile.
/// - `page` is writable for a page, does not overlap the payload, and no other thread touches it
///   meanwhile.
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
pub(super) unsafe fn decode(payload: *const u8, len: usize, page: *mut u8) -> bool {
    if len < TAIL {
        return false;
    }
    // SAFETY: the tail lies in the payload.
    let (words, packed, distances) = unsafe {
        let tail = payload.add(len - TAIL);
        (
            tail.cast::<[u8; LINES]>().read(),
            tail.add(LINES).cast::<[u8; LINES / 2]>().read(),
            tail.add(LINES + LINES / 2).cast::<[u8; DISTANCES]>().read(),
        )
    };
    let groups = words.as_chunks::<8>().0.iter().map(|group| u64::from_le_bytes(*group));
    let word_count: usize = groups.map(|group| group.count_ones() as usize).sum();
    if word_count > len - TAIL {
        return false;
    }
    let mut masks = [0u64; LINES];
    let mut at = len - TAIL - word_count;
    let (bytes_len, mut byte_count) = (at, 0);
    for (mask, words) in masks.iter_mut().zip(&words) {
        // SAFETY: `at` is at most `len - TAIL`, so 8 bytes from there lie in the payload.
        let bytes = unsafe { payload.add(at).cast::<u64>().read_unaligned() };
        *mask = _pdep_u64(bytes, SPREAD[*words as usize]);
        at += words.count_ones() as usize;
        byte_count += mask.count_ones() as usize;
    }
    if byte_count != bytes_len {
        return false;
    }
    let offsets = distances_of(&distances);
    let mut at = 0;
    for (line, mask) in masks.iter().enumerate() {
        let predictor = packed[line / 2] >> (4 * (line % 2)) & 15;
        let distance = offsets[predictor as usize] as usize;
        // SAFETY: the line lies in the page; its prediction lies before it or is the line of zeros.
        // `at` is at most `bytes_len`, as the counts say, so 8 bytes from there lie in the payload.
        unsafe {
            let from = match (line * LINE).checked_sub(distance) {
                Some(offset) => page.add(offset).cast_const(),
                None => ZERO_LINE.0.as_ptr(),
            };
            let to = page.add(line * LINE);
            for (word, set) in mask.to_le_bytes().into_iter().enumerate() {
                let bytes = payload.add(at).cast::<u64>().read_unaligned();
                let residual = _pdep_u64(bytes, SPREAD[set as usize]);
                let prediction = from.cast::<u64>().add(word).read_unaligned();
                to.cast::<u64>().add(word).write_unaligned(residual ^ prediction);
                at += set.count_ones() as usize;
            }
        }
    }
    true
}
