//! The encoder and the decoder with AVX-512.
use super::layout::*;
use super::votes::{MULTIPLIER, SHIFTS, Scratch, WEIGHTS, WORDS};
use core::arch::x86_64::*;
use memfold_os::units::PAGE_SIZE;

/// Lines that are compared at a time.
const GROUP: usize = 8;
const GROUPS: usize = LINES / GROUP;

#[repr(align(64))]
struct Line<T>(T);

/// Encodes the page at `page` to `to`. Returns the length, or `None` if it is above
/// [`PACKED_MAX`].
///
/// # Safety
/// - The processor has what [`memfold_os::vectors::have_avx512_bytes`] names.
/// - `page` is readable for a page, and no thread writes there meanwhile.
/// - `to` is writable for [`ROOM`] bytes, does not overlap the page, and no other thread touches it
///   meanwhile.
#[target_feature(
    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512bitalg,avx512vpopcntdq,bmi1,bmi2,popcnt,avx2"
)]
pub(super) unsafe fn encode(scratch: &mut Scratch, page: *const u8, to: *mut u8) -> Option<usize> {
    // SAFETY: the caller vouches for the page.
    unsafe { hash(scratch, page) };
    let distances = scratch.choose();
    let predictors = predict(scratch, &distances.words[..distances.count]);
    let offsets = distances_of(&distances.words);
    let mut masks = Line([0u64; LINES]);
    let mut words = Line([0u8; LINES]);
    let mut len = 0;
    for line in 0..LINES {
        let predictor = (predictors.0[line] & 15) as usize;
        // SAFETY: the line lies in the page; a prediction lies in the page before its line, or is the
        // line of zeros. The store writes at most 64 bytes behind `len`, which is below `PACKED_MAX`
        // and 16 lines.
        unsafe {
            let value = _mm512_loadu_si512(page.add(line * LINE).cast());
            let from = match (line * LINE).checked_sub(offsets[predictor] as usize) {
                Some(offset) => page.add(offset),
                None => ZERO_LINE.0.as_ptr(),
            };
            let residual = _mm512_xor_si512(value, _mm512_loadu_si512(from.cast()));
            let mask = _mm512_test_epi8_mask(residual, residual);
            words.0[line] = _mm512_test_epi64_mask(residual, residual);
            masks.0[line] = mask;
            let bytes = _mm512_maskz_compress_epi8(mask, residual);
            _mm512_storeu_si512(to.add(len).cast(), bytes);
            len += mask.count_ones() as usize;
        }
        if line % LOOK_LINES == LOOK_LINES - 1
            && (len > PACKED_MAX - TAIL || len > (line + 1) * DENSE_LINE)
        {
            return None;
        }
    }
    for group in 0..GROUPS {
        // SAFETY: 8 masks lie in the array. The store writes 64 bytes behind `len`, which is below
        // `PACKED_MAX` and the 512 masks.
        unsafe {
            let used = words.0.as_ptr().add(GROUP * group).cast::<u64>().read_unaligned();
            let bytes = _mm512_loadu_si512(masks.0.as_ptr().add(GROUP * group).cast());
            _mm512_storeu_si512(to.add(len).cast(), _mm512_maskz_compress_epi8(used, bytes));
            len += used.count_ones() as usize;
        }
    }
    if len > PACKED_MAX - TAIL {
        return None;
    }
    // SAFETY: there is room for the tail behind `len`.
    unsafe { put_tail(to.add(len), &words, &predictors, &distances.words) };
    Some(len + TAIL)
}

/// Writes words, predictors and distances.
///
/// # Safety
/// - `to` is writable for [`TAIL`] bytes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn put_tail(
    to: *mut u8,
    words: &Line<[u8; LINES]>,
    predictors: &Line<[u8; LINES]>,
    distances: &[u8; DISTANCES],
) {
    // SAFETY: the arrays have 64 bytes, and the parts of the tail are as long as what is written.
    unsafe {
        _mm512_storeu_si512(to.cast(), _mm512_loadu_si512(words.0.as_ptr().cast()));
        // Each pair of bytes becomes one: the second times 16, and the first.
        let pairs = _mm512_maddubs_epi16(
            _mm512_loadu_si512(predictors.0.as_ptr().cast()),
            _mm512_set1_epi16(0x1001),
        );
        _mm256_storeu_si256(to.add(LINES).cast(), _mm512_cvtepi16_epi8(pairs));
        let at = to.add(LINES + LINES / 2);
        core::ptr::copy_nonoverlapping(distances.as_ptr(), at, DISTANCES);
    }
}

/// # Safety
/// - As for [`encode`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
#[inline]
unsafe fn hash(scratch: &mut Scratch, page: *const u8) {
    let multiplier = _mm512_set1_epi64(MULTIPLIER as i64);
    let one = _mm512_set1_epi64(1);
    for line in 0..LINES {
        // SAFETY: the line lies in the page.
        let value = unsafe { _mm512_loadu_si512(page.add(line * LINE).cast()) };
        let shifted = [
            value,
            _mm512_srli_epi64::<{ SHIFTS[1] }>(value),
            _mm512_srli_epi64::<{ SHIFTS[2] }>(value),
        ];
        for (hashes, shifted) in scratch.hashes.iter_mut().zip(shifted) {
            let is_used = _mm512_test_epi64_mask(shifted, shifted);
            let hash = _mm512_srli_epi64::<56>(_mm512_mullo_epi64(shifted, multiplier));
            let bytes = _mm512_cvtepi64_epi8(_mm512_maskz_max_epu64(is_used, hash, one));
            let to = &mut hashes.words[LINE_WORDS * line..][..LINE_WORDS];
            to.copy_from_slice(&_mm_cvtsi128_si64(bytes).to_le_bytes());
        }
    }
}

/// Chooses for each line the distance at which most of its hashes are equal, or 0 if more of its words
/// are 0. Equal hashes of more bits count more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn predict(scratch: &Scratch, distances: &[u8]) -> Line<[u8; LINES]> {
    let zero = _mm512_setzero_si512();
    let mut best = [zero; GROUPS];
    for (group, best) in best.iter_mut().enumerate() {
        let mut score = zero;
        for (hashes, weight) in scratch.hashes.iter().zip(WEIGHTS) {
            // SAFETY: 64 hashes from a multiple of 64 below 512 on.
            let hashes = unsafe { _mm512_loadu_si512(hashes.at(64 * group).cast()) };
            let is_zero = _mm512_testn_epi8_mask(hashes, hashes);
            let weights = _mm512_maskz_set1_epi8(is_zero, weight);
            score = _mm512_add_epi64(score, _mm512_sad_epu8(weights, zero));
        }
        *best = _mm512_or_si512(score, _mm512_set1_epi64(DISTANCES as i64));
    }
    for (nth, distance) in distances.iter().enumerate() {
        let rank = _mm512_set1_epi64((DISTANCES - 1 - nth) as i64);
        for (group, best) in best.iter_mut().enumerate() {
            let mut score = zero;
            for (hashes, weight) in scratch.hashes.iter().zip(WEIGHTS) {
                // SAFETY: 64 hashes from there on, and from up to 255 bytes before, where `Hashes` has
                // 256.
                let (now, then) = unsafe {
                    let at = hashes.at(64 * group);
                    (
                        _mm512_loadu_si512(at.cast()),
                        _mm512_loadu_si512(at.sub(*distance as usize).cast()),
                    )
                };
                let is_equal = _mm512_cmpeq_epi8_mask(now, then);
                let weights = _mm512_maskz_mov_epi8(is_equal, _mm512_set1_epi8(weight));
                score = _mm512_add_epi64(score, _mm512_sad_epu8(weights, zero));
            }
            *best = _mm512_max_epu64(*best, _mm512_or_si512(score, rank));
        }
    }
    let last = _mm512_set1_epi64(DISTANCES as i64);
    let mut predictors = Line([0; LINES]);
    for (group, best) in best.iter().enumerate() {
        let chosen = _mm512_sub_epi64(last, _mm512_and_si512(*best, last));
        let bytes = _mm_cvtsi128_si64(_mm512_cvtepi64_epi8(chosen)).to_le_bytes();
        predictors.0[GROUP * group..][..GROUP].copy_from_slice(&bytes);
    }
    predictors
}

const _: () = assert!(WORDS == 64 * GROUPS);

/// Decodes a page. Returns `false` if the payload is damaged; then nothing was written.
///
/// # Safety
/// - As for [`encode`], of the processor.
/// - `payload` is readable for `len` bytes, and no thread writes there meanwhile.
/// - `page` is writable for a page, does not overlap the payload, and no other thread touches it
///   meanwhile.
#[target_feature(
    enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512bitalg,avx512vpopcntdq,bmi1,bmi2,popcnt,avx2"
)]
pub(super) unsafe fn decode(payload: *const u8, len: usize, page: *mut u8) -> bool {
    if len < TAIL {
        return false;
    }
    // SAFETY: the tail lies in the payload.
    let (words, predictors, distances) = unsafe { tail_of(payload, len) };
    let word_count: usize = words.0.iter().map(|group| group.count_ones() as usize).sum();
    if word_count > len - TAIL {
        return false;
    }
    let mut masks = Line([0u64; LINES]);
    let mut counts = _mm512_setzero_si512();
    let mut at = len - TAIL - word_count;
    let bytes_len = at;
    for (group, used) in words.0.iter().enumerate() {
        // SAFETY: `at` is at most `len - TAIL`, so 64 bytes from there lie in the payload; 8 masks lie
        // in the array.
        unsafe {
            let bytes = _mm512_loadu_si512(payload.add(at).cast());
            let expanded = _mm512_maskz_expand_epi8(*used, bytes);
            _mm512_storeu_si512(masks.0.as_mut_ptr().add(GROUP * group).cast(), expanded);
            counts = _mm512_add_epi64(counts, _mm512_popcnt_epi64(expanded));
        }
        at += used.count_ones() as usize;
    }
    if _mm512_reduce_add_epi64(counts) as usize != bytes_len {
        return false;
    }
    let offsets = distances_of(&distances);
    let mut at = 0;
    for line in 0..LINES {
        let mask = masks.0[line];
        let distance = offsets[(predictors.0[line] & 15) as usize] as usize;
        // SAFETY: `at` is at most `bytes_len`, as the counts say, so 64 bytes from there lie in the
        // payload. The line lies in the page; its prediction lies before it or is the line of zeros.
        unsafe {
            let bytes = _mm512_loadu_si512(payload.add(at).cast());
            let residual = _mm512_maskz_expand_epi8(mask, bytes);
            let from = match (line * LINE).checked_sub(distance) {
                Some(offset) => page.add(offset).cast_const(),
                None => ZERO_LINE.0.as_ptr(),
            };
            let value = _mm512_xor_si512(residual, _mm512_loadu_si512(from.cast()));
            _mm512_storeu_si512(page.add(line * LINE).cast(), value);
        }
        at += mask.count_ones() as usize;
    }
    true
}

/// Returns the words, the predictors, a byte each, and the distances.
///
/// # Safety
/// - As for [`decode`]; `len` is at least [`TAIL`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
unsafe fn tail_of(
    payload: *const u8,
    len: usize,
) -> (Line<[u64; GROUPS]>, Line<[u8; LINES]>, [u8; DISTANCES]) {
    let (mut words, mut predictors) = (Line([0; GROUPS]), Line([0; LINES]));
    // SAFETY: the parts of the tail lie in the payload; the arrays have 64 bytes.
    unsafe {
        let tail = payload.add(len - TAIL);
        _mm512_storeu_si512(words.0.as_mut_ptr().cast(), _mm512_loadu_si512(tail.cast()));
        let pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(tail.add(LINES).cast()));
        let low = _mm512_and_si512(pairs, _mm512_set1_epi16(0x0f));
        let high = _mm512_slli_epi16::<4>(_mm512_and_si512(pairs, _mm512_set1_epi16(0xf0)));
        _mm512_storeu_si512(predictors.0.as_mut_ptr().cast(), _mm512_or_si512(low, high));
        (words, predictors, tail.add(LINES + LINES / 2).cast::<[u8; DISTANCES]>().read())
    }
}

const _: () = assert!(PAGE_SIZE == LINES * LINE);
