//! Fork: the child gets copies of the page table and no engine, so everything folded comes back first.
//!
//! `prepare` is registered before any handler of the program and therefore runs after all of them, `child` before.
//! vfork and posix_spawn share the parent's memory, and its engine serves the child until it executes something.
use crate::program;
use crate::{proc, say};
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold::config::Size;

static FROZEN: AtomicBool = AtomicBool::new(false);

/// Registers the handlers.
pub fn install() {
    // SAFETY: three functions of the right type that stay loaded (the library is linked with `-z nodelete`).
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

unsafe extern "C" fn prepare() {
    let Some(program) = program::get() else { return };
    program.pause();
    let away = program.pager.away_bytes();
    let available = proc::available_bytes();
    if away > available {
        say::die(format_args!(
            "fork() needs all memory back in place: {} are folded, the machine has {} left; stopping before data is lost",
            Size(away),
            Size(available)
        ));
    }
    program.pager.freeze();
    FROZEN.store(true, SeqCst);
}

unsafe extern "C" fn parent() {
    let Some(program) = program::get() else { return };
    if FROZEN.swap(false, SeqCst) {
        // SAFETY: `prepare` paused it, and the swap lets only one caller pass.
        unsafe { program.resume() };
        program.pager.thaw();
    }
}

unsafe extern "C" fn child() {
    program::abandon();
}
