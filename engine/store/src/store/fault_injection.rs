//! Deliberate faults for tests: the Nth codec call fails, the Nth allocation finds the pool full,
//! bytes are damaged.
use memfold_os::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// A kind of fault.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// A block's compression fails: `SaveError::Codec`.
    Codec,
    /// An allocation finds the pool full: `SaveError::PoolFull`.
    PoolFull,
    /// A bit of the compressed bytes flips before they are stored, as if the codec were wrong: only
    /// verification detects it. Only compressed blocks count, not raw or same-filled ones.
    Compressed,
    /// A bit of a stored object flips after the save: loads of it fail.
    Stored,
}

const KINDS: usize = 4;

/// The armed faults. Costs one relaxed load per chance when none is armed.
pub struct FaultPlan {
    armed: AtomicBool,
    due: [DueFault; KINDS],
}

struct DueFault {
    /// Chances until the fault, 0 when off.
    left: AtomicU64,
    /// Chances between repetitions, 0 for once.
    every: AtomicU64,
    struck: AtomicU64,
}

impl FaultPlan {
    pub(crate) const fn new() -> FaultPlan {
        let faults = [const {
            DueFault {
                left: AtomicU64::new(0),
                every: AtomicU64::new(0),
                struck: AtomicU64::new(0),
            }
        }; KINDS];
        FaultPlan { armed: AtomicBool::new(false), due: faults }
    }

    /// Makes `fault` strike once, at the `nth` chance from now (1: the next). 0 disarms it.
    pub fn strike_at(&self, fault: InjectedFault, nth: u64) {
        self.arm(fault, nth, 0);
    }

    /// Makes `fault` strike at every `nth` chance. 0 disarms it.
    pub fn strike_every(&self, fault: InjectedFault, nth: u64) {
        self.arm(fault, nth, nth);
    }

    /// Disarms everything.
    pub fn clear(&self) {
        self.armed.store(false, SeqCst);
        for entry in &self.due {
            entry.left.store(0, SeqCst);
        }
    }

    /// Returns how often `fault` struck.
    pub fn struck(&self, fault: InjectedFault) -> u64 {
        self.due[fault as usize].struck.load(SeqCst)
    }

    /// Returns whether `fault` strikes at this chance.
    #[inline]
    pub(crate) fn strikes(&self, fault: InjectedFault) -> bool {
        self.armed.load(Relaxed) && self.count_down(fault)
    }

    fn arm(&self, fault: InjectedFault, nth: u64, every: u64) {
        let entry = &self.due[fault as usize];
        entry.every.store(every, SeqCst);
        entry.left.store(nth, SeqCst);
        self.armed.store(true, SeqCst);
    }

    #[cold]
    fn count_down(&self, fault: InjectedFault) -> bool {
        let entry = &self.due[fault as usize];
        let every = entry.every.load(SeqCst);
        let next = |left: u64| match left {
            0 => None,
            1 => Some(every),
            n => Some(n - 1),
        };
        let strikes = entry.left.fetch_update(SeqCst, SeqCst, next) == Ok(1);
        entry.struck.fetch_add(strikes as u64, SeqCst);
        strikes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_strikes_at_its_chance_and_no_other() {
        let plan = FaultPlan::new();
        assert!(!plan.strikes(InjectedFault::Codec));
        plan.strike_at(InjectedFault::Codec, 3);
        let strikes: Vec<_> = (0..6).map(|_| plan.strikes(InjectedFault::Codec)).collect();
        assert_eq!(strikes, [false, false, true, false, false, false]);
        plan.strike_every(InjectedFault::PoolFull, 2);
        let strikes: Vec<_> = (0..5).map(|_| plan.strikes(InjectedFault::PoolFull)).collect();
        assert_eq!(strikes, [false, true, false, true, false]);
        plan.clear();
        assert!((0..9).all(|_| !plan.strikes(InjectedFault::PoolFull)));
        assert_eq!(
            (plan.struck(InjectedFault::Codec), plan.struck(InjectedFault::PoolFull)),
            (1, 2)
        );
    }
}
