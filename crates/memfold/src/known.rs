//! Where memory may be that is folded, now or later: a byte for each 2 MiB of the address space. Under
//! `memfold run` it is set when something private without a file is mapped there, and never taken
//! back; for regions of the library while there is one.
use core::ops::Range;
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};
use memfold_sys::Errno;
use memfold_sys::memory::zone::Zone;
use memfold_sys::units::PAGE_SIZE;

const CHUNK_SHIFT: u32 = 21;
/// Nothing above is ever managed.
pub const TOP: usize = 1 << 47;
/// Of a larger range nobody asks for each chunk.
const CHUNKS_MAX: usize = 4096;

/// See the module.
pub struct Known(Zone);

impl Known {
    /// Nothing is known.
    ///
    /// # Errors
    /// What reserving a zone says.
    pub fn new() -> Result<Known, Errno> {
        Zone::reserve(TOP >> CHUNK_SHIFT, PAGE_SIZE).map(Known)
    }

    fn chunk(&self, chunk: usize) -> &AtomicU8 {
        debug_assert!(chunk < TOP >> CHUNK_SHIFT);
        // SAFETY: the zone has a byte for each chunk below the top, all zeros at first, and nobody
        // uses them in another way.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(chunk)) }
    }

    fn chunks(range: &Range<usize>) -> Range<usize> {
        let end = range.end.min(TOP);
        (range.start >> CHUNK_SHIFT)..end.div_ceil(1 << CHUNK_SHIFT)
    }

    /// Children of fork know nothing.
    ///
    /// # Errors
    /// What madvise says.
    pub fn forget_in_children(&self) -> Result<(), Errno> {
        self.0.wipe_in_children()
    }

    /// Something is there.
    pub fn set(&self, range: &Range<usize>) {
        for chunk in Known::chunks(range) {
            if self.chunk(chunk).load(Relaxed) == 0 {
                self.chunk(chunk).store(1, Relaxed);
            }
        }
    }

    /// Nothing is there any more.
    pub fn unset(&self, range: &Range<usize>) {
        Known::chunks(range).for_each(|chunk| self.chunk(chunk).store(0, Relaxed));
    }

    /// Whether something may be there.
    pub fn is_set(&self, range: &Range<usize>) -> bool {
        let chunks = Known::chunks(range);
        chunks.len() > CHUNKS_MAX
            || chunks.into_iter().any(|chunk| self.chunk(chunk).load(Relaxed) != 0)
    }
}
