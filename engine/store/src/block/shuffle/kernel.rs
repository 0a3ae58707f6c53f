//! Words to byte planes and back: plane `i` is byte `i` of every word, from the lowest on.
//!
//! Loads use SSE2, which every x86-64 has: 16 words at a time, unpacked in log2(word length) steps.
//! Small differences of words of 8 bytes use AVX2 where available (`steps.rs`). Other processors do
//! one word at a time.
use crate::block::shuffle::plan::WIDTH_MAX;

/// Words that are processed at a time: a page has a multiple of this, whatever their width.
pub(super) const STEP: usize = 16;

/// The source of a plane.
#[derive(Copy, Clone)]
pub(super) enum PlaneSource {
    /// One byte for each word from here on.
    Bytes(*const u8),
    /// The same byte for all words.
    Constant(u8),
}

/// Splits words into planes: plane `i` goes to `planes[i * count..]`. With `deltas` it splits each
/// word's difference from the one before, as [`folded`] encodes it; the first is 0.
///
/// # Panics
/// If the width is none of 2, 4, 8, or the lengths don't fit.
pub(super) fn split(words: &[u8], width: usize, deltas: bool, planes: &mut [u8]) {
    assert!(words.len() == planes.len());
    match width {
        2 => split_words::<2>(words, deltas, planes),
        4 => split_words::<4>(words, deltas, planes),
        8 => split_words::<8>(words, deltas, planes),
        _ => panic!("words of {width} bytes"),
    }
}

fn split_words<const W: usize>(words: &[u8], deltas: bool, planes: &mut [u8]) {
    let count = words.len() / W;
    let mut before = word::<W>(words, 0);
    for at in (0..count).step_by(STEP) {
        let mut step = [0u64; STEP];
        for (i, to) in step.iter_mut().enumerate() {
            *to = word::<W>(words, at + i);
        }
        if deltas {
            for to in &mut step {
                let now = *to;
                *to = folded::<W>(now.wrapping_sub(before));
                before = now;
            }
        }
        for plane in 0..W {
            let to = &mut planes[plane * count + at..][..STEP];
            to.iter_mut().zip(&step).for_each(|(to, word)| *to = (word >> (8 * plane)) as u8);
        }
    }
}

/// Returns word `nth` of `W` bytes.
pub(super) fn word<const W: usize>(words: &[u8], nth: usize) -> u64 {
    let mut bytes = [0; WIDTH_MAX];
    bytes[..W].copy_from_slice(&words[nth * W..][..W]);
    u64::from_le_bytes(bytes)
}

/// Encodes a difference of two words as a number that is small for small differences in both
/// directions ("zigzag").
pub(super) fn folded<const W: usize>(difference: u64) -> u64 {
    let spare_bits = 64 - 8 * W as u32;
    let difference = (difference << spare_bits) as i64 >> spare_bits;
    (((difference << 1) ^ (difference >> 63)) as u64) << spare_bits >> spare_bits
}

/// Builds `count` words of `width` bytes from their planes. With `first` the planes are those of
/// differences, and `first` is the first word.
///
/// # Panics
/// If the width is none of 2, 4, 8, or the count is no multiple of [`STEP`].
///
/// # Safety
/// - Each of the first `width` planes is readable for `count` bytes; `to` is writable for `count`
///   words, overlaps none of them, and no other thread touches either.
pub(super) unsafe fn join(
    planes: &[PlaneSource; WIDTH_MAX],
    width: usize,
    count: usize,
    first: Option<u64>,
    to: *mut u8,
) {
    assert!(count.is_multiple_of(STEP));
    // SAFETY: as the caller says.
    unsafe {
        match (width, first) {
            (2, None) => join_words::<2, false>(planes, count, 0, to),
            (4, None) => join_words::<4, false>(planes, count, 0, to),
            (8, None) => join_words::<8, false>(planes, count, 0, to),
            (2, Some(first)) => join_words::<2, true>(planes, count, first, to),
            (4, Some(first)) => join_words::<4, true>(planes, count, first, to),
            (8, Some(first)) => join_words::<8, true>(planes, count, first, to),
            _ => panic!("words of {width} bytes"),
        }
    }
}

/// # Safety
/// - As for [`join`].
#[cfg(test)]
unsafe fn plain<const W: usize, const DELTAS: bool>(
    planes: &[PlaneSource; WIDTH_MAX],
    count: usize,
    first: u64,
    to: *mut u8,
) {
    let mut before = first;
    for nth in 0..count {
        let mut bytes = [0; WIDTH_MAX];
        for (byte, plane) in bytes.iter_mut().zip(&planes[..W]) {
            *byte = match plane {
                // SAFETY: the plane has a byte for each word.
                PlaneSource::Bytes(at) => unsafe { *at.add(nth) },
                PlaneSource::Constant(byte) => *byte,
            };
        }
        let mut word = u64::from_le_bytes(bytes);
        if DELTAS {
            before = before.wrapping_add(word >> 1 ^ (word & 1).wrapping_neg());
            word = before;
        }
        // SAFETY: word `nth` lies in what the caller vouches for.
        unsafe { core::ptr::copy_nonoverlapping(word.to_le_bytes().as_ptr(), to.add(nth * W), W) };
    }
}

use sse2::join_words;

mod sse2 {
    use super::{PlaneSource, STEP};
    use crate::block::shuffle::plan::WIDTH_MAX;
    use core::arch::x86_64::*;

    /// # Safety
    /// - As for [`super::join`]; every x86-64 has SSE2.
    #[target_feature(enable = "sse2")]
    pub unsafe fn join_words<const W: usize, const DELTAS: bool>(
        planes: &[PlaneSource; WIDTH_MAX],
        count: usize,
        first: u64,
        to: *mut u8,
    ) {
        let mut constants = [[0u8; STEP]; W];
        // A constant plane is read from the same place again and again.
        let mut sources = [(core::ptr::null(), 0usize); W];
        for ((source, plane), constant) in sources.iter_mut().zip(planes).zip(&mut constants) {
            *source = match plane {
                PlaneSource::Bytes(at) => (*at, !0),
                PlaneSource::Constant(byte) => {
                    constant.fill(*byte);
                    (constant.as_ptr(), 0)
                }
            };
        }
        let mut carry = match W {
            2 => _mm_set1_epi16(first as i16),
            4 => _mm_set1_epi32(first as i32),
            _ => _mm_set1_epi64x(first as i64),
        };
        for at in (0..count).step_by(STEP) {
            // SAFETY: 16 bytes of a plane, or of a constant; unaligned loads.
            let bytes = sources
                .map(|(plane, mask)| unsafe { _mm_loadu_si128(plane.add(at & mask).cast()) });
            let words = unpack(bytes);
            for (i, mut part) in words.into_iter().enumerate() {
                if DELTAS {
                    part = sum::<W>(part, &mut carry);
                }
                // SAFETY: 16 words of `W` bytes are `W` vectors, within what the caller vouches
                // for; unaligned stores.
                unsafe { _mm_storeu_si128(to.add(at * W + i * 16).cast(), part) };
            }
        }
    }

    /// Builds 16 words of `W` bytes from their planes, two, four, and eight bytes at a time.
    #[target_feature(enable = "sse2")]
    #[inline]
    fn unpack<const W: usize>(planes: [__m128i; W]) -> [__m128i; W] {
        let mut words = planes;
        let bytes = |low, high| (_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high));
        let pairs = |low, high| (_mm_unpacklo_epi16(low, high), _mm_unpackhi_epi16(low, high));
        let fours = |low, high| (_mm_unpacklo_epi32(low, high), _mm_unpackhi_epi32(low, high));
        let (a, b) = bytes(planes[0], planes[1]);
        if W == 2 {
            (words[0], words[1]) = (a, b);
            return words;
        }
        let (c, d) = bytes(planes[2], planes[3]);
        let ((a, b), (c, d)) = (pairs(a, c), pairs(b, d));
        if W == 4 {
            (words[0], words[1], words[2], words[3]) = (a, b, c, d);
            return words;
        }
        let ((e, f), (g, h)) = (bytes(planes[4], planes[5]), bytes(planes[6], planes[7]));
        let ((e, f), (g, h)) = (pairs(e, g), pairs(f, h));
        (words[0], words[1]) = fours(a, e);
        (words[2], words[3]) = fours(b, f);
        (words[4], words[5]) = fours(c, g);
        (words[6], words[7]) = fours(d, h);
        words
    }

    /// Returns words from their encoded differences; `carry` has the word before in each lane.
    #[target_feature(enable = "sse2")]
    #[inline]
    fn sum<const W: usize>(folded: __m128i, carry: &mut __m128i) -> __m128i {
        let zero = _mm_setzero_si128();
        match W {
            2 => {
                let sign = _mm_sub_epi16(zero, _mm_and_si128(folded, _mm_set1_epi16(1)));
                let mut sums = _mm_xor_si128(_mm_srli_epi16::<1>(folded), sign);
                sums = _mm_add_epi16(sums, _mm_slli_si128::<2>(sums));
                sums = _mm_add_epi16(sums, _mm_slli_si128::<4>(sums));
                sums = _mm_add_epi16(sums, _mm_slli_si128::<8>(sums));
                let last = _mm_shuffle_epi32::<0xff>(_mm_shufflehi_epi16::<0xff>(sums));
                let words = _mm_add_epi16(sums, *carry);
                *carry = _mm_add_epi16(*carry, last);
                words
            }
            4 => {
                let sign = _mm_sub_epi32(zero, _mm_and_si128(folded, _mm_set1_epi32(1)));
                let mut sums = _mm_xor_si128(_mm_srli_epi32::<1>(folded), sign);
                sums = _mm_add_epi32(sums, _mm_slli_si128::<4>(sums));
                sums = _mm_add_epi32(sums, _mm_slli_si128::<8>(sums));
                let words = _mm_add_epi32(sums, *carry);
                *carry = _mm_add_epi32(*carry, _mm_shuffle_epi32::<0xff>(sums));
                words
            }
            _ => {
                let sign = _mm_sub_epi64(zero, _mm_and_si128(folded, _mm_set1_epi64x(1)));
                let mut sums = _mm_xor_si128(_mm_srli_epi64::<1>(folded), sign);
                sums = _mm_add_epi64(sums, _mm_slli_si128::<8>(sums));
                let words = _mm_add_epi64(sums, *carry);
                *carry = _mm_add_epi64(*carry, _mm_unpackhi_epi64(sums, sums));
                words
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Random;

    fn back<const W: usize>(words: &[u8], deltas: bool, constant: Option<usize>) {
        let mut words = words.to_vec();
        if let Some(plane) = constant {
            words.iter_mut().skip(plane).step_by(W).for_each(|byte| *byte = 0x5a);
        }
        let mut bytes = vec![0; words.len()];
        split(&words, W, deltas, &mut bytes);
        let count = words.len() / W;
        let mut planes = [PlaneSource::Constant(0); WIDTH_MAX];
        for (i, plane) in planes[..W].iter_mut().enumerate() {
            let own = &bytes[i * count..][..count];
            let is_constant = own.iter().all(|byte| *byte == own[0]);
            assert!(deltas || constant != Some(i) || is_constant);
            *plane = if is_constant {
                PlaneSource::Constant(own[0])
            } else {
                PlaneSource::Bytes(own.as_ptr())
            };
        }
        let first = deltas.then(|| word::<W>(&words, 0));
        let mut planes_joined = [vec![0xc3; words.len()], vec![0xc3; words.len()]];
        // SAFETY: the planes lie in `bytes`, or are constant; the results have room for all words.
        unsafe {
            join(&planes, W, count, first, planes_joined[0].as_mut_ptr());
            let to = planes_joined[1].as_mut_ptr();
            match deltas {
                true => plain::<W, true>(&planes, count, word::<W>(&words, 0), to),
                false => plain::<W, false>(&planes, count, 0, to),
            }
        }
        assert!(planes_joined[0] == words, "{W} {deltas} {constant:?}");
        assert!(planes_joined[1] == words, "{W} {deltas} {constant:?}, a word at a time");
    }

    #[test]
    fn words_come_back_from_their_planes() {
        let mut random = Random::new(17);
        for len in [4096, 12288] {
            let words: Vec<u8> = (0..len).map(|_| random.word() as u8).collect();
            for deltas in [false, true] {
                back::<2>(&words, deltas, None);
                back::<4>(&words, deltas, None);
                back::<8>(&words, deltas, None);
                back::<2>(&words, deltas, Some(1));
                back::<4>(&words, deltas, Some(3));
                back::<8>(&words, deltas, Some(5));
            }
        }
    }

    #[test]
    fn small_differences_are_small_numbers() {
        assert_eq!([0, 1, u64::MAX, 2].map(folded::<8>), [0, 2, 1, 4]);
        assert_eq!(folded::<2>(5u64.wrapping_sub(7)), 3);
        assert_eq!(folded::<4>(0x8000_0000), 0xffff_ffff);
        // Rows 7 apart, of a table of numbers: all but the lowest plane are zeros.
        let words: Vec<u8> = (0..512u64).flat_map(|i| ((1 << 40) + i * 7).to_le_bytes()).collect();
        let mut planes = vec![1; 4096];
        split(&words, 8, true, &mut planes);
        assert!(planes[512..].iter().all(|byte| *byte == 0) && planes[1] == 14);
    }
}
