//! The slot of a process in the table of its user, and what it is charged with.
use super::bounds::UserPortion;
use crate::fair_share::ShareClaim;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed};
use memfold_os::Errno;
use memfold_os::thread::owner::{OwnerState, RobustList, RobustOwner};
use memfold_stats::Stats;

/// Seats that lie together.
pub(super) const GROUP: usize = 64;
/// A process is charged for what it takes in steps of so many bytes.
const CHARGE_BYTES: u64 = 256 << 10;

/// What processes of a table have in common.
#[repr(C)]
pub(super) struct TableCharges {
    /// What those without an engine have mapped past what each may have, bytes.
    pub(super) waiting_bytes: AtomicU64,
    /// What all with a slot are charged with, bytes.
    pub(super) charged_bytes: AtomicU64,
}

impl TableCharges {
    /// A process that has ended, or begins, holds nothing.
    pub(super) fn forget(&self, slot: &SlotWords) {
        if slot.charged_bytes.load(Relaxed) > 0 {
            let charged = slot.charged_bytes.swap(0, AcqRel);
            self.charged_bytes.fetch_sub(charged, AcqRel);
        }
    }
}

/// What all processes look at all the time.
#[repr(C)]
pub(super) struct SlotWords {
    pub(super) owner: RobustOwner,
    /// The process, by its number as `memfold run` sees it.
    pub(super) pid: AtomicU32,
    need_bytes: AtomicU64,
    /// What it can't fold, uncompressed, and what is folded.
    least_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// Its part of what all are charged with.
    charged_bytes: AtomicU64,
}

impl SlotWords {
    /// What it asks of a bound; `limit`: of one that counts what is folded.
    pub(super) fn claim(&self, limit: bool) -> ShareClaim {
        let stored = if limit { self.stored_bytes.load(Relaxed) } else { 0 };
        ShareClaim {
            need: self.need_bytes.load(Relaxed),
            least: self.least_bytes.load(Relaxed).saturating_add(stored),
        }
    }
}

#[repr(C, align(64))]
pub(super) struct SlotFigures {
    pub(super) will: RobustList,
    pub(super) stats: Stats,
}

#[repr(C)]
pub(super) struct TableGroup {
    pub(super) slots: [SlotWords; GROUP],
    pub(super) places: [SlotFigures; GROUP],
}

/// A process of the run.
#[derive(Copy, Clone)]
pub struct ProcessSlot {
    /// Of its slot, which is at several addresses where several mappings have it.
    pub(super) number: usize,
    pub(super) charges: &'static TableCharges,
    pub(super) portion: UserPortion,
    pub(super) slot: &'static SlotWords,
    pub(super) place: &'static SlotFigures,
}

impl ProcessSlot {
    /// Its number, as `memfold run` sees it.
    pub fn pid(&self) -> u32 {
        self.slot.pid.load(Relaxed)
    }

    /// Whether it is still there, and its program is the one that has the slot.
    pub fn is_alive(&self) -> bool {
        self.slot.owner.state() == OwnerState::Held
    }

    /// Gives the slot up: by the thread that has claimed it.
    ///
    /// # Errors
    /// As [`RobustOwner::leave`].
    pub fn leave(&self) -> Result<(), Errno> {
        self.slot.owner.leave()
    }

    /// Its figures.
    pub fn stats(&self) -> &'static Stats {
        &self.place.stats
    }

    /// What it needs of the limit, bytes.
    pub fn set_need(&self, bytes: u64) {
        self.slot.need_bytes.store(bytes, Relaxed);
    }

    /// What it can't fold, uncompressed, and what it has folded takes, bytes.
    pub fn set_least(&self, bytes: u64, stored: u64) {
        self.slot.least_bytes.store(bytes, Relaxed);
        self.slot.stored_bytes.store(stored, Relaxed);
    }

    /// Whether both are the same process.
    pub fn is(&self, other: &ProcessSlot) -> bool {
        self.number == other.number
    }

    /// What it asks of the limit, or of the bound of resident memory.
    pub fn claim(&self, limit: bool) -> ShareClaim {
        self.slot.claim(limit)
    }

    /// Charges this process with `bytes` in all, unless it is charged with so much already: before
    /// it takes memory. `false`: all processes together would be past the limit, or past the bound
    /// of resident memory, and nothing was charged. Costs one load while there is room in the step.
    ///
    /// Processes that grow at once learn of each other so. The sum is never below what the slots are
    /// charged with, also where a process is killed in between: the sum is raised first, and
    /// lowered last.
    pub fn charge(&self, bytes: u64, limit: bool) -> bool {
        let own = self.slot.charged_bytes.load(Relaxed);
        if bytes <= own {
            return true;
        }
        let bounds = self.portion.left(self.charges.waiting_bytes.load(Relaxed));
        let most = if limit { bounds.0 } else { bounds.1 };
        let step = (bytes - own).next_multiple_of(CHARGE_BYTES);
        [step, bytes - own].into_iter().any(|more| {
            let fits = |sum: u64| sum.checked_add(more).filter(|sum| *sum <= most);
            let is_charged = self.charges.charged_bytes.fetch_update(AcqRel, Relaxed, fits).is_ok();
            if is_charged {
                self.slot.charged_bytes.fetch_add(more, AcqRel);
            }
            is_charged
        })
    }

    /// Charges it with what it holds, bytes: no more and no less.
    pub fn settle(&self, bytes: u64) {
        let own = self.slot.charged_bytes.load(Relaxed);
        if bytes > own {
            self.charges.charged_bytes.fetch_add(bytes - own, AcqRel);
            self.slot.charged_bytes.fetch_add(bytes - own, AcqRel);
        } else {
            let less = |now: u64| now.checked_sub(own - bytes);
            if self.slot.charged_bytes.fetch_update(AcqRel, Relaxed, less).is_ok() {
                self.charges.charged_bytes.fetch_sub(own - bytes, AcqRel);
            }
        }
    }
}
