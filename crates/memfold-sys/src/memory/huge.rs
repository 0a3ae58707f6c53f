//! Huge pages for memory that stays where it is for long. Everything here is a request: where the
//! kernel refuses, pages stay as they are.
use crate::raw::system_call;
use crate::units::MAX_BYTES;
use core::ops::Range;

/// Lets parts of a mapping be put into huge pages. It is given whole: a mapping that has the mark
/// in parts is cut in parts.
pub fn allow(addrs: Range<usize>) {
    let args = [addrs.start, addrs.end - addrs.start, libc::MADV_HUGEPAGE as usize, 0, 0, 0];
    // SAFETY: changes how pages are made, and no byte.
    let _ = unsafe { system_call(libc::SYS_madvise, args) };
}

/// Puts each aligned 2 MiB inside a range whose pages are all there into a huge page: touches at
/// random are up to twice as fast. It copies, for which the calling thread waits.
pub fn collapse(addrs: Range<usize>) {
    let (start, end) = (addrs.start.next_multiple_of(MAX_BYTES), addrs.end & !(MAX_BYTES - 1));
    for at in (start..end.max(start)).step_by(MAX_BYTES) {
        // SAFETY: the bytes stay what they are, whoever reads and writes them meanwhile.
        let _ = unsafe {
            system_call(libc::SYS_madvise, [at, MAX_BYTES, libc::MADV_COLLAPSE as usize, 0, 0, 0])
        };
    }
}
