//! Fork: the child gets copies of the page table and no engine, so everything folded comes back first.
//!
//! `prepare` is registered before any handler of the program and therefore runs after all of them, `child` before.
//! vfork and posix_spawn share the parent's memory, and its engine serves the child until it executes something.
use crate::program;
use crate::{proc, say};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use memfold::config::Size;

static FROZEN: AtomicBool = AtomicBool::new(false);
/// The thread that is between `prepare` and the end of its fork; 0 if none is.
static FORKING: AtomicI32 = AtomicI32::new(0);

/// Registers the handlers.
pub fn install() {
    // SAFETY: three functions of the right type that stay loaded (the library is linked with `-z nodelete`).
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

/// A copy of the process that libc's handlers don't know of.
pub struct Copying {
    /// It is made by a libc call whose handlers have run.
    nested: bool,
}

impl Copying {
    /// Before the copy is made.
    pub fn begin() -> Copying {
        let nested = FORKING.load(SeqCst) == own_thread();
        if !nested {
            // SAFETY: the handler may run at any time.
            unsafe { prepare() };
        }
        Copying { nested }
    }

    /// After it was made, in each of the two; also if it was not.
    pub fn end(self, in_child: bool) {
        match (self.nested, in_child) {
            // SAFETY: `prepare` has run in `begin`.
            (false, true) => unsafe { child() },
            // SAFETY: likewise.
            (false, false) => unsafe { parent() },
            (true, _) => {}
        }
    }
}

fn own_thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}

unsafe extern "C" fn prepare() {
    let Some(program) = program::get() else { return };
    program.pause();
    FORKING.store(own_thread(), SeqCst);
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
    program.pager.set_inherited(true);
    FROZEN.store(true, SeqCst);
}

unsafe extern "C" fn parent() {
    let Some(program) = program::get() else { return };
    if FROZEN.swap(false, SeqCst) {
        program.pager.set_inherited(false);
        FORKING.store(0, SeqCst);
        // SAFETY: `prepare` paused it, and the swap lets only one caller pass.
        unsafe { program.resume() };
        program.pager.thaw();
    }
}

unsafe extern "C" fn child() {
    FORKING.store(0, SeqCst);
    program::abandon();
}
