//! The order between the program's address-space changes and the engine's own moves.
//!
//! The kernel refuses moves (EAGAIN) from the moment a change begins until its event has been
//! *read*. From then until the event has been *applied* this lock refuses them, so no page is ever
//! moved on the strength of what an event is about to make false. Whoever reads events: `reading`
//! -> read -> `begin` if it is a change -> apply -> `end`.
//!
//! # Events and moves
//! A program may unmap, move or discard memory at any time. The kernel reports each as an event on
//! the same descriptor as the faults, and the reader has to know what the page table looks like
//! when it moves a page. The argument, for `area/event_order.rs` and `delivery/program/mod.rs`:
//!
//! 1. **From the change's begin until its event is read** the kernel refuses MOVE and COPY on the
//!    whole descriptor (EAGAIN).
//! 2. **From read until applied** `Changes::applying` refuses them: it is set under `moving` for
//!    writing, together with the read, so no move is under way and none begins. `quiet` returns
//!    `None`; the mover gives up every lock (`Served::Again`, `Stop::Again`), and `Pager::apply`
//!    gets `areas` for writing.
//! 3. **After that** the index knows of the change. Unmap and remap were done before their events.
//!    A discard may still be on its way, which is harmless for what is mapped meanwhile: only zeros
//!    are mapped there, and **a `Resident` folio's missing page is zeros**, whoever dropped it.
//! 4. Reading is serialised by `reading`, and a change is applied before the next read. The kernel
//!    hands out faults before events, so a fault may be read before the event that precedes it; the
//!    move for it says EAGAIN, the fault stays with its handler (`Pending`), and the handler reads
//!    on until it can be served. So no fault is ever served against an index that is older than the
//!    fault.
//!
//! What this does not cover: between the end of `apply` for a discard and the kernel's own dropping
//! of the pages, an old page may be taken into a new folio (a neighbour is touched by another
//! thread at that moment; the zero-fill of its window meets EEXIST) and that folio may be evicted
//! before the kernel gets there. The old bytes would then survive the discard. It takes a program
//! that touches a range while another thread discards it, and a folio that goes from newest to
//! oldest in that instant.
//!
//! **Invariant: a `Served::Again` holds no lock.** Whoever retries must first let `areas` go, or
//! the event can't be applied.
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
        Changes {
            reading: Mutex::new(()),
            moving: RwLock::new(()),
            applying: AtomicBool::new(false),
        }
    }

    /// Permission to move pages at the program's addresses, as long as the guard lives. `None`
    /// while an event that was read waits to be applied: give up every lock, so that it can be.
    pub fn quiet(&self) -> Option<ReadGuard<'_, ()>> {
        let guard = self.moving.read();
        if self.applying.load(SeqCst) { None } else { Some(guard) }
    }

    /// The right to read events.
    pub fn reading(&self) -> MutexGuard<'_, ()> {
        self.reading.lock()
    }

    /// Reads by `read`; if what it gives is a change, moves are refused before anybody can see its
    /// effects.
    pub fn read<T>(
        &self,
        _: &MutexGuard<'_, ()>,
        read: impl FnOnce() -> T,
        is_change: impl FnOnce(&T) -> bool,
    ) -> T {
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
