//! Histograms of times.
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of buckets of a histogram: two for each doubling, from 256 ns to 4 s. The first and the
/// last have all that is beyond.
pub const TIME_BUCKETS: usize = 48;

/// An index of the buckets of a histogram.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TimeBucket(pub usize);

impl TimeBucket {
    /// The first bucket ends at two to the power of this, times one and a half, nanoseconds.
    const LEAST_SHIFT: u32 = 8;

    /// Returns the bucket of a time in nanoseconds.
    pub fn of(ns: u64) -> TimeBucket {
        let shift = (ns | 1).ilog2();
        if shift < Self::LEAST_SHIFT {
            return TimeBucket(0);
        }
        let half = (ns >> (shift - 1)) as usize & 1;
        TimeBucket((2 * (shift - Self::LEAST_SHIFT) as usize + half).min(TIME_BUCKETS - 1))
    }

    /// Returns the least time in nanoseconds that is above all times of the bucket. Times beyond the
    /// last bucket's end are counted there too.
    pub fn end_ns(self) -> u64 {
        let (shift, half) = (self.0 as u32 / 2 + Self::LEAST_SHIFT, self.0 as u64 % 2);
        (3 + half) << (shift - 1)
    }

    /// Returns the least time of the bucket, nanoseconds.
    pub fn start_ns(self) -> u64 {
        self.0.checked_sub(1).map_or(0, |before| TimeBucket(before).end_ns())
    }
}

/// Counts of times by their length.
#[repr(C)]
pub struct TimeHistogram {
    buckets: [AtomicU64; TIME_BUCKETS],
    total_ns: AtomicU64,
}

impl TimeHistogram {
    /// Nothing yet.
    pub const fn new() -> TimeHistogram {
        TimeHistogram {
            buckets: [const { AtomicU64::new(0) }; TIME_BUCKETS],
            total_ns: AtomicU64::new(0),
        }
    }

    /// Counts one time, nanoseconds.
    pub fn note(&self, ns: u64) {
        self.buckets[TimeBucket::of(ns).0].fetch_add(1, Relaxed);
        self.total_ns.fetch_add(ns, Relaxed);
    }

    /// Returns the present counts.
    pub fn counts(&self) -> TimeCounts {
        TimeCounts {
            buckets: core::array::from_fn(|n| self.buckets[n].load(Relaxed)),
            total_ns: self.total_ns.load(Relaxed),
        }
    }
}

impl Default for TimeHistogram {
    fn default() -> Self {
        TimeHistogram::new()
    }
}

/// The counts of a [`TimeHistogram`], or sums of several.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct TimeCounts {
    /// Times in each bucket.
    pub buckets: [u64; TIME_BUCKETS],
    /// The sum of all times, nanoseconds.
    pub total_ns: u64,
}

impl TimeCounts {
    /// No times.
    pub const NONE: TimeCounts = TimeCounts { buckets: [0; TIME_BUCKETS], total_ns: 0 };

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &TimeCounts) {
        for (to, from) in self.buckets.iter_mut().zip(other.buckets) {
            *to = to.wrapping_add(from);
        }
        self.total_ns = self.total_ns.wrapping_add(other.total_ns);
    }

    /// Returns the counts since an earlier moment, at which they were `before`. Counts that are less
    /// than before began anew at zero.
    pub fn since(&self, before: &TimeCounts) -> TimeCounts {
        let growth = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        TimeCounts {
            buckets: core::array::from_fn(|n| growth(self.buckets[n], before.buckets[n])),
            total_ns: growth(self.total_ns, before.total_ns),
        }
    }

    /// Returns how many times were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, n| sum.wrapping_add(*n))
    }

    /// Returns the time that `percent` percent of the times don't exceed, nanoseconds. It is right
    /// within a bucket. Returns `None` without times.
    pub fn percentile_ns(&self, percent: u64) -> Option<u64> {
        let count = self.count();
        // The rank of the time that is asked for, from 1 on.
        let rank = (u128::from(count) * u128::from(percent)).div_ceil(100).max(1) as u64;
        let mut before = 0;
        for (n, within) in self.buckets.iter().enumerate() {
            if before + within >= rank {
                let (start, end) = (TimeBucket(n).start_ns(), TimeBucket(n).end_ns());
                return Some(start + (end - start) * (rank - before) / within);
            }
            before += within;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_within_its_bucket() {
        for ns in (8..31).flat_map(|shift| [1u64 << shift, 3 << (shift - 1), (2 << shift) - 1]) {
            let bucket = TimeBucket::of(ns);
            assert!(bucket.start_ns() <= ns && ns < bucket.end_ns(), "{ns} {bucket:?}");
        }
        assert_eq!((TimeBucket::of(0), TimeBucket::of(255)), (TimeBucket(0), TimeBucket(0)));
        assert_eq!(TimeBucket::of(u64::MAX), TimeBucket(TIME_BUCKETS - 1));
        let ends = (0..TIME_BUCKETS).map(|n| TimeBucket(n).end_ns());
        assert!(ends.clone().zip(ends.skip(1)).all(|(a, b)| a < b));
    }

    /// For random times, each percentile lies in the bucket of the right time.
    #[test]
    fn percentile_is_right_within_a_bucket() {
        let mut seed = 7u64;
        let mut random = || {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            seed >> 33
        };
        for _ in 0..200 {
            let (mut all, times) = (std::vec::Vec::new(), TimeHistogram::new());
            for _ in 0..1 + random() % 300 {
                let ns = random() % (1 << (1 + random() % 31));
                times.note(ns);
                all.push(ns);
            }
            all.sort_unstable();
            let counts = times.counts();
            assert_eq!((counts.count(), counts.total_ns), (all.len() as u64, all.iter().sum()));
            for percent in [0, 1, 50, 90, 99, 100] {
                let rank = (all.len() * percent as usize).div_ceil(100).max(1);
                let (right, estimate) = (all[rank - 1], counts.percentile_ns(percent).unwrap());
                let bucket = TimeBucket::of(right);
                assert!(
                    bucket.start_ns() <= estimate && estimate <= bucket.end_ns(),
                    "{right} {estimate}"
                );
            }
        }
        assert_eq!(TimeHistogram::new().counts().percentile_ns(99), None);
    }

    #[test]
    fn counts_since_a_moment_have_only_later_times() {
        let times = TimeHistogram::new();
        times.note(1000);
        let before = times.counts();
        [2000, 1000].into_iter().for_each(|ns| times.note(ns));
        let mut sum = times.counts().since(&before);
        assert_eq!((sum.count(), sum.total_ns), (2, 3000));
        sum.add(&before);
        assert_eq!((sum, before.since(&times.counts()).count()), (times.counts(), 1));
    }
}
