//! Counts the traps of each system call site, to find those that are worth a patch.
//!
//! Each site has a counter of its own. Sites once shared counters. Beside a site that can't be
//! patched and traps in turn with it, another one was never found, however often it trapped.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of traps after which a site is patched. By then they have cost more than the page
/// that is copied.
const HOT: u64 = 8;
const COUNTERS: usize = 1024;
/// A site's counter is one of so many, in a row. If all belong to others, it takes the first one.
const ROW: usize = 8;
/// The low bits of a counter are the number of traps, which stays at its largest value. The others
/// are the address after the site.
const COUNT_BITS: u32 = 16;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

pub struct TrapCounts([AtomicU64; COUNTERS]);

impl TrapCounts {
    pub const fn new() -> TrapCounts {
        TrapCounts([const { AtomicU64::new(0) }; COUNTERS])
    }

    /// Counts a trap of the site that ends at `after`. Returns whether the site is to be patched
    /// now. If that fails, this returns `true` again when the count has doubled.
    pub fn note(&self, after: usize) -> bool {
        let site = after as u64;
        if site >> (u64::BITS - COUNT_BITS) != 0 {
            // The kernel maps memory there only on request, and no code that is patched.
            return false;
        }
        let more = |word: u64| match word >> COUNT_BITS {
            0 => Some(site << COUNT_BITS | 1),
            counted if counted == site => {
                Some(if word & COUNT_MASK == COUNT_MASK { word } else { word + 1 })
            }
            _ => None,
        };
        let index = after ^ after >> 10;
        let mut row = (index..index + ROW).map(|at| &self.0[at % COUNTERS]);
        let Some(before) = row.find_map(|count| count.fetch_update(Relaxed, Relaxed, more).ok())
        else {
            self.0[index % COUNTERS].store(site << COUNT_BITS | 1, Relaxed);
            return false;
        };
        let count = (before & COUNT_MASK) + 1;
        count >= HOT && count.is_power_of_two() && count <= COUNT_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the counts of traps of `site` at which it is to be patched, while others trap too.
    fn patched_at(counts: &TrapCounts, site: usize, others: &[usize], rounds: u32) -> Vec<u32> {
        (1..=rounds)
            .filter(|_| {
                others.iter().for_each(|other| {
                    counts.note(*other);
                });
                counts.note(site)
            })
            .collect()
    }

    /// Five sites share a row, and four of them can't be patched.
    #[test]
    fn site_is_found_beside_others_that_trap_in_turn() {
        let site = 0x40_1000;
        // The bits from 20 on don't count for the place.
        let others: Vec<usize> = (1..5).map(|n| site + (n << 20)).collect();
        let counts = TrapCounts::new();
        assert_eq!(patched_at(&counts, site, &others, 40), [8, 16, 32]);
        // Each of the others is found as soon.
        let counts = TrapCounts::new();
        assert_eq!(patched_at(&counts, others[3], &[site], 40), [8, 16, 32]);
    }

    #[test]
    fn counts_end_without_a_last_patch() {
        let counts = TrapCounts::new();
        let site = patched_at(&counts, 77, &[], 200_000);
        assert_eq!((site.len(), site.last()), (13, Some(&(1 << 15))));
    }

    #[test]
    fn full_row_gives_a_new_site_its_first_counter() {
        let counts = TrapCounts::new();
        (1..=COUNTERS * 4).for_each(|site| {
            counts.note(site);
        });
        assert_eq!(patched_at(&counts, 1 << 30, &[], 9), [8]);
        assert!(!counts.note(usize::MAX), "an address of the kernel");
    }
}
