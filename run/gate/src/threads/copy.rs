//! Serves calls that copy the process: `fork`, and `clone` without CLONE_VM.
use crate::actions::PROTECTED;
use crate::frame::SignalAction;
use crate::keeper::{Keeper, RefusedCall};
use crate::patch;
use crate::record::{GateThread, KEEPER, resume_growth, stop_growth};
use crate::signals::{block_all, install_protected};
use crate::threads::behalf::child;
use crate::user_dispatch::{arm, is_retired};
use core::sync::atomic::{AtomicIsize, Ordering::SeqCst};
use memfold_os::raw::{set_signals_blocked, system_call};

/// The flag of `clone3` that resets the child's handlers to the default action.
pub const CLEAR_SIGHAND: usize = 0x1_0000_0000;

/// Makes the copy by the call `nr`, whose arguments name no stack. Returns the call's result, which
/// is 0 in the copy.
///
/// The serving thread holds the locks during the copy in two cases. The caller may be killed
/// meanwhile. Or the caller may have to wait for another thread of the program, because the kernel
/// reports the copy to a userfaultfd of the program. The locks are free again by then.
pub fn copy(
    keeper: &Keeper,
    record: &'static GateThread,
    nr: usize,
    args: &[usize; 6],
    flags: usize,
) -> isize {
    keeper.life.expect_copy();
    block_all();
    // The value until the call returns. If the errand ends before that, the task has died or still
    // waits, and the copy was made.
    let child_pid = AtomicIsize::new(1);
    let make = || {
        // SAFETY: the arguments name no stack, so the child continues here on its copy of this
        // stack. It is alone in its memory.
        let result = unsafe { system_call(nr as i64, *args) };
        let result = result.map_or_else(|e| -(e.raw_os_error() as isize), |pid| pid as isize);
        child_pid.store(result, SeqCst);
    };
    let server = || {
        keeper.children.server().filter(|_| child().is_some() || keeper.children.waits_in_copy())
    };
    let mut with_lock = || {
        stop_growth();
        stop(keeper, record);
        record.errand.ask(&|| keeper.children.is_copied());
        // SAFETY: `stop` has returned above, and this is called once for it. In the parent the
        // serving thread runs this. The copy doesn't have that thread.
        unsafe { resume(keeper, record, child_pid.load(SeqCst), flags) };
    };
    let mut with_lock: &mut dyn FnMut() = &mut with_lock;
    let (mut by, mut is_called) = (server(), false);
    // A task whose calls don't pass the gate may copy the memory while the errand waits for this
    // call. Then the errand ends early and is posted again.
    while !is_called {
        let Some(serving) = by else {
            stop_growth();
            if is_retired() {
                // SAFETY: `stop_growth` was called above, and this is called once for it.
                unsafe { resume_growth() };
                // The copy has no keeper and no gate either.
                make();
                break;
            }
            stop(keeper, record);
            make();
            // SAFETY: `stop` has returned above, and this is called once for it. In the copy this
            // runs in its only thread.
            unsafe { resume(keeper, record, child_pid.load(SeqCst), flags) };
            break;
        };
        let is_served = record.errand.post(&raw mut with_lock as usize, &serving, &mut || {
            is_called = true;
            make();
            if child_pid.load(SeqCst) == 0 {
                // SAFETY: the serving thread of the parent has called `stop`. This is the only
                // thread of the copy, and calls this once for it.
                unsafe { resume(keeper, record, 0, flags) };
                // The copy doesn't have the serving thread, so nothing else ends the errand.
                record.errand.clear();
            }
        });
        if !is_served {
            // The errand may be in use until this returns.
            by = server();
        }
    }
    child_pid.load(SeqCst)
}

/// Keeps the state of gate and keeper unchanged until [`resume`], by holding their locks. The caller
/// has called [`stop_growth`].
fn stop(keeper: &Keeper, record: &GateThread) {
    patch::stop();
    keeper.life.begin_copy();
    record.actions().stop();
}

/// Ends [`stop`] after the thread of `record` has made the copy. `made` is the call's result, which
/// is 0 in the copy.
///
/// # Safety
/// - `stop` has returned, in this process or in the parent that this process is a copy of.
/// - This is called once for that `stop`.
/// - In the copy its only thread calls this.
unsafe fn resume(keeper: &Keeper, record: &'static GateThread, made: isize, flags: usize) {
    // SAFETY: `stop` has stopped the actions, and by the caller's promise this is called once for
    // it.
    unsafe { record.actions().resume() };
    if made == 0 {
        record.pending.store(0, SeqCst);
        record.sent.set(0);
        record.actions().forget_sent();
        record.claim();
        record.robust.store(0, SeqCst);
        record.give_back_others();
        record.begin_as_copy();
        // If another thread was about to execute a program, the kernel may ignore some (`exec.rs`).
        let _ = install_protected(record);
        begin(record, flags);
    }
    keeper.life.end_copy(made);
    // SAFETY: `stop` has stopped patching and the growth of the slots, and by the caller's promise
    // this is called once for it.
    unsafe {
        patch::resume();
        resume_growth();
    }
}

/// Begins a task: arms it, and resets its handlers if `flags` ask for that. All signals that may be
/// blocked are blocked. If the task can't be armed, its process ends.
pub fn begin(record: &GateThread, flags: usize) {
    // A task begins without a dispatch of its own. The kernel clears that too.
    record.dispatch.set(None);
    if flags & CLEAR_SIGHAND != 0 {
        record.actions().with(|actions| {
            actions.iter_mut().filter(|each| each.is_handler()).for_each(|each| {
                *each = SignalAction::DEFAULT;
            });
        });
    }
    let outcome = if flags & CLEAR_SIGHAND != 0 { install_protected(record) } else { Ok(()) };
    if is_retired() {
        return;
    }
    if let Err(e) = outcome.and_then(|()| arm()) {
        // Calls of an unarmed task could name folded memory. A filter that refuses the task this
        // call can't be distinguished from a kernel that lacks it.
        if let Some(keeper) = KEEPER.get() {
            keeper.rights.tells(RefusedCall::Task(e));
        }
        set_signals_blocked(PROTECTED);
        // SAFETY: the call takes no pointers and doesn't return. The task has run no code of the
        // program yet.
        let _ = unsafe { system_call(libc::SYS_exit_group, [255, 0, 0, 0, 0, 0]) };
    }
}
