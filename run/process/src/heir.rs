//! What becomes of a child of vfork whose parent's process ends first.
//!
//! All threads of that process end with it, the engine's too. The child has the memory, the engine's
//! data, and its own copies of the descriptors. No other task has them, except further children.
//!
//! - If no thread has ended in the middle of work on the engine, the engine is whole. All locks are
//!   free then, because a thread has a lock during such work. The child takes the place of the
//!   process: it starts the engine's threads again, in itself. It is a managed process from then
//!   on, and its engine serves the other children.
//! - Otherwise it is unknown which memory is folded. The child continues without the engine. It
//!   can execute a program, end, and handle signals. Its changes of mappings are made plainly. If it
//!   touches folded memory, or copies it by a fork, it ends with a message.
use crate::program::{self, ManagedProgram, get};
use crate::{engine, limits};
use core::mem::forget;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::memory::zone::list_is_held;
use memfold_os::raw::system_call;
use memfold_os::thread::{bare, process_id, yield_now};

/// The child that decides; 0 if there is none.
static HEIR: AtomicU32 = AtomicU32::new(0);

/// Returns whether a process exists. A process of another user does too (EPERM).
fn exists(process: u32) -> bool {
    // SAFETY: signal 0 isn't sent. The call only asks whether the process exists.
    let result = unsafe { system_call(libc::SYS_kill, [process as usize, 0, 0, 0, 0, 0]) };
    result != Err(Errno::SRCH)
}

/// Makes the calling child take the place of its parent's process, which has ended, or lose the
/// engine. If another child does that already, waits until it has.
pub fn inherit() {
    let own = process_id();
    while bare::life() == 0 {
        let Some(program) = get() else { return };
        let other = HEIR.load(SeqCst);
        if other != 0 && exists(other) {
            yield_now();
        } else if HEIR.compare_exchange(other, own, SeqCst, SeqCst).is_ok() {
            if bare::life() == 0 {
                decide(program);
            }
            HEIR.store(0, SeqCst);
        }
    }
}

fn decide(program: &'static ManagedProgram) {
    let has_ended = bare::await_last_instructions().is_ok();
    if !has_ended || !is_at_rest(program) {
        return program::lose();
    }
    // SAFETY: the barrier has returned, so no thread of the process that had the engine executes
    // an instruction any more. Its other children touch nothing of the engine.
    unsafe {
        program.memory().maps().forget_readers();
        program.pager().fork().inherit();
        memfold_gate::succeed();
        // The restarted thread assumes that the thread that starts it holds the lock.
        forget(program.memory().state().lock());
        engine::start_in_heir();
        program.memory().state().unlock();
    }
}

/// Returns whether no thread is in the middle of work on the engine, or has ended in it.
fn is_at_rest(program: &ManagedProgram) -> bool {
    !program.memory().is_in_change()
        && !limits::are_held()
        && !list_is_held()
        && !crate::heap::arena().is_held()
        && memfold_gate::is_at_rest()
        && program.pager().fork().is_at_rest()
}
