//! Fork: the child gets a copy of the engine at rest, and threads for it. Where that can't be,
//! everything folded comes back first, and the child has no engine.
//!
//! Between libc's handlers and the copy, and between the copy and the handlers, libc and libraries
//! touch memory of their own, as the blocks of threads. So for libc's fork the copy is taken out of
//! libc's hands (`memfold_sys::thread::dispatch`), and both processes are served before libc goes
//! on. vfork and posix_spawn share the parent's memory, and its engine serves the child until it
//! executes something.
use crate::program::{self, Program};
use crate::{engine, proc, say, slots};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use memfold::config::Size;
use memfold_sys::raw::set_signals_blocked;
use memfold_sys::thread::{bare, dispatch, thread_id};
use memfold_sys::uffd::Uffd;

/// The thread that is between `prepare` and the end of its fork; 0 if none is.
static FORKING: AtomicU32 = AtomicU32::new(0);

/// Registers the handlers.
pub fn install() {
    // SAFETY: three functions of the right type that stay loaded (the library is linked with `-z
    // nodelete`).
    unsafe { libc::pthread_atfork(Some(prepare_libc), Some(parent), Some(child)) };
}

/// A copy of the process that libc's handlers don't know of.
pub struct Copying {
    /// It is made by a libc call whose handlers have run.
    nested: bool,
}

impl Copying {
    /// Before the copy is made.
    pub fn begin() -> Copying {
        let nested = FORKING.load(SeqCst) == thread_id();
        if !nested {
            prepare(false);
        }
        Copying { nested }
    }

    /// After it was made, in each of the two; also if it was not.
    pub fn end(self, in_child: bool) {
        if !self.nested {
            end(in_child);
        }
    }
}

/// So often a fork looks for a time at which other threads change no mapping: each is a few
/// milliseconds.
const RESTS: u32 = 4;

/// What `prepare` has done for the fork under way.
const NOTHING: u32 = 0;
/// The engine is at rest: the child gets a copy of it.
const AT_REST: u32 = 1;
/// Everything is back in place: the child gets no engine.
const BACK: u32 = 2;
static PREPARED: AtomicU32 = AtomicU32::new(NOTHING);
/// The signals that the forking thread had blocked.
static BLOCKED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn prepare_libc() {
    prepare(true);
}

/// There is something left to do only where the copy was not caught, or not made.
unsafe extern "C" fn parent() {
    if FORKING.load(SeqCst) == thread_id() {
        dispatch::end();
        end(false);
    }
}

/// Likewise.
unsafe extern "C" fn child() {
    end(true);
}

/// Before a copy, which libc will make, or the caller.
fn prepare(by_libc: bool) {
    let Some(program) = program::get() else { return };
    // A handler of a signal could touch folded memory while nobody serves it.
    let blocked = set_signals_blocked(u64::MAX);
    program.pause();
    BLOCKED.store(blocked, SeqCst);
    FORKING.store(thread_id(), SeqCst);
    // With a swap file two would own its slots; and the child must be able to open a userfaultfd, a
    // right that a process may lose.
    let alone = proc::threads() == 1 + bare::count() as u64;
    let caught = !by_libc || dispatch::probe();
    if !program.pager.has_swap() && caught && Uffd::probe().is_ok() {
        for tried in 1.. {
            // A child is spared to tell what others had changed at the moment of the copy, if there
            // is a time when they don't.
            let last = alone || tried == RESTS;
            program.quiesce(alone);
            let mut still = false;
            engine::have_done(|| still = program.lend_to_children(last));
            if still || last {
                break;
            }
            give_up_rest(program);
        }
        return begin_copying(program, by_libc.then_some(blocked));
    }
    bring_back(program);
}

/// Has the first engine thread do `work` at rest. Called by a thread of the program, while no
/// adoption is under way.
pub fn at_rest(program: &Program, work: fn(&Program)) {
    program.quiesce(true);
    engine::have_done(|| work(program));
    give_up_rest(program);
}

/// Ends a rest in which no copy was made.
fn give_up_rest(program: &Program) {
    // SAFETY: the engine is at rest, and nobody else ends it, as no copy is being made.
    unsafe {
        program.pager.allow_requests();
        engine::have_done(|| program.end_quiescence());
    }
    program.pager.forget_rest();
}

/// The engine is at rest, and the copy is about to be made; if by libc, in a thread that had
/// `blocked` these signals.
fn begin_copying(program: &Program, by_libc: Option<u64>) {
    program.begin_copying();
    PREPARED.store(AT_REST, SeqCst);
    if let Some(blocked) = by_libc {
        // SAFETY: all signals are blocked, `parent` ends it, and the program stays paused until
        // this fork has ended.
        if let Err(e) = unsafe { dispatch::begin(blocked, after_copy) } {
            say::die(format_args!("fork: prctl(PR_SET_SYSCALL_USER_DISPATCH): {e}"));
        }
    }
}

fn bring_back(program: &Program) {
    let away = program.pager.away_bytes();
    let available = proc::available_bytes();
    if away > available {
        say::die(format_args!(
            "fork() needs all memory back in place: {} are folded, the machine has {} left; stopping before data is lost",
            Size(away),
            Size(available)
        ));
    }
    engine::have_done(|| program.pager.freeze());
    at_rest(program, Program::leave_to_children);
    PREPARED.store(BACK, SeqCst);
}

/// In parent and child: all of the end but for the signals, which stay blocked.
fn after_copy(in_child: bool) {
    let Some(program) = program::get() else { return };
    if in_child {
        slots::begin_as_child();
    }
    match (PREPARED.swap(NOTHING, SeqCst), in_child) {
        // SAFETY: `prepare` brought it to rest, and the swap lets only one caller pass. A child has
        // this thread alone.
        (AT_REST, true) => unsafe {
            program.allow_allocation();
            engine::start_in_child();
        },
        // SAFETY: likewise.
        (AT_REST, false) => unsafe {
            program.allow_allocation();
            engine::have_done(|| {
                program.keep_from_children();
                program.end_quiescence();
            });
        },
        (BACK, true) => program::abandon(),
        (BACK, false) => {
            at_rest(program, Program::keep_from_children);
            program.pager.thaw();
        }
        _ => return,
    }
    FORKING.store(0, SeqCst);
    // SAFETY: `prepare` paused it, and only one caller gets here for it.
    unsafe { program.resume() };
}

/// In parent and child, where that was not done already.
fn end(in_child: bool) {
    let blocked = BLOCKED.load(SeqCst);
    if PREPARED.load(SeqCst) != NOTHING {
        after_copy(in_child);
        set_signals_blocked(blocked);
    }
}
