//! A set of blocks of one folio.
use memfold_os::units::MAX_PAGES;

const WORDS: usize = MAX_PAGES / 64;

/// A bitmap over the blocks of a folio, up to 512 (a 2 MiB folio in 4 KiB blocks).
#[derive(Copy, Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockSet {
    words: [u64; WORDS],
}

impl BlockSet {
    /// The empty set.
    pub const EMPTY: BlockSet = BlockSet { words: [0; WORDS] };

    /// Returns the blocks `0..count`.
    ///
    /// # Panics
    /// If `count` is above 512.
    pub const fn first(count: usize) -> BlockSet {
        assert!(count <= MAX_PAGES);
        let mut set = BlockSet::EMPTY;
        let mut word = 0;
        while word < count / 64 {
            set.words[word] = u64::MAX;
            word += 1;
        }
        if !count.is_multiple_of(64) {
            set.words[word] = (1 << (count % 64)) - 1;
        }
        set
    }

    /// Adds block `block`.
    ///
    /// # Panics
    /// If `block` is 512 or more.
    pub const fn insert(&mut self, block: usize) {
        self.words[block / 64] |= 1 << (block % 64);
    }

    /// Removes block `block`.
    ///
    /// # Panics
    /// If `block` is 512 or more.
    pub const fn remove(&mut self, block: usize) {
        self.words[block / 64] &= !(1 << (block % 64));
    }

    /// Returns whether block `block` is in the set; `false` from 512 on.
    pub const fn contains(&self, block: usize) -> bool {
        block < MAX_PAGES && self.words[block / 64] & 1 << (block % 64) != 0
    }

    /// Returns the number of blocks in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|w| *w == 0)
    }

    /// Returns one past the last block of the set, 0 for the empty set.
    pub fn end(&self) -> usize {
        match self.words.iter().rposition(|w| *w != 0) {
            Some(i) => i * 64 + 64 - self.words[i].leading_zeros() as usize,
            None => 0,
        }
    }

    /// Returns the blocks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = *word;
            core::iter::from_fn(move || {
                if rest == 0 {
                    return None;
                }
                let bit = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                Some(i * 64 + bit)
            })
        })
    }

    /// Returns the bits 64 at a time, block 0 in bit 0 of the first word.
    pub const fn words(&self) -> &[u64; WORDS] {
        &self.words
    }
}

impl FromIterator<usize> for BlockSet {
    fn from_iter<I: IntoIterator<Item = usize>>(blocks: I) -> BlockSet {
        let mut set = BlockSet::EMPTY;
        blocks.into_iter().for_each(|b| set.insert(b));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_lists_what_was_put_in() {
        for count in [0, 1, 63, 64, 65, 511, 512] {
            let set = BlockSet::first(count);
            assert_eq!(set.iter().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
            assert_eq!((set.count(), set.end(), set.is_empty()), (count, count, count == 0));
        }
        let mut set: BlockSet = [3, 64, 500].into_iter().collect();
        set.remove(64);
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 500]);
        assert!(set.contains(3) && !set.contains(64) && !set.contains(512));
        assert_eq!(set.end(), 501);
    }
}
