//! Decides whether folding costs more than it saves. A limit is then exceeded, if a program would
//! pay for it with most of its time, and save little memory.
//!
//! This happens with data that hardly compresses. The pool fills with it, the program's working set
//! finds no room beside the pool, and each access faults. A tenth of the memory then costs a
//! hundred times the time. With data that compresses well the limit is always kept, whatever it
//! costs.

/// Folding may cost at least so many times the program's own time.
const SLOWDOWN_LEAST: f64 = 10.0;
/// For each part of the memory that it saves, folding may cost so many times more. For a fifth of
/// the memory that is 20 times the program's own time.
const SLOWDOWN_FOR_ALL: f64 = 100.0;
/// Data that is stored in less than this part of its size is always folded.
const SHRINKS_WELL: f64 = 0.6;
/// The compression ratio counts only after one part in this many of all memory was stored.
const STORED_SHARE: u64 = 8;
/// Faults must have taken so much time before the first judgement, nanoseconds. A start costs more
/// than the rest of a run.
const LEAST_NS: u64 = 100_000_000;
/// Time between two judgements, of faults and program together, nanoseconds.
const APART_NS: u64 = 20_000_000;
/// The memory that stays resident grows by one part in this many with each judgement.
const STEP: u64 = 4;

/// The costs of a process since it began.
#[derive(Copy, Clone, Debug, Default)]
pub struct FoldingCost {
    /// CPU time in faults, nanoseconds.
    pub fault_ns: u64,
    /// CPU time of the program itself, without faults and engine threads, nanoseconds.
    pub own_ns: u64,
}

/// The memory that folding has saved by now, bytes.
#[derive(Copy, Clone, Debug)]
pub struct FoldingGain {
    /// All memory of the process as it would be without folding.
    pub plain: u64,
    /// The part of it that is only in the store.
    pub folded: u64,
    /// The part of it that has a stored copy, before compression.
    pub stored: u64,
    /// Bytes of store and index.
    pub takes: u64,
    /// Bytes that are uncompressed now.
    pub resident: u64,
}

impl FoldingGain {
    /// Returns the part of all memory that folding saves.
    fn share(&self) -> f64 {
        self.folded.saturating_sub(self.takes) as f64 / self.plain.max(1) as f64
    }

    fn shrinks_well(&self) -> bool {
        self.stored < self.plain / STORED_SHARE
            || (self.takes as f64) < self.stored as f64 * SHRINKS_WELL
    }
}

/// The judge of one process.
#[derive(Debug, Default)]
pub struct ThrashJudge {
    last: FoldingCost,
    floor: u64,
}

impl ThrashJudge {
    /// Judges anew, and returns how much uncompressed memory stays, bytes: 0 if the bounds alone
    /// decide.
    pub fn judge(&mut self, now: FoldingCost, gain: &FoldingGain) -> u64 {
        if now.fault_ns + now.own_ns < self.last.fault_ns + self.last.own_ns + APART_NS {
            return self.floor;
        }
        let before = core::mem::replace(&mut self.last, now);
        let lately = FoldingCost {
            fault_ns: now.fault_ns.saturating_sub(before.fault_ns),
            own_ns: now.own_ns.saturating_sub(before.own_ns),
        };
        let most = SLOWDOWN_LEAST.max(SLOWDOWN_FOR_ALL * gain.share());
        let is_past = |cost: FoldingCost| cost.fault_ns as f64 > cost.own_ns as f64 * most;
        if now.fault_ns > LEAST_NS && is_past(now) && is_past(lately) && !gain.shrinks_well() {
            self.floor = self.floor.max(gain.resident + gain.resident / STEP);
        }
        self.floor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const POOR: FoldingGain =
        FoldingGain { plain: 81, folded: 60, stored: 70, takes: 48, resident: 20 };

    fn cost(fault_ms: u64, own_ms: u64) -> FoldingCost {
        FoldingCost { fault_ns: fault_ms * MS, own_ns: own_ms * MS }
    }

    #[test]
    fn incompressible_data_stays_where_faults_cost_too_much() {
        let mut thrash = ThrashJudge::default();
        assert_eq!(thrash.judge(cost(50, 1), &POOR), 0, "too early to tell");
        assert_eq!(thrash.judge(cost(200, 30), &POOR), 0, "7 times the own time");
        assert_eq!(thrash.judge(cost(900, 35), &POOR), 25);
        assert_eq!(
            thrash.judge(cost(901, 60), &FoldingGain { resident: 25, ..POOR }),
            25,
            "it has helped"
        );
        assert_eq!(thrash.judge(cost(1500, 61), &FoldingGain { resident: 25, ..POOR }), 31);
    }

    #[test]
    fn data_that_shrinks_well_is_folded_at_any_cost() {
        let mut thrash = ThrashJudge::default();
        let well = FoldingGain { takes: 41, ..POOR };
        assert_eq!(thrash.judge(cost(100_000, 1), &well), 0);
    }

    #[test]
    fn the_more_is_saved_the_more_it_may_cost() {
        let judge = |folded, fault_ms| {
            ThrashJudge::default().judge(cost(fault_ms, 10), &FoldingGain { folded, ..POOR })
        };
        assert_eq!((judge(64, 190), judge(64, 210)), (0, 25));
        assert_eq!((judge(68, 240), judge(68, 260)), (0, 25));
    }
}
