//! The counters of a run: sums over its processes, its own peaks, and its compression ratio.
use memfold_run::table::totals::PEAKS;
use memfold_run::users::UserTables;
use memfold_stats::{FIGURES, ORDER_FIGURES, ORDERS, Stats, TIME_FIGURES, TimeCounts, size_suffix};

/// Counters of one process, or sums over several.
#[derive(Clone)]
pub struct RunFigures {
    values: [u64; FIGURES.len()],
    orders: [[u64; ORDERS]; ORDER_FIGURES.len()],
    times: [TimeCounts; TIME_FIGURES.len()],
}

impl RunFigures {
    /// Returns the present counters of one process.
    pub fn of(stats: &Stats) -> RunFigures {
        RunFigures { values: stats.values(), orders: stats.order_values(), times: stats.times() }
    }

    /// Returns the sums over every process of the run. A peak is that of all processes at one
    /// moment, and at least the largest peak of one process. `peak_held_bytes` is always the
    /// latter.
    pub fn sum(tables: &UserTables) -> RunFigures {
        let mut sum = RunFigures {
            values: [0; FIGURES.len()],
            orders: [[0; ORDERS]; ORDER_FIGURES.len()],
            times: [TimeCounts::NONE; TIME_FIGURES.len()],
        };
        for one in tables.processes().map(|process| RunFigures::of(process.stats())) {
            for ((to, from), figure) in sum.values.iter_mut().zip(one.values).zip(FIGURES) {
                *to = match figure.name.starts_with("peak_") {
                    true => from.max(*to),
                    false => to.wrapping_add(from),
                };
            }
            for (to, from) in
                sum.orders.as_flattened_mut().iter_mut().zip(one.orders.as_flattened())
            {
                *to = to.wrapping_add(*from);
            }
            sum.times.iter_mut().zip(&one.times).for_each(|(to, from)| to.add(from));
        }
        for (name, peak) in PEAKS.iter().zip(tables.peaks()) {
            let at = FIGURES.iter().position(|figure| figure.name == *name);
            let own = &mut sum.values[at.expect("each of these peaks is a figure too")];
            *own = peak.max(*own);
        }
        sum
    }

    /// Returns one counter of [`FIGURES`].
    pub fn get(&self, name: &str) -> u64 {
        let at = FIGURES.iter().position(|figure| figure.name == name);
        self.values[at.unwrap_or_else(|| panic!("{name} is no figure"))]
    }

    /// Returns bytes before compression for each compressed byte, of all that was stored over the
    /// run. Returns `None` if nothing was stored.
    pub fn ratio(&self) -> Option<f64> {
        let payload = self.get("payload_bytes").saturating_sub(self.get("recompress_gained_bytes"));
        (payload > 0).then(|| self.get("saved_bytes") as f64 / payload as f64)
    }

    /// Returns the CPU time of folding as a share of the program's own, percent. Returns `None` if
    /// the program has not worked.
    pub fn slowdown(&self) -> Option<f64> {
        let own = self.get("own_ns");
        (own > 0).then(|| self.get("folding_ns") as f64 * 100.0 / own as f64)
    }

    /// Returns every histogram of times with its name.
    pub fn times(&self) -> impl Iterator<Item = (&'static str, &TimeCounts)> {
        TIME_FIGURES.iter().map(|figure| figure.name).zip(&self.times)
    }

    /// Returns every counter with its name. The name of a counter for one order has the size of the
    /// folio in it (`zswpout_64K`).
    pub fn each(&self) -> impl Iterator<Item = (String, u64)> {
        let figures =
            FIGURES.iter().zip(self.values).map(|(figure, value)| (figure.name.to_string(), value));
        let per_order = ORDER_FIGURES.iter().zip(&self.orders).flat_map(|(figure, values)| {
            let base = figure.name.trim_end_matches("_folio");
            values
                .iter()
                .enumerate()
                .map(move |(order, value)| (format!("{base}_{}", size_suffix(order)), *value))
        });
        figures.chain(per_order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn sums_run_over_all_processes_and_orders_are_named_by_size() {
        let tables = tables();
        for pid in [10, 11] {
            let stats = claim(&tables, pid).stats();
            stats.faults.store(5, Relaxed);
            stats.zswpout_folio[4].store(2, Relaxed);
        }
        let sum = RunFigures::sum(&tables);
        let get =
            |name: &str| sum.each().find(|f| f.0 == name).unwrap_or_else(|| panic!("{name}")).1;
        assert_eq!((get("faults"), get("zswpout_64K"), get("swpout_fallback_2M")), (10, 4, 0));
        assert_eq!(sum.each().count(), FIGURES.len() + ORDER_FIGURES.len() * ORDERS);
    }

    #[test]
    fn a_peak_is_that_of_all_at_once_and_at_least_that_of_one() {
        let tables = tables();
        for (pid, now) in [(1, 40), (2, 50)] {
            let stats = claim(&tables, pid).stats();
            stats.resident_bytes.store(now, Relaxed);
            for peak in [&stats.peak_bytes, &stats.peak_held_bytes] {
                peak.store(70 + now, Relaxed);
            }
        }
        let peaks = |sum: &RunFigures| (sum.get("peak_bytes"), sum.get("peak_held_bytes"));
        assert_eq!(peaks(&RunFigures::sum(&tables)), (120, 120));
        tables.bounds().set_slotless(1, 100);
        tables.note_totals();
        assert_eq!(peaks(&RunFigures::sum(&tables)), (190, 120));
    }

    #[test]
    fn the_ratio_is_that_of_all_that_was_stored() {
        let tables = tables();
        assert_eq!(RunFigures::sum(&tables).ratio(), None);
        for (pid, payload) in [(1, 30), (2, 90)] {
            let stats = claim(&tables, pid).stats();
            stats.saved_bytes.store(100, Relaxed);
            stats.payload_bytes.store(payload, Relaxed);
        }
        claim(&tables, 3).stats().recompress_gained_bytes.store(20, Relaxed);
        assert_eq!(RunFigures::sum(&tables).ratio(), Some(2.0));
    }
}
