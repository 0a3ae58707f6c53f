//! A histogram of latencies with a fixed size of 15 KiB, so that the measurement does not grow
//! memory.

use std::time::Duration;

/// 32 buckets per octave of nanoseconds: a quantile is at most 3% off. Mean and maximum are exact.
pub struct Latency {
    counts: Vec<u64>,
    count: u64,
    sum_ns: u64,
    max_ns: u64,
}

const BUCKETS: usize = 1920;

impl Default for Latency {
    fn default() -> Self {
        Latency { counts: vec![0; BUCKETS], count: 0, sum_ns: 0, max_ns: 0 }
    }
}

impl Latency {
    /// Adds one measurement.
    #[inline]
    pub fn add(&mut self, elapsed: Duration) {
        let ns = elapsed.as_nanos() as u64;
        self.counts[bucket(ns)] += 1;
        self.count += 1;
        self.sum_ns += ns;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Adds all measurements of `other`.
    pub fn merge(&mut self, other: &Latency) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
        self.count += other.count;
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// Returns the number of measurements.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the mean in microseconds; 0 without measurements.
    pub fn mean_us(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum_ns as f64 / self.count as f64 / 1e3 }
    }

    /// Returns the largest measurement in microseconds.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// Returns points of the distribution: a value in microseconds, and the share of measurements
    /// that don't exceed it.
    pub fn cdf(&self) -> Vec<(f64, f64)> {
        let mut sum = 0;
        let mut points = Vec::new();
        for (index, &count) in self.counts.iter().enumerate() {
            sum += count;
            if count > 0 {
                points.push((
                    upper(index).min(self.max_ns) as f64 / 1e3,
                    sum as f64 / self.count as f64,
                ));
            }
        }
        points
    }

    /// Returns the value in microseconds that `share` (0..=1) of the measurements don't exceed.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let rank = (share * self.count as f64).ceil() as u64;
        let mut sum = 0;
        for (index, count) in self.counts.iter().enumerate() {
            sum += count;
            if sum >= rank && *count > 0 {
                return (upper(index).min(self.max_ns)) as f64 / 1e3;
            }
        }
        self.max_us()
    }
}

fn bucket(ns: u64) -> usize {
    if ns < 64 {
        return ns as usize;
    }
    let shift = 58 - ns.leading_zeros();
    (shift * 32) as usize + (ns >> shift) as usize
}

/// Returns the largest value that falls into bucket `index`.
fn upper(index: usize) -> u64 {
    if index < 64 {
        return index as u64;
    }
    let shift = index / 32 - 1;
    (((index % 32 + 33) as u128) << shift).saturating_sub(1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_at_or_below_its_bucket_and_within_3_percent() {
        for shift in 0..64 {
            for add in [0u64, 1, 5] {
                let ns = (1u64 << shift).saturating_add(add << (shift / 2));
                let top = upper(bucket(ns));
                assert!(bucket(ns) < BUCKETS && top >= ns, "{ns} -> {top}");
                assert!(top - ns <= ns / 31 + 1, "{ns} -> {top}");
            }
        }
    }

    #[test]
    fn quantiles_mean_and_maximum_are_right() {
        let mut latency = Latency::default();
        for us in 1..=100 {
            latency.add(Duration::from_micros(us));
        }
        assert!((latency.mean_us() - 50.5).abs() < 1e-9);
        assert_eq!(latency.max_us(), 100.0);
        assert!((latency.quantile_us(0.5) - 50.0).abs() < 2.0);
        assert!((latency.quantile_us(0.99) - 99.0).abs() < 3.5);
        let cdf = latency.cdf();
        assert!(cdf.is_sorted() && cdf.last() == Some(&(100.0, 1.0)));
        let half = cdf.iter().find(|point| point.1 >= 0.5).unwrap().0;
        assert_eq!(half, latency.quantile_us(0.5));
    }
}
