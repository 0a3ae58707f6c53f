//! Gives pages of the engine's own back to the kernel without a report.
//!
//! Where discards are reported as events, `madvise` sleeps until a handler has read the report; a
//! handler that shares its CPU with the program may need a timer tick to get there (4 ms measured),
//! and meanwhile the kernel refuses every move. So the pages are moved to a range of another
//! userfaultfd, without events, and discarded there.
use crate::Errno;
use crate::maps::pagemap::Pagemap;
use crate::memory::zone::Zone;
use crate::sync::Mutex;
use crate::uffd::{OpenError, Uffd, feature};
use crate::units::{MAX_BYTES, PAGE_SIZE};
use alloc::sync::Arc;
use core::ops::Range;
use rustix::mm::{Advice, madvise};

/// See the module.
pub struct Bin {
    uffd: Uffd,
    pagemap: Arc<Pagemap>,
    /// Empty whenever nobody holds `used`.
    zone: Zone,
    used: Mutex<()>,
}

impl Bin {
    /// An empty one. `pagemap` is that of this process, also in a child of fork.
    ///
    /// # Errors
    /// See [`OpenError`]; `Other` if there is no address space.
    pub fn new(pagemap: Arc<Pagemap>) -> Result<Bin, OpenError> {
        let bin = Bin {
            uffd: Uffd::open(feature::MOVE, true)?,
            pagemap,
            zone: Zone::reserve(MAX_BYTES, MAX_BYTES).map_err(OpenError::Other)?,
            used: Mutex::new(()),
        };
        bin.register().map_err(OpenError::Other)?;
        Ok(bin)
    }

    /// In a child of fork, whose parent's descriptor changes the parent: opens one of its own.
    ///
    /// # Errors
    /// As [`Bin::new`].
    pub fn reopen(&self) -> Result<(), OpenError> {
        self.uffd.reopen()?;
        self.register().map_err(OpenError::Other)
    }

    fn register(&self) -> Result<(), Errno> {
        // SAFETY: nobody touches the zone.
        unsafe { self.uffd.register(self.zone.start(), self.zone.len(), false) }
    }

    /// Discards ranges. Returns how many bytes are gone, counted from the first on: fewer than all
    /// where the kernel doesn't move a page, as one that a fork shares.
    ///
    /// # Safety
    /// - The ranges are private anonymous memory of the engine's own, and their bytes are needed no
    ///   longer.
    pub unsafe fn discard(&self, ranges: &[Range<usize>]) -> usize {
        let _used = self.used.lock();
        let (mut gone, mut filled) = (0, 0);
        'ranges: for range in ranges {
            let mut at = range.start;
            while at < range.end {
                if filled == self.zone.len() {
                    self.empty(filled);
                    filled = 0;
                }
                let part = (range.end - at).min(self.zone.len() - filled);
                // SAFETY: the zone is empty from `filled` on; the caller gives up what is at the
                // source.
                let (moved, stays) = match unsafe {
                    self.uffd.move_pages(self.zone.start() + filled, at, part, false)
                } {
                    Ok(()) => (part, false),
                    Err(partial) if self.pagemap.is_populated(at + partial.done) => {
                        (partial.done, true)
                    }
                    // A move that fails may have moved a page more than it says.
                    Err(partial) => (partial.done + PAGE_SIZE, false),
                };
                (gone, filled, at) = (gone + moved, filled + moved, at + moved);
                if stays {
                    break 'ranges;
                }
            }
        }
        self.empty(filled);
        gone
    }

    /// Discards the first bytes of the zone: not all of it, or the kernel would free its page table
    /// too, which the next move needs.
    fn empty(&self, filled: usize) {
        // Also while an mlockall of the program's has it locked, which is for a moment (Linux
        // 5.18). SAFETY: the zone is this bin's own.
        let emptied =
            unsafe { madvise(self.zone.as_ptr().cast(), filled, Advice::LinuxDontneedLocked) };
        assert!(emptied.is_ok(), "madvise refuses the engine's own memory: {emptied:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::space::{Space, UffdSpace};
    use core::slice::from_ref;

    fn new_bin() -> Bin {
        Bin::new(Arc::new(Pagemap::open().unwrap())).expect("userfaultfd with MOVE")
    }

    #[test]
    fn what_is_locked_for_a_moment_is_discarded_all_the_same() {
        let _alone = crate::FORKS.lock();
        let bin = new_bin();
        let zone = Zone::reserve(8 * PAGE_SIZE, PAGE_SIZE).unwrap();
        // Both, as by mlockall: the kernel moves nothing between what is locked and what isn't.
        for zone in [&zone, &bin.zone] {
            // SAFETY: changes no byte.
            unsafe {
                rustix::mm::mlock_with(
                    zone.as_ptr().cast(),
                    zone.len(),
                    rustix::mm::MlockFlags::ONFAULT,
                )
                .unwrap()
            };
        }
        for _ in 0..2 {
            filled(&zone, zone.len());
            // SAFETY: the test's own memory.
            let discarded =
                unsafe { bin.discard(from_ref(&(zone.start()..zone.start() + zone.len()))) };
            assert_eq!(discarded, zone.len());
            assert_eq!(first_filled(&zone, zone.len()), None);
        }
    }

    fn filled(zone: &Zone, len: usize) {
        // SAFETY: inside the test's zone.
        unsafe { zone.as_ptr().write_bytes(7, len) };
    }

    fn first_filled(zone: &Zone, len: usize) -> Option<usize> {
        // SAFETY: inside the test's zone.
        (0..len).step_by(PAGE_SIZE).find(|at| unsafe { zone.as_ptr().add(*at).read() } != 0)
    }

    #[test]
    fn what_is_thrown_away_is_gone() {
        let _alone = crate::FORKS.lock();
        let bin = new_bin();
        let zone = Zone::reserve(2 * MAX_BYTES, MAX_BYTES).unwrap();
        for len in [PAGE_SIZE, MAX_BYTES, MAX_BYTES + 3 * PAGE_SIZE] {
            filled(&zone, len);
            // SAFETY: the test's own memory.
            assert_eq!(unsafe { bin.discard(from_ref(&(zone.start()..zone.start() + len))) }, len);
            assert_eq!(first_filled(&zone, len), None);
        }
    }

    #[test]
    fn a_hole_is_passed_over() {
        let _alone = crate::FORKS.lock();
        let bin = new_bin();
        let zone = Zone::reserve(8 * PAGE_SIZE, PAGE_SIZE).unwrap();
        filled(&zone, 8 * PAGE_SIZE);
        // SAFETY: the test's own memory.
        unsafe {
            madvise(zone.as_ptr().add(3 * PAGE_SIZE).cast(), 2 * PAGE_SIZE, Advice::LinuxDontNeed)
                .unwrap()
        };
        // SAFETY: as above.
        let discarded =
            unsafe { bin.discard(from_ref(&(zone.start()..zone.start() + zone.len()))) };
        assert_eq!(discarded, 8 * PAGE_SIZE);
        assert_eq!(first_filled(&zone, 8 * PAGE_SIZE), None);
    }

    #[test]
    fn what_a_fork_shares_is_discarded_now_all_the_same() {
        let _alone = crate::FORKS.lock();
        let uffd = Arc::new(Uffd::open(feature::MOVE, true).expect("userfaultfd"));
        let space =
            UffdSpace::with_bin(uffd, Arc::new(Pagemap::open().unwrap()), Arc::new(new_bin()));
        let zone = Zone::reserve(8 * PAGE_SIZE, PAGE_SIZE).unwrap();
        filled(&zone, 8 * PAGE_SIZE);
        // SAFETY: the child makes system calls only.
        let child = match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: waits for the signal that ends it.
                unsafe { libc::pause() };
            },
            child => child,
        };
        // SAFETY: the test's own memory.
        let shared =
            unsafe { new_bin().discard(from_ref(&(zone.start()..zone.start() + zone.len()))) };
        // SAFETY: as above.
        let gone =
            unsafe { space.discard_now(from_ref(&(zone.start()..zone.start() + zone.len()))) };
        // SAFETY: the child of above, which nobody else waits for.
        unsafe {
            (libc::kill(child, libc::SIGKILL), libc::waitpid(child, core::ptr::null_mut(), 0))
        };
        assert_eq!((shared, gone), (0, 8 * PAGE_SIZE));
        assert_eq!(first_filled(&zone, 8 * PAGE_SIZE), None);
    }
}
