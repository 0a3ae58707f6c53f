//! POLYVAL of whole pages, 32 words of 16 bytes at a time, on processors with VPCLMULQDQ. It is
//! five to ten times as fast as the crate `polyval`, which defines the result and computes the
//! rest.
//!
//! The products of 32 words with 32 powers of the secret are summed before they are reduced. These
//! are 32 steps of the definition, `sum = (sum + word) * secret * x^-128`, at once. A product is
//! made of three products of half as long factors (Karatsuba's), one of them of the sums of halves.
//! The reduction is Gueron's and Lindell's (the paper of AES-GCM-SIV).
use core::arch::x86_64::*;
use memfold_os::vectors::{have_avx512, have_vpclmulqdq};

/// Words hashed at a time, and powers of the secret for them.
const WORDS: usize = 32;
/// Bytes of these words: the length of the hashed data must be a multiple.
pub const STEP: usize = 16 * WORDS;

/// The secret's powers, the highest first.
#[derive(Clone)]
pub struct SecretPowers {
    whole: [[u64; 2]; WORDS],
    /// The sum of the halves of each, twice.
    folded: [[u64; 2]; WORDS],
    /// Whether one instruction computes four words, not two.
    by_four: bool,
}

impl SecretPowers {
    /// Computes the powers of a secret; `None` where the processor or the system lacks the
    /// instructions.
    pub fn of(secret: &[u8; 16]) -> Option<SecretPowers> {
        // SAFETY: the processor and the system support the instructions.
        have_vpclmulqdq().then(|| unsafe { powers(secret, have_avx512()) })
    }

    /// Returns the POLYVAL of bytes.
    ///
    /// # Panics
    /// If they are no multiple of [`STEP`].
    pub fn hash(&self, bytes: &[u8]) -> [u64; 2] {
        assert!(bytes.len().is_multiple_of(STEP));
        // SAFETY: `of` has found that the processor and the system support the instructions.
        unsafe { if self.by_four { hash_by_four(self, bytes) } else { hash_by_two(self, bytes) } }
    }

    /// Returns a copy that computes two words by one instruction.
    #[cfg(test)]
    pub fn without_four(&self) -> SecretPowers {
        SecretPowers { by_four: false, ..self.clone() }
    }
}

#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn powers(secret: &[u8; 16], by_four: bool) -> SecretPowers {
    let half = |at: usize| u64::from_le_bytes(secret[at..at + 8].try_into().expect("8 bytes"));
    let one = _mm_set_epi64x(half(8) as i64, half(0) as i64);
    let mut powers = SecretPowers { whole: [[0; 2]; WORDS], folded: [[0; 2]; WORDS], by_four };
    let mut power = one;
    for (whole, folded) in powers.whole.iter_mut().zip(&mut powers.folded).rev() {
        *whole = numbers(power);
        *folded = [whole[0] ^ whole[1]; 2];
        let (low, high) =
            (_mm_clmulepi64_si128::<0x00>(power, one), _mm_clmulepi64_si128::<0x11>(power, one));
        let crossed = _mm_xor_si128(
            _mm_clmulepi64_si128::<0x01>(power, one),
            _mm_clmulepi64_si128::<0x10>(power, one),
        );
        power = reduced(low, crossed, high);
    }
    powers
}

#[target_feature(enable = "avx2,pclmulqdq,vpclmulqdq")]
fn hash_by_two(powers: &SecretPowers, bytes: &[u8]) -> [u64; 2] {
    let mut hash = _mm_setzero_si128();
    for step in bytes.chunks_exact(STEP) {
        let zero = _mm256_setzero_si256();
        let (mut low, mut middle, mut high) = (zero, zero, zero);
        // The words that depend on the step before come last.
        for at in (0..WORDS).step_by(2).rev() {
            let (whole, folded) = (&powers.whole[at..][..2], &powers.folded[at..][..2]);
            // SAFETY: 32 readable bytes each; the loads need no alignment.
            let (mut words, whole, folded) = unsafe {
                (
                    _mm256_loadu_si256(step[16 * at..][..32].as_ptr().cast()),
                    _mm256_loadu_si256(whole.as_ptr().cast()),
                    _mm256_loadu_si256(folded.as_ptr().cast()),
                )
            };
            if at == 0 {
                words = _mm256_xor_si256(words, _mm256_zextsi128_si256(hash));
            }
            let halves = _mm256_xor_si256(words, _mm256_shuffle_epi32::<0x4e>(words));
            low = _mm256_xor_si256(low, _mm256_clmulepi64_epi128::<0x00>(words, whole));
            high = _mm256_xor_si256(high, _mm256_clmulepi64_epi128::<0x11>(words, whole));
            middle = _mm256_xor_si256(middle, _mm256_clmulepi64_epi128::<0x00>(halves, folded));
        }
        middle = _mm256_xor_si256(middle, _mm256_xor_si256(low, high));
        hash = reduced(joined(low), joined(middle), joined(high));
    }
    numbers(hash)
}

/// Hashes like [`hash_by_two`], with twice as wide registers.
#[target_feature(enable = "avx2,avx512f,pclmulqdq,vpclmulqdq")]
fn hash_by_four(powers: &SecretPowers, bytes: &[u8]) -> [u64; 2] {
    let mut hash = _mm_setzero_si128();
    let sum_of_four = |four| {
        let halves = (_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64::<1>(four));
        joined(_mm256_xor_si256(halves.0, halves.1))
    };
    for step in bytes.chunks_exact(STEP) {
        let zero = _mm512_setzero_si512();
        let (mut low, mut middle, mut high) = (zero, zero, zero);
        for at in (0..WORDS).step_by(4).rev() {
            let (whole, folded) = (&powers.whole[at..][..4], &powers.folded[at..][..4]);
            // SAFETY: 64 readable bytes each; the loads need no alignment.
            let (mut words, whole, folded) = unsafe {
                (
                    _mm512_loadu_si512(step[16 * at..][..64].as_ptr().cast()),
                    _mm512_loadu_si512(whole.as_ptr().cast()),
                    _mm512_loadu_si512(folded.as_ptr().cast()),
                )
            };
            if at == 0 {
                words = _mm512_xor_si512(words, _mm512_zextsi128_si512(hash));
            }
            let halves = _mm512_xor_si512(words, _mm512_shuffle_epi32::<0x4e>(words));
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128::<0x00>(words, whole));
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128::<0x11>(words, whole));
            middle = _mm512_xor_si512(middle, _mm512_clmulepi64_epi128::<0x00>(halves, folded));
        }
        middle = _mm512_xor_si512(middle, _mm512_xor_si512(low, high));
        hash = reduced(sum_of_four(low), sum_of_four(middle), sum_of_four(high));
    }
    numbers(hash)
}

/// Returns a product of 256 bits, its middle 128 apart, times x^-128, modulo x^128 + x^127 + x^126
/// + x^121 + 1.
#[target_feature(enable = "avx2,pclmulqdq")]
#[inline]
fn reduced(low: __m128i, middle: __m128i, high: __m128i) -> __m128i {
    let low = _mm_xor_si128(low, _mm_slli_si128::<8>(middle));
    let high = _mm_xor_si128(high, _mm_srli_si128::<8>(middle));
    let modulus = _mm_set_epi64x(0xc200_0000_0000_0000u64 as i64, 1);
    let once = |sum| {
        let part = _mm_clmulepi64_si128::<0x10>(sum, modulus);
        _mm_xor_si128(_mm_shuffle_epi32::<0x4e>(sum), part)
    };
    _mm_xor_si128(high, once(once(low)))
}

/// Returns the sum of two lanes.
#[target_feature(enable = "avx2")]
#[inline]
fn joined(lanes: __m256i) -> __m128i {
    _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes))
}

#[target_feature(enable = "avx2")]
#[inline]
fn numbers(word: __m128i) -> [u64; 2] {
    [_mm_cvtsi128_si64(word) as u64, _mm_extract_epi64::<1>(word) as u64]
}
