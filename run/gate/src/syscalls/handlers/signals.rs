//! Serves calls on actions, masks and stacks of signals, and calls that send signals.
use crate::signals;
use crate::syscalls::row::{CallingThread, ProgramCall, value};

/// Serves `rt_sigreturn`.
pub fn resume(call: &mut ProgramCall) {
    signals::resume(call.record, call.context);
}

/// Serves `rt_sigaction`.
pub fn set_action(caller: CallingThread, _: usize, args: &[usize; 6]) -> isize {
    value(signals::set_action(caller.record, args))
}

/// Serves `rt_sigprocmask`.
pub fn set_mask(call: &mut ProgramCall) -> isize {
    value(signals::set_mask(call.record, call.context, &call.args))
}

/// Serves `rt_sigpending`.
pub fn pending(call: &mut ProgramCall) -> isize {
    value(signals::pending(call.record, &call.args))
}

/// Serves `sigaltstack`. The new stack is excluded from folding.
pub fn set_alternate(call: &mut ProgramCall) -> isize {
    match signals::set_alternate(call.record, call.context, &call.args) {
        Ok(Some(stack)) if stack.size > 0 => {
            call.keeper.pages.never_fold(stack.sp, stack.size);
            0
        }
        done => value(done.map(drop)),
    }
}

/// Serves `kill`.
pub fn kill(call: &mut ProgramCall) -> isize {
    signals::kill(call.record, &call.args).unwrap_or_else(|| call.wait())
}

/// Serves `rt_sigqueueinfo` and `pidfd_send_signal`.
pub fn queue(call: &mut ProgramCall) -> isize {
    send(call, [1, 2], false)
}

/// Serves `rt_tgsigqueueinfo`.
pub fn queue_for_thread(call: &mut ProgramCall) -> isize {
    send(call, [2, 3], true)
}

/// Sends a signal with information. `places` are the numbers of the arguments that have the signal
/// and the information.
fn send(call: &mut ProgramCall, places: [usize; 2], for_thread: bool) -> isize {
    let (record, nr) = (call.record, call.nr);
    // SAFETY: all that the call names is memory of the gate, which stays resident.
    let make = |args: &[usize; 6]| unsafe { signals::call(record, nr, args) };
    signals::make_up(&call.args, places, for_thread, make).unwrap_or_else(|| call.wait())
}
