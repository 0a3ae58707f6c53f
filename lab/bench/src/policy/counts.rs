//! What happened in a replay, and what it costs.

use serde::Serialize;

/// Numbers of events in a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Touches of stored pages. Each loads the page.
    pub misses: u64,
    /// Pages loaded beside them.
    pub ahead: u64,
    /// Of these, the pages that were evicted before they were touched.
    pub wasted: u64,
    /// First writes to pages that were mapped read-only.
    pub write_faults: u64,
    /// Touches of pages in the swap cache.
    pub rescues: u64,
    /// Evictions of pages that had to be compressed.
    pub saved: u64,
    /// Evictions of writable pages that had not changed: their bytes were compared.
    pub unchanged: u64,
    /// Evictions of read-only pages.
    pub dropped: u64,
    /// Pages that stayed because their write bit or accessed bit was set.
    pub spared: u64,
}

/// Time of each event, microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostTable {
    /// A fault: the signal's delivery and return.
    pub fault: f64,
    /// The engine's own work for a fault: look-ups, locks, lists, requests.
    pub engine: f64,
    /// A load: decompression, and UFFDIO_COPY of a page.
    pub load: f64,
    /// The end of a page's write protection.
    pub unprotect: f64,
    /// A page moved out or back, a flush of other CPUs included.
    pub move_page: f64,
    /// A page's fingerprint.
    pub compare: f64,
    /// A page compressed and stored.
    pub compress: f64,
    /// A page's part of a batch that is dropped.
    pub drop_page: f64,
    /// A page's part of a look at write bits.
    pub spare: f64,
}

/// The table that replays use, so that their results don't depend on the machine. It was measured
/// with `memfold bench costs`: 2 CPUs, Linux 6.18, lz4, no other thread busy. Two are
/// not measured: `compare` is estimated, and `engine` was chosen so that the times of two programs
/// (luajit-lookups, sort-lines) agree with those under `memfold run`.
pub const COSTS: CostTable = CostTable {
    fault: 3.1,
    engine: 5.0,
    load: 3.6,
    unprotect: 0.9,
    move_page: 1.0,
    compare: 0.5,
    compress: 7.3,
    drop_page: 0.6,
    spare: 0.6,
};

/// The same while another thread of the program is busy. A call for a single page then interrupts
/// the thread's CPU.
pub const COSTS_BUSY: CostTable =
    CostTable { fault: 3.6, load: 4.2, unprotect: 10.9, move_page: 10.6, drop_page: 0.8, ..COSTS };

impl Counts {
    /// Returns the time of all events, seconds.
    pub fn seconds(&self, costs: &CostTable) -> f64 {
        let each = [
            (self.misses + self.write_faults + self.rescues, costs.fault + costs.engine),
            (self.misses + self.ahead, costs.load),
            (self.write_faults, costs.unprotect),
            (self.rescues + self.saved + self.unchanged, costs.move_page),
            (self.saved + self.unchanged, costs.compare),
            (self.saved, costs.compress),
            (self.dropped, costs.drop_page),
            (self.spared, costs.spare),
        ];
        each.iter().map(|(count, cost)| *count as f64 * cost).sum::<f64>() / 1e6
    }
}
