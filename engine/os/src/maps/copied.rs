//! Detects whether a fork has copied the memory of the process, also before the fork has returned.
//! A page that only this process had is then shared. The kernel doesn't report that for a page
//! while it copies.
use crate::maps::pagemap::Pagemap;
use crate::raw::system_call;
use crate::units::PAGE_SIZE;
use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The page; a static. It counts, so that no other page has its bytes. Otherwise the kernel could
/// merge it with one.
#[repr(align(4096))]
pub struct CopyMark {
    count: AtomicU64,
    _rest: [u8; PAGE_SIZE - 8],
}

impl CopyMark {
    /// Makes a mark that detects nothing yet.
    pub const fn new() -> CopyMark {
        CopyMark { count: AtomicU64::new(u64::MAX / 3), _rest: [1; PAGE_SIZE - 8] }
    }

    fn address(&self) -> usize {
        &raw const *self as usize
    }

    /// Locks it in memory: a swapped-out page would not show whether it is shared.
    pub fn lock(&self) {
        // SAFETY: mlock changes no byte.
        let _ = unsafe { system_call(libc::SYS_mlock, [self.address(), PAGE_SIZE, 0, 0, 0, 0]) };
    }

    /// Makes the page private to this process again, until the memory is copied.
    pub fn renew(&self) {
        self.count.fetch_add(1, SeqCst);
    }

    /// Returns whether the memory has been copied since the last [`CopyMark::renew`]. Without /proc
    /// it returns `false`.
    pub fn is_copied(&self, pagemap: &Pagemap) -> bool {
        pagemap.is_shared(self.address())
    }
}

impl Default for CopyMark {
    fn default() -> Self {
        CopyMark::new()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn copy_is_seen_until_the_mark_is_renewed() {
        static MARK: CopyMark = CopyMark::new();
        let _forks = crate::FORKS.lock();
        let pagemap = Pagemap::open().unwrap();
        for _ in 0..3 {
            MARK.renew();
            assert!(!MARK.is_copied(&pagemap));
            // SAFETY: the child makes only system calls.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: the child waits to be killed.
                unsafe { libc::pause() };
            }
            assert!(MARK.is_copied(&pagemap));
            // SAFETY: the process is a child of this test.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: the process is a child of this test, and no status is stored.
            unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
        }
    }
}
