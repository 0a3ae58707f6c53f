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
/// The memory that stays resident grows or shrinks by one part in this many with a judgement.
const STEP: u64 = 4;
/// It shrinks after so many calm judgements in a row. The number doubles each time that it had to
/// grow again, up to the second.
const PATIENCE: u32 = 1;
const PATIENCE_MOST: u32 = 1024;
/// Less than this is nothing, bytes.
const FLOOR_LEAST: u64 = 1 << 20;

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

    /// Returns whether so much was stored that the compression ratio counts.
    fn is_known(&self) -> bool {
        self.stored >= self.plain / STORED_SHARE
    }

    fn shrinks_well(&self) -> bool {
        !self.is_known() || (self.takes as f64) < self.stored as f64 * SHRINKS_WELL
    }
}

/// The judge of one process.
#[derive(Debug)]
pub struct ThrashJudge {
    last: FoldingCost,
    floor: u64,
    /// Calm judgements since the floor last changed, and how many are needed for it to fall.
    calm: u32,
    patience: u32,
    /// Whether the last change was a fall.
    has_fallen: bool,
}

impl Default for ThrashJudge {
    fn default() -> ThrashJudge {
        ThrashJudge {
            last: FoldingCost::default(),
            floor: 0,
            calm: 0,
            patience: PATIENCE,
            has_fallen: false,
        }
    }
}

impl ThrashJudge {
    /// Judges anew, and returns how much uncompressed memory stays, bytes: 0 if the bounds alone
    /// decide. It falls again once the data shrinks well. It is never much more than all memory, so
    /// that what the program frees is not kept for other data.
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
            self.rise(gain.resident + gain.resident / STEP);
        } else if gain.is_known() && gain.shrinks_well() {
            self.fall();
        }
        self.floor = self.floor.min(gain.plain + gain.plain / STEP);
        self.floor
    }

    fn rise(&mut self, floor: u64) {
        if core::mem::replace(&mut self.has_fallen, false) {
            self.patience = (self.patience * 2).min(PATIENCE_MOST);
        }
        self.floor = self.floor.max(floor);
        self.calm = 0;
    }

    fn fall(&mut self) {
        self.calm += 1;
        if self.floor == 0 || self.calm < self.patience {
            return;
        }
        let less = self.floor - self.floor / STEP;
        self.floor = if less < FLOOR_LEAST { 0 } else { less };
        (self.calm, self.has_fallen) = (0, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const MIB: u64 = 1 << 20;
    const POOR: FoldingGain = FoldingGain {
        plain: 81 * MIB,
        folded: 60 * MIB,
        stored: 70 * MIB,
        takes: 48 * MIB,
        resident: 20 * MIB,
    };

    fn cost(fault_ms: u64, own_ms: u64) -> FoldingCost {
        FoldingCost { fault_ns: fault_ms * MS, own_ns: own_ms * MS }
    }

    #[test]
    fn incompressible_data_stays_where_faults_cost_too_much() {
        let mut thrash = ThrashJudge::default();
        assert_eq!(thrash.judge(cost(50, 1), &POOR), 0, "too early to tell");
        assert_eq!(thrash.judge(cost(200, 30), &POOR), 0, "7 times the own time");
        assert_eq!(thrash.judge(cost(900, 35), &POOR), 25 * MIB);
        let more = FoldingGain { resident: 25 * MIB, ..POOR };
        assert_eq!(thrash.judge(cost(901, 60), &more), 25 * MIB, "it has helped");
        assert_eq!(thrash.judge(cost(1500, 61), &more), 25 * MIB / 4 * 5);
    }

    #[test]
    fn what_is_freed_is_not_kept() {
        let mut thrash = ThrashJudge::default();
        assert_eq!(thrash.judge(cost(900, 35), &POOR), 25 * MIB);
        let little = FoldingGain { plain: 4 * MIB, resident: 4 * MIB, ..POOR };
        assert_eq!(thrash.judge(cost(901, 135), &little), 5 * MIB);
    }

    /// What stays has no stored copy then, so nothing is known of it.
    #[test]
    fn floor_stays_while_little_is_stored() {
        let mut thrash = ThrashJudge::default();
        assert_eq!(thrash.judge(cost(900, 35), &POOR), 25 * MIB);
        let little = FoldingGain { folded: 0, stored: 10 * MIB, takes: MIB, ..POOR };
        for n in 1..2000 {
            assert_eq!(thrash.judge(cost(900, 35 + 30 * n), &little), 25 * MIB);
        }
    }

    /// The incompressible data may be gone, or only rest.
    #[test]
    fn floor_falls_once_data_shrinks_well_and_ever_later_if_in_vain() {
        let mut thrash = ThrashJudge::default();
        let well = FoldingGain { takes: 10 * MIB, resident: 60 * MIB, ..POOR };
        let mut now = cost(900, 35);
        let mut step = |thrash: &mut ThrashJudge, fault_ms, own_ms, gain: &FoldingGain| {
            now.fault_ns += fault_ms * MS;
            now.own_ns += own_ms * MS;
            thrash.judge(now, gain)
        };
        let mut waited = Vec::new();
        for _ in 0..16 {
            assert_eq!(step(&mut thrash, 900_000, 1, &POOR), 25 * MIB);
            let mut calm = 0;
            while step(&mut thrash, 1, 20, &well) == 25 * MIB {
                calm += 1;
            }
            waited.push(calm + 1);
        }
        assert_eq!((waited[0], waited[1], waited[15]), (1, 2, PATIENCE_MOST));
        for _ in 0..16 * PATIENCE_MOST {
            step(&mut thrash, 1, 20, &well);
        }
        assert_eq!(step(&mut thrash, 1, 20, &well), 0);
    }

    #[test]
    fn data_that_shrinks_well_is_folded_at_any_cost() {
        let mut thrash = ThrashJudge::default();
        let well = FoldingGain { takes: 41 * MIB, ..POOR };
        assert_eq!(thrash.judge(cost(100_000, 1), &well), 0);
    }

    #[test]
    fn the_more_is_saved_the_more_it_may_cost() {
        let judge = |folded, fault_ms| {
            let gain = FoldingGain { folded: folded * MIB, ..POOR };
            ThrashJudge::default().judge(cost(fault_ms, 10), &gain)
        };
        assert_eq!((judge(64, 190), judge(64, 210)), (0, 25 * MIB));
        assert_eq!((judge(68, 240), judge(68, 260)), (0, 25 * MIB));
    }
}
