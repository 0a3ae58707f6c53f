//! Which limits the run would have needed for a given slowdown, by an estimate from its refaults.
//!
//! A larger limit keeps the pages whose refault distance is small. It saves their part of the
//! slowdown. Smaller limits than the given one can't be judged, because the kernel
//! does not report touches of pages that are in memory.
//!
//! No limit is larger than what the run would have had without memfold. The part of a process can't
//! be known well: a child of fork begins with the folded memory of its parent, and may hold little
//! of the limit.
use crate::report::curve::CurvePoints;
use crate::report::figures::RunFigures;
use crate::report::recent::{WorkNote, refaults_of};
use memfold_engine::config::Size;
use memfold_run::users::UserTables;
use memfold_stats::{LIMIT_BUCKETS, LimitBucket};
use serde_json::Value;
use std::sync::atomic::Ordering::Relaxed;

/// The slowdowns for which a limit is recommended, percent.
const SLOWDOWNS: [f64; 3] = [2.0, 10.0, 50.0];

/// The slowdown of a run as a function of its limit.
pub struct LimitCurve {
    /// The slowdown of the run as it was, percent.
    slowdown: f64,
    /// The most that the run has held, bytes.
    peak: u64,
    /// Limits in bytes, each with the number of pages that a smaller one loads again. They descend.
    refaults: Vec<(u64, u64)>,
}

impl LimitCurve {
    /// Returns the curve of a run; `None` if it has loaded nothing, or has not worked.
    pub fn of(tables: &UserTables, sum: &RunFigures) -> Option<LimitCurve> {
        LimitCurve::since(tables, sum, None)
    }

    /// Returns the curve of what the run has done since `begin`, or since its start; `None` if it
    /// has loaded nothing since, or has not worked.
    pub fn since(
        tables: &UserTables,
        sum: &RunFigures,
        begin: Option<&WorkNote>,
    ) -> Option<LimitCurve> {
        let slowdown = match begin {
            Some(begin) => begin.slowdown(sum),
            None => sum.slowdown()?,
        };
        let run_peak = sum.get("peak_bytes");
        // The most of each kind, so at least the most of both together.
        let plain_bytes =
            sum.get("peak_resident_bytes").saturating_add(sum.get("peak_folded_bytes"));
        let enough = plain_bytes.max(run_peak);
        let processes = tables.processes();
        let all = processes.flat_map(|process| {
            let stats = process.stats();
            let refaults = begin.map_or_else(|| refaults_of(stats), |it| it.refaults_since(stats));
            scaled(refaults, stats.peak_bytes.load(Relaxed).max(1), run_peak)
        });
        let mut refaults: Vec<(u64, u64)> =
            all.map(|(limit, pages)| (limit.min(enough), pages)).collect();
        refaults.sort_unstable_by(|one, other| other.cmp(one));
        (!refaults.is_empty()).then_some(LimitCurve { slowdown, peak: run_peak, refaults })
    }

    /// Returns the least limit in bytes at which the slowdown is at most so many percent. Returns
    /// `None` if it was no more at the limit that the run had.
    pub fn limit_for(&self, percent: f64) -> Option<u64> {
        let all = self.refaults.iter().fold(0, |sum: u64, (_, pages)| sum.saturating_add(*pages));
        let mut faults_left = 0u64;
        self.refaults.iter().find_map(|(limit, pages)| {
            faults_left = faults_left.saturating_add(*pages);
            (self.slowdown * faults_left as f64 / all as f64 > percent).then_some(*limit)
        })
    }

    /// Returns the slowdown at the limit that the run had, and at each larger one that saves some of
    /// it.
    pub fn points(&self) -> CurvePoints {
        let all = self.refaults.iter().fold(0, |sum: u64, (_, pages)| sum.saturating_add(*pages));
        let (mut faults_left, mut points) = (all, vec![(self.peak, self.slowdown)]);
        for (limit, pages) in self.refaults.iter().rev() {
            faults_left = faults_left.saturating_sub(*pages);
            let percent = self.slowdown * faults_left as f64 / all as f64;
            match points.last_mut() {
                // The run has held so much, and has loaded these pages all the same.
                Some(_) if *limit <= self.peak => {}
                Some(last) if *limit == last.0 => last.1 = percent,
                _ => points.push((*limit, percent)),
            }
        }
        CurvePoints(points)
    }

    /// Returns an object with the limit for each slowdown in percent, in bytes. It is null where the
    /// limit that the run had is enough.
    pub fn json(&self) -> Value {
        let one = |percent: f64| (format!("{percent}"), self.limit_for(percent).into());
        Value::Object(SLOWDOWNS.into_iter().map(one).collect())
    }

    /// Returns the line of the summary; `None` if no slowdown asks for a larger limit.
    pub fn line(&self) -> Option<String> {
        let one = |percent: f64| {
            let limit = self.limit_for(percent);
            limit.map(|bytes| format!("{} for {percent}%", Size(bytes)))
        };
        let all: Vec<String> = SLOWDOWNS.into_iter().filter_map(one).collect();
        (!all.is_empty())
            .then(|| format!("limits for a smaller slowdown, by an estimate: {}", all.join(", ")))
    }
}

/// Returns the refaults of a process by the limit of the run: it is taken to have the same part of
/// any limit of the run.
fn scaled(
    refaults: [u64; LIMIT_BUCKETS],
    peak: u64,
    run_peak: u64,
) -> impl Iterator<Item = (u64, u64)> {
    let of_run = move |bytes: u64| {
        (u128::from(bytes) * u128::from(run_peak.max(peak)) / u128::from(peak)) as u64
    };
    refaults
        .into_iter()
        .enumerate()
        .filter(|(_, pages)| *pages > 0)
        .map(move |(n, pages)| (of_run(LimitBucket(n).end()), pages))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use memfold_run::table::ProcessSlot;

    const MIB: u64 = 1 << 20;

    /// A process with refaults by the limit, in MiB.
    fn process(tables: &UserTables, pid: u32, refaults: &[(u64, u64)]) -> ProcessSlot {
        let process = claim(tables, pid);
        for (mib, pages) in refaults {
            let bucket = LimitBucket::of(mib * MIB);
            process.stats().refaults_by_limit[bucket.0].store(*pages, Relaxed);
        }
        process.stats().own_ns.store(1_000_000, Relaxed);
        process.stats().folding_ns.store(600_000, Relaxed);
        process.stats().peak_bytes.store(100 * MIB, Relaxed);
        process.stats().peak_folded_bytes.store(800 * MIB, Relaxed);
        process
    }

    fn curve(tables: &UserTables) -> LimitCurve {
        LimitCurve::of(tables, &RunFigures::sum(tables)).unwrap()
    }

    #[test]
    fn larger_limits_save_the_refaults_that_they_avoid() {
        let tables = tables();
        process(&tables, 1, &[(100, 300), (200, 200), (400, 100)]);
        let curve = curve(&tables);
        let mib = |percent| curve.limit_for(percent).map(|bytes| bytes / MIB);
        // 60% with all of them, 30% without the nearest, 10% without two thirds.
        assert_eq!([2.0, 11.0, 50.0, 60.0].map(mib), [Some(416), Some(208), Some(104), None]);
        assert_eq!(
            curve.line().unwrap(),
            "limits for a smaller slowdown, by an estimate: 416.0 MiB for 2%, 208.0 MiB for 10%, 104.0 MiB for 50%"
        );
    }

    #[test]
    fn processes_have_their_part_of_the_limit() {
        let tables = tables();
        process(&tables, 1, &[(200, 10)]).stats().resident_bytes.store(50 * MIB, Relaxed);
        process(&tables, 2, &[]).stats().resident_bytes.store(150 * MIB, Relaxed);
        tables.note_totals();
        let limit = curve(&tables).limit_for(1.0).map(|bytes| bytes / MIB);
        assert_eq!(limit, Some(416), "twice what the process itself would need");
    }

    /// Children of fork that held little of the limit asked for 25 GiB.
    #[test]
    fn no_limit_is_above_what_the_run_would_have_plainly() {
        let tables = tables();
        process(&tables, 1, &[(100, 10)]).stats().resident_bytes.store(100 * MIB, Relaxed);
        let child = process(&tables, 2, &[(150, 10)]);
        child.stats().peak_bytes.store(MIB, Relaxed);
        for process in tables.processes() {
            process.stats().folded_bytes.store(60 * MIB, Relaxed);
            process.stats().peak_folded_bytes.store(60 * MIB, Relaxed);
        }
        tables.note_totals();
        let limit = curve(&tables).limit_for(1.0).map(|bytes| bytes / MIB);
        assert_eq!(limit, Some(220), "100 MiB in memory, and 60 MiB folded in each");
    }

    #[test]
    fn points_descend_from_the_runs_own_slowdown() {
        let tables = tables();
        process(&tables, 1, &[(50, 60), (120, 240), (200, 200), (400, 100)]);
        let points = curve(&tables).points().0;
        let points_shown: Vec<(u64, u64)> =
            points.iter().map(|(at, by)| (at / MIB, by.round() as u64)).collect();
        assert_eq!(points_shown, [(100, 60), (128, 30), (208, 10), (416, 0)]);
        for (bytes, percent) in points {
            assert!(curve(&tables).limit_for(percent).is_none_or(|limit| limit <= bytes));
        }
    }

    #[test]
    fn a_run_without_refaults_has_no_curve() {
        let tables = tables();
        process(&tables, 1, &[]);
        assert!(LimitCurve::of(&tables, &RunFigures::sum(&tables)).is_none());
    }
}
