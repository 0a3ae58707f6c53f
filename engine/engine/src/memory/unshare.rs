//! Folios that could not be moved out because a fork still shares their pages. A background thread
//! makes them private again (`reclaim/background.rs`).
use core::ops::Range;
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use memfold_os::thread::now_ns;
use memfold_os::units::PAGE_SIZE;

const NOTED: usize = 64;
/// A fork shares all memory. So an aligned range of this size around such a page is made private
/// with it.
const AROUND_BYTES: usize = 64 << 10;

/// Ranges of addresses to be made private.
pub struct ToUnshare {
    ranges: Mutex<([(usize, usize); NOTED], usize)>,
    /// Until then, a page that can't be moved is probably shared by a fork; `u64::MAX` for a time
    /// without end.
    until_ns: AtomicU64,
    met: AtomicU64,
    /// Whether shared pages stay ([`ToUnshare::stays`]).
    stays: AtomicBool,
    /// Whether copies of shared pages are charged before the kernel makes them.
    charges_copies: AtomicBool,
}

/// For this long after a fork, a page that can't be moved is probably shared by it, if nothing else
/// is known.
const SHARED_NS: u64 = 1_000_000_000;
/// For this long after the end of all sharing, a page that can't be moved was probably shared.
const PRIVATE_NS: u64 = 10_000_000_000;

impl ToUnshare {
    /// Makes an empty set.
    pub const fn new() -> ToUnshare {
        ToUnshare {
            ranges: Mutex::new(([(0, 0); NOTED], 0)),
            until_ns: AtomicU64::new(0),
            met: AtomicU64::new(0),
            stays: AtomicBool::new(false),
            charges_copies: AtomicBool::new(false),
        }
    }

    /// Records that the process has just forked. For owners that don't count the processes that share
    /// pages: they don't call [`ToUnshare::note_shared`].
    pub fn note_fork(&self) {
        self.until_ns.fetch_max(now_ns() + SHARED_NS, SeqCst);
    }

    /// Records that the process forks unseen from now on. So a page that can't be moved may be
    /// shared at any time.
    pub fn note_unseen_forks(&self) {
        self.until_ns.store(u64::MAX, SeqCst);
    }

    /// Records that the process shares memory by a fork until [`ToUnshare::note_private`], and
    /// whether the shared pages stay ([`ToUnshare::stays`]).
    pub fn note_shared(&self, stays: bool) {
        self.stays.store(stays, SeqCst);
        self.until_ns.store(u64::MAX, SeqCst);
    }

    /// Records that the process shares no memory any more. The kernel still moves none of the pages
    /// that were shared, until they are written to.
    pub fn note_private(&self) {
        self.stays.store(false, SeqCst);
        self.until_ns.store(now_ns() + PRIVATE_NS, SeqCst);
    }

    /// Records whether all shared pages are protected from writes, so that each copy is charged before
    /// the kernel makes it.
    pub fn set_charges_copies(&self, charges: bool) {
        self.charges_copies.store(charges, SeqCst);
    }

    /// Returns whether each copy of a shared page is charged before the kernel makes it.
    pub fn charges_copies(&self) -> bool {
        self.charges_copies.load(SeqCst)
    }

    /// Returns whether shared pages stay: it isn't known yet how many processes share them since a
    /// fork, or to make them private, and to fold them, would take more memory than it frees.
    pub fn stays(&self) -> bool {
        self.stays.load(SeqCst) && self.is_shared()
    }

    /// Returns whether a page that can't be moved is probably shared by a fork.
    pub fn is_shared(&self) -> bool {
        now_ns() < self.until_ns.load(SeqCst)
    }

    /// Returns the number of calls of [`ToUnshare::note`].
    pub fn met(&self) -> u64 {
        self.met.load(SeqCst)
    }

    /// Records a range of addresses of the area within `bounds`. It is dropped if there are too
    /// many ranges, because it will be met again.
    pub fn note(&self, range: Range<usize>, bounds: Range<usize>) {
        let start = (range.start & !(AROUND_BYTES - 1)).max(bounds.start);
        let len = range.end.next_multiple_of(AROUND_BYTES).min(bounds.end) - start;
        self.met.fetch_add(1, SeqCst);
        let mut ranges = self.ranges.lock();
        let (list, count) = &mut *ranges;
        if *count < NOTED && !list[..*count].contains(&(start, len)) {
            list[*count] = (start, len);
            *count += 1;
        }
    }

    /// Takes the pages (addresses) of the recorded ranges, which are not recorded any more.
    pub fn take(&self) -> impl Iterator<Item = usize> {
        let mut ranges = self.ranges.lock();
        let (list, count) = (ranges.0, core::mem::take(&mut ranges.1));
        let ranges = list.into_iter().take(count);
        ranges.flat_map(|(start, len)| (start..start + len).step_by(PAGE_SIZE))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn too_many_ranges_are_forgotten_not_lost_count_of() {
        let busy = ToUnshare::new();
        let bounds = 0..usize::MAX;
        (0..2 * NOTED).for_each(|n| busy.note(n << 12..(n + 1) << 12, bounds.clone()));
        assert_eq!(busy.ranges.lock().1, 2 * NOTED / 16, "64 KiB at a time");
        (0..NOTED + 10).for_each(|n| busy.note(n << 20..(n << 20) + 4096, bounds.clone()));
        assert_eq!(busy.ranges.lock().1, NOTED);
        let last = busy.ranges.lock().0[1];
        assert_eq!(last, (AROUND_BYTES, AROUND_BYTES));
    }
}
