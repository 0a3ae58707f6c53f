//! Copies the process: `fork`, and `clone` without CLONE_VM.
use crate::actions::PROTECTED;
use crate::frame::SignalAction;
use crate::keeper::{Keeper, RefusedCall};
use crate::patch;
use crate::record::{GateThread, KEEPER, resume_growth, stop_growth};
use crate::signals::{block_all, install_protected};
use crate::threads::behalf::child;
use crate::user_dispatch::arm;
use core::sync::atomic::{AtomicIsize, Ordering::SeqCst};
use memfold_os::raw::{set_signals_blocked, system_call};

/// The flag of `clone3` by which the child has no handlers.
pub const CLEAR_SIGHAND: usize = 0x1_0000_0000;

/// Makes the copy by the call `nr`, whose arguments name no stack.
///
/// The serving thread holds the locks where the caller may be killed meanwhile. It also holds them
/// where the caller may have to wait for another thread of the program: after the copy the kernel
/// reports it to a userfaultfd of the program's. The locks are free again by then.
pub fn copy(
    keeper: &dyn Keeper,
    record: &'static GateThread,
    nr: usize,
    args: &[usize; 6],
    flags: usize,
) -> isize {
    block_all();
    // The value until the call returns. The task may be gone or wait by then, and the copy was
    // made.
    let made = AtomicIsize::new(1);
    let make = || {
        // SAFETY: the child goes on here, on its copy of this stack.
        let result = unsafe { system_call(nr as i64, *args) };
        let result = result.map_or_else(|e| -(e.raw_os_error() as isize), |pid| pid as isize);
        made.store(result, SeqCst);
    };
    let server = keeper.server().filter(|_| child().is_some() || keeper.waits_in_copy());
    let Some(ring) = server else {
        stop(keeper, record);
        make();
        // SAFETY: stopped above.
        unsafe { resume(keeper, record, made.load(SeqCst), flags) };
        return made.load(SeqCst);
    };
    let mut held = || {
        stop(keeper, record);
        record.errand.ask(&|| keeper.is_copied());
        // SAFETY: stopped above.
        unsafe { resume(keeper, record, made.load(SeqCst), flags) };
    };
    let mut held: &mut dyn FnMut() = &mut held;
    let mut called = false;
    // A task whose calls don't pass the gate may copy the memory in between.
    while !called {
        record.errand.post(&raw mut held as usize, ring, &mut || {
            called = true;
            make();
            if made.load(SeqCst) == 0 {
                // SAFETY: stopped in the parent.
                unsafe { resume(keeper, record, 0, flags) };
                // The serving thread is the parent's.
                record.errand.clear();
            }
        });
    }
    made.load(SeqCst)
}

/// Keeps the state of gate and keeper unchanged until [`resume`].
fn stop(keeper: &dyn Keeper, record: &GateThread) {
    stop_growth();
    patch::stop();
    keeper.begin_copy();
    record.actions().stop();
}

/// Ends [`stop`] after the copy was made by the thread of `record`; `made` is 0 in the copy.
///
/// # Safety
/// - `stop` has returned, in this process or in the parent that it is a copy of, and this is called once
///   for it. In the copy it is called by the only thread.
unsafe fn resume(keeper: &dyn Keeper, record: &'static GateThread, made: isize, flags: usize) {
    // SAFETY: the caller's promise; likewise below.
    unsafe { record.actions().resume() };
    if made == 0 {
        record.pending.store(0, SeqCst);
        record.sent.set(0);
        record.actions().forget_sent();
        record.claim();
        record.robust.store(0, SeqCst);
        record.give_back_others();
        record.begin_as_copy();
        begin(record, flags);
    }
    keeper.end_copy(made);
    // SAFETY: as above.
    unsafe {
        patch::resume();
        resume_growth();
    }
}

/// Begins a task, with all signals blocked that may be.
pub fn begin(record: &GateThread, flags: usize) {
    // A task begins without a dispatch of its own: the kernel clears that, too.
    record.dispatch.set(None);
    if flags & CLEAR_SIGHAND != 0 {
        record.actions().with(|actions| {
            actions.iter_mut().filter(|each| each.is_handler()).for_each(|each| {
                *each = SignalAction::DEFAULT;
            });
        });
    }
    let begun = if flags & CLEAR_SIGHAND != 0 { install_protected(record) } else { Ok(()) };
    if let Err(e) = begun.and_then(|()| arm()) {
        // Its calls would meet folded memory. A filter that refuses the task the call looks the
        // same as a kernel without it.
        if let Some(keeper) = KEEPER.get() {
            keeper.tells(RefusedCall::Task(e));
        }
        set_signals_blocked(PROTECTED);
        // SAFETY: it has done nothing yet.
        let _ = unsafe { system_call(libc::SYS_exit_group, [255, 0, 0, 0, 0, 0]) };
    }
}
