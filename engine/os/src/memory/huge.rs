//! Huge pages for memory that stays resident for long. Everything here is a request: if the kernel
//! refuses, pages stay as they are.
use crate::raw::system_call;
use crate::units::MAX_BYTES;
use core::ops::Range;

/// Allows huge pages in a mapping. Pass it whole, because a mapping with the mark on a part is
/// split.
pub fn allow(addrs: Range<usize>) {
    // SAFETY: the advice changes how pages are made, and no byte.
    unsafe { advise(addrs, libc::MADV_HUGEPAGE) };
}

/// Forbids large folios in the mappings of a range, so that a touch of one missing page maps one
/// page.
pub fn forbid(addrs: Range<usize>) {
    // SAFETY: the advice changes how pages are made, and no byte.
    unsafe { advise(addrs, libc::MADV_NOHUGEPAGE) };
}

/// Makes a huge page of each aligned 2 MiB inside a range whose pages are all present. Random
/// touches are up to twice as fast then. The kernel copies, and the calling thread waits for it.
/// Returns whether all of them are huge pages.
pub fn collapse(addrs: Range<usize>) -> bool {
    let (start, end) = (addrs.start.next_multiple_of(MAX_BYTES), addrs.end & !(MAX_BYTES - 1));
    let mut are_all = true;
    for at in (start..end.max(start)).step_by(MAX_BYTES) {
        // SAFETY: the bytes are unchanged, also for threads that read and write them meanwhile.
        are_all &= unsafe { advise(at..at + MAX_BYTES, libc::MADV_COLLAPSE) };
    }
    are_all
}

/// # Safety
/// - The advice changes no byte.
unsafe fn advise(addrs: Range<usize>, advice: i32) -> bool {
    let args = [addrs.start, addrs.end - addrs.start, advice as usize, 0, 0, 0];
    // SAFETY: the caller promises that no byte changes.
    unsafe { system_call(libc::SYS_madvise, args) }.is_ok()
}
