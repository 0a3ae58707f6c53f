//! What the thread that writes to the swap file is to do, and who waits for it.
use memfold_sys::sync::{Condvar, Mutex};
use memfold_sys::units::Order;

/// Raw writes that can wait: one for each buffer.
pub const WRITES_MAX: usize = 3;

/// A folio whose raw write is under way.
#[derive(Copy, Clone, Debug)]
pub struct RawWrite {
    /// The folio, as long as its ticket is this one.
    pub id: u32,
    /// Its key.
    pub key: u64,
    /// Its order.
    pub order: Order,
    /// What tells this write from others of the same folio.
    pub ticket: u32,
    /// The buffer that holds its sealed bytes.
    pub buffer: usize,
    /// Where they go.
    pub slot: u64,
}

#[derive(Default)]
struct Inner {
    raw: [Option<RawWrite>; WRITES_MAX],
    /// Raw writes that were handed over and have not ended.
    under_way: usize,
    /// The pool holds more than it should.
    pressed: bool,
    /// Emptied clusters wait to be discarded.
    discard: bool,
    stop: bool,
    /// A thread serves the outbox.
    has_writer: bool,
    /// Rounds that the writer has ended.
    rounds: u64,
    /// The last ticket.
    ticket: u32,
}

/// What [`Outbox::next`] found.
#[derive(Default)]
pub struct Work {
    /// Raw writes to do.
    pub raw: [Option<RawWrite>; WRITES_MAX],
    /// Write packed objects until the pool holds less.
    pub pressed: bool,
    /// Discard emptied clusters.
    pub discard: bool,
    /// End the thread when all is done.
    pub stop: bool,
}

/// Work for the writer.
#[derive(Default)]
pub struct Outbox {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Outbox {
    /// A number for a raw write that none had for a long time; never 0.
    pub fn ticket(&self) -> u32 {
        let mut outbox = self.inner.lock();
        outbox.ticket = outbox.ticket.wrapping_add(1).max(1);
        outbox.ticket
    }

    /// Asks for a discard of emptied clusters.
    pub fn discard(&self) {
        self.inner.lock().discard = true;
        self.changed.notify_all();
    }

    /// Hands a sealed raw write to the writer. `false`: there is none, and the caller must do
    /// [`Outbox::next`]'s work.
    pub fn submit(&self, write: RawWrite) -> bool {
        let mut outbox = self.inner.lock();
        let place = outbox.raw.iter_mut().find(|w| w.is_none()).expect("one for each buffer");
        *place = Some(write);
        outbox.under_way += 1;
        self.changed.notify_all();
        outbox.has_writer
    }

    /// Asks the writer to make the pool smaller; with `wait`, sleeps until it has ended a round.
    /// `false`: there is no writer.
    pub fn press(&self, wait: bool) -> bool {
        let mut outbox = self.inner.lock();
        if !outbox.pressed {
            outbox.pressed = true;
            self.changed.notify_all();
        }
        // Asked and read under one lock, so a round will end.
        let round = outbox.rounds;
        while wait && outbox.has_writer && outbox.rounds == round && !outbox.stop {
            outbox = self.changed.wait(outbox);
        }
        outbox.has_writer
    }

    /// Tells that a thread serves the outbox.
    pub fn set_writer(&self) {
        self.inner.lock().has_writer = true;
    }

    /// Ends the writer, when it has done what waits.
    pub fn stop(&self) {
        self.inner.lock().stop = true;
        self.changed.notify_all();
    }

    /// Takes back [`Outbox::stop`]: it is about to be started again.
    pub fn resume(&self) {
        self.inner.lock().stop = false;
    }

    /// Sleeps until there is something to do.
    pub fn wait_for_work(&self) {
        let mut outbox = self.inner.lock();
        while outbox.raw.iter().all(|w| w.is_none())
            && !outbox.pressed
            && !outbox.discard
            && !outbox.stop
        {
            outbox = self.changed.wait(outbox);
        }
    }

    /// Takes what there is to do.
    pub fn next(&self) -> Work {
        let mut outbox = self.inner.lock();
        let raw = core::mem::take(&mut outbox.raw);
        let (pressed, discard) = (outbox.pressed, outbox.discard);
        (outbox.pressed, outbox.discard) = (false, false);
        Work { raw, pressed, discard, stop: outbox.stop }
    }

    /// Nobody asks or takes anything until [`Outbox::unfreeze`]: for a fork.
    pub fn freeze(&self) {
        core::mem::forget(self.inner.lock());
    }

    /// Ends [`Outbox::freeze`].
    ///
    /// # Safety
    /// - `freeze` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn unfreeze(&self) {
        // SAFETY: the guard was forgotten.
        unsafe { self.inner.unlock() };
    }

    /// Ends a round of [`Outbox::next`]'s work: `raw` writes have ended.
    pub fn done(&self, raw: usize) {
        let mut outbox = self.inner.lock();
        outbox.under_way -= raw;
        outbox.rounds += 1;
        self.changed.notify_all();
    }

    /// Sleeps until the writer has ended a round, if raw writes are under way. `false`: none are,
    /// or nobody does them.
    pub fn wait_for_write(&self) -> bool {
        let mut outbox = self.inner.lock();
        if !outbox.has_writer || outbox.stop || outbox.under_way == 0 {
            return false;
        }
        let round = outbox.rounds;
        while outbox.rounds == round && !outbox.stop {
            outbox = self.changed.wait(outbox);
        }
        true
    }
}
