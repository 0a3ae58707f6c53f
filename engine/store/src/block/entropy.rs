//! Estimates from a sample whether a block is too dense to be worth a codec's time.
//!
//! It follows the heuristic of Linux' btrfs (fs/btrfs/compression.c, `btrfs_compress_heuristic`)
//! with a sample of short pieces from all over the block. Few different bytes: it compresses. Bytes
//! that are spread evenly without repetition: it does not. Instead of Shannon's entropy, whose
//! estimate from few bytes is biased, it counts pairs of equal bytes (the collision entropy), of
//! which even random bytes have a known number. Where btrfs compares the two halves of its sample,
//! this looks for words that occur twice, chosen by content so that both copies are chosen.
use core::ptr::read_unaligned;
use memfold_os::units::PAGE_SIZE;

/// Bytes of a piece.
const PIECE: usize = 8;
/// Pieces of the first look, which identifies most blocks that compress.
const FIRST_PIECES: usize = 8;
/// Random bytes have 57 different values in 64, give or take 2.4.
const FIRST_VALUES_MIN: u32 = 50;
/// Pieces of the second look.
const PIECES: usize = 64;
const SAMPLE: u32 = (PIECES * PIECE) as u32;
const LANES: usize = 4;
/// Pairs of equal bytes that random bytes have in the second look: one of 256 pairs.
const PAIRS_RANDOM: u32 = SAMPLE * (SAMPLE - 1) / 2 / 256;
/// Most pairs that count as dense. Random bytes exceed it once in 20,000 blocks: 3.9 standard
/// deviations.
const PAIRS_MAX: u32 = PAIRS_RANDOM / 100 * 118;
/// Average number of words that are chosen to find repetition.
const WORDS: usize = 512;
const SEEN: usize = 1024;

/// Returns whether a page looks as if no codec could make it smaller. Costs at most 1 µs.
pub fn looks_dense(page: &[u8; PAGE_SIZE]) -> bool {
    // SAFETY: a page's bytes, borrowed.
    unsafe { is_dense(page.as_ptr(), PAGE_SIZE) }
}

/// Returns whether the `len` bytes at `src` look as if no codec could make them smaller.
///
/// Costs 8 loads for most blocks that compress, and a pass over the block for one that does not:
/// about 1 µs for 4 KiB.
///
/// # Safety
/// - `src` is readable for `len` bytes, a multiple of the page size and not 0; no thread writes
///   there meanwhile.
pub(crate) unsafe fn is_dense(src: *const u8, len: usize) -> bool {
    debug_assert!(len > 0 && len.is_multiple_of(PAGE_SIZE));
    // SAFETY: as the caller says.
    unsafe { has_many_values(src, len) && is_even(src, len) && !repeats(src, len) }
}

/// Returns the start of piece `nth` of `pieces`. The position within each stretch varies, so that a
/// sample of records shows all their fields.
fn piece_at(nth: usize, pieces: usize, len: usize) -> usize {
    let stretch = len / pieces;
    nth * stretch + nth * 5 * PIECE % stretch
}

/// # Safety
/// - As for [`is_dense`].
unsafe fn has_many_values(src: *const u8, len: usize) -> bool {
    let mut bits = [0u64; 4];
    for nth in 0..FIRST_PIECES {
        // SAFETY: a piece is 8 bytes at a multiple of 8 within its stretch, which is a multiple of
        // 8 and within `len`.
        let word =
            unsafe { read_unaligned(src.add(piece_at(nth, FIRST_PIECES, len)).cast::<u64>()) };
        for byte in word.to_ne_bytes() {
            bits[(byte >> 6) as usize] |= 1 << (byte & 63);
        }
    }
    bits.iter().map(|bits| bits.count_ones()).sum::<u32>() >= FIRST_VALUES_MIN
}

/// # Safety
/// - As for [`is_dense`].
unsafe fn is_even(src: *const u8, len: usize) -> bool {
    // Separate counters, so that equal bytes in a row don't wait for each other.
    let mut counts = [[0u8; 256]; LANES];
    for nth in 0..PIECES {
        // SAFETY: a piece is 8 bytes at a multiple of 8 within its stretch, which is a multiple of
        // 8 and within `len`.
        let word = unsafe { read_unaligned(src.add(piece_at(nth, PIECES, len)).cast::<u64>()) };
        for (at, byte) in word.to_ne_bytes().into_iter().enumerate() {
            counts[at % LANES][byte as usize] += 1;
        }
    }
    let [a, b, c, d] = &counts;
    let count =
        |value: usize| a[value] as u32 + b[value] as u32 + c[value] as u32 + d[value] as u32;
    let squares: u32 = (0..256).map(|value| count(value) * count(value)).sum();
    // n equal bytes are n * (n - 1) / 2 pairs.
    (squares - SAMPLE) / 2 <= PAIRS_MAX
}

/// Returns whether at least one of 32 chosen words was seen before. No branch depends on the data.
///
/// # Safety
/// - As for [`is_dense`].
unsafe fn repeats(src: *const u8, len: usize) -> bool {
    let words = len / 8;
    let one_in = (words / WORDS).next_power_of_two() as u64;
    // One more than used, for words that are not chosen.
    let mut bits = [0u32; SEEN + 1];
    let (mut chosen_count, mut again) = (0, 0);
    for nth in 0..words {
        // SAFETY: word `nth` lies within `len` bytes.
        let word = unsafe { read_unaligned(src.cast::<u64>().add(nth)) };
        let hash = word.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let is_chosen = (hash >> 40) & (one_in - 1) == 0;
        let slot = &mut bits[if is_chosen { (hash >> 54) as usize } else { SEEN }];
        let tag = hash as u32 | 1;
        again += (is_chosen & (*slot == tag)) as usize;
        *slot = tag;
        chosen_count += is_chosen as usize;
    }
    again > 0 && again * 32 >= chosen_count
}

const _: () = assert!(
    PAGE_SIZE.is_multiple_of(PIECES * PIECE)
        && SEEN == 1 << (64 - 54)
        && SAMPLE as usize / LANES <= 255
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{CodecInput, CodecOutput, CodecSpec};
    use crate::format::huge_threshold;
    use crate::store::tests::{Random, corpus};

    fn dense(bytes: &[u8]) -> bool {
        // SAFETY: the bytes are borrowed.
        unsafe { is_dense(bytes.as_ptr(), bytes.len()) }
    }

    fn random(len: usize, random: &mut Random) -> Vec<u8> {
        (0..len / 8).flat_map(|_| random.word().to_ne_bytes()).collect()
    }

    /// Counts: blocks called dense that compress, blocks called open that don't, dense ones that
    /// don't compress, all; bytes lost.
    fn judge(bytes: &[u8], block: usize, spec: &str) -> [usize; 5] {
        let mut encoder = CodecSpec::parse(spec).unwrap().encoder(block);
        let mut output = vec![0; block + block / 100 + 1024];
        let mut sums = [0; 5];
        for block in bytes.chunks_exact(block) {
            // SAFETY: both buffers are as long as said and apart.
            let size = unsafe {
                encoder.encode(
                    CodecInput { at: block.as_ptr(), len: block.len() },
                    CodecOutput::of(&mut output),
                    None,
                )
            };
            let shrinks = size.unwrap().filter(|size| *size <= huge_threshold(block.len()));
            match (dense(block), shrinks) {
                (true, Some(size)) => {
                    sums[0] += 1;
                    sums[4] += block.len() - size;
                }
                (false, None) => sums[1] += 1,
                (true, None) => sums[2] += 1,
                (false, Some(_)) => {}
            }
            sums[3] += 1;
        }
        sums
    }

    #[test]
    fn random_bytes_are_dense_and_real_ones_that_shrink_are_not() {
        let bytes = random(8 << 20, &mut Random::new(3));
        for block in [4096, 16384, 65536, 12 * 4096] {
            let [false_negatives, missed, ..] = judge(&bytes, block, "lz4");
            assert_eq!(false_negatives, 0);
            assert!(
                missed * 100 <= bytes.len() / block,
                "{missed} blocks of {block} random bytes were not called dense"
            );
            for spec in ["lz4", "zstd"] {
                let [_, _, _, all, lost_bytes] = judge(corpus(), block, spec);
                assert!(lost_bytes * 1000 < all * block, "{spec} {block}: {lost_bytes} bytes lost");
            }
        }
    }

    #[test]
    fn blocks_that_shrink_a_little_are_not_dense() {
        let mut random_ = Random::new(4);
        for block in [4096, 16384, 65536] {
            for round in 0..50 {
                let mut bytes = random(block, &mut random_);
                bytes[round * 8..][..block / 8].fill(0);
                assert!(!dense(&bytes), "an eighth of zeros");
                let mut bytes = random(block, &mut random_);
                let copy = bytes[..block / 4].to_vec();
                bytes[block / 2 + round * 8..][..block / 4].copy_from_slice(&copy);
                assert!(!dense(&bytes), "a quarter that is there twice");
                let bytes: Vec<u8> = random(block, &mut random_).iter().map(|b| b & 0x7f).collect();
                assert!(!dense(&bytes), "seven bits of eight");
                // Records of 64 bytes that start with a random word.
                let mut bytes = random(block, &mut random_);
                bytes.chunks_exact_mut(64).for_each(|record| record[40..].fill(round as u8));
                assert!(!dense(&bytes), "records");
            }
        }
    }

    /// Prints how often the estimate is wrong on the benchmark's corpus.
    #[test]
    #[ignore = "needs `memfold bench corpus`, measures"]
    fn measure() {
        let path =
            std::path::Path::new(&std::env::var("HOME").unwrap()).join(".cache/memfold/corpus.bin");
        let bytes = std::fs::read(path).unwrap();
        for spec in ["lz4", "zstd", "deflate"] {
            for block in [4096, 16384, 65536] {
                let [false_negatives, missed, right, all, lost_bytes] = judge(&bytes, block, spec);
                println!(
                    "{spec} {:>2}K: {all} blocks; {right} dense and don't shrink; {false_negatives} dense but shrink, \
                     {lost_bytes} bytes lost; {missed} not dense but don't shrink",
                    block >> 10
                );
            }
        }
        let start = std::time::Instant::now();
        let count =
            (0..10).map(|_| bytes.chunks_exact(4096).filter(|b| dense(b)).count()).sum::<usize>();
        println!(
            "corpus: {count} dense, {:?} a block",
            start.elapsed() / (10 * bytes.len() / 4096) as u32
        );
        let bytes = random(16 << 20, &mut Random::new(5));
        for block in [4096, 16384, 65536] {
            let start = std::time::Instant::now();
            let blocks = bytes.chunks_exact(block).filter(|b| dense(b)).count();
            println!(
                "random {block}: {blocks} dense, {:?} a block",
                start.elapsed() / (bytes.len() / block) as u32
            );
        }
    }
}
