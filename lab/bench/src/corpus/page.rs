//! The content of the walk's pages, and its verification.
//!
//! Page `n` is page `n` (modulo its length) of the corpus, with two words replaced: a stamp, so
//! that no two pages are equal, and, once the page was changed, a word computed from the number of
//! changes.

use crate::corpus::file::{CorpusFile, PAGE, WORDS};
use memfold_testkit::random::mix;

/// Index of the stamp in a page.
const STAMP: usize = 0;
/// Index of the word that a change writes: in the middle of the page, away from the stamp.
const CHANGED: usize = 261;
/// Sequential reads check this many words spread over a page, besides the two above.
const SAMPLES: usize = 8;
/// Sequential reads compare every page of this number whole.
const WHOLE_EVERY: u64 = 64;

/// A run of pages for one thread.
pub struct Pages<'c> {
    start: *mut u8,
    first: u64,
    changes: Vec<u16>,
    corpus: &'c CorpusFile,
    sums: &'c [u64],
    /// Wrong bytes found in all checks so far.
    pub bytes_wrong: u64,
}

// SAFETY: only this value owns `start` (see `new`); all other fields are Send.
unsafe impl Send for Pages<'_> {}

impl<'c> Pages<'c> {
    /// Makes the pages from `start`, numbered from `first`, with `sums` from [`corpus_sums`].
    ///
    /// # Safety
    /// - `start` is page-aligned, and `pages` pages from it are readable and writable for `'c`;
    /// - nothing else reads or writes them meanwhile, except a pager that keeps their content.
    pub unsafe fn new(
        start: *mut u8,
        pages: usize,
        first: u64,
        corpus: &'c CorpusFile,
        sums: &'c [u64],
    ) -> Self {
        // Written now, so that it does not fault in during a measured phase.
        let mut changes = Vec::with_capacity(pages);
        changes.resize_with(pages, || std::hint::black_box(0));
        Pages { start, first, changes, corpus, sums, bytes_wrong: 0 }
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// Writes all of page `i`.
    #[inline]
    pub fn fill(&mut self, i: usize) {
        let page = self.at(i);
        // SAFETY: both are whole pages, and the corpus is a mapping of its own.
        unsafe {
            std::ptr::copy_nonoverlapping(self.corpus.page(self.first + i as u64), page, PAGE)
        };
        self.set(i, STAMP, mix(self.first + i as u64));
        self.changes[i] = 0;
    }

    /// Changes one word of page `i`.
    #[inline]
    pub fn change(&mut self, i: usize) {
        self.changes[i] = self.changes[i].wrapping_add(1).max(1);
        self.set(i, CHANGED, self.expected(i, CHANGED));
    }

    /// Reads words spread over page `i`. Every 64th page is read whole.
    #[inline]
    pub fn check_samples(&mut self, i: usize) {
        let number = self.first + i as u64;
        let rotation = number as usize % (WORDS / SAMPLES);
        let mut right = self.get(i, STAMP) == self.expected(i, STAMP);
        right &= self.get(i, CHANGED) == self.expected(i, CHANGED);
        for sample in 0..SAMPLES {
            let word = rotation + sample * (WORDS / SAMPLES);
            right &= self.get(i, word) == self.expected(i, word);
        }
        if !right || number.is_multiple_of(WHOLE_EVERY) {
            self.check_whole(i);
        }
    }

    /// Verifies page `i` by the sum of its words, which finds any single wrong word.
    #[inline]
    pub fn check_sum(&mut self, i: usize) {
        let expected = self.sums[((self.first + i as u64) % self.corpus.pages() as u64) as usize]
            .wrapping_add(self.expected(i, STAMP))
            .wrapping_add(self.expected(i, CHANGED));
        // SAFETY: `at` returns a whole page, which is aligned for words.
        if unsafe { sum(self.at(i)) } != expected {
            self.check_whole(i);
        }
    }

    /// Compares all of page `i`, and counts the bytes that are wrong.
    pub fn check_whole(&mut self, i: usize) {
        let mut expected = [0u64; WORDS];
        let corpus = self.corpus.page(self.first + i as u64);
        // SAFETY: reads a whole page of the corpus into a local buffer of the same size.
        unsafe { std::ptr::copy_nonoverlapping(corpus, expected.as_mut_ptr().cast(), PAGE) };
        expected[STAMP] = self.expected(i, STAMP);
        expected[CHANGED] = self.expected(i, CHANGED);
        // SAFETY: both are readable for a page, which is all that memcmp requires.
        if unsafe { libc::memcmp(self.at(i).cast(), expected.as_ptr().cast(), PAGE) } == 0 {
            return;
        }
        for (word, expected) in expected.iter().enumerate() {
            let difference = self.get(i, word) ^ expected;
            self.bytes_wrong +=
                difference.to_le_bytes().iter().filter(|&&byte| byte != 0).count() as u64;
        }
    }

    /// Returns the expected value of word `word` of page `i`.
    #[inline]
    fn expected(&self, i: usize, word: usize) -> u64 {
        let number = self.first + i as u64;
        match (word, self.changes[i]) {
            (STAMP, _) => mix(number),
            (CHANGED, changes) if changes > 0 => mix(number ^ (u64::from(changes) << 40)),
            // SAFETY: word < WORDS in every caller, so it lies in the page, which is aligned.
            _ => unsafe { self.corpus.page(number).cast::<u64>().add(word).read() },
        }
    }

    #[inline]
    fn at(&self, i: usize) -> *mut u8 {
        assert!(i < self.changes.len());
        // SAFETY: i is below the number of pages given to `new`.
        unsafe { self.start.add(i * PAGE) }
    }

    #[inline]
    fn get(&self, i: usize, word: usize) -> u64 {
        debug_assert!(word < WORDS);
        // SAFETY: a word inside page i; volatile, so that every check really reads the memory.
        unsafe { self.at(i).cast::<u64>().add(word).read_volatile() }
    }

    #[inline]
    fn set(&mut self, i: usize, word: usize, value: u64) {
        debug_assert!(word < WORDS);
        // SAFETY: a word inside page i, which only this value writes.
        unsafe { self.at(i).cast::<u64>().add(word).write_volatile(value) }
    }
}

/// Returns the sum of each corpus page without the two words that the walk replaces: the stamp and
/// the changed word. The reader adds those.
pub fn corpus_sums(corpus: &CorpusFile) -> Vec<u64> {
    (0..corpus.pages() as u64)
        .map(|number| {
            let page = corpus.page(number);
            // SAFETY: a whole, aligned page of the corpus; STAMP and CHANGED are words of it.
            unsafe {
                let words = page.cast::<u64>();
                sum(page)
                    .wrapping_sub(words.add(STAMP).read())
                    .wrapping_sub(words.add(CHANGED).read())
            }
        })
        .collect()
}

/// The wrapping sum of all words of a page.
///
/// # Safety
/// `page` is aligned to 8 and readable for 4096 bytes.
#[inline]
unsafe fn sum(page: *const u8) -> u64 {
    let words = page.cast::<u64>();
    let mut sum = 0u64;
    for word in 0..WORDS {
        // SAFETY: word < WORDS, inside the page by the caller's promise.
        sum = sum.wrapping_add(unsafe { words.add(word).read() });
    }
    sum
}
