//! What folding has cost a run in the last minutes, without its start: a server that has long been
//! idle loaded much when it began.
use crate::report::figures::RunFigures;
use memfold_run::users::UserTables;
use memfold_stats::{LIMIT_BUCKETS, Stats};
use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;

/// The time between two notes, nanoseconds. The last minutes are one to two of it.
const PERIOD_NS: u64 = 120_000_000_000;

/// The counters of a run at one moment.
pub struct WorkNote {
    at_ns: u64,
    folding_ns: u64,
    own_ns: u64,
    /// The refaults of each process by the limit. A process is the place of its counters.
    refaults: HashMap<usize, [u64; LIMIT_BUCKETS]>,
}

impl WorkNote {
    fn of(tables: &UserTables, at_ns: u64) -> WorkNote {
        let sum = RunFigures::sum(tables);
        let refaults = tables.processes().filter_map(|process| {
            let counts = refaults_of(process.stats());
            counts.iter().any(|count| *count > 0).then_some((place(process.stats()), counts))
        });
        let (folding_ns, own_ns) = (sum.get("folding_ns"), sum.get("own_ns"));
        WorkNote { at_ns, folding_ns, own_ns, refaults: refaults.collect() }
    }

    /// Returns the seconds from then to `now_ns`.
    pub fn seconds_until(&self, now_ns: u64) -> f64 {
        now_ns.saturating_sub(self.at_ns) as f64 / 1e9
    }

    /// Returns the CPU time of folding since then as a share of the program's own, percent. A run
    /// that did nothing was not slowed down.
    pub fn slowdown(&self, sum: &RunFigures) -> f64 {
        let folding = sum.get("folding_ns").saturating_sub(self.folding_ns);
        let own = sum.get("own_ns").saturating_sub(self.own_ns);
        if own == 0 { 0.0 } else { folding as f64 * 100.0 / own as f64 }
    }

    /// Returns the refaults of a process since then, by the limit.
    pub fn refaults_since(&self, stats: &Stats) -> [u64; LIMIT_BUCKETS] {
        let mut counts = refaults_of(stats);
        if let Some(before) = self.refaults.get(&place(stats)) {
            counts.iter_mut().zip(before).for_each(|(count, b)| *count = count.saturating_sub(*b));
        }
        counts
    }
}

fn place(stats: &Stats) -> usize {
    ptr::from_ref(stats).addr()
}

/// Returns all refaults of a process, by the limit.
pub fn refaults_of(stats: &Stats) -> [u64; LIMIT_BUCKETS] {
    std::array::from_fn(|n| stats.refaults_by_limit[n].load(Relaxed))
}

/// The notes of a run.
#[derive(Default)]
pub struct RecentWork {
    older: Option<WorkNote>,
    newer: Option<WorkNote>,
}

impl RecentWork {
    /// Notes the counters, if it is time to. `now_ns` is a monotonic clock.
    pub fn note(&mut self, tables: &UserTables, now_ns: u64) {
        let is_due = |note: &WorkNote| now_ns.saturating_sub(note.at_ns) >= PERIOD_NS;
        if self.newer.as_ref().is_none_or(is_due) {
            self.older = self.newer.take();
            self.newer = Some(WorkNote::of(tables, now_ns));
        }
    }

    /// Returns the note from which the last minutes count. Returns `None` in the first ones.
    pub fn begin(&self) -> Option<&WorkNote> {
        self.older.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::recommended::LimitCurve;
    use crate::table::hand_over::tests::{claim, tables};
    use memfold_stats::LimitBucket;

    const MIB: u64 = 1 << 20;

    #[test]
    fn start_of_an_idle_server_costs_it_nothing_later() {
        let (tables, mut recent) = (tables(), RecentWork::default());
        let process = claim(&tables, 1);
        let stats = process.stats();
        stats.peak_bytes.store(100 * MIB, Relaxed);
        stats.peak_folded_bytes.store(800 * MIB, Relaxed);
        let load = |mib: u64, pages: u64, folding_ns: u64| {
            stats.refaults_by_limit[LimitBucket::of(mib * MIB).0].fetch_add(pages, Relaxed);
            stats.folding_ns.fetch_add(folding_ns, Relaxed);
            stats.own_ns.fetch_add(1000, Relaxed);
        };
        recent.note(&tables, 0);
        load(400, 1000, 3000);
        assert!(recent.begin().is_none(), "its start is all that there is");
        for period in 1..4 {
            recent.note(&tables, period * PERIOD_NS);
        }
        let sum = || RunFigures::sum(&tables);
        let curve = |recent: &RecentWork| LimitCurve::since(&tables, &sum(), recent.begin());
        assert!(LimitCurve::of(&tables, &sum()).unwrap().limit_for(2.0).is_some());
        assert!(curve(&recent).is_none() && recent.begin().unwrap().slowdown(&sum()) == 0.0);
        load(200, 10, 500);
        let curve = curve(&recent).unwrap();
        let points = curve.points().0;
        assert_eq!(points.iter().map(|(_, percent)| *percent).collect::<Vec<_>>(), [50.0, 0.0]);
        assert_eq!(points[1].0 / MIB, 208, "only the refaults of now count");
    }
}
