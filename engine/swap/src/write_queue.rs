//! The write queue: work for the thread that writes to the swap file, and the threads that wait for
//! that work.
use memfold_os::sync::{Condvar, Mutex};
use memfold_os::units::Order;

/// Queued raw writes, at most: one for each buffer.
pub const WRITES_MAX: usize = 3;

/// A raw object that is being written.
#[derive(Copy, Clone, Debug)]
pub struct RawWrite {
    /// Names the object. The caller chooses it. With `ticket` it names one state of the object.
    pub id: u32,
    /// The key of the object. The caller chooses it.
    pub key: u64,
    /// The object's order.
    pub order: Order,
    /// Distinguishes this write from others of the same object.
    pub ticket: u32,
    /// The buffer that holds the sealed bytes of the object.
    pub buffer: usize,
    /// First slot of the write.
    pub slot: u64,
}

/// The state under the lock.
#[derive(Default)]
struct WriteQueueState {
    raw: [Option<RawWrite>; WRITES_MAX],
    /// Raw writes that were submitted and have not ended.
    under_way: usize,
    /// The pool holds more than its share.
    shrink_pool: bool,
    /// Emptied clusters are to be discarded.
    discard: bool,
    stop: bool,
    /// A thread serves the queue.
    has_writer: bool,
    /// Rounds that the writer has ended.
    rounds: u64,
    /// The last ticket.
    ticket: u32,
}

/// Work that [`WriteQueue::take_work`] has taken out of the queue.
#[derive(Default)]
pub struct PendingWork {
    /// Raw writes to make.
    pub raw: [Option<RawWrite>; WRITES_MAX],
    /// Write packed objects until the pool holds less.
    pub shrink_pool: bool,
    /// Discard emptied clusters.
    pub discard: bool,
    /// End the thread when all work is done.
    pub stop: bool,
}

/// Work for the writer. Any number of threads may call every method at once.
#[derive(Default)]
pub struct WriteQueue {
    state: Mutex<WriteQueueState>,
    changed: Condvar,
}

impl WriteQueue {
    /// Returns a ticket for a raw write. It was not used for a long time, and is never 0.
    pub fn next_ticket(&self) -> u32 {
        let mut state = self.state.lock();
        state.ticket = state.ticket.wrapping_add(1).max(1);
        state.ticket
    }

    /// Requests a discard of emptied clusters.
    pub fn request_discard(&self) {
        self.state.lock().discard = true;
        self.changed.notify_all();
    }

    /// Passes a sealed raw write to the writer. Returns `false` if there is no writer. Then the
    /// caller must do the work that [`WriteQueue::take_work`] returns.
    pub fn submit(&self, write: RawWrite) -> bool {
        let mut state = self.state.lock();
        let place = state.raw.iter_mut().find(|w| w.is_none()).expect("one for each buffer");
        *place = Some(write);
        state.under_way += 1;
        self.changed.notify_all();
        state.has_writer
    }

    /// Requests that the writer shrinks the pool. With `wait`, sleeps until it has ended a round.
    /// Returns `false` if there is no writer.
    pub fn request_shrink(&self, wait: bool) -> bool {
        let mut state = self.state.lock();
        if !state.shrink_pool {
            state.shrink_pool = true;
            self.changed.notify_all();
        }
        // The request and `rounds` are under one lock, so a round that sees the request is still to
        // end.
        let round = state.rounds;
        while wait && state.has_writer && state.rounds == round && !state.stop {
            state = self.changed.wait(state);
        }
        state.has_writer
    }

    /// Notes that a thread serves the queue from now on.
    pub fn set_writer(&self) {
        self.state.lock().has_writer = true;
    }

    /// Ends the writer when all queued work is done.
    pub(crate) fn stop(&self) {
        self.state.lock().stop = true;
        self.changed.notify_all();
    }

    /// Undoes [`WriteQueue::stop`]: the writer is about to be started again.
    pub(crate) fn resume(&self) {
        self.state.lock().stop = false;
    }

    /// Sleeps until there is work.
    pub fn wait_for_work(&self) {
        let mut state = self.state.lock();
        while state.raw.iter().all(|w| w.is_none())
            && !state.shrink_pool
            && !state.discard
            && !state.stop
        {
            state = self.changed.wait(state);
        }
    }

    /// Takes all queued work.
    pub fn take_work(&self) -> PendingWork {
        let mut state = self.state.lock();
        let raw = core::mem::take(&mut state.raw);
        let (shrink_pool, discard) = (state.shrink_pool, state.discard);
        (state.shrink_pool, state.discard) = (false, false);
        PendingWork { raw, shrink_pool, discard, stop: state.stop }
    }

    /// Ends a round of the work that [`WriteQueue::take_work`] returned, in which `raw` writes have
    /// ended.
    pub fn finish_round(&self, raw: usize) {
        let mut state = self.state.lock();
        state.under_way -= raw;
        state.rounds += 1;
        self.changed.notify_all();
    }

    /// Sleeps until the writer has ended a round, if raw writes are in progress. Returns `false` if
    /// none are, or if no thread makes them.
    pub fn wait_for_write(&self) -> bool {
        let mut state = self.state.lock();
        if !state.has_writer || state.stop || state.under_way == 0 {
            return false;
        }
        let round = state.rounds;
        while state.rounds == round && !state.stop {
            state = self.changed.wait(state);
        }
        true
    }

    /// Blocks the queue until [`WriteQueue::unfreeze`], for a fork: a thread that calls another
    /// method waits.
    pub(crate) fn freeze(&self) {
        core::mem::forget(self.state.lock());
    }

    /// Returns whether a thread uses the queue at this moment, or has ended while it did.
    pub(crate) fn is_held(&self) -> bool {
        self.state.is_held()
    }

    /// Ends [`WriteQueue::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub(crate) unsafe fn unfreeze(&self) {
        // SAFETY: the caller promises that `freeze` has returned and that this is the one call for
        // it. `freeze` has forgotten the guard, so the lock is held.
        unsafe { self.state.unlock() };
    }
}
