//! Makes a thread of the keeper work for a child of `vfork` ([`crate::errand`]).
use crate::keeper::{ErrandServer, Keeper};
use crate::patch;
use crate::record::{self, GateThread, each_used};

/// Returns the number of the calling task if it is a child that shares the keeper's memory, and
/// otherwise `None`. The task must be on its slot's stack.
pub fn child() -> Option<usize> {
    GateThread::of_caller()
        .filter(|record| !record.is_of_first_process())
        .map(|record| record.number.get())
}

/// Makes [`serve_errands`] call `what`, and waits until that is done. Returns `false` if the
/// process of `server` has ended first. Then a thread may be in the middle of `what`, until
/// [`crate::ChildKeeper::server`] was called.
///
/// # Safety
/// - Another thread may call `what` while the caller waits.
/// - `what` touches no memory of the program.
///
/// # Panics
/// If the caller isn't in the gate.
pub unsafe fn hand_over(mut what: &mut dyn FnMut(), server: &ErrandServer) -> bool {
    let record = GateThread::of_caller().expect("it stands on its slot");
    record.errand.post(&raw mut what as usize, server, &mut || {})
}

/// Does work that takes locks of the gate or the keeper. For a child of `vfork` the serving thread
/// does it. `what` is called again if a thread has ended in the middle of it.
///
/// # Safety
/// - The conditions of [`hand_over`] hold for `what`.
pub(super) unsafe fn on_behalf(keeper: &Keeper, what: &mut dyn FnMut()) {
    while let Some(server) = keeper.children.server().filter(|_| child().is_some()) {
        // SAFETY: the caller promises that another thread may call `what`, and that it touches no
        // memory of the program.
        if unsafe { hand_over(what, &server) } {
            return;
        }
    }
    what();
}

/// Makes all memory resident for the caller ([`PageKeeper::keep_home`]) if `keep` is true, and
/// otherwise ends that. Returns whether it succeeded. The parent of a child of `vfork` ends it when
/// the child ends.
pub fn keep_home(keeper: &Keeper, record: &GateThread, keep: bool) -> bool {
    let mut is_done = false;
    // SAFETY: the closure uses only the keeper, which all threads may use, and locals and the
    // record of the caller, which waits meanwhile. It touches no memory of the program.
    unsafe {
        on_behalf(keeper, &mut || {
            is_done = keeper.pages.keep_home(keep);
            record.traced.set(is_done && keep);
        });
    }
    is_done
}

/// Stops all eviction for the caller if `keep` is true, and otherwise ends that
/// ([`PageKeeper::keep_all`]).
pub(super) fn keep_all(keeper: &Keeper, record: &GateThread, keep: bool) {
    // SAFETY: the closure uses only the keeper, which all threads may use, and the record of the
    // caller, which waits meanwhile. It touches no memory of the program.
    unsafe {
        on_behalf(keeper, &mut || {
            keeper.pages.keep_all(keep);
            record.keeps_all.set(keep);
        });
    }
}

/// Does all errands that are posted. A thread of the keeper calls this. `life` is that of its
/// process ([`ErrandServer::life`]).
pub fn serve_errands(life: u32) {
    each_used(|record| record.errand.serve(life));
}

/// Returns whether no thread is in the middle of a change of the gate's state, or has ended in one.
pub fn is_at_rest() -> bool {
    !record::is_growing() && !patch::is_held()
}

/// Makes the calling child the first process of its memory. All threads of the former first process
/// have ended, and their slots are given back.
///
/// # Safety
/// - No thread of the former first process lives.
pub unsafe fn succeed() {
    if let Some(record) = GateThread::of_caller() {
        record.succeed();
    }
}
