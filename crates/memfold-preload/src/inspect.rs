//! What a debugger may call in the program: it stops every thread, the engine's too, and then can't
//! read what is folded.
use crate::{engine, gate};
use core::ffi::c_int;
use memfold::pager::Pager;

fn pager() -> Option<&'static Pager> {
    gate::get().map(|gated| &*gated.pager)
}

/// Brings everything folded back, past the limit if need be, and keeps it in memory until
/// [`memfold_fold`] or the next fork of a program of several threads. Returns 0, or -1 if this
/// process is not managed.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_unfold() -> c_int {
    let Some(pager) = pager() else { return -1 };
    engine::have_done(|| pager.fork().freeze());
    0
}

/// Ends [`memfold_unfold`]: memory is folded as before. Returns likewise.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_fold() -> c_int {
    let Some(pager) = pager() else { return -1 };
    pager.fork().thaw();
    0
}
