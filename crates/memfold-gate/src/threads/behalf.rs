//! What a child of `vfork` has a thread of the keeper's do: see [`crate::errand`].
use crate::record::{Record, each_used};

fn of_caller() -> Option<&'static Record> {
    let here = 0u8;
    Record::of_stack(&raw const here as usize)
}

/// Whether the calling task is another process than the keeper's, which shares the memory. It stands on
/// its slot.
pub fn is_child() -> bool {
    of_caller().is_some_and(|record| !record.is_of_first_process())
}

/// Has [`serve_errands`] do something, which `ring` tells it, and waits until it is done. It touches
/// no memory of the program's.
///
/// # Panics
/// If the caller isn't in the gate.
pub fn hand_over(mut what: &mut (dyn FnMut() + Send), ring: fn()) {
    let record = of_caller().expect("it stands on its slot");
    record.errand.post(&raw mut what as usize, ring);
}

/// Does what there is to do.
pub fn serve_errands() {
    each_used(|record| record.errand.serve());
}
