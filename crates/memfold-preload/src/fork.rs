//! Fork: the child gets a copy of the engine at rest, and threads for it. Where that can't be, everything folded comes back
//! first, and the child has no engine.
//!
//! `prepare` is registered before any handler of the program and therefore runs after all of them, `child` before.
//! vfork and posix_spawn share the parent's memory, and its engine serves the child until it executes something.
use crate::program::{self, Program};
use crate::{engine, files, proc, say};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering::SeqCst};
use memfold::config::Size;
use memfold_sys::bare;
use memfold_sys::raw::set_signals_blocked;
use memfold_sys::uffd::Uffd;

/// The thread that is between `prepare` and the end of its fork; 0 if none is.
static FORKING: AtomicI32 = AtomicI32::new(0);

/// Registers the handlers.
pub fn install() {
    files::find();
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

/// What `prepare` has done for the fork under way.
const NOTHING: u32 = 0;
/// The engine is at rest: the child gets a copy of it.
const AT_REST: u32 = 1;
/// Everything is back in place: the child gets no engine.
const BACK: u32 = 2;
static PREPARED: AtomicU32 = AtomicU32::new(NOTHING);
/// The signals that the forking thread had blocked.
static BLOCKED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn prepare() {
    let Some(program) = program::get() else { return };
    // A handler of a signal could touch folded memory while nobody serves it.
    let blocked = set_signals_blocked(u64::MAX);
    program.release_cpu();
    program.pause();
    BLOCKED.store(blocked, SeqCst);
    FORKING.store(own_thread(), SeqCst);
    // With a swap file two would own its slots; and the child must be able to open a userfaultfd, a right that a process may lose.
    let alone = proc::threads() == 1 + bare::count() as u64;
    if !program.pager.has_swap() && (alone || program.copies_beside_threads()) && Uffd::probe().is_ok() {
        program.come_to_rest(alone);
        engine::have_done(|| program.lend_to_children(alone));
        files::touch();
        program.begin_copying();
        PREPARED.store(AT_REST, SeqCst);
        return;
    }
    let away = program.pager.away_bytes();
    let available = proc::available_bytes();
    if away > available {
        say::die(format_args!(
            "fork() needs all memory back in place: {} are folded, the machine has {} left; stopping before data is lost",
            Size(away),
            Size(available)
        ));
    }
    engine::have_done(|| {
        program.pager.freeze();
        program.leave_to_children();
    });
    PREPARED.store(BACK, SeqCst);
}

unsafe extern "C" fn parent() {
    let Some(program) = program::get() else { return };
    match PREPARED.swap(NOTHING, SeqCst) {
        AT_REST => {
            // SAFETY: `prepare` brought it to rest, and the swap lets only one caller pass.
            unsafe {
                program.allow_allocation();
                engine::have_done(|| {
                    program.end_rest();
                    program.keep_from_children();
                });
            }
        }
        BACK => {
            engine::have_done(|| program.keep_from_children());
            program.pager.thaw();
        }
        _ => return,
    }
    go_on(program);
}

unsafe extern "C" fn child() {
    let Some(program) = program::get() else { return };
    match PREPARED.swap(NOTHING, SeqCst) {
        AT_REST => {
            // SAFETY: a copy of what `prepare` brought to rest. This is the only thread.
            unsafe {
                program.allow_allocation();
                engine::start_in_child();
            }
        }
        BACK => program::abandon(),
        _ => return,
    }
    go_on(program);
}

/// After the fork, in either process.
fn go_on(program: &Program) {
    FORKING.store(0, SeqCst);
    let blocked = BLOCKED.load(SeqCst);
    // SAFETY: `prepare` paused it, and only one caller gets here for it.
    unsafe { program.resume() };
    set_signals_blocked(blocked);
}
