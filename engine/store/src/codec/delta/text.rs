//! A sample that tells text, and other data without zero bytes, from objects and pointers.
use memfold_os::units::PAGE_SIZE;

/// Words of a page that are looked at.
const SAMPLE: usize = 32;
/// How many of them have no zero byte in a page that LZ4 most likely makes smaller. Of 40,000 pages of
/// ten programs, LZ4 was better by an eighth for 8 of 10 pages above and 1 of 40 below.
const DENSE_MIN: usize = 20;

/// Returns whether most words of a page have no zero byte: text, hashes, or random bytes. Pointers and
/// small numbers have some.
///
/// # Safety
/// - `page` is readable for a page, and no thread writes there meanwhile.
#[inline]
pub(super) unsafe fn has_dense_words(page: *const u8) -> bool {
    const STRETCH: usize = PAGE_SIZE / SAMPLE;
    let mut dense = 0;
    for nth in 0..SAMPLE {
        // The place in each stretch varies, so that a sample of records shows all their fields.
        let at = nth * STRETCH + nth * 5 * 8 % STRETCH;
        // SAFETY: the word lies in its stretch of the page.
        let word = unsafe { page.add(at).cast::<u64>().read_unaligned() };
        dense += !has_zero_byte(word) as usize;
    }
    dense >= DENSE_MIN
}

/// Returns whether a byte of the word is 0.
fn has_zero_byte(word: u64) -> bool {
    const ONES: u64 = 0x0101_0101_0101_0101;
    word.wrapping_sub(ONES) & !word & ONES << 7 != 0
}
