//! Counters: one table, from which help, reports and metrics are made.
//!
//! The struct is plain atomics with a fixed layout, so it can live in memory that another process
//! reads (`memfold run` keeps it in a memfd). A counter that counts successes is raised only after
//! the fact (Z5).
#![cfg_attr(not(test), no_std)]

mod times;

pub use times::{TIME_BUCKETS, TimeBucket, TimeCounts, TimeHistogram};

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::units::MAX_ORDER;

/// Orders counted one by one: 0..=9.
pub const ORDERS: usize = MAX_ORDER as usize + 1;

/// Number of buckets in [`Stats::refaults_by_limit`].
pub const LIMIT_BUCKETS: usize = 128;

/// An index of [`Stats::refaults_by_limit`]. There are eight buckets for each doubling, from 1 MiB
/// to 64 GiB. The first and the last have all that is beyond.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LimitBucket(pub usize);

impl LimitBucket {
    const LEAST_SHIFT: u32 = 20;
    /// A doubling has two to the power of this many buckets.
    const PARTS_SHIFT: u32 = 3;

    /// Returns the bucket of a limit in bytes.
    pub fn of(bytes: u64) -> LimitBucket {
        let shift = (bytes | 1).ilog2();
        if shift < Self::LEAST_SHIFT {
            return LimitBucket(0);
        }
        let part = (bytes >> (shift - Self::PARTS_SHIFT)) as usize & ((1 << Self::PARTS_SHIFT) - 1);
        let at = ((shift - Self::LEAST_SHIFT) << Self::PARTS_SHIFT) as usize + part;
        LimitBucket(at.min(LIMIT_BUCKETS - 1))
    }

    /// Returns the least limit in bytes that is above all limits of the bucket.
    pub fn end(self) -> u64 {
        let (octave, part) =
            (self.0 >> Self::PARTS_SHIFT, self.0 as u64 & ((1 << Self::PARTS_SHIFT) - 1));
        ((1 << Self::PARTS_SHIFT) + part + 1)
            << (octave as u32 + Self::LEAST_SHIFT - Self::PARTS_SHIFT)
    }
}

/// Whether a figure only grows or goes up and down.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FigureKind {
    /// Only grows.
    Counter,
    /// The present value.
    Gauge,
    /// A histogram of times.
    Times,
}

/// The unit of a figure.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum FigureUnit {
    /// How often something happened.
    Events,
    /// System calls.
    Calls,
    /// Page faults.
    Faults,
    /// Pages of 4 KiB.
    Pages,
    /// Folios of any order.
    Folios,
    /// Blocks that are compressed as one.
    Blocks,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
    /// Bytes times seconds.
    ByteSeconds,
}

impl FigureUnit {
    /// Returns its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            FigureUnit::Events => "times",
            FigureUnit::Calls => "calls",
            FigureUnit::Faults => "faults",
            FigureUnit::Pages => "pages",
            FigureUnit::Folios => "folios",
            FigureUnit::Blocks => "blocks",
            FigureUnit::Bytes => "bytes",
            FigureUnit::Nanoseconds => "ns",
            FigureUnit::ByteSeconds => "byte seconds",
        }
    }
}

/// One figure as reports show it.
pub struct Figure {
    /// Name.
    pub name: &'static str,
    /// Counter, gauge or histogram.
    pub kind: FigureKind,
    /// The unit of its value.
    pub unit: FigureUnit,
    /// Linux's name of the same figure for the kernel's swap, in /proc/vmstat if no file is named.
    /// Empty if there is none.
    pub kernel: &'static str,
    /// One line of help.
    pub help: &'static str,
}

macro_rules! stats {
    ($($kind:ident[$unit:ident] $name:ident $(= $kernel:literal)?: $help:literal,)*
        ; per order: $($oname:ident $(= $okernel:literal)?: $ohelp:literal,)*
        ; times: $($tname:ident: $thelp:literal,)*) => {
        /// All figures of one engine.
        #[repr(C)]
        pub struct Stats {
            $(#[doc = $help] pub $name: AtomicU64,)*
            $(#[doc = $ohelp] pub $oname: [AtomicU64; ORDERS],)*
            $(#[doc = $thelp] pub $tname: TimeHistogram,)*
            /// Pages loaded again on a touch, by the limit that would have kept them in memory
            /// ([`LimitBucket`]).
            pub refaults_by_limit: [AtomicU64; LIMIT_BUCKETS],
        }

        /// Every plain figure, in the order of the struct.
        pub const FIGURES: &[Figure] = &[$(Figure {
            name: stringify!($name),
            kind: FigureKind::$kind,
            unit: FigureUnit::$unit,
            kernel: concat!($($kernel)?),
            help: $help,
        },)*];
        /// Every figure that is counted per order; reports append the folio size, as in
        /// `zswpout_64K`.
        pub const ORDER_FIGURES: &[Figure] = &[$(Figure {
            name: stringify!($oname),
            kind: FigureKind::Counter,
            unit: FigureUnit::Folios,
            kernel: concat!($($okernel)?),
            help: $ohelp,
        },)*];
        /// Every histogram of times.
        pub const TIME_FIGURES: &[Figure] = &[$(Figure {
            name: stringify!($tname),
            kind: FigureKind::Times,
            unit: FigureUnit::Nanoseconds,
            kernel: "",
            help: $thelp,
        },)*];

        impl Stats {
            /// All zero.
            #[doc(hidden)] // for owners of a table
            pub const fn new() -> Stats {
                Stats {
                    $($name: AtomicU64::new(0),)*
                    $($oname: [const { AtomicU64::new(0) }; ORDERS],)*
                    $($tname: TimeHistogram::new(),)*
                    refaults_by_limit: [const { AtomicU64::new(0) }; LIMIT_BUCKETS],
                }
            }

            /// The present values of [`FIGURES`], in its order.
            #[doc(hidden)] // no promise: the arrays grow with the tables
            pub fn values(&self) -> [u64; FIGURES.len()] {
                [$(self.$name.load(Relaxed),)*]
            }

            /// The present values of a program that begins are zero; counters and peaks go on.
            #[doc(hidden)] // for owners of a table
            pub fn clear_gauges(&self) {
                for (figure, value) in FIGURES.iter().zip([$(&self.$name,)*]) {
                    if figure.kind == FigureKind::Gauge && !figure.name.starts_with("peak_") {
                        value.store(0, Relaxed);
                    }
                }
            }

            /// The present values of [`ORDER_FIGURES`], in its order.
            #[doc(hidden)] // no promise: the arrays grow with the tables
            pub fn order_values(&self) -> [[u64; ORDERS]; ORDER_FIGURES.len()] {
                [$(core::array::from_fn(|o| self.$oname[o].load(Relaxed)),)*]
            }

            /// The present counts of [`TIME_FIGURES`], in its order.
            #[doc(hidden)] // no promise: the arrays grow with the tables
            pub fn times(&self) -> [TimeCounts; TIME_FIGURES.len()] {
                [$(self.$tname.counts(),)*]
            }
        }
    };
}

stats! {
    Counter[Faults] faults = "pgfault": "Page faults handled",
    Counter[Faults] pgmajfault = "pgmajfault": "Page faults that loaded data from the store",
    Counter[Faults] faults_zero: "Page faults that were first touches and got zeros",
    Counter[Faults] faults_stale: "Page faults that another thread had handled meanwhile",
    Counter[Faults] faults_waited: "Page faults that waited for another thread to load or save the folio",
    Counter[Faults] faults_write: "First writes to pages that were loaded for a read",
    Counter[Folios] rescues: "Folios in the swap cache that a touch mapped again before they were stored",
    Counter[Pages] zswpout = "zswpout": "Pages saved to the compressed store",
    Counter[Pages] zswpin = "zswpin": "Pages loaded from the compressed store",
    Counter[Pages] zswpwb = "zswpwb": "Pages written back from the compressed store to a device",
    Counter[Pages] pswpout = "pswpout": "Pages written to a device",
    Counter[Pages] pswpin = "pswpin": "Pages read from a device",
    Counter[Events] swap_write_failed: "Failed writes to a device; the data stayed in memory",
    Counter[Pages] remote_out: "Pages moved from the swap file to the remote store",
    Counter[Pages] remote_in: "Pages read from the remote store",
    Counter[Events] remote_failed: "Failed requests to the remote store; the data stayed local",
    Counter[Pages] swap_ra = "swap_ra": "Pages read ahead from a device",
    Counter[Pages] swap_ra_hit = "swap_ra_hit": "Pages read ahead from a device that were used",
    Counter[Pages] workingset_refault = "workingset_refault_anon": "Pages that were loaded again after an eviction",
    Counter[Pages] workingset_activate = "workingset_activate_anon": "Pages that became active on a refault, because their eviction was recent",
    Counter[Pages] workingset_restore = "workingset_restore_anon": "Refaulted pages that became active and had been active when they were evicted",
    Counter[Folios] clean_evictions: "Folios evicted without compression, because their stored copy was valid",
    Counter[Events] drops: "Calls that dropped a batch of folios with a valid stored copy",
    Counter[Blocks] blocks_clean: "Blocks evicted without compression, because their stored copy was valid",
    Counter[Blocks] blocks_saved: "Blocks compressed and stored",
    Counter[Bytes] saved_bytes: "Data of these blocks before compression, bytes",
    Counter[Bytes] payload_bytes: "Data of these blocks after compression (8 bytes for a same-filled page), bytes",
    Counter[Blocks] blocks_loaded: "Blocks decompressed",
    Counter[Pages] fork_page_loads: "Single pages read from a stored block for a touch while a fork has paused the engine",
    Counter[Events] block_cache_hits: "Loads of pages answered from the cache of decompressed blocks",
    Counter[Events] block_cache_misses: "Loads of pages that decompressed the whole block, which went to the cache",
    Counter[Blocks] partial_writes: "Stored blocks of which a discard removed a part; the other pages were stored again one by one",
    Counter[Blocks] blocks_cut: "Blocks split into pages, because of random accesses",
    Counter[Blocks] blocks_joined: "Split blocks joined again, because a stream read all their pages",
    Counter[Events] huge_pages: "Huge pages made again, of memory that was a huge page when it was folded",
    Counter[Blocks] blocks_recompressed: "Cold blocks that a stronger codec made smaller",
    Counter[Bytes] recompress_gained_bytes: "Compressed bytes that recompression saved",
    Counter[Bytes] compacted_bytes: "Pool memory freed by compaction, bytes",
    Counter[Events] clean_dropped: "Stored copies dropped to keep the budget of clean copies (--clean)",
    Counter[Events] save_refused: "Saves that the store refused (pool full, verify mismatch); the folio stayed in memory",
    Counter[Blocks] verify_mismatch: "Blocks that failed verification; the folio stayed in memory",
    Counter[Events] load_fallback: "Loads on the single-page path",
    Counter[Events] page_loads: "Loads of some pages of a stored block; the others were resident or not needed",
    Counter[Events] frame_alloc: "Requests for large frames",
    Counter[Events] frame_alloc_failed: "Requests for large frames that got a smaller one",
    Counter[Events] readahead_windows: "Windows loaded ahead of a stream",
    Counter[Events] readahead_hits: "Windows loaded ahead that were used",
    Counter[Pages] readahead_wasted: "Pages read ahead that were evicted unused",
    Counter[Events] direct_reclaims = "allocstall_*": "Times that a faulting thread had to reclaim memory itself",
    Counter[Events] moves_out: "UFFDIO_MOVE calls that evict pages; each may interrupt the program's other CPUs",
    Counter[Events] move_again: "UFFDIO_MOVE returned EAGAIN",
    Counter[Events] move_busy: "UFFDIO_MOVE returned EBUSY (shared or pinned page)",
    Counter[Events] move_exists: "UFFDIO_MOVE or UFFDIO_COPY returned EEXIST",
    Counter[Events] move_holes: "UFFDIO_MOVE found a missing page",
    Counter[Events] move_partial: "UFFDIO_MOVE or UFFDIO_COPY completed only part of a range",
    Counter[Pages] move_uncounted: "Pages that UFFDIO_MOVE moved and did not count",
    Counter[Calls] copies: "Pages or ranges mapped with UFFDIO_COPY",
    Counter[Folios] splits = "hugepages-*/stats/split": "Folios split",
    Counter[Folios] merges: "Folios merged while loading a stream",
    Counter[Pages] discarded_pages: "Pages dropped by discard, munmap or madvise",
    Counter[Events] over_limit = "memory.events high": "Times that the limit was exceeded",
    Counter[Nanoseconds] fault_ns: "CPU time of threads in page faults, estimated from one fault in 16, nanoseconds",
    Counter[Nanoseconds] background_ns: "CPU time of background threads that reclaim and read ahead, nanoseconds",
    Counter[Nanoseconds] folding_ns: "CPU time that folding has taken from the working program, nanoseconds: that of faults, and that of memfold's threads divided by the number of CPUs",
    Counter[Nanoseconds] waking_ns: "The same for the seconds in which the program woke from idleness, nanoseconds",
    Counter[Nanoseconds] own_ns: "CPU time of the program's own work, nanoseconds",
    Counter[Nanoseconds] idle_ns: "With --slowdown: time for which the process was idle and all of it was folded, nanoseconds",
    Counter[ByteSeconds] saved_byte_seconds: "Memory saved, times the seconds for which it was saved, bytes",
    Counter[Events] calls_refused: "run: System calls that failed because of folded memory, which is a bug",
    Counter[Events] looks: "run: Looks at the size of the process",
    Counter[Events] sharing_measured: "run: Measurements of the memory that the process shares after a fork",
    Counter[Bytes] adopted_bytes: "run: Address space that was adopted, bytes",
    Gauge[Bytes] resident_bytes = "memory.stat anon": "Managed resident pages, bytes",
    Gauge[Bytes] frame_bytes: "Frames that hold memory, used or free, bytes",
    Gauge[Bytes] pool_bytes = "memory.stat zswap": "Memory of the compressed pool, bytes",
    Gauge[Bytes] index_bytes: "Memory of index and metadata, bytes",
    Gauge[Bytes] folded_bytes = "memory.stat zswapped": "Data that is only in the store, before compression, bytes",
    Gauge[Bytes] stored_bytes: "Data that has a copy in the store, before compression, bytes",
    Gauge[Bytes] swap_bytes = "memory.swap.current": "Space used in the swap file, bytes",
    Gauge[Bytes] remote_bytes: "Data in the remote store, bytes",
    Gauge[Bytes] refused_bytes: "Resident data that could not be stored at its last eviction, bytes",
    Gauge[Bytes] refused_dense_bytes: "The part of it that does not compress, bytes",
    Gauge[Bytes] refused_full_bytes: "The part of it that did not fit in the pool, bytes",
    Gauge[Bytes] refused_pinned_bytes: "The part of it that a device has pinned, bytes",
    Gauge[Bytes] refused_shared_bytes: "The part of it that so many processes share after a fork that folding would save nothing, bytes",
    Gauge[Bytes] kept_bytes: "Memory that stays uncompressed past the limit, because folding it would cost far more time than it saves memory, bytes; 0 where only the limit decides",
    Gauge[Bytes] unmanaged_bytes: "run: Unmanaged resident memory of the program, bytes",
    Gauge[Bytes] shared_bytes: "run: Resident memory that is counted in other processes that share it after a fork, bytes",
    Gauge[Bytes] need_bytes: "run: Data that counts for the process's share of the limit, uncompressed, bytes; 0 while it is idle",
    Gauge[Bytes] peak_bytes = "memory.peak": "Peak of resident pages, frames, pool and index together, bytes",
    Gauge[Bytes] peak_resident_bytes: "Peak of resident pages, frames and unmanaged memory together, bytes",
    Gauge[Bytes] peak_held_bytes: "run: Peak of large buffers that system calls held at once, bytes",
    Gauge[Bytes] peak_pool_bytes: "Peak of the compressed pool, bytes",
    Gauge[Bytes] peak_index_bytes: "Peak of index and metadata, bytes",
    Gauge[Bytes] peak_folded_bytes: "Peak of folded data, bytes",
    Gauge[Folios] folios: "Folios in the index",
    ; per order:
    zswpout_folio = "hugepages-*/stats/zswpout": "Folios saved to the compressed store",
    zswpin_folio: "Folios loaded from the compressed store",
    swpout_folio = "hugepages-*/stats/swpout": "Folios written to a device",
    swpin_folio = "hugepages-*/stats/swpin": "Folios read from a device",
    swpout_fallback = "hugepages-*/stats/swpout_fallback": "Folios split because no frame or slot of their order was free",
    ; times:
    fault_zero_time: "Time of a fault that got zeros; one in 16 is timed",
    fault_rescue_time: "Time of a fault that mapped a folio back from the swap cache; one in 16 is timed",
    fault_pool_time: "Time of a fault that loaded from the compressed pool; one in 16 is timed",
    fault_file_time: "Time of a fault that loaded from the swap file; each is timed",
    fault_remote_time: "Time of a fault that loaded from the remote store; each is timed",
    reclaim_time: "Time of one reclaim, in a faulting or a background thread",
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
    #[doc(hidden)] // for tests
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
    fn a_limit_is_below_the_end_of_its_bucket() {
        for bytes in (20..36).flat_map(|shift| [1u64 << shift, (5 << shift) >> 2, (2 << shift) - 1])
        {
            let bucket = LimitBucket::of(bytes);
            assert!(bytes < bucket.end() && bucket.end() <= bytes + bytes / 8 + 1, "{bytes}");
        }
        assert_eq!(
            (LimitBucket::of(5), LimitBucket::of(u64::MAX).0),
            (LimitBucket(0), LIMIT_BUCKETS - 1)
        );
    }

    #[test]
    fn names_are_unique_and_helped() {
        let mut names: std::vec::Vec<_> =
            FIGURES.iter().chain(ORDER_FIGURES).chain(TIME_FIGURES).map(|f| f.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), FIGURES.len() + ORDER_FIGURES.len() + TIME_FIGURES.len());
        assert!(FIGURES.iter().all(|f| !f.help.is_empty()));
    }
}
