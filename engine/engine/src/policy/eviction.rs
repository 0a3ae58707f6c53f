//! Eviction: which folio leaves next, how many leave together, and when dirty ones are compressed.
use crate::folio::index::FolioId;
pub use crate::folio::lru::{Lru, LruList};
use memfold_os::units::Order;

/// Most pages that are dropped together, unless one folio is larger. The fault that drops them
/// waits. With 16, 64 and 256 the 99th percentile of random reads is 45, 67 and 165 us. A walk
/// takes 2.24, 2.15 and 2.16 s of CPU time (two busy CPUs, blocks of 16 KiB).
const BATCH_PAGES: u64 = 64;
/// A batch is also at most one part in this many of the memory there is.
const BATCH_SHARE: u64 = 64;
/// Most folios that are moved out beside those that are dropped together.
const MOVES_MAX: usize = 16;
/// Dirty folios of at most a block may hold one part in this many of the target until they are
/// compressed. What they hold is taken from the mapped ones: with an eighth, a trace of node's heap
/// takes 1.6 times as long, with a 64th 1.06 times.
const DIRTY_SHARE: u64 = 128;
/// Larger ones may hold this part. Background threads compress them, and need work ahead: with a
/// 64th, memory is filled at 0.6 of the speed.
const LARGE_DIRTY_SHARE: u64 = 8;
/// Pages that were read ahead and not used yet may take one part in this many of the target: four
/// of the largest windows.
const AHEAD_SHARE: u64 = 8;

/// The next step of a reclaim.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum ReclaimStep {
    /// Saves the oldest folio of a swap-cache list. Without `compress`, a dirty one only goes to
    /// `Dirty`.
    Save {
        /// The list.
        list: LruList,
        /// Whether the caller may compress.
        compress: bool,
    },
    /// Evicts mapped folios.
    Evict,
}

/// Returns the next step of a reclaim towards `target` pages, with blocks of order `block`.
/// `urgent`: dirty folios can't wait any longer.
pub fn next_step(lists: &Lru, target: u64, block: Order, urgent: bool) -> ReclaimStep {
    // Pages that were read ahead are about to be used. They are evicted last, unless they are too
    // many.
    let ahead = lists.pages(LruList::Ahead);
    if ahead > target / AHEAD_SHARE || ahead > 0 && urgent {
        return ReclaimStep::Save { list: LruList::Ahead, compress: false };
    }
    let dirty = lists.pages(LruList::Dirty);
    let is_small = || lists.oldest_order(LruList::Dirty).is_some_and(|order| order <= block.get());
    let compress =
        urgent || dirty > target / LARGE_DIRTY_SHARE || dirty > target / DIRTY_SHARE && is_small();
    if lists.pages(LruList::Cooling) > 0 {
        ReclaimStep::Save { list: LruList::Cooling, compress }
    } else if dirty > 0 && compress {
        ReclaimStep::Save { list: LruList::Dirty, compress }
    } else {
        ReclaimStep::Evict
    }
}

/// Isolates the next folio to evict: the oldest of the mapped folios that were not refused.
pub fn next_victim(lists: &Lru) -> Option<(FolioId, u64)> {
    lists.rebalance();
    lists.isolate(LruList::Inactive).or_else(|| lists.isolate(LruList::Active))
}

/// Returns whether an eviction takes no more folios: `moved` were moved out, `dropped` are to be
/// dropped together, and `is_full` says whether these are enough.
pub fn is_enough(moved: usize, dropped: usize, is_full: bool) -> bool {
    moved > 0 && (dropped == 0 || moved == MOVES_MAX) || dropped > 0 && is_full
}

/// Returns how many pages are dropped together where `target` pages may be in memory.
pub fn batch_pages(target: u64) -> u64 {
    BATCH_PAGES.min(target / BATCH_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(lists: &Lru, target: u64, urgent: bool) -> ReclaimStep {
        next_step(lists, target, Order::new(2).unwrap(), urgent)
    }

    fn save(list: LruList, compress: bool) -> ReclaimStep {
        ReclaimStep::Save { list, compress }
    }

    #[test]
    fn cooling_folios_are_saved_before_others_are_evicted() {
        let lists = Lru::new().unwrap();
        assert_eq!(next(&lists, 1280, false), ReclaimStep::Evict);
        (1..=10).for_each(|id| lists.push(id, id as u64, 0, LruList::Dirty));
        assert_eq!(next(&lists, 1280, false), ReclaimStep::Evict, "they may wait");
        assert_eq!(next(&lists, 1280, true), save(LruList::Dirty, true));
        lists.push(11, 11, 0, LruList::Cooling);
        assert_eq!(next(&lists, 1280, false), save(LruList::Cooling, false));
        lists.push(12, 12, 0, LruList::Ahead);
        assert_eq!(next(&lists, 1280, false), save(LruList::Cooling, false));
        assert_eq!(next(&lists, 1280, true), save(LruList::Ahead, false));
    }

    #[test]
    fn dirty_folios_above_a_block_wait_longer() {
        for (order, share) in [(0, DIRTY_SHARE), (2, DIRTY_SHARE), (3, LARGE_DIRTY_SHARE)] {
            let (lists, target) = (Lru::new().unwrap(), share * (4 << order));
            (1..=4).for_each(|id| lists.push(id, (id as u64) << order, order, LruList::Dirty));
            assert_eq!(next(&lists, target, false), ReclaimStep::Evict, "order {order}");
            assert_eq!(
                next(&lists, target - 1, false),
                save(LruList::Dirty, true),
                "order {order}"
            );
        }
    }

    #[test]
    fn active_folios_are_evicted_last() {
        let lists = Lru::new().unwrap();
        (1..=2).for_each(|id| lists.push(id, id as u64, 0, LruList::Active));
        (3..=4).for_each(|id| lists.push(id, id as u64, 0, LruList::Inactive));
        let order: Vec<_> = core::iter::from_fn(|| next_victim(&lists)).map(|(id, _)| id).collect();
        assert_eq!(order, [3, 4, 1, 2]);
    }

    #[test]
    fn one_dirty_folio_ends_an_eviction_and_clean_ones_make_a_batch() {
        assert!(is_enough(1, 0, false));
        assert!(!is_enough(0, 5, false) && is_enough(0, 5, true));
        assert!(!is_enough(15, 5, false) && is_enough(16, 5, false));
        assert_eq!((batch_pages(1000), batch_pages(1 << 20)), (15, 64));
    }
}
