//! What `memfold run` says about a run while it goes on, each once: that the program spends its time
//! on loading memory, and that processes without an engine have more than the limit.
use crate::report::figures::RunFigures;
use crate::report::recommended::LimitCurve;
use memfold_engine::config::Size;
use memfold_run::users::UserTables;

/// The time over which a program is judged, nanoseconds.
const WINDOW_NS: u64 = 10_000_000_000;

/// CPU time of a run until a moment, nanoseconds.
#[derive(Copy, Clone, Default)]
struct WorkNote {
    at_ns: u64,
    folding_ns: u64,
    own_ns: u64,
}

impl WorkNote {
    /// Returns whether more than half of the CPU time since `before` has gone to folding. It must
    /// have taken half of the time of a CPU too: a program that mostly sleeps is not slow.
    fn is_mostly_folding(&self, before: &WorkNote) -> bool {
        let folding = self.folding_ns.saturating_sub(before.folding_ns);
        let own = self.own_ns.saturating_sub(before.own_ns);
        folding > own && folding > self.at_ns.saturating_sub(before.at_ns) / 2
    }
}

/// Watches a run.
#[derive(Default)]
pub struct RunNotes {
    window: Option<WorkNote>,
    has_told_work: bool,
}

impl RunNotes {
    /// Returns the line to print now, if there is one. `now_ns` is a monotonic clock.
    pub fn line(&mut self, tables: &UserTables, now_ns: u64) -> Option<String> {
        past_by_small_ones(tables).or_else(|| self.thrashing(tables, now_ns))
    }

    fn thrashing(&mut self, tables: &UserTables, now_ns: u64) -> Option<String> {
        if self.has_told_work {
            return None;
        }
        let before = *self.window.get_or_insert(WorkNote { at_ns: now_ns, ..WorkNote::default() });
        if now_ns.saturating_sub(before.at_ns) < WINDOW_NS {
            return None;
        }
        let sum = RunFigures::sum(tables);
        let (folding_ns, own_ns) = (sum.get("folding_ns"), sum.get("own_ns"));
        let now = WorkNote { at_ns: now_ns, folding_ns, own_ns };
        self.window = Some(now);
        self.has_told_work = now.is_mostly_folding(&before);
        if !self.has_told_work {
            return None;
        }
        let larger = LimitCurve::of(tables, &sum).and_then(|curve| curve.line());
        let seconds = (now_ns - before.at_ns) / 1_000_000_000;
        Some(format!(
            "warning: In the last {seconds} s, most of the program's CPU time went to loading folded memory{}",
            larger.map_or(String::new(), |limits| format!("; {limits}"))
        ))
    }
}

/// Returns the warning that processes without an engine have more than the whole run may have, if
/// it is the first that the limit can't be kept.
fn past_by_small_ones(tables: &UserTables) -> Option<String> {
    let (limit, resident) = tables.bounds().given();
    let (count, bytes) = tables.bounds().slotless();
    if bytes <= limit.min(resident) || !tables.tables()[0].report_limit() {
        return None;
    }
    Some(format!(
        "warning: The limit of {} can't be kept, and is exceeded so that no data is lost. {count} processes without an engine have {}: they are too small to be folded, or can't be managed",
        Size(limit.min(resident)),
        Size(bytes)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::hand_over::tests::{claim, tables};
    use std::sync::atomic::Ordering::Relaxed;

    const S: u64 = 1_000_000_000;

    #[test]
    fn thrashing_is_told_once_while_it_happens() {
        let (tables, mut notes) = (tables(), RunNotes::default());
        let process = claim(&tables, 1);
        let stats = process.stats();
        let at = |notes: &mut RunNotes, now_s: u64, folding_ms: u64, own_ms: u64| {
            stats.folding_ns.fetch_add(folding_ms * 1_000_000, Relaxed);
            stats.own_ns.fetch_add(own_ms * 1_000_000, Relaxed);
            notes.line(&tables, now_s * S)
        };
        assert_eq!(at(&mut notes, 100, 0, 0), None);
        assert_eq!(at(&mut notes, 109, 9000, 10), None, "too short");
        assert_eq!(at(&mut notes, 110, 0, 9100), None, "it works as much");
        assert_eq!(at(&mut notes, 120, 4900, 10), None, "it mostly sleeps");
        let line = at(&mut notes, 130, 6000, 5000).unwrap();
        assert!(line.contains("In the last 10 s, most of"), "{line}");
        assert_eq!(at(&mut notes, 140, 9000, 10), None, "once");
    }

    #[test]
    fn small_processes_past_the_limit_are_told_once() {
        let (tables, mut notes) = (tables(), RunNotes::default());
        tables.bounds().set_given(100 << 20, u64::MAX);
        tables.bounds().set_slotless(30, 100 << 20);
        assert_eq!(notes.line(&tables, 0), None);
        tables.bounds().set_slotless(31, 101 << 20);
        let line = notes.line(&tables, 0).unwrap();
        assert!(line.contains("100.0 MiB") && line.contains("31 processes"), "{line}");
        assert_eq!(notes.line(&tables, 0), None);
    }
}
