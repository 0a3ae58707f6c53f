//! Fingerprints of blocks. Blocks with equal fingerprints are taken for equal. A folio that was
//! touched and has the fingerprints of its stored copy is not written again. Data read from a
//! device must have the fingerprint that it was written with.
//!
//! A fingerprint is POLYVAL (RFC 8452, section 3) of the block under a random secret, with which
//! AES-GCM-SIV authenticates too. It is a polynomial in the secret. The block's words of 16 bytes
//! are its coefficients. So two given blocks of `n` words have equal fingerprints for at most `n`
//! of the 2^128 secrets. That is a chance below 2^-110 for the largest block, for any choice of
//! bytes, as long as the choice doesn't depend on the secret. An attacker can't learn the secret,
//! because neither secret nor fingerprints leave the process. XXH3 and similar hashes have no such
//! bound: pairs of blocks with equal hashes can be written down.
use crate::backing::polyval::{STEP, SecretPowers};
use memfold_os::Errno;
use memfold_os::random;
use polyval::universal_hash::UniversalHash;
use polyval::{Key, Polyval};

/// The fingerprint of a block. Only those of blocks of one size, by one [`Fingerprints`], may be
/// compared.
#[derive(Copy, Clone, PartialEq, Eq)]
pub struct Fingerprint([u64; 2]);

impl Fingerprint {
    /// The fingerprint of no block.
    pub const NONE: Fingerprint = Fingerprint([0; 2]);
}

/// Computes fingerprints under one secret, which children of fork have too.
pub struct Fingerprints {
    hash: Polyval,
    powers: Option<SecretPowers>,
}

impl Fingerprints {
    /// Takes a new secret.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn new() -> Result<Fingerprints, Errno> {
        let mut key = [0; 16];
        random::fill(&mut key)?;
        Ok(Fingerprints::with(key))
    }

    fn with(key: [u8; 16]) -> Fingerprints {
        Fingerprints { hash: Polyval::new(&Key::from(key)), powers: SecretPowers::of(&key) }
    }

    /// Returns the fingerprint of `block`. Takes about 40 GB/s with AVX-512 and VPCLMULQDQ, 20 with
    /// AVX2 and VPCLMULQDQ, 6 with only PCLMULQDQ (Zen 5, in the cache).
    pub fn of(&self, block: &[u8]) -> Fingerprint {
        if let Some(powers) = self.powers.as_ref().filter(|_| block.len().is_multiple_of(STEP)) {
            return Fingerprint(powers.hash(block));
        }
        self.plain(block)
    }

    fn plain(&self, block: &[u8]) -> Fingerprint {
        let mut hash = self.hash.clone();
        hash.update_padded(block);
        let tag: [u8; 16] = hash.finalize().into();
        let word = |at: usize| u64::from_ne_bytes(tag[at..at + 8].try_into().expect("8 bytes"));
        Fingerprint([word(0), word(8)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::fill::equal_xxh3;
    use std::vec::Vec;

    /// Uses the examples of RFC 8452, appendix A.
    #[test]
    fn it_is_polyval() {
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len())
                .step_by(2)
                .map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap())
                .collect()
        };
        let key: [u8; 16] = hex("25629347589242761d31f826ba4b757b").try_into().unwrap();
        let block = hex("4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362");
        let tag = Fingerprints::with(key).of(&block);
        let expected = hex("f7a3b47b846119fae5b7866cf5e5b77e");
        assert_eq!(tag.0.map(u64::to_ne_bytes).concat(), expected);
    }

    #[test]
    fn many_words_at_a_time_are_the_same() {
        let mut random = memfold_testkit::random::Random::new(8);
        for len in [0usize, 16, 256, 512, 4096, 4112, 16 << 10, 12 << 10] {
            let fingerprints = Fingerprints::new().unwrap();
            let block: Vec<u8> = (0..len).map(|_| random.word() as u8).collect();
            assert!(fingerprints.of(&block) == fingerprints.plain(&block), "{len} bytes");
            if let Some(powers) = fingerprints.powers.as_ref().map(SecretPowers::without_four)
                && len.is_multiple_of(STEP)
            {
                assert_eq!(powers.hash(&block), fingerprints.plain(&block).0, "{len} bytes by two");
            }
        }
    }

    /// Prints how fast blocks of 16 KiB are hashed, by this module and by the crate.
    #[test]
    #[ignore = "measures"]
    fn measure() {
        let (fingerprints, block) = (Fingerprints::new().unwrap(), [7; 16 << 10]);
        for _ in 0..3 {
            let hashes: [fn(&Fingerprints, &[u8]) -> Fingerprint; 2] =
                [Fingerprints::of, Fingerprints::plain];
            for hash in hashes {
                let start = std::time::Instant::now();
                (0..20_000).for_each(|_| {
                    std::hint::black_box(hash(&fingerprints, std::hint::black_box(&block)));
                });
                std::println!("{:?} a block", start.elapsed() / 20_000);
            }
        }
    }

    #[test]
    fn blocks_made_to_have_equal_xxh3_have_other_fingerprints() {
        for len in [4 << 10, 16 << 10, 64 << 10, 2 << 20] {
            let [mut a, mut b] = [std::vec![0u8; len], std::vec![0u8; len]];
            a.chunks_exact_mut(4096).for_each(|page| equal_xxh3(page, 1, 7));
            b.chunks_exact_mut(4096).for_each(|page| equal_xxh3(page, 2, 6));
            assert_eq!(
                memfold_store::xxh3_128(&a),
                memfold_store::xxh3_128(&b),
                "the pair is not one"
            );
            let fingerprints = Fingerprints::new().unwrap();
            assert!(fingerprints.of(&a) == fingerprints.of(&a.clone()));
            assert!(fingerprints.of(&a) != fingerprints.of(&b));
        }
    }

    #[test]
    fn another_secret_gives_others() {
        let block = [7; 4096];
        assert!(Fingerprints::new().unwrap().of(&block) != Fingerprints::new().unwrap().of(&block));
    }
}
