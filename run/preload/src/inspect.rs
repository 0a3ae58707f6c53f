//! What a debugger may call in the program: it stops every thread, the engine's too, and then can't
//! read what is folded.
use core::ffi::c_int;

/// As [`memfold_process::unfold`]. Returns 0, or -1 if this process is not managed.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_unfold() -> c_int {
    if memfold_process::unfold() { 0 } else { -1 }
}

/// Ends [`memfold_unfold`]: memory is folded as before. Returns likewise.
#[unsafe(no_mangle)]
pub extern "C" fn memfold_fold() -> c_int {
    if memfold_process::fold() { 0 } else { -1 }
}
