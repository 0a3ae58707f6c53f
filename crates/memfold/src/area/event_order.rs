//! The order between the program's address-space changes and the engine's own moves.
//!
//! The kernel refuses moves (EAGAIN) from the moment a change begins until its event has been *read*. From then until the
//! event has been *applied* this lock refuses them, so no page is ever moved on the strength of what an event is about to
//! make false. Whoever reads events: `reading` -> read -> `begin` if it is a change -> apply -> `end`.
use memfold_sys::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_sys::sync::{Mutex, MutexGuard, ReadGuard, RwLock};

/// See the module.
pub struct Changes {
    reading: Mutex<()>,
    moving: RwLock<()>,
    applying: AtomicBool,
}

impl Changes {
    /// Nothing changes.
    pub fn new() -> Changes {
        Changes { reading: Mutex::new(()), moving: RwLock::new(()), applying: AtomicBool::new(false) }
    }

    /// Permission to move pages at the program's addresses, as long as the guard lives. `None` while an event that was
    /// read waits to be applied: give up every lock, so that it can be.
    pub fn quiet(&self) -> Option<ReadGuard<'_, ()>> {
        let guard = self.moving.read();
        if self.applying.load(SeqCst) { None } else { Some(guard) }
    }

    /// The right to read events.
    pub fn reading(&self) -> MutexGuard<'_, ()> {
        self.reading.lock()
    }

    /// Reads by `read`; if what it gives is a change, moves are refused before anybody can see its effects.
    pub fn read<T>(&self, _: &MutexGuard<'_, ()>, read: impl FnOnce() -> T, is_change: impl FnOnce(&T) -> bool) -> T {
        let _moving = self.moving.write();
        let got = read();
        if is_change(&got) {
            self.applying.store(true, SeqCst);
        }
        got
    }

    /// The change has been applied.
    pub fn end(&self, _: &MutexGuard<'_, ()>) {
        self.applying.store(false, SeqCst);
    }
}
