//! Chooses a dictionary's content from samples: the pieces whose parts occur in the most samples.
//!
//! It follows COVER (Liao, Petri, Moffat, Wirth: "Effective construction of relative Lempel-Ziv
//! dictionaries", WWW 2016) in the form of zstd's FastCOVER. Sequences of 8 bytes are counted by
//! hash. The samples are cut into as many epochs as the dictionary has pieces. From each epoch the
//! piece with the highest score is taken, and its sequences then count no more.
use alloc::vec;
use alloc::vec::Vec;

/// Bytes of a sequence.
const D: usize = 8;
const HASH_BITS: u32 = 17;

/// The sequences of the samples.
pub(crate) struct SampleCover<'a> {
    samples: &'a [u8],
    /// In how many samples a sequence occurs, by hash. One counts as none, because nothing is
    /// gained from a sequence of one sample.
    found_in: Vec<u16>,
}

impl<'a> SampleCover<'a> {
    /// Counts the sequences of samples of `sample_bytes` each. Takes 0.75 MiB meanwhile.
    pub fn new(samples: &'a [u8], sample_bytes: usize) -> SampleCover<'a> {
        let mut found_in = vec![0u16; 1 << HASH_BITS];
        let mut last = vec![u32::MAX; 1 << HASH_BITS];
        for (nth, sample) in samples.chunks(sample_bytes).enumerate() {
            for sequence in sample.windows(D) {
                let hash = hash(sequence);
                if last[hash] != nth as u32 {
                    last[hash] = nth as u32;
                    found_in[hash] = found_in[hash].saturating_add(1);
                }
            }
        }
        // Zeros and similar sequences compress without a dictionary.
        for byte in [0, 0xff] {
            found_in[hash(&[byte; D])] = 0;
        }
        SampleCover { samples, found_in }
    }

    /// Returns content of at most `bytes` bytes in pieces of `piece` bytes. The best come last,
    /// where they are nearest.
    pub fn choose(&self, bytes: usize, piece: usize) -> Vec<u8> {
        let mut found_in = self.found_in.clone();
        let epochs = (bytes / piece).max(1);
        let epoch_bytes = (self.samples.len() / epochs).max(piece);
        let mut pieces: Vec<(u64, &[u8])> = Vec::new();
        for epoch in self.samples.chunks(epoch_bytes) {
            let Some((score, at)) = best(epoch, piece, &found_in) else { continue };
            let window = &epoch[at..at + piece];
            window.windows(D).for_each(|sequence| found_in[hash(sequence)] = 0);
            pieces.push((score, window));
        }
        pieces.sort_by_key(|(score, _)| core::cmp::Reverse(*score));
        pieces.truncate(epochs);
        pieces.iter().rev().flat_map(|(_, window)| window.iter().copied()).collect()
    }
}

/// Returns the score and position of the best piece, if any scores.
fn best(epoch: &[u8], piece: usize, found_in: &[u16]) -> Option<(u64, usize)> {
    let gain = |at: usize| found_in[hash(&epoch[at..at + D])].saturating_sub(1) as u64;
    if epoch.len() < piece || piece < D {
        return None;
    }
    let mut score: u64 = (0..=piece - D).map(gain).sum();
    let mut best = (score, 0);
    for at in 1..=epoch.len() - piece {
        score = score + gain(at + piece - D) - gain(at - 1);
        if score > best.0 {
            best = (score, at);
        }
    }
    (best.0 > 0).then_some(best)
}

fn hash(sequence: &[u8]) -> usize {
    let word = u64::from_le_bytes(sequence.try_into().expect("D bytes"));
    (word.wrapping_mul(0xCF1B_BCDC_B7A5_6463) >> (64 - HASH_BITS)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Random;

    #[test]
    fn cover_takes_shared_data_and_leaves_noise() {
        let mut random = Random::new(1);
        let shared_bytes: Vec<u8> = (0..64).flat_map(|_| random.word().to_ne_bytes()).collect();
        let mut samples: Vec<u8> =
            (0..64 * 512).flat_map(|_| random.word().to_ne_bytes()).collect();
        let places: Vec<usize> = (0..64).map(|_| random.below(3000)).collect();
        for (sample, at) in samples.chunks_mut(4096).zip(places) {
            sample[at..at + 512].copy_from_slice(&shared_bytes);
        }
        let content = SampleCover::new(&samples, 4096).choose(2048, 256);
        assert!(content.len() <= 2048);
        let count =
            shared_bytes.windows(64).filter(|part| content.windows(64).any(|c| c == *part)).count();
        assert!(count * 10 > (512 - 63) * 8, "{count}");
        let noise: Vec<u8> = (0..64 * 512).flat_map(|_| random.word().to_ne_bytes()).collect();
        assert!(SampleCover::new(&noise, 4096).choose(2048, 256).len() <= 2048);
        assert!(SampleCover::new(&[0; 8192], 4096).choose(2048, 256).is_empty());
        assert!(SampleCover::new(&[], 4096).choose(2048, 256).is_empty());
    }
}
