//! The memory that the processes hold at one moment, and its peaks. The peaks are in the table that
//! the processes share.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_stats::{Stats, raise};

/// Names of the figures that have a peak for the run, in the order of [`PeakSums`].
pub const PEAKS: [&str; 5] = [
    "peak_bytes",
    "peak_resident_bytes",
    "peak_pool_bytes",
    "peak_index_bytes",
    "peak_folded_bytes",
];
/// Up to so many slots, every call sums them.
const SLOTS_FEW: usize = 4;
/// Time between two sums for each slot if there are more, in nanoseconds. It is some hundred times
/// what a sum costs.
const SLOT_NS: u64 = 20_000;

/// Bytes that several processes hold, in the order of [`PEAKS`].
#[derive(Copy, Clone, Default)]
pub struct PeakSums([u64; PEAKS.len()]);

impl PeakSums {
    /// Adds what one process holds now. Of memory that it shares with others after a fork, only its
    /// part is counted.
    pub fn add(&mut self, stats: &Stats) {
        let of = |gauge: &AtomicU64| gauge.load(Relaxed);
        let (pool, index) = (of(&stats.pool_bytes), of(&stats.index_bytes));
        let resident = of(&stats.resident_bytes)
            .saturating_add(of(&stats.frame_bytes))
            .saturating_add(of(&stats.unmanaged_bytes))
            .saturating_sub(of(&stats.shared_bytes));
        let all = resident.saturating_add(pool).saturating_add(index);
        let one = [all, resident, pool, index, of(&stats.folded_bytes)];
        for (to, from) in self.0.iter_mut().zip(one) {
            *to = to.saturating_add(from);
        }
    }

    /// Returns the bytes of all kinds of memory.
    pub fn bytes(&self) -> u64 {
        self.0[0]
    }

    /// Adds memory that no engine manages.
    pub fn add_unmanaged(&mut self, bytes: u64) {
        for to in &mut self.0[..2] {
            *to = to.saturating_add(bytes);
        }
    }
}

/// The peaks. All zeros are none.
#[repr(C)]
#[derive(Default)]
pub struct TablePeaks {
    summed_at_ns: AtomicU64,
    peaks: [AtomicU64; PEAKS.len()],
}

impl TablePeaks {
    /// Returns whether a sum over so many slots is due. Only one caller gets `true`, and it must
    /// sum.
    pub fn is_due(&self, slots: usize, now_ns: u64) -> bool {
        let last = self.summed_at_ns.load(Relaxed);
        // Processes in other time namespaces have other clocks.
        let is_due = slots <= SLOTS_FEW || now_ns.abs_diff(last) >= slots as u64 * SLOT_NS;
        is_due && self.summed_at_ns.compare_exchange(last, now_ns, Relaxed, Relaxed).is_ok()
    }

    /// Raises the peaks to `sum`, which is what processes with a slot hold now, plus the bytes of
    /// those without.
    pub fn note(&self, mut sum: PeakSums, slotless_bytes: u64) {
        sum.add_unmanaged(slotless_bytes);
        for (peak, now) in self.peaks.iter().zip(sum.0) {
            raise(peak, now);
        }
    }

    /// Returns the most that the run ever held, in the order of [`PEAKS`].
    pub fn peaks(&self) -> [u64; PEAKS.len()] {
        self.peaks.each_ref().map(|peak| peak.load(Relaxed))
    }
}
