//! Folios that could not be moved out because a fork still shares their pages: a background thread
//! makes them private again (`reclaim/background.rs`).
use core::ops::Range;
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use memfold_sys::thread::now_ns;
use memfold_sys::units::PAGE_SIZE;

const NOTED: usize = 64;
/// A fork shares all that is in memory, so what is around such a page is made private with it: an
/// aligned range of this size.
const AROUND_BYTES: usize = 64 << 10;

/// Ranges of addresses to be made private.
pub struct ToUnshare {
    ranges: Mutex<([(usize, usize); NOTED], usize)>,
    forked_ns: AtomicU64,
    met: AtomicU64,
    /// Making such pages private, to fold them, would take more memory than it brings.
    shared_by_many: AtomicBool,
}

/// For this long after a fork it is likely that a page which can't be moved is shared by it.
const SHARED_NS: u64 = 1_000_000_000;

impl ToUnshare {
    /// None.
    pub const fn new() -> ToUnshare {
        ToUnshare {
            ranges: Mutex::new(([(0, 0); NOTED], 0)),
            forked_ns: AtomicU64::new(0),
            met: AtomicU64::new(0),
            shared_by_many: AtomicBool::new(false),
        }
    }

    /// The process has just forked, or been made by a fork. What was shared by many still is.
    pub fn note_fork(&self) {
        self.forked_ns.store(now_ns(), SeqCst);
    }

    /// The process forks now and then from now on, unseen: a page that can't be moved is likely to
    /// be shared at any time.
    pub fn note_unseen_forks(&self) {
        self.forked_ns.store(u64::MAX, SeqCst);
    }

    /// It still shares memory by a fork, `by_many` or not.
    pub fn note_shared(&self, by_many: bool) {
        self.shared_by_many.store(by_many, SeqCst);
        self.forked_ns.store(now_ns(), SeqCst);
    }

    /// Whether what can't be moved is most likely shared by so many that it is best left where it
    /// is.
    pub fn is_shared_by_many(&self) -> bool {
        self.has_forked_lately() && self.shared_by_many.load(SeqCst)
    }

    /// Whether there was a fork not long ago.
    pub fn has_forked_lately(&self) -> bool {
        let forked = self.forked_ns.load(SeqCst);
        forked != 0 && now_ns().saturating_sub(forked) < SHARED_NS
    }

    /// Counts the calls of [`ToUnshare::note`].
    pub fn met(&self) -> u64 {
        self.met.load(SeqCst)
    }

    /// Notes a range of addresses of the area within `bounds`. Forgotten if too many are: it will
    /// be met again.
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

    /// The pages (addresses) of the noted ranges, which are noted no more.
    pub fn take(&self) -> impl Iterator<Item = usize> {
        let mut ranges = self.ranges.lock();
        let (list, count) = (ranges.0, core::mem::take(&mut ranges.1));
        let noted = list.into_iter().take(count);
        noted.flat_map(|(start, len)| (start..start + len).step_by(PAGE_SIZE))
    }
}

#[cfg(all(test, not(shuttle)))]
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
