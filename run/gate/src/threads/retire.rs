//! Ends the gate in a process for good: each thread continues as it would without memfold, and so do
//! the threads and processes that it makes.
//!
//! No thread is interrupted. All threads have the same selector, so one store lets all their calls
//! pass. A thread that is in the gate at that time leaves it as always. Two things must not happen
//! to it meanwhile:
//! - A step of a patched site traps to deliver a pending signal. So the selector changes only when
//!   no other thread has one. New ones can't arise, because the kernel has the program's own
//!   handlers by then.
//! - The kernel must deliver a SIGSYS that it raised before the selector changed to the gate. So the
//!   program's action for it comes last, after all CPUs have left what they did.
use crate::actions::PROTECTED;
use crate::frame::SignalContext;
use crate::record::{GateThread, each_used, resume_growth, stop_growth};
use crate::signals::{give_back_some, keep_no_more};
use crate::threads::end::is_gone;
use crate::user_dispatch;
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::raw::system_call;
use memfold_os::thread::yield_now;

/// Ends the gate. `record` is that of the caller. All memory must be resident for good.
pub fn retire(record: &GateThread) {
    // A copy of the process is made before this or after it.
    stop_growth();
    if user_dispatch::note_retired() {
        keep_no_more();
        give_back_some(record, !PROTECTED);
        while others_are_pending(record) {
            yield_now();
        }
        user_dispatch::let_all_pass();
        await_each_cpu();
        give_back_some(record, PROTECTED);
    }
    // SAFETY: `stop_growth` was called above, and this is called once for it.
    unsafe { resume_growth() };
}

fn others_are_pending(record: &GateThread) -> bool {
    let mut any = false;
    each_used(|other| {
        let is_other = !core::ptr::eq(other, record);
        any |= is_other && other.pending.load(SeqCst) != 0 && !is_gone(other);
    });
    any
}

/// Waits until each CPU has left the code of the kernel that it ran.
fn await_each_cpu() {
    /// MEMBARRIER_CMD_GLOBAL of `include/uapi/linux/membarrier.h`.
    const GLOBAL: usize = 1;
    // SAFETY: the call touches no memory.
    let _ = unsafe { system_call(libc::SYS_membarrier, [GLOBAL, 0, 0, 0, 0, 0]) };
}

/// Lets a thread that leaves the retired gate continue with its own alternate stack and mask.
pub fn leave_for_good(record: &GateThread, context: &mut SignalContext) {
    context.mask |= record.blocked.get();
    context.stack = record.alternate.get();
}
