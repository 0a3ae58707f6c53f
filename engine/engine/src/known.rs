//! A map of the address space where memory may be folded, now or later: a bit for each 2 MiB. Under
//! `memfold run` a bit is set when private memory without a file is mapped there, and is never
//! cleared. For regions of the library it is set while there is one. Tables for 256 GiB each are
//! made when they are needed, because programs use few.
use alloc::boxed::Box;
use core::array::from_fn;
use core::ops::Range;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

const CHUNK_SHIFT: u32 = 21;
/// The end of the addresses that may be managed.
pub const TOP: usize = 1 << 47;
/// Ranges of more chunks are not queried chunk by chunk.
const CHUNKS_MAX: usize = 4096;
const TABLE_SHIFT: u32 = 38;
const TABLES: usize = TOP >> TABLE_SHIFT;
const WORD_BITS: usize = u64::BITS as usize;
const WORDS: usize = (1 << (TABLE_SHIFT - CHUNK_SHIFT)) / WORD_BITS;

type Table = [AtomicU64; WORDS];

/// The map; see the module.
pub struct FoldableMap([AtomicPtr<Table>; TABLES]);

/// Returns the words, counted through all tables, that hold the bits of a range.
fn words(range: &Range<usize>) -> Range<usize> {
    let chunks = chunks(range);
    chunks.start / WORD_BITS..chunks.end.div_ceil(WORD_BITS)
}

fn chunks(range: &Range<usize>) -> Range<usize> {
    let end = range.end.min(TOP);
    (range.start >> CHUNK_SHIFT)..end.div_ceil(1 << CHUNK_SHIFT)
}

/// Returns the bits of a word that are in a range of chunks.
fn mask(word: usize, chunks: &Range<usize>) -> u64 {
    let first = word * WORD_BITS;
    let from = chunks.start.saturating_sub(first);
    let to = (chunks.end - first).min(WORD_BITS);
    u64::MAX << from & u64::MAX >> (WORD_BITS - to)
}

impl Default for FoldableMap {
    /// Makes an empty map.
    fn default() -> FoldableMap {
        FoldableMap(from_fn(|_| AtomicPtr::new(null_mut())))
    }
}

impl FoldableMap {
    fn table(&self, word: usize) -> Option<&Table> {
        // SAFETY: the pointer is null, or that of a leaked box.
        unsafe { self.0[word / WORDS].load(SeqCst).as_ref() }
    }

    #[cold]
    fn make_table(&self, word: usize) -> &Table {
        // SAFETY: zeros are a valid table. The box is allocated as zeros, so unused parts get no
        // page.
        let new = Box::into_raw(unsafe { Box::<Table>::new_zeroed().assume_init() });
        let place = &self.0[word / WORDS];
        match place.compare_exchange(null_mut(), new, SeqCst, SeqCst) {
            // SAFETY: the exchange has just leaked the box.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: this thread made `new` and has not shared it; the other is a leaked box.
                unsafe {
                    drop(Box::from_raw(new));
                    &*other
                }
            }
        }
    }

    /// Sets the bits of a range.
    pub fn set(&self, range: &Range<usize>) {
        let chunks = chunks(range);
        for word in words(range) {
            let table = self.table(word).unwrap_or_else(|| self.make_table(word));
            let (place, mask) = (&table[word % WORDS], mask(word, &chunks));
            if place.load(Relaxed) & mask != mask {
                place.fetch_or(mask, Relaxed);
            }
        }
    }

    /// Clears the bits of a range.
    pub fn unset(&self, range: &Range<usize>) {
        let chunks = chunks(range);
        for word in words(range) {
            if let Some(table) = self.table(word) {
                table[word % WORDS].fetch_and(!mask(word, &chunks), Relaxed);
            }
        }
    }

    /// Clears all bits.
    pub fn clear(&self) {
        for table in &self.0 {
            // SAFETY: the pointer is null, or that of a leaked box.
            if let Some(table) = unsafe { table.load(SeqCst).as_ref() } {
                table.iter().for_each(|word| word.store(0, Relaxed));
            }
        }
    }

    /// Returns whether memory of a range may be folded.
    pub fn is_set(&self, range: &Range<usize>) -> bool {
        let chunks = chunks(range);
        let is_any = |word: usize| {
            let table = self.table(word);
            table.is_some_and(|table| table[word % WORDS].load(Relaxed) & mask(word, &chunks) != 0)
        };
        chunks.len() > CHUNKS_MAX || words(range).any(is_any)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn what_has_ended_is_known_no_more_and_what_is_beside_it_is() {
        const CHUNK: usize = 1 << CHUNK_SHIFT;
        let known = FoldableMap::default();
        let at = (1 << TABLE_SHIFT) - 3 * CHUNK;
        known.set(&(at - CHUNK..at));
        // Across two tables; it covers its last chunk only in part.
        let region = at..at + 100 * CHUNK + 5;
        known.set(&region);
        known.set(&(at + 101 * CHUNK..at + 102 * CHUNK));
        for inside in [at, at + 3 * CHUNK, at + 100 * CHUNK + 4] {
            assert!(known.is_set(&(inside..inside + 1)));
        }
        known.unset(&region);
        assert!(!known.is_set(&(at..at + 101 * CHUNK)));
        assert!(
            known.is_set(&(at - 1..at)) && known.is_set(&(at + 101 * CHUNK..at + 101 * CHUNK + 1))
        );
        known.clear();
        assert!(!known.is_set(&(at - CHUNK..at + 102 * CHUNK)));
    }
}
