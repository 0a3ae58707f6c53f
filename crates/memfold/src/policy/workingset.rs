//! Shadows and refaults (C4): does a folio that comes back belong to the working set?
//!
//! The shadow is what `Folio::age` keeps while a folio is away: the eviction clock, in pages, when
//! it left the page table. When it comes back, the clock's advance since then is its **refault
//! distance**: how many other pages had to leave meanwhile, so how much more memory would have kept
//! it. If that is no more than what the lists of mapped folios hold, it would have been kept had it
//! competed with the active ones, so it comes back active. After Linux's `mm/workingset.c`.
use memfold_sys::units::Order;

/// Pages in a step of the shadow's clock.
const STEP_SHIFT: u32 = 2;

/// The shadow of a folio that leaves when the clock, in pages, is `clock`: the clock, and in bit 0
/// whether the folio was active.
pub fn shadow(clock: u64, active: bool) -> u32 {
    ((clock >> STEP_SHIFT) as u32) << 1 | active as u32
}

/// Whether the folio was active when it left.
pub fn was_active(shadow: u32) -> bool {
    shadow & 1 != 0
}

/// Pages that have left since a shadow was made. A clock that has gone round makes an old shadow
/// look young: after 2^33 pages, 32 TiB of evictions.
pub fn distance(clock: u64, shadow: u32) -> u64 {
    ((self::shadow(clock, false).wrapping_sub(shadow & !1) >> 1) as u64) << STEP_SHIFT
}

/// Whether a folio that refaults at this distance comes back active: it would have stayed if it
/// could have had the room of the `mapped` pages there are.
pub fn is_workingset(distance: u64, mapped: u64, order: Order) -> bool {
    distance <= mapped.max(order.pages() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_is_what_left_meanwhile_also_across_the_end_of_the_clock() {
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
