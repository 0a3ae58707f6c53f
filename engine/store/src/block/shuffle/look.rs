//! Examines a sample of a block's words: which of their planes don't change.
use crate::block::shuffle::kernel;
use crate::block::shuffle::plan::{PlaneWords, ShufflePlan, TABLE_MAX};

/// Positions that are examined, and bytes at each: a cache line.
const PLACES: usize = 16;
const LINE: usize = 64;
/// Most different words in [`LINE`] * [`PLACES`] bytes for which a table is tried. Of 256 equally
/// frequent words, a sample of 128 has 101 different ones.
const SEEN_MAX: usize = 110;
const DRAWN: usize = 128;

/// Returns how to split the block, if that looks as if it left at most 7/8 of it.
pub(super) fn look(block: &[u8]) -> Option<ShufflePlan> {
    let lines = sample(block);
    let mut best = (block.len() / 8 * 7 + 1, None);
    let mut offer = |cost: usize, width, words| {
        if cost < best.0 {
            best = (cost, Some(ShufflePlan { width, words }));
        }
        best.0
    };
    // Of two plans with one cost, the faster one to decode comes first.
    let share = block.len() / 64;
    offer(share * planes::<2>(&lines, false), 2, PlaneWords::Plain);
    offer(share * planes::<4>(&lines, false), 4, PlaneWords::Plain);
    offer(share * planes::<8>(&lines, false), 8, PlaneWords::Plain);
    offer(share * planes::<2>(&lines, true), 2, PlaneWords::Deltas);
    offer(share * planes::<4>(&lines, true), 4, PlaneWords::Deltas);
    let least = offer(share * planes::<8>(&lines, true), 8, PlaneWords::Deltas);
    if least > block.len() / 4 {
        offer(table::<4>(&lines, block.len()), 4, PlaneWords::Table);
    }
    if least > block.len() / 8 {
        offer(table::<8>(&lines, block.len()), 8, PlaneWords::Table);
    }
    best.1
}

/// Returns lines from all over the block, each at another position in its stretch, so that a block
/// of records shows all its fields.
fn sample(block: &[u8]) -> [[u8; LINE]; PLACES] {
    let stretch = block.len() / PLACES;
    core::array::from_fn(|nth| {
        let at = nth * stretch + nth * 5 * LINE % stretch;
        block[at..at + LINE].try_into().expect("a line")
    })
}

/// Estimates the planes of words of `W` bytes, in 64ths of the block.
fn planes<const W: usize>(lines: &[[u8; LINE]; PLACES], deltas: bool) -> usize {
    let mut changes = 0u64;
    let first = kernel::word::<W>(&lines[0], 0);
    for line in lines {
        let mut before = kernel::word::<W>(line, 0);
        for nth in 0..LINE / W {
            let word = kernel::word::<W>(line, nth);
            changes |= match deltas {
                true => kernel::folded::<W>(word.wrapping_sub(before)),
                false => word ^ first,
            };
            before = word;
        }
    }
    let changes = changes.to_le_bytes();
    let bits = changes[..W].iter().map(|bits| match bits.count_ones() {
        // A codec makes it smaller.
        few @ 0..=5 => few as usize,
        _ => 8,
    });
    bits.sum::<usize>() * 8 / W
}

/// Estimates a table of the words of `W` bytes, in bytes, if one is possible.
fn table<const W: usize>(lines: &[[u8; LINE]; PLACES], len: usize) -> usize {
    let mut samples = [0u64; DRAWN];
    for (i, to) in samples.iter_mut().enumerate() {
        // Takes the same number from every line: its first word, and every other one of four bytes.
        let nth = i % (DRAWN / PLACES) * (LINE / W / (DRAWN / PLACES));
        *to = kernel::word::<W>(&lines[i / (DRAWN / PLACES)], nth);
    }
    samples.sort_unstable();
    let different = 1 + samples.windows(2).filter(|two| two[0] != two[1]).count();
    let cost = len / W + W * (2 * different).min(TABLE_MAX);
    if different > SEEN_MAX { usize::MAX } else { cost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Random;

    fn block(word: impl FnMut(u64) -> u64) -> Vec<u8> {
        (0..2048).map(word).flat_map(u64::to_le_bytes).collect()
    }

    fn plan(width: usize, words: PlaneWords) -> Option<ShufflePlan> {
        Some(ShufflePlan { width, words })
    }

    #[test]
    fn each_kind_of_numbers_is_seen() {
        let mut random = Random::new(5);
        let mut row = 1 << 33;
        let rows = block(|_| {
            row += random.below(60) as u64;
            row
        });
        assert_eq!(look(&rows), plan(8, PlaneWords::Deltas));
        let small = block(|_| random.word() & 0x3f_0000_003f);
        assert_eq!(look(&small), plan(4, PlaneWords::Plain));
        let some: Vec<u64> = (0..120).map(|_| random.word()).collect();
        let few_values = block(|_| some[random.below(120)]);
        assert_eq!(look(&few_values), plan(8, PlaneWords::Table));
        let eighths = |n: usize| (n as f32 / 127.0).to_bits() as u64;
        let few_values = block(|_| eighths(random.below(128)) | eighths(random.below(128)) << 32);
        assert_eq!(look(&few_values), plan(4, PlaneWords::Table));
        let mut level = 0x8000u16;
        let sound = block(|_| {
            (0..4).fold(0, |word, i| {
                level = level.wrapping_add(random.below(120) as u16).wrapping_sub(60);
                word | (level as u64) << (16 * i)
            })
        });
        assert_eq!(look(&sound), plan(2, PlaneWords::Deltas));
    }

    #[test]
    fn blocks_without_planes_stay_as_they_are() {
        let mut random = Random::new(6);
        assert_eq!(look(&block(|_| random.word())), None);
    }
}
