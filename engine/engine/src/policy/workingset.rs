//! Shadows and refaults (C4): does a loaded folio belong to the working set?
//!
//! `Folio::age` keeps a shadow while a folio is folded: the eviction clock, in pages, at its
//! eviction. When the folio is loaded, the clock's advance since then is its **refault distance**:
//! the number of other pages that were evicted meanwhile. So much more memory would have kept it.
//! If that is at most the size of the lists of mapped folios, the folio would have been kept had it
//! competed with the active ones. So it becomes active. This follows Linux's `mm/workingset.c`.
//! While a folio is in memory, `age` is the clock at its load: which pages were loaded together?
use memfold_os::units::Order;

/// Pages in a step of the shadow's clock.
const STEP_SHIFT: u32 = 2;

/// Returns the shadow of a folio that is evicted when the clock, in pages, is `clock`. It has the
/// clock, and in bit 0 whether the folio was active.
pub fn shadow(clock: u64, active: bool) -> u32 {
    ((clock >> STEP_SHIFT) as u32) << 1 | active as u32
}

/// Returns whether the folio was active at its eviction.
pub fn was_active(shadow: u32) -> bool {
    shadow & 1 != 0
}

/// Returns the number of pages evicted since a shadow was made. The clock wraps after 2^33 pages,
/// 32 TiB of evictions. An old shadow then looks young.
pub fn distance(clock: u64, shadow: u32) -> u64 {
    ((self::shadow(clock, false).wrapping_sub(shadow & !1) >> 1) as u64) << STEP_SHIFT
}

/// Returns whether a folio that refaults at this distance becomes active: it would have stayed if
/// it could have had the room of the `mapped` pages.
pub fn is_workingset(distance: u64, mapped: u64, order: Order) -> bool {
    distance <= mapped.max(order.pages() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_counts_evictions_also_when_the_clock_wraps() {
        assert_eq!(distance(1000, shadow(200, true)), 800);
        let end = (1u64 << 33) - 40;
        assert_eq!(distance(end + 100, shadow(end, false)), 100);
        assert!(was_active(shadow(end, true)) && !was_active(shadow(end, false)));
    }

    #[test]
    fn near_refaults_are_active_and_far_ones_are_not() {
        assert!(is_workingset(100, 100, Order::PAGE));
        assert!(!is_workingset(101, 100, Order::PAGE));
        assert!(is_workingset(512, 0, Order::MAX), "its own pages are no distance");
    }
}
