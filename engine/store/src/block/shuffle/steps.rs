//! Words of 8 bytes whose differences fit one byte, such as the row numbers of a join or offsets of
//! short strings. The sums of 16 differences fit 16 bits, so they are added there, all 16 in one
//! register, and become words only then.
use crate::block::shuffle::kernel::{PlaneSource, STEP};
use crate::block::shuffle::plan::WIDTH_MAX;
use core::arch::x86_64::*;
use memfold_os::vectors::have_avx2;

/// Returns the lowest plane of differences, if they are this small and the processor has what
/// [`join`] needs.
pub(super) fn only_plane(planes: &[PlaneSource; WIDTH_MAX]) -> Option<*const u8> {
    let (PlaneSource::Bytes(plane), others) = (planes[0], &planes[1..]) else { return None };
    let small = others.iter().all(|plane| matches!(plane, PlaneSource::Constant(0)));
    (small && have_avx2()).then_some(plane)
}

/// Decodes words of 8 bytes from their differences, as [`super::kernel::join`] does.
///
/// # Safety
/// - `plane` is readable for `count` bytes, a multiple of [`STEP`]; `to` is writable for `count`
///   words, doesn't overlap it, and no other thread touches either.
/// - The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn join(plane: *const u8, count: usize, first: u64, to: *mut u8) {
    // The word before, in each lane.
    let mut carry = _mm256_set1_epi64x(first as i64);
    for at in (0..count).step_by(STEP) {
        // SAFETY: 16 bytes of the plane; unaligned loads.
        let lanes_in = unsafe { _mm_loadu_si128(plane.add(at).cast()) };
        let (low, high) = sums(_mm256_cvtepu8_epi16(lanes_in));
        let fours = [low, _mm_unpackhi_epi64(low, low), high, _mm_unpackhi_epi64(high, high)];
        for (i, four) in fours.into_iter().enumerate() {
            let words = _mm256_add_epi64(_mm256_cvtepi16_epi64(four), carry);
            // SAFETY: four words of the 16, within what the caller vouches for; unaligned stores.
            unsafe { _mm256_storeu_si256(to.add((at + 4 * i) * 8).cast(), words) };
        }
        let last = _mm_extract_epi16::<7>(high) as i16;
        carry = _mm256_add_epi64(carry, _mm256_set1_epi64x(last as i64));
    }
}

/// Adds 16 encoded differences to those before: returns the first eight, and the others.
#[target_feature(enable = "avx2")]
#[inline]
fn sums(folded: __m256i) -> (__m128i, __m128i) {
    let sign =
        _mm256_sub_epi16(_mm256_setzero_si256(), _mm256_and_si256(folded, _mm256_set1_epi16(1)));
    let mut sums = _mm256_xor_si256(_mm256_srli_epi16::<1>(folded), sign);
    sums = _mm256_add_epi16(sums, _mm256_slli_si256::<2>(sums));
    sums = _mm256_add_epi16(sums, _mm256_slli_si256::<4>(sums));
    sums = _mm256_add_epi16(sums, _mm256_slli_si256::<8>(sums));
    let low = _mm256_castsi256_si128(sums);
    let last_of_low = _mm_shuffle_epi8(low, _mm_set1_epi16(0x0f0e));
    (low, _mm_add_epi16(_mm256_extracti128_si256::<1>(sums), last_of_low))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::shuffle::kernel;
    use crate::store::tests::Random;

    /// Goes up and down by as much as one byte holds, and past the largest and the smallest word.
    #[test]
    fn words_come_back_from_small_steps() {
        const WORDS: usize = 1536;
        let mut random = Random::new(18);
        for (most, first) in [(127u64, 0u64), (1, u64::MAX - 4), (127, i64::MAX as u64), (2, 9)] {
            let mut word = first;
            let words: Vec<u8> = (0..WORDS)
                .flat_map(|nth| {
                    let step = match nth / 64 % 3 {
                        _ if nth == 0 => 0,
                        0 => most,
                        1 => (most + 1).wrapping_neg(),
                        _ => (random.below(2 * most as usize + 1) as u64).wrapping_sub(most),
                    };
                    word = word.wrapping_add(step);
                    word.to_le_bytes()
                })
                .collect();
            let mut planes = vec![0; words.len()];
            kernel::split(&words, 8, true, &mut planes);
            let mut sources = [PlaneSource::Constant(0); WIDTH_MAX];
            sources[0] = PlaneSource::Bytes(planes.as_ptr());
            assert!(planes[WORDS..].iter().all(|byte| *byte == 0), "steps of one byte");
            let Some(plane) = only_plane(&sources) else { return eprintln!("SKIPPED: no AVX2") };
            let mut planes_joined = [vec![0xc3; words.len()], vec![0x3c; words.len()]];
            // SAFETY: the plane has a byte for each word, the results have room for all words, and
            // the processor has AVX2.
            unsafe {
                join(plane, WORDS, first, planes_joined[0].as_mut_ptr());
                kernel::join(&sources, 8, WORDS, Some(first), planes_joined[1].as_mut_ptr());
            }
            assert!(
                planes_joined[0] == words && planes_joined[1] == words,
                "steps of {most} from {first}"
            );
            sources[3] = PlaneSource::Constant(1);
            assert!(only_plane(&sources).is_none());
        }
    }
}
