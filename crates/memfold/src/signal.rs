//! Signal delivery: the faulting thread serves itself in a SIGBUS handler.
//!
//! The handler runs with every signal blocked, so no other handler of the program can fault while an engine lock is held.
//! It makes raw system calls only, so `errno` stays as it was.
use crate::fault::{Fault, Served};
use crate::pager::Pager;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_sys::sync::StaticMutex;
use memfold_sys::thread::{Previous, SigbusInfo, set_sigbus, yield_now};

/// Engines with signal delivery in one process, at most.
pub const ENGINES_MAX: usize = 64;

static ENGINES: [AtomicPtr<Pager>; ENGINES_MAX] = [const { AtomicPtr::new(null_mut()) }; ENGINES_MAX];
static PREVIOUS: StaticMutex<Option<Previous>> = StaticMutex::new(None);

/// Lists an engine, and installs the handler with the first. `false` if there are too many.
pub(crate) fn enlist(pager: &Pager) -> bool {
    let mut previous = PREVIOUS.lock();
    if previous.is_none() {
        *previous = Some(set_sigbus(on_sigbus));
    }
    let me = pager as *const Pager as *mut Pager;
    ENGINES.iter().any(|e| e.compare_exchange(null_mut(), me, SeqCst, SeqCst).is_ok())
}

/// Takes an engine off the list. No thread may be touching its memory.
pub(crate) fn delist(pager: &Pager) {
    let me = pager as *const Pager as *mut Pager;
    for engine in &ENGINES {
        let _ = engine.compare_exchange(me, null_mut(), SeqCst, SeqCst);
    }
}

fn on_sigbus(info: &SigbusInfo) {
    let addr = info.addr();
    for engine in &ENGINES {
        let pager = engine.load(SeqCst);
        if pager.is_null() {
            continue;
        }
        // SAFETY: an engine is delisted before it is dropped, and not while a thread touches its memory, as this one does.
        // An engine that this address doesn't belong to may be dropped at any time, but only by its owner's promise that
        // nobody uses it: the list is read again for each engine, and a dropped one is null.
        let pager = unsafe { &*pager };
        loop {
            // A fault on a protected page is told from a missing one by what happens: protection is lifted either way.
            match pager.fault(Fault { addr, ..Fault::default() }) {
                Served::Yes | Served::Mapped { .. } => return,
                Served::Again => yield_now(),
                Served::NotManaged => break,
            }
        }
    }
    // Not ours: do what the program had asked for.
    match PREVIOUS.lock().as_ref() {
        Some(previous) => previous.call(info),
        None => unreachable!("the handler is installed after what it replaced was noted"),
    }
}
