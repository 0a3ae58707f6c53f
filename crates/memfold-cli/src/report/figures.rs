//! The figures of a run: sums over its processes, and what they came to at the height of the pool.
use crate::table::slots::Slots;
use memfold::stats::{FIGURES, ORDER_FIGURES, ORDERS, Stats, size_suffix};
use std::sync::atomic::Ordering::Relaxed;

/// Figures of one process, or sums over several.
#[derive(Clone)]
pub struct Figures {
    values: [u64; FIGURES.len()],
    orders: [[u64; ORDERS]; ORDER_FIGURES.len()],
}

impl Figures {
    /// The present figures of one process.
    pub fn of(stats: &Stats) -> Figures {
        Figures { values: stats.values(), orders: stats.order_values() }
    }

    /// The sums over every process of the run. Peaks are summed too: with several processes, whose
    /// peaks need not coincide, the sum is an upper bound.
    pub fn sum(slots: &Slots) -> Figures {
        let mut sum =
            Figures { values: [0; FIGURES.len()], orders: [[0; ORDERS]; ORDER_FIGURES.len()] };
        for one in slots.table().processes().map(|process| Figures::of(process.stats())) {
            for (to, from) in sum.values.iter_mut().zip(one.values) {
                *to = to.wrapping_add(from);
            }
            for (to, from) in
                sum.orders.as_flattened_mut().iter_mut().zip(one.orders.as_flattened())
            {
                *to = to.wrapping_add(*from);
            }
        }
        sum
    }

    /// Every figure with its name, those counted per order with the size of the folio
    /// (`zswpout_64K`).
    pub fn each(&self) -> impl Iterator<Item = (String, u64)> {
        let plain =
            FIGURES.iter().zip(self.values).map(|(figure, value)| (figure.name.to_string(), value));
        let per_order = ORDER_FIGURES.iter().zip(&self.orders).flat_map(|(figure, values)| {
            let base = figure.name.trim_end_matches("_folio");
            values
                .iter()
                .enumerate()
                .map(move |(order, value)| (format!("{base}_{}", size_suffix(order)), *value))
        });
        plain.chain(per_order)
    }
}

/// How well the pool compressed, taken when it held the most: at its end a program has often freed
/// everything.
#[derive(Default)]
pub struct Height {
    stored_bytes: u64,
    pool_bytes: u64,
}

impl Height {
    /// Looks at the gauges now and keeps them if the pool is larger than ever before.
    pub fn sample(&mut self, slots: &Slots) {
        let sum =
            |of: fn(&Stats) -> u64| slots.table().processes().map(|p| of(p.stats())).sum::<u64>();
        let pool_bytes = sum(|s| s.pool_bytes.load(Relaxed));
        if pool_bytes > self.pool_bytes {
            *self = Height { stored_bytes: sum(|s| s.stored_bytes.load(Relaxed)), pool_bytes };
        }
    }

    /// Bytes before compression for each byte that the pool held; `None` if nothing was ever
    /// stored.
    pub fn ratio(&self) -> Option<f64> {
        (self.pool_bytes > 0).then(|| self.stored_bytes as f64 / self.pool_bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::slots::tests::claim;

    #[test]
    fn sums_run_over_all_processes_and_orders_are_named_by_size() {
        let slots = Slots::new().unwrap();
        for pid in [10, 11] {
            let stats = claim(&slots, pid).stats();
            stats.faults.store(5, Relaxed);
            stats.zswpout_folio[4].store(2, Relaxed);
        }
        let sum = Figures::sum(&slots);
        let get =
            |name: &str| sum.each().find(|f| f.0 == name).unwrap_or_else(|| panic!("{name}")).1;
        assert_eq!((get("faults"), get("zswpout_64K"), get("swpout_fallback_2M")), (10, 4, 0));
        assert_eq!(sum.each().count(), FIGURES.len() + ORDER_FIGURES.len() * ORDERS);
    }

    #[test]
    fn the_ratio_is_that_of_the_fullest_moment() {
        let slots = Slots::new().unwrap();
        let mut height = Height::default();
        assert_eq!(height.ratio(), None);
        let slot = claim(&slots, 1).stats();
        for (stored, pool) in [(300, 100), (500, 200), (0, 10)] {
            slot.stored_bytes.store(stored, Relaxed);
            slot.pool_bytes.store(pool, Relaxed);
            height.sample(&slots);
        }
        assert_eq!(height.ratio(), Some(2.5));
    }
}
