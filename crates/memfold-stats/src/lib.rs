//! Counters: one table, from which help, reports and metrics are made.
//!
//! The struct is plain atomics with a fixed layout, so it can live in memory that another process
//! reads (`memfold run` keeps it in a memfd). A counter that counts successes is raised only after
//! the fact (Z5).
#![cfg_attr(not(test), no_std)]

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_sys::units::MAX_ORDER;

/// Orders counted one by one: 0..=9.
pub const ORDERS: usize = MAX_ORDER as usize + 1;

/// Whether a figure only grows or goes up and down.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// Only grows.
    Counter,
    /// The present value.
    Gauge,
}

/// One figure as reports show it.
pub struct Figure {
    /// Name.
    pub name: &'static str,
    /// Counter or gauge.
    pub kind: FigureKind,
    /// One line of help; states the unit.
    pub help: &'static str,
}

macro_rules! stats {
    ($($kind:ident $name:ident: $help:literal,)*  ; per order: $($oname:ident: $ohelp:literal,)*) => {
        /// All figures of one engine.
        #[repr(C)]
        pub struct Stats {
            $(#[doc = $help] pub $name: AtomicU64,)*
            $(#[doc = $ohelp] pub $oname: [AtomicU64; ORDERS],)*
        }

        /// Every plain figure, in the order of the struct.
        pub const FIGURES: &[Figure] = &[$(Figure { name: stringify!($name), kind: FigureKind::$kind, help: $help },)*];
        /// Every figure that is counted per order; reports append the folio size, as in
        /// `zswpout_64K`.
        pub const ORDER_FIGURES: &[Figure] = &[$(Figure { name: stringify!($oname), kind: FigureKind::Counter, help: $ohelp },)*];

        impl Stats {
            /// All zero.
            pub const fn new() -> Stats {
                Stats {
                    $($name: AtomicU64::new(0),)*
                    $($oname: [const { AtomicU64::new(0) }; ORDERS],)*
                }
            }

            /// The present values of [`FIGURES`], in its order.
            pub fn values(&self) -> [u64; FIGURES.len()] {
                [$(self.$name.load(Relaxed),)*]
            }

            /// The present values of a program that begins are zero; counters and peaks go on.
            pub fn clear_gauges(&self) {
                for (figure, value) in FIGURES.iter().zip([$(&self.$name,)*]) {
                    if figure.kind == FigureKind::Gauge && !figure.name.starts_with("peak_") {
                        value.store(0, Relaxed);
                    }
                }
            }

            /// The present values of [`ORDER_FIGURES`], in its order.
            pub fn order_values(&self) -> [[u64; ORDERS]; ORDER_FIGURES.len()] {
                [$(core::array::from_fn(|o| self.$oname[o].load(Relaxed)),)*]
            }
        }
    };
}

stats! {
    Counter faults: "faults served",
    Counter pgmajfault: "faults that needed a load from the store",
    Counter faults_zero: "faults that were first touches, filled with zeros",
    Counter faults_stale: "faults that somebody else had served meanwhile",
    Counter faults_waited: "faults that waited for another thread's load or save of the same folio",
    Counter faults_write: "first writes to what had been loaded for a read",
    Counter rescues: "folios taken back from the swap cache by a touch before they were saved",
    Counter zswpout: "pages saved to the compressed store",
    Counter zswpin: "pages loaded from the compressed store",
    Counter zswpwb: "pages written back from the compressed store to a device",
    Counter pswpout: "pages written to a device",
    Counter pswpin: "pages read from a device",
    Counter swap_write_failed: "writes to a device that failed; the data stayed in memory",
    Counter remote_out: "pages moved from the swap file to the remote store",
    Counter remote_in: "pages read from the remote store",
    Counter remote_failed: "requests to the remote store that failed; what was to be moved stayed local",
    Counter swap_ra: "pages read from a device ahead of their use",
    Counter swap_ra_hit: "pages read from a device ahead that were then used",
    Counter workingset_refault: "pages that came back to memory after an eviction",
    Counter workingset_activate: "pages that came back active: they had left not long before",
    Counter workingset_restore: "pages that came back active and had been active when they left",
    Counter clean_evictions: "folios evicted without compression, their stored copy still true",
    Counter drops: "calls that dropped folios whose stored copy was true, many at once",
    Counter blocks_clean: "blocks not compressed at eviction, their stored copy still true",
    Counter blocks_saved: "blocks compressed and stored",
    Counter saved_bytes: "data of these blocks before compression, bytes",
    Counter payload_bytes: "what it was compressed to, a same-filled page counted as 8 bytes, bytes",
    Counter blocks_loaded: "blocks decompressed",
    Counter partial_loads: "single pages read out of a stored block, for who touches one while a fork has the engine at rest",
    Counter recent_hits: "of those, pages of a block that had been decompressed just before",
    Counter partial_writes: "stored blocks that a discard cut, whose other pages were stored again one by one",
    Counter blocks_cut: "blocks cut into pages, as they were asked for by themselves",
    Counter blocks_joined: "cut blocks joined again, as a stream had asked for all their pages",
    Counter blocks_recompressed: "cold blocks that a stronger codec made smaller",
    Counter recompress_gained_bytes: "compressed bytes that this saved",
    Counter compacted_bytes: "pool memory emptied by packing sparse parts, bytes",
    Counter clean_dropped: "stored copies dropped to keep the budget of clean copies",
    Counter save_refused: "saves that the store refused (pool full, verify mismatch); the folio stayed",
    Counter verify_mismatch: "blocks whose verification failed; the folio stayed",
    Counter load_fallback: "loads that took the small-page path",
    Counter part_loads: "loads of some pages of a stored block, the others being there already or not asked for",
    Counter frame_alloc: "large frames asked for",
    Counter frame_alloc_failed: "large frames that could not be had at the size asked for",
    Counter readahead_windows: "windows loaded ahead of a stream",
    Counter readahead_hits: "windows loaded ahead that were then used",
    Counter direct_reclaims: "times a faulting thread had to reclaim for itself",
    Counter move_again: "UFFDIO_MOVE said EAGAIN",
    Counter move_busy: "UFFDIO_MOVE said EBUSY (shared or pinned page)",
    Counter move_exists: "UFFDIO_MOVE or COPY said EEXIST",
    Counter move_holes: "UFFDIO_MOVE met a missing page",
    Counter move_partial: "UFFDIO_MOVE or COPY did part of a range",
    Counter move_uncounted: "UFFDIO_MOVE moved a page more than it said",
    Counter copies: "installs by UFFDIO_COPY",
    Counter splits: "folios split",
    Counter merges: "folios merged while loading a stream",
    Counter discarded_pages: "pages dropped by discard, unmap or madvise",
    Counter over_limit: "times the limit could not be kept",
    Counter fault_ns: "CPU time that threads have spent in faults, by one fault in 16, nanoseconds",
    Counter background_ns: "CPU time of background threads that reclaim and read ahead, nanoseconds",
    Counter calls_refused: "run: calls that failed as they met folded memory, which is a bug",
    Counter adopted_bytes: "run: bytes of address space taken under management",
    Gauge resident_bytes: "mapped pages under management, bytes",
    Gauge frame_bytes: "frames that hold memory, used or free, bytes",
    Gauge pool_bytes: "memory held by the compressed pool, bytes",
    Gauge index_bytes: "memory held by index and metadata, bytes",
    Gauge folded_bytes: "data that is only in the store, before compression, bytes",
    Gauge stored_bytes: "data that has a copy in the store, before compression, bytes",
    Gauge swap_bytes: "space in use in the swap file, bytes",
    Gauge remote_bytes: "data in the remote store, bytes",
    Gauge refused_bytes: "mapped data that nothing took when it was last to leave memory, bytes",
    Gauge refused_dense_bytes: "of it, what doesn't shrink, bytes",
    Gauge refused_full_bytes: "of it, what found no room in the pool, bytes",
    Gauge refused_pinned_bytes: "of it, what a device has pinned, bytes",
    Gauge refused_shared_bytes: "of it, what a fork shares with so many that to fold it would save nothing, bytes",
    Gauge kept_bytes: "uncompressed memory that stays although the limit can't be kept, as to fold it would cost far more time than it saves memory, bytes; 0 where the limit alone decides",
    Gauge unmanaged_bytes: "run: resident memory of the program that is not under management, bytes",
    Gauge shared_bytes: "run: resident memory that counts in the processes that a fork shares it with, bytes",
    Gauge need_bytes: "run: data that counts for the process's share of the limit, uncompressed, bytes",
    Gauge peak_bytes: "the most that resident, frames, pool and index came to, bytes",
    Gauge peak_resident_bytes: "the most that mapped pages, frames and unmanaged memory came to, bytes",
    Gauge peak_held_bytes: "run: the most that calls held at once of large buffers, bytes",
    Gauge peak_pool_bytes: "the most that the compressed pool held, bytes",
    Gauge peak_index_bytes: "the most that index and metadata took, bytes",
    Gauge peak_folded_bytes: "the most that was folded at once, bytes",
    Gauge folios: "folios in the index",
    ; per order:
    zswpout_folio: "folios saved to the compressed store",
    zswpin_folio: "folios loaded from the compressed store",
    swpout_folio: "folios written to a device",
    swpin_folio: "folios read from a device",
    swpout_fallback: "folios split because no frame or slot of their order was left",
}

impl Default for Stats {
    fn default() -> Self {
        Stats::new()
    }
}

/// Adds `n` to a counter.
pub fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Relaxed);
}

/// Raises a gauge to at least `n`.
pub fn raise(gauge: &AtomicU64, n: u64) {
    if gauge.load(Relaxed) < n {
        gauge.fetch_max(n, Relaxed);
    }
}

/// The suffix of a per-order figure: `4K`, `8K`, ... `2M`.
pub fn size_suffix(order: usize) -> &'static str {
    ["4K", "8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M", "2M"][order]
}

impl Stats {
    /// Every plain figure by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        FIGURES.iter().map(|f| f.name).zip(self.values())
    }

    /// Checks the sums of Z5: the page totals equal the folio counts times their pages.
    ///
    /// # Errors
    /// Names the total that is off. Exact only while no thread is counting.
    pub fn check_sums(&self) -> Result<(), &'static str> {
        let sum = |orders: &[AtomicU64; ORDERS]| {
            (0..ORDERS).map(|o| orders[o].load(Relaxed) << o).sum::<u64>()
        };
        let pairs = [
            ("zswpout", &self.zswpout, &self.zswpout_folio),
            ("zswpin", &self.zswpin, &self.zswpin_folio),
            ("pswpout", &self.pswpout, &self.swpout_folio),
            ("pswpin", &self.pswpin, &self.swpin_folio),
        ];
        match pairs.iter().find(|(_, total, orders)| total.load(Relaxed) != sum(orders)) {
            Some((name, ..)) => Err(name),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_checked_against_orders() {
        let stats = Stats::new();
        add(&stats.zswpout_folio[4], 3);
        assert_eq!(stats.check_sums(), Err("zswpout"));
        add(&stats.zswpout, 48);
        assert_eq!(stats.check_sums(), Ok(()));
    }

    #[test]
    fn names_are_unique_and_helped() {
        let mut names: std::vec::Vec<_> =
            FIGURES.iter().chain(ORDER_FIGURES).map(|f| f.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FIGURES.len() + ORDER_FIGURES.len());
        assert!(FIGURES.iter().all(|f| !f.help.is_empty()));
    }
}
