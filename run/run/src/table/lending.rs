//! Requests of processes of a run to keep memory resident for them. A system call on the memory of
//! another process (`process_vm_readv`) fails where that memory is folded, and only the engine of
//! that other process can load it.
//!
//! The borrower takes a request of the lender's slot, writes the ranges, and rings. The lender's
//! first engine thread loads the ranges, holds them, and writes how much it holds. When the borrower
//! has made its call, it gives the request back. The lender sees that and ends the hold.
//!
//! | `owner` | `state` | means |
//! |---|---|---|
//! | 0 | any | The request is free |
//! | a borrower | `ASKED` of this use | The lender is to hold the ranges |
//! | a borrower | `HELD` of this use | The lender holds the first `held` bytes of them |
//! | a borrower | anything else | The borrower writes the ranges |
//!
//! - **Only the lender's first engine thread makes `ASKED` to `HELD`**, and only for the use that it
//!   has read. A borrower may give up at any time, and another one may take the request.
//! - **A borrower may end at any time.** The lender frees the requests of ended borrowers. A slot's
//!   [`ProcessSlot::id`] is another one for each process that claims the slot.
//! - **Neither side trusts the table.** A forged request loads memory, and holds what a call may hold.
//!   A forged answer makes a call fail. The kernel checks the permission for the call itself.
use super::slot::SlotWords;
use super::{ProcessSlot, RunTable};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use memfold_os::thread::owner::OwnerState;
use rustix::thread::{Timespec, futex};

/// Requests of a slot. So many threads of other processes may borrow from one process at a time.
pub const REQUESTS: usize = 8;
/// Ranges of a request.
pub const PARTS: usize = 16;

/// Bits of a slot: its process is asked since it last looked, and the slot was asked at any time. Until
/// then its requests take no memory.
const ASKS: u32 = 1;
const HAD_ASKS: u32 = 2;

/// The kinds of a state. The rest of the word is the number of the use.
const ASKED: u32 = 1;
const HELD: u32 = 2;
const KINDS: u32 = 3;
const USE: u32 = 4;

/// Words in the memory of each process with a slot, by which other processes know it: the run's key,
/// and [`ProcessSlot::id`].
#[derive(Default)]
pub struct ProcessSign(pub [AtomicU64; 3]);

impl ProcessSign {
    /// Returns the sign of no process.
    pub const fn none() -> ProcessSign {
        ProcessSign([const { AtomicU64::new(0) }; 3])
    }

    /// Makes it the sign of no process.
    pub fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, SeqCst));
    }
}

/// One request.
#[repr(C, align(64))]
pub(super) struct Request {
    owner: AtomicU64,
    state: AtomicU32,
    writes: AtomicU32,
    held: AtomicU64,
    count: AtomicU64,
    /// First addresses and lengths.
    parts: [[AtomicU64; 2]; PARTS],
}

/// The requests of a slot.
#[repr(C)]
pub(super) struct SlotRequests([Request; REQUESTS]);

/// What a borrower has asked for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct AskedMemory {
    /// Which use of the request this is.
    pub lease: LeaseId,
    /// First addresses and lengths, of which `count` are set.
    pub parts: [[usize; 2]; PARTS],
    /// The number of ranges.
    pub count: usize,
    /// Whether the borrower writes to the ranges.
    pub writes: bool,
}

/// A use of a request.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LeaseId {
    owner: u64,
    state: u32,
}

/// A request of this process to another one, until it is dropped.
pub struct Lease {
    lender: ProcessSlot,
    lender_id: u64,
    request: &'static Request,
    id: LeaseId,
}

impl Lease {
    /// Waits until the memory is held, for `ns` nanoseconds at most. Returns how many bytes of the
    /// ranges are held, from the first on. Returns `None` if the lender hasn't answered yet.
    pub fn wait(&self, ns: u64) -> Option<u64> {
        const SECOND_NS: u64 = 1_000_000_000;
        let time = Timespec { tv_sec: (ns / SECOND_NS) as i64, tv_nsec: (ns % SECOND_NS) as i64 };
        let state = &self.request.state;
        if state.load(SeqCst) == self.id.state {
            let _ = futex::wait(state, futex::Flags::empty(), self.id.state, Some(&time));
        }
        match state.load(SeqCst) {
            same if same == self.id.state => None,
            held if held == self.id.state + (HELD - ASKED) => Some(self.request.held.load(SeqCst)),
            // Only a process that breaks the rules writes anything else.
            _ => Some(0),
        }
    }

    /// Returns whether the lender is still the process that was asked.
    pub fn has_lender(&self) -> bool {
        self.lender.is_still(self.lender_id)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let owner = self.id.owner;
        let _ = self.request.owner.compare_exchange(owner, 0, SeqCst, Relaxed);
    }
}

impl ProcessSlot {
    /// Returns a number for the process that now has the slot, which no other process of the run
    /// has.
    pub fn id(&self) -> u64 {
        (self.number as u64 + 1) << 32 | u64::from(self.slot.claims.load(SeqCst))
    }

    /// Returns whether the process with this number lives and has the slot.
    pub fn is_still(&self, id: u64) -> bool {
        self.id() == id && self.is_alive()
    }

    /// Makes `sign` the sign of this process, in its memory.
    pub(crate) fn put_sign(&self, sign: &'static ProcessSign, key: [u64; 2]) {
        for (to, word) in sign.0.iter().zip([key[0], key[1], self.id()]) {
            to.store(word, SeqCst);
        }
        self.slot.sign.store(&raw const *sign as u64, SeqCst);
    }

    /// Returns the thread that serves requests of this process, as the process itself numbers it.
    pub fn server(&self) -> u32 {
        self.slot.owner.thread()
    }

    /// Asks this process to hold ranges for the process `own`. Returns `None` if all requests are
    /// taken.
    pub fn ask(&self, own: &ProcessSlot, parts: &[[usize; 2]], writes: bool) -> Option<Lease> {
        let (owner, lender_id) = (own.id(), self.id());
        let take = |request: &&Request| {
            request.owner.load(Relaxed) == 0
                && request.owner.compare_exchange(0, owner, SeqCst, Relaxed).is_ok()
        };
        let Some(request) = self.requests.0.iter().find(take) else {
            // The lender frees requests of ended processes.
            self.ring();
            return None;
        };
        let parts = &parts[..parts.len().min(PARTS)];
        for (to, from) in request.parts.iter().zip(parts) {
            to[0].store(from[0] as u64, Relaxed);
            to[1].store(from[1] as u64, Relaxed);
        }
        request.count.store(parts.len() as u64, Relaxed);
        request.writes.store(writes.into(), Relaxed);
        let state = (request.state.load(SeqCst) & !KINDS).wrapping_add(USE) | ASKED;
        request.state.store(state, SeqCst);
        self.ring();
        let id = LeaseId { owner, state };
        Some(Lease { lender: *self, lender_id, request, id })
    }

    fn ring(&self) {
        self.slot.asks.store(ASKS | HAD_ASKS, SeqCst);
        self.wake();
    }

    /// Returns whether other processes have asked since the last call. The process itself calls it.
    pub fn take_asks(&self) -> bool {
        let asks = &self.slot.asks;
        asks.load(SeqCst) & ASKS != 0 && asks.fetch_and(!ASKS, SeqCst) & ASKS != 0
    }

    /// Returns what the request `n` asks for, if it asks.
    pub fn asked(&self, n: usize) -> Option<AskedMemory> {
        let request = &self.requests.0[n];
        let lease =
            LeaseId { state: request.state.load(SeqCst), owner: request.owner.load(SeqCst) };
        if lease.owner == 0 || lease.state & KINDS != ASKED {
            return None;
        }
        let parts = core::array::from_fn(|at| {
            [0, 1].map(|word: usize| request.parts[at][word].load(Relaxed) as usize)
        });
        let count = (request.count.load(Relaxed) as usize).min(PARTS);
        Some(AskedMemory { lease, parts, count, writes: request.writes.load(Relaxed) != 0 })
    }

    /// Tells the borrower that `bytes` of what the request `n` asks for are held. Returns whether it
    /// still waits for that.
    pub fn lend(&self, n: usize, lease: LeaseId, bytes: u64) -> bool {
        let request = &self.requests.0[n];
        request.held.store(bytes, SeqCst);
        let state = lease.state + (HELD - ASKED);
        let is_told = request.state.compare_exchange(lease.state, state, SeqCst, Relaxed).is_ok();
        if is_told {
            let _ = futex::wake(&request.state, futex::Flags::empty(), i32::MAX as u32);
        }
        is_told && request.owner.load(SeqCst) == lease.owner
    }

    /// Returns whether the borrower still uses what [`ProcessSlot::lend`] has lent.
    pub fn is_lent(&self, n: usize, lease: LeaseId) -> bool {
        let request = &self.requests.0[n];
        request.owner.load(SeqCst) == lease.owner
            && request.state.load(SeqCst) == lease.state + (HELD - ASKED)
    }
}

impl RunTable {
    /// Returns the living process in whose memory `read` reads. `read` is given an address and room
    /// for the words there, and returns whether it has read them. `pid` is the most likely number of
    /// the process.
    ///
    /// A process is known by its memory, because the caller may be in another PID namespace. What
    /// shares the memory is the same process here, such as a child of vfork.
    pub fn find(
        &self,
        pid: u32,
        read: &dyn Fn(usize, &mut [u64; 3]) -> bool,
    ) -> Option<ProcessSlot> {
        let key = self.key();
        let is_it = |process: &ProcessSlot| {
            let (at, mut numbers) = (process.slot.sign.load(SeqCst) as usize, [0; 3]);
            at != 0 && read(at, &mut numbers) && numbers == [key[0], key[1], process.id()]
        };
        let likely = self.alive().filter(|process| process.pid() == pid).find(is_it);
        likely.or_else(|| self.alive().filter(|process| process.pid() != pid).find(is_it))
    }

    /// Frees the requests to `lender` of processes that have ended.
    pub fn free_requests(&self, lender: &ProcessSlot) {
        if lender.slot.asks.load(SeqCst) == 0 {
            return;
        }
        for request in &lender.requests.0 {
            let owner = request.owner.load(SeqCst);
            let lives = (owner >> 32)
                .checked_sub(1)
                .and_then(|number| self.slot(number as usize))
                .is_some_and(|slot| lives(slot, owner));
            if owner != 0 && !lives {
                let _ = request.owner.compare_exchange(owner, 0, SeqCst, Relaxed);
            }
        }
    }
}

/// Returns whether a slot is that of the process with this number, which lives.
fn lives(slot: &SlotWords, id: u64) -> bool {
    slot.claims.load(SeqCst) == id as u32 && slot.owner.state() == OwnerState::Held
}
