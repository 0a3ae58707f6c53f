//! What a run holds in all of its processes at one moment, and the most that this ever was. It lies
//! in the table that they share.
use crate::stats::{Stats, raise};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Names of the figures of which the run has a peak of its own, in the order of [`Sum`].
pub const PEAKS: [&str; 5] = [
    "peak_bytes",
    "peak_resident_bytes",
    "peak_pool_bytes",
    "peak_index_bytes",
    "peak_folded_bytes",
];
/// Seats up to which every look sums.
const SEATS_FEW: usize = 4;
/// Time between two sums for each seat beyond, nanoseconds: some hundred times what it costs.
const SEAT_NS: u64 = 20_000;

/// Bytes that several processes hold, in the order of [`PEAKS`].
#[derive(Copy, Clone, Default)]
pub struct Sum([u64; PEAKS.len()]);

impl Sum {
    /// Adds what one process holds now. Memory that it shares with others after a fork counts in
    /// each with its part.
    pub fn add(&mut self, stats: &Stats) {
        let of = |gauge: &AtomicU64| gauge.load(Relaxed);
        let (pool, index) = (of(&stats.pool_bytes), of(&stats.index_bytes));
        let resident = (of(&stats.resident_bytes) + of(&stats.frame_bytes))
            .saturating_add(of(&stats.unmanaged_bytes))
            .saturating_sub(of(&stats.shared_bytes));
        let one = [resident + pool + index, resident, pool, index, of(&stats.folded_bytes)];
        for (to, from) in self.0.iter_mut().zip(one) {
            *to = to.saturating_add(from);
        }
    }

    /// Adds memory that no engine manages.
    pub fn add_unmanaged(&mut self, bytes: u64) {
        for to in &mut self.0[..2] {
            *to = to.saturating_add(bytes);
        }
    }
}

/// The peaks of a run, and its processes that have no seat.
#[repr(C)]
pub struct Totals {
    summed_at_ns: AtomicU64,
    peaks: [AtomicU64; PEAKS.len()],
    seatless: AtomicU64,
    seatless_bytes: AtomicU64,
    peak_seatless_bytes: AtomicU64,
}

impl Totals {
    /// Whether a sum over so many seats is due. `true` is for the caller alone, who sums then.
    pub fn is_due(&self, seats: usize, now_ns: u64) -> bool {
        let last = self.summed_at_ns.load(Relaxed);
        // Processes in other time namespaces have other clocks.
        let due = seats <= SEATS_FEW || now_ns.abs_diff(last) >= seats as u64 * SEAT_NS;
        due && self.summed_at_ns.compare_exchange(last, now_ns, Relaxed, Relaxed).is_ok()
    }

    /// Raises the peaks to what all processes with a seat hold now, and those without.
    pub fn note(&self, mut sum: Sum) {
        sum.add_unmanaged(self.seatless_bytes.load(Relaxed));
        for (peak, now) in self.peaks.iter().zip(sum.0) {
            raise(peak, now);
        }
    }

    /// The most that the run ever held, in the order of [`PEAKS`].
    pub fn peaks(&self) -> [u64; PEAKS.len()] {
        self.peaks.each_ref().map(|peak| peak.load(Relaxed))
    }

    /// Notes how many processes of the run have no seat, and their anonymous memory, bytes.
    pub fn set_seatless(&self, count: u64, bytes: u64) {
        self.seatless.store(count, Relaxed);
        self.seatless_bytes.store(bytes, Relaxed);
        raise(&self.peak_seatless_bytes, bytes);
    }

    /// Processes of the run without a seat, and their anonymous memory, bytes.
    pub fn seatless(&self) -> (u64, u64) {
        (self.seatless.load(Relaxed), self.seatless_bytes.load(Relaxed))
    }

    /// The most memory that processes without a seat ever had at once, bytes.
    pub fn peak_seatless_bytes(&self) -> u64 {
        self.peak_seatless_bytes.load(Relaxed)
    }
}
