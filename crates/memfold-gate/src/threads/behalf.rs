//! Has a thread of the keeper's work for a child of `vfork`: see [`crate::errand`].
use crate::keeper::Keeper;
use crate::record::{GateThread, each_used};

fn of_caller() -> Option<&'static GateThread> {
    let here = 0u8;
    GateThread::of_stack(&raw const here as usize)
}

/// Returns the number of the calling task, if it is a child that shares the keeper's memory. It
/// must be on its slot.
pub fn child() -> Option<usize> {
    of_caller().filter(|record| !record.is_of_first_process()).map(|record| record.number.get())
}

/// Has [`serve_errands`] do something, and waits until it is done. `ring` wakes that thread.
///
/// # Safety
/// - Another thread may do it while the caller waits. It touches no memory of the program's.
///
/// # Panics
/// If the caller isn't in the gate.
pub unsafe fn hand_over(mut what: &mut dyn FnMut(), ring: fn()) {
    let record = of_caller().expect("it stands on its slot");
    record.errand.post(&raw mut what as usize, ring, &mut || {});
}

/// Does work that takes locks of the gate's or the keeper's. For a child of `vfork` the serving
/// thread does it.
///
/// # Safety
/// - As for [`hand_over`].
pub(super) unsafe fn on_behalf(keeper: &dyn Keeper, what: &mut dyn FnMut()) {
    match keeper.server().filter(|_| child().is_some()) {
        // SAFETY: the caller's promise.
        Some(ring) => unsafe { hand_over(what, ring) },
        None => what(),
    }
}

/// Makes all memory resident for the caller ([`Keeper::keep_home`]), or ends that. The parent of a
/// child of `vfork` ends it with the child.
pub fn keep_home(keeper: &dyn Keeper, record: &GateThread, keep: bool) -> bool {
    let mut done = false;
    // SAFETY: the record is the caller's, who waits.
    unsafe {
        on_behalf(keeper, &mut || {
            done = keeper.keep_home(keep);
            record.traced.set(done && keep);
        });
    }
    done
}

/// Stops all eviction for the caller, or ends that ([`Keeper::keep_all`]).
pub(super) fn keep_all(keeper: &dyn Keeper, record: &GateThread, keep: bool) {
    // SAFETY: as above.
    unsafe {
        on_behalf(keeper, &mut || {
            keeper.keep_all(keep);
            record.keeps_all.set(keep);
        });
    }
}

/// Does all errands that are posted.
pub fn serve_errands() {
    each_used(|record| record.errand.serve());
}
