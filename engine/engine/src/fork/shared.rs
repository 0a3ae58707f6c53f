//! Writes to shared pages are charged from a moment on at which the process runs already.
use super::Fork;
use crate::known::TOP;
use core::iter::once;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::units::{PAGE_SHIFT, PAGE_SIZE};

/// So many pages are protected with the areas locked once. A run of them that a system call holds a
/// part of stays unprotected.
const PROTECTED_PAGES: u64 = 64;

impl Fork<'_> {
    /// Protects all managed pages from writes that a fork shares with another process. So each copy of
    /// one is charged from now on, before the kernel makes it (`fault/copies.rs`). Called by an engine
    /// thread, with no lock, while the program runs.
    ///
    /// The kernel can't write to a protected page, so pages that system calls hold are left out
    /// (`holds.rs`). A page that is written to meanwhile may be protected though it isn't shared any
    /// more. The next write to it is charged in vain, until the charge is settled.
    ///
    /// # Errors
    /// The errors of `UFFDIO_WRITEPROTECT`. ENOSYS: the space can't protect resident memory.
    pub fn charge_copies_from_now_on(&self) -> Result<(), Errno> {
        if !self.mapper.drops_clean() {
            return Err(Errno::NOSYS);
        }
        // Set first, because a fault of a protected page looks at this.
        self.to_unshare.set_charges_copies(true);
        let mut page = 0;
        while page < (TOP >> PAGE_SHIFT) as u64 {
            let areas = self.areas.read();
            let (is_managed, run_end) = areas.run_at(page);
            let end = if is_managed { run_end.min(page + PROTECTED_PAGES) } else { run_end };
            if is_managed {
                self.protect_shared((page as usize) << PAGE_SHIFT..(end as usize) << PAGE_SHIFT)?;
            }
            page = end;
        }
        Ok(())
    }

    /// Protects the shared pages of a range in an area, as far as no system call holds them. The range
    /// has at most [`PROTECTED_PAGES`].
    fn protect_shared(&self, range: Range<usize>) -> Result<(), Errno> {
        let space = self.mapper.space();
        let mut at = range.start;
        loop {
            at += space.unshared_bytes(at..range.end, false);
            if at == range.end {
                return Ok(());
            }
            // A page that was made private since is protected with the others.
            let end = at + space.shared_bytes(at..range.end).max(PAGE_SIZE);
            let leaving = self.holds.mark_leaving(once(at..end));
            if leaving.may_evict(at..end) {
                space.protect(at, end - at, true)?;
            }
            at = end;
        }
    }
}
