//! Drops many scattered pages by one system call: `process_madvise` of this process itself.
//!
//! Each `madvise` that drops a page interrupts all other CPUs that the program runs on, to flush
//! their TLBs. One `process_madvise` of many ranges does so once, since Linux 6.16. Kernels before
//! 6.13 refuse it (MADV_DONTNEED was not supported). The process is named by `PIDFD_SELF`, which is
//! newer than that. So there is no descriptor that a program could close or a child of fork
//! inherit.
use crate::Errno;
use crate::memory::zone::Zone;
use crate::raw::system_call;
use crate::uffd::Partial;
use crate::units::PAGE_SIZE;
use core::ops::Range;

/// Most ranges that one call drops.
pub const SPANS_MAX: usize = 64;

/// `PIDFD_SELF_THREAD_GROUP`.
const SELF: isize = -10001;

/// A range of addresses, as the kernel's `iovec`. Whole pages.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Default)]
#[repr(C)]
pub struct AddressSpan {
    /// First address.
    pub start: usize,
    /// Bytes.
    pub len: usize,
}

impl From<&Range<usize>> for AddressSpan {
    fn from(range: &Range<usize>) -> AddressSpan {
        AddressSpan { start: range.start, len: range.len() }
    }
}

/// Returns whether this kernel supports it.
pub fn is_offered() -> bool {
    let Ok(zone) = Zone::reserve(PAGE_SIZE, PAGE_SIZE) else { return false };
    let page = zone.as_ptr();
    // SAFETY: the page is in the zone, which only this function uses.
    unsafe {
        page.write_volatile(1);
        drop_spans(&[AddressSpan { start: page as usize, len: PAGE_SIZE }]).is_ok()
            && page.read_volatile() == 0
    }
}

/// Drops the pages of at most [`SPANS_MAX`] ranges.
///
/// # Errors
/// `done` bytes are gone: whole ranges, counted from the first on. Pages of the next range may be
/// gone too if it lies in several of the kernel's areas. EINVAL (pages are locked), ENOMEM (nothing
/// is mapped there, or no memory for the call itself), EAGAIN, EINTR, ENOSYS, EBADF.
///
/// # Safety
/// - The bytes there are not needed any more.
pub unsafe fn drop_spans(spans: &[AddressSpan]) -> Result<(), Partial> {
    debug_assert!(spans.len() <= SPANS_MAX);
    let len: usize = spans.iter().map(|span| span.len).sum();
    let advice = libc::MADV_DONTNEED as usize;
    let args = [SELF as usize, spans.as_ptr() as usize, spans.len(), advice, 0, 0];
    // SAFETY: an `AddressSpan` is laid out as an `iovec`, and `spans` has so many; the caller gives
    // up the bytes.
    match unsafe { system_call(libc::SYS_process_madvise, args) } {
        Ok(done) if done as usize == len => Ok(()),
        // A call for the rest returns why it stopped.
        Ok(done) => Err(Partial { done: done as usize, errno: Errno::AGAIN }),
        Err(errno) => Err(Partial { done: 0, errno }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_meets_a_locked_page_says_how_far_it_came() {
        if !is_offered() {
            return;
        }
        let zone = Zone::reserve(16 * PAGE_SIZE, PAGE_SIZE).unwrap();
        let at = |page: usize| zone.start() + page * PAGE_SIZE;
        let spans = [0, 2, 4, 6].map(|page| AddressSpan { start: at(page), len: PAGE_SIZE });
        let first = |page: usize| {
            // SAFETY: the page is inside the zone.
            unsafe { (at(page) as *const u8).read_volatile() }
        };
        // SAFETY: the pages are inside the zone, which only this test uses.
        unsafe {
            zone.as_ptr().write_bytes(7, zone.len());
            let lock_args = [at(4), PAGE_SIZE, 0, 0, 0, 0];
            system_call(libc::SYS_mlock, lock_args).expect("a page may be locked");
            let partial = drop_spans(&spans).unwrap_err();
            assert_eq!(partial, Partial { done: 2 * PAGE_SIZE, errno: Errno::AGAIN });
            let reason = drop_spans(&spans[2..]).unwrap_err();
            assert_eq!(reason, Partial { done: 0, errno: Errno::INVAL });
            assert_eq!([0, 1, 2, 3, 4, 6].map(first), [0, 7, 0, 7, 7, 7]);
            drop_spans(&spans[3..]).unwrap();
            assert_eq!((first(5), first(6)), (7, 0));
        }
    }
}
