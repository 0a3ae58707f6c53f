//! The slot of a process in the table of its user, and the memory that it is charged with.
use super::bounds::UserPortion;
use super::lending::SlotRequests;
use crate::fair_share::ShareClaim;
use core::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Relaxed, Ordering::SeqCst,
};
use memfold_os::Errno;
use memfold_os::thread::owner::{OwnerState, RobustList, RobustOwner};
use memfold_stats::Stats;
use rustix::thread::futex;

/// Number of slots in a group.
pub(super) const GROUP: usize = 64;
/// The size of the steps in which a process is charged, in bytes.
const CHARGE_BYTES: u64 = 256 << 10;

/// Charges of the processes of a table.
#[repr(C)]
pub(super) struct TableCharges {
    /// Bytes that all processes with a slot are charged with.
    pub(super) charged_bytes: AtomicU64,
}

impl TableCharges {
    /// Releases the charge of a slot whose process has ended or begins, and so holds nothing.
    /// Returns whether the process shared memory, which the first call for it learns.
    pub(super) fn forget(&self, slot: &SlotWords) -> bool {
        if slot.charged_bytes.load(Relaxed) > 0 {
            let bytes = slot.charged_bytes.swap(0, AcqRel);
            self.charged_bytes.fetch_sub(bytes, AcqRel);
        }
        slot.shares_memory.load(Relaxed) != 0 && slot.shares_memory.swap(0, AcqRel) != 0
    }
}

/// The part of a slot that all other processes read often.
#[repr(C)]
pub(super) struct SlotWords {
    pub(super) owner: RobustOwner,
    /// The process's number as `memfold run` sees it.
    pub(super) pid: AtomicU32,
    need_bytes: AtomicU64,
    /// Uncompressed bytes that the process cannot fold. `stored_bytes` is what its folded memory
    /// takes.
    least_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// The part of [`TableCharges::charged_bytes`] of this process.
    charged_bytes: AtomicU64,
    /// The process sleeps on this futex, which is incremented to wake it.
    bell: AtomicU32,
    /// [`News`] for the process since it last looked.
    news: AtomicU32,
    /// 1 while the process rests, so that news must wake it. Otherwise it looks soon anyway.
    rests: AtomicU32,
    /// 1 if the process shares memory with others because of a fork.
    shares_memory: AtomicU32,
    /// The processes that forks have made from one have the same family; 0 for none.
    family: AtomicU32,
    /// Whether other processes have asked for memory (`lending.rs`).
    pub(super) asks: AtomicU32,
    /// Number of processes that have claimed the slot.
    pub(super) claims: AtomicU32,
    /// The address of the process's [`super::lending::ProcessSign`]; 0 if it has none.
    pub(super) sign: AtomicU64,
}

/// Bits of news that processes of a run send each other. A process that sleeps wakes for news, and
/// for nothing else that other processes do.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct News(pub u32);

impl News {
    /// The bounds have changed, or a process needs more of them than it has.
    pub const BOUNDS: News = News(1);
    /// Memory that processes share has changed. Only processes that share memory get this.
    pub const SHARING: News = News(2);

    /// Returns whether these have all bits of `other`.
    pub fn has(self, other: News) -> bool {
        self.0 & other.0 == other.0
    }
}

impl SlotWords {
    /// Returns what the process asks of a bound. `limit` is whether the bound counts folded memory.
    pub(super) fn claim(&self, limit: bool) -> ShareClaim {
        let bytes = if limit { self.stored_bytes.load(Relaxed) } else { 0 };
        ShareClaim {
            need: self.need_bytes.load(Relaxed),
            least: self.least_bytes.load(Relaxed).saturating_add(bytes),
            ..ShareClaim::default()
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
    /// Last, because few processes use them, and the others take no memory for them.
    pub(super) requests: [SlotRequests; GROUP],
}

/// A process of the run, by its slot.
#[derive(Copy, Clone)]
pub struct ProcessSlot {
    /// Index of the slot. The slot itself is at several addresses where several mappings have it.
    pub(super) number: usize,
    pub(super) charges: &'static TableCharges,
    pub(super) portion: UserPortion,
    pub(super) slot: &'static SlotWords,
    pub(super) place: &'static SlotFigures,
    pub(super) requests: &'static SlotRequests,
}

impl ProcessSlot {
    /// Returns the process's number as `memfold run` sees it.
    pub fn pid(&self) -> u32 {
        self.slot.pid.load(Relaxed)
    }

    /// Returns whether the process lives and still runs the program that claimed the slot.
    pub fn is_alive(&self) -> bool {
        self.slot.owner.state() == OwnerState::Held
    }

    /// Gives up the slot. The thread that claimed it must call this.
    ///
    /// # Errors
    /// The errors of [`RobustOwner::leave`].
    pub fn leave(&self) -> Result<(), Errno> {
        self.slot.owner.leave()
    }

    /// Returns the figures of the process.
    pub fn stats(&self) -> &'static Stats {
        &self.place.stats
    }

    /// Publishes how many bytes of the limit the process needs.
    pub fn set_need(&self, bytes: u64) {
        self.slot.need_bytes.store(bytes, Relaxed);
    }

    /// Publishes how many uncompressed bytes the process cannot fold, and how many bytes its folded
    /// memory takes.
    pub fn set_least(&self, bytes: u64, stored: u64) {
        self.slot.least_bytes.store(bytes, Relaxed);
        self.slot.stored_bytes.store(stored, Relaxed);
    }

    /// Publishes whether the process shares memory with others because of a fork.
    pub fn set_shares_memory(&self, shares: bool) {
        self.slot.shares_memory.store(shares.into(), Relaxed);
    }

    /// Publishes the family of the process; 0 for none.
    pub fn set_family(&self, family: u32) {
        self.slot.family.store(family, Relaxed);
    }

    /// Returns whether the process shares memory with others of this family.
    pub fn shares_with(&self, family: u32) -> bool {
        self.shares_memory() && self.slot.family.load(Relaxed) == family
    }

    /// Returns whether the process shares memory with others because of a fork.
    pub fn shares_memory(&self) -> bool {
        self.slot.shares_memory.load(Relaxed) != 0
    }

    /// Sends news to the process, and wakes it if it rests.
    pub fn send(&self, news: News) {
        self.slot.news.fetch_or(news.0, SeqCst);
        if self.slot.rests.load(SeqCst) != 0 {
            self.wake();
        }
    }

    /// Ends a sleep of the process, or its next one.
    pub(super) fn wake(&self) {
        self.slot.bell.fetch_add(1, SeqCst);
        let _ = futex::wake(&self.slot.bell, futex::Flags::empty(), 1);
    }

    /// Begins a rest of the process, which calls this itself. Returns `false` if there is news by
    /// now: either this finds it, or its sender finds that the process rests.
    pub fn begin_rest(&self) -> bool {
        self.slot.rests.store(1, SeqCst);
        self.slot.news.load(SeqCst) == 0
    }

    /// Ends a rest.
    pub fn end_rest(&self) {
        self.slot.rests.store(0, SeqCst);
    }

    /// Returns the news since the last call. The process itself calls this.
    pub fn take_news(&self) -> News {
        News(self.slot.news.swap(0, AcqRel))
    }

    /// Returns the futex on which the process sleeps. It is shared with other processes.
    pub fn bell(&self) -> &'static AtomicU32 {
        &self.slot.bell
    }

    /// Returns whether both are the same process.
    pub fn is(&self, other: &ProcessSlot) -> bool {
        self.number == other.number
    }

    /// Returns what the process asks of the limit, or of the bound of resident memory.
    pub fn claim(&self, limit: bool) -> ShareClaim {
        self.slot.claim(limit)
    }

    /// Charges this process with `bytes` in all, before it takes the memory. Does nothing if it is
    /// charged with so much already. Returns `false`, and charges nothing, if all processes
    /// together would exceed the limit, or the bound of resident memory. Costs one load while the
    /// last step has room.
    ///
    /// Charges show processes that grow at once each other's growth. The sum is never below what
    /// the slots are charged with, even if a process is killed in between. For that, the sum is
    /// raised before the slot and lowered after it.
    pub fn charge(&self, bytes: u64, limit: bool) -> bool {
        let own = self.slot.charged_bytes.load(Relaxed);
        if bytes <= own {
            return true;
        }
        let bounds = self.portion.left();
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

    /// Sets the charge of this process to the `bytes` that it holds.
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
