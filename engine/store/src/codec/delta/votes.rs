//! The distances that a page chooses, and the state of the encoders.
use super::layout::{DISTANCE_MIN, DISTANCES};
use core::arch::x86_64::*;
use memfold_os::units::PAGE_SIZE;

/// Words of a page.
pub(super) const WORDS: usize = PAGE_SIZE / 8;
/// Bytes before the first hash, so that all distances may be compared.
pub(super) const BEFORE: usize = 256;
/// Bits that the words are shifted by before they are hashed. Pointers to neighbours differ in their
/// low bits, so they are equal under the second and third.
pub(super) const SHIFTS: [u32; 3] = [0, 16, 40];
/// The weights of equal hashes, for each shift.
pub(super) const WEIGHTS: [i8; 3] = [32, 32, 64];
/// Multiplier of the hashes: the golden ratio.
pub(super) const MULTIPLIER: u64 = 0x9E37_79B9_7F4A_7C15;
/// Votes that a distance needs.
const VOTES_MIN: u8 = 2;
/// Threshold from which on the search ends.
const VOTES_HIGH: u8 = 250;

/// A byte for each word: a hash of its upper bits, 0 only if these are 0.
#[repr(C, align(64))]
pub(super) struct Hashes {
    before: [u8; BEFORE],
    pub words: [u8; WORDS],
}

impl Hashes {
    /// Returns the address of the hash of word `at`. Those of [`BEFORE`] words before the first are 0.
    #[inline]
    pub fn at(&self, word: usize) -> *const u8 {
        (&raw const *self).cast::<u8>().wrapping_add(BEFORE + word)
    }
}

/// The state of an encoder, which no page leaves anything in that another needs.
#[repr(C, align(64))]
pub(super) struct Scratch {
    /// For each of [`SHIFTS`].
    pub hashes: [Hashes; 3],
    /// The last word with each hash.
    last: [u16; 256],
    /// Words whose last equal word was so far away. Two, in turns, so that equal distances in a row
    /// don't wait for each other.
    votes: [[u8; 1024]; 2],
}

impl Scratch {
    pub const fn new() -> Scratch {
        const NONE: Hashes = Hashes { before: [0; BEFORE], words: [0; WORDS] };
        Scratch { hashes: [NONE; 3], last: [0; 256], votes: [[0; 1024]; 2] }
    }
}

/// The distances of a page.
pub(super) struct Distances {
    /// In words; unused ones are 0.
    pub words: [u8; DISTANCES],
    pub count: usize,
}

#[repr(align(64))]
struct Sums([u8; 256]);

impl Scratch {
    /// Chooses the distances at which most words have the same hash, from the hashes of the first of
    /// [`SHIFTS`].
    #[target_feature(enable = "avx2,bmi1,popcnt")]
    #[inline]
    pub fn choose(&mut self) -> Distances {
        self.vote();
        let mut sums = Sums([0; 256]);
        for (sum, (a, b)) in sums.0.iter_mut().zip(self.votes[0].iter().zip(&self.votes[1])) {
            *sum = a.saturating_add(*b);
        }
        // A shorter distance than a line has a multiple from 8 to 14.
        let short = &sums.0;
        let add = |to: usize, from: &[usize]| {
            from.iter().fold(short[to], |sum, at| sum.saturating_add(short[*at]))
        };
        let joined = [
            (8, add(8, &[1, 2, 4])),
            (9, add(9, &[3])),
            (10, add(10, &[5])),
            (12, add(12, &[6])),
            (14, add(14, &[7])),
        ];
        for (to, sum) in joined {
            sums.0[to] = sum;
        }
        sums.0[..DISTANCE_MIN as usize].fill(0);
        pick(&sums)
    }

    /// Counts, for each word, the distance to the last word with the same hash.
    #[inline(always)]
    fn vote(&mut self) {
        // No word is so far away that it counts.
        self.last = [0u16.wrapping_sub(256); 256];
        self.votes = [[0; 1024]; 2];
        let hashes = self.hashes[0].words.as_chunks::<8>().0;
        for (nth, hashes) in hashes.iter().enumerate() {
            for (word, hash) in hashes.iter().enumerate() {
                let at = (8 * nth + word) as u16;
                let last = &mut self.last[*hash as usize];
                // Zeros count elsewhere.
                let distance = at.wrapping_sub(*last) | ((*hash == 0) as u16) << 9;
                *last = at;
                let votes = &mut self.votes[word % 2][(distance & 1023) as usize];
                *votes = votes.wrapping_add(1);
            }
        }
    }
}

/// Returns which of 32 distances have at least `least` votes.
#[target_feature(enable = "avx2")]
#[inline]
fn reached(sums: &Sums, group: usize, least: u8) -> u32 {
    let bytes = &sums.0[32 * group..][..32];
    // SAFETY: 32 readable bytes; the load needs no alignment.
    let sums = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    let is_reached = _mm256_cmpeq_epi8(_mm256_max_epu8(sums, _mm256_set1_epi8(least as i8)), sums);
    _mm256_movemask_epi8(is_reached) as u32
}

/// Returns the distances with the most votes. Raises a threshold until few enough reach it, and then
/// takes some that reached the one before.
#[target_feature(enable = "avx2,bmi1,popcnt")]
#[inline]
fn pick(sums: &Sums) -> Distances {
    let mut least = VOTES_MIN;
    let mut sets = [0u32; 8];
    loop {
        let mut count = 0;
        for (group, set) in sets.iter_mut().enumerate() {
            *set = reached(sums, group, least);
            count += set.count_ones() as usize;
        }
        if count <= DISTANCES || least >= VOTES_HIGH {
            break;
        }
        least += 1 + (least >> 3);
    }
    let mut chosen = Distances { words: [0; DISTANCES], count: 0 };
    for (group, set) in sets.iter().enumerate() {
        chosen.add(group, *set);
    }
    let before = (least - 1 - ((least - 1) >> 3)).max(VOTES_MIN);
    if before < least {
        for (group, set) in sets.iter().enumerate() {
            if chosen.count == DISTANCES {
                break;
            }
            chosen.add(group, reached(sums, group, before) & !set);
        }
    }
    chosen
}

impl Distances {
    /// Adds distances of a set, as long as there is room.
    #[inline]
    fn add(&mut self, group: usize, mut set: u32) {
        while set != 0 && self.count < DISTANCES {
            self.words[self.count] = (32 * group) as u8 + set.trailing_zeros() as u8;
            self.count += 1;
            set &= set - 1;
        }
    }
}
