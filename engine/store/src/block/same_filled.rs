//! The same-filled test: whether a page repeats one 8-byte pattern.
use memfold_os::units::PAGE_SIZE;

const WORDS: usize = PAGE_SIZE / 8;
/// Words that are compared before the next early exit; a multiple of every vector width.
const STRIDE: usize = 64;

/// Returns the pattern of the page at `page` if all its 512 words are equal (0 for a page of
/// zeros).
///
/// Three loads rule out most pages: the first, the last and a middle word.
///
/// # Safety
/// - `page` points to a readable page, aligned to 8 bytes, that no thread writes during the call.
#[inline]
pub(crate) unsafe fn pattern_of(page: *const u8) -> Option<u64> {
    debug_assert!((page as usize).is_multiple_of(8));
    let words = page.cast::<u64>();
    // SAFETY: words 0, WORDS / 2 and WORDS - 1 lie in the page, which is readable and aligned.
    unsafe {
        let first = words.read();
        if words.add(WORDS - 1).read() != first || words.add(WORDS / 2).read() != first {
            return None;
        }
        all_equal(words, first).then_some(first)
    }
}

/// # Safety
/// As for [`pattern_of`].
unsafe fn all_equal(words: *const u64, value: u64) -> bool {
    let mut at = 0;
    while at < WORDS {
        let mut differs = 0;
        for i in 0..STRIDE {
            // SAFETY: at + i < WORDS, as STRIDE divides WORDS.
            differs |= unsafe { words.add(at + i).read() } ^ value;
        }
        if differs != 0 {
            return false;
        }
        at += STRIDE;
    }
    true
}

/// Fills `len` bytes at `dst` with `pattern`.
///
/// # Safety
/// - `dst` is writable for `len` bytes and aligned to 8; `len` is a multiple of 8; no other thread
///   touches it meanwhile.
pub(crate) unsafe fn fill(dst: *mut u8, len: usize, pattern: u64) {
    debug_assert!((dst as usize).is_multiple_of(8) && len.is_multiple_of(8));
    // SAFETY: every word written lies within the `len` bytes that the caller vouches for.
    unsafe {
        if pattern == 0 {
            core::ptr::write_bytes(dst, 0, len);
            return;
        }
        let words = dst.cast::<u64>();
        for i in 0..len / 8 {
            words.add(i).write(pattern);
        }
    }
}

const _: () = assert!(WORDS.is_multiple_of(STRIDE));

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(page: &[u64; WORDS]) -> Option<u64> {
        // SAFETY: an array of WORDS words is a readable, aligned page.
        unsafe { pattern_of(page.as_ptr().cast()) }
    }

    #[test]
    fn every_word_counts() {
        for value in [0, 0x0123_4567_89ab_cdef] {
            let mut page = [value; WORDS];
            assert_eq!(pattern(&page), Some(value));
            for i in 0..WORDS {
                page[i] ^= 1 << (i % 64);
                assert_eq!(pattern(&page), None, "word {i}");
                page[i] = value;
            }
        }
    }

    #[test]
    fn fill_is_read_back_as_its_pattern() {
        let mut page = [7u64; WORDS];
        for value in [0, 1, u64::MAX] {
            // SAFETY: the array is a writable, aligned page.
            unsafe { fill(page.as_mut_ptr().cast(), PAGE_SIZE, value) };
            assert_eq!(pattern(&page), Some(value));
        }
    }
}
