//! Actions, masks and stacks of signals, and signals that the program sends.
use crate::signals;
use crate::syscalls::row::{ProgramCall, value};

/// `rt_sigreturn`.
pub fn resume(call: &mut ProgramCall) {
    signals::resume(call.record, call.context);
}

/// `rt_sigaction`.
pub fn set_action(call: &mut ProgramCall) -> isize {
    value(signals::set_action(call.record, &call.args))
}

/// `rt_sigprocmask`.
pub fn set_mask(call: &mut ProgramCall) -> isize {
    value(signals::set_mask(call.record, call.context, &call.args))
}

/// `rt_sigpending`.
pub fn pending(call: &mut ProgramCall) -> isize {
    value(signals::pending(call.record, &call.args))
}

/// `sigaltstack`.
pub fn set_alternate(call: &mut ProgramCall) -> isize {
    match signals::set_alternate(call.record, call.context, &call.args) {
        Ok(Some(stack)) if stack.size > 0 => {
            call.keeper.never_fold(stack.sp, stack.size);
            0
        }
        done => value(done.map(drop)),
    }
}

/// `kill`.
pub fn kill(call: &mut ProgramCall) -> isize {
    signals::kill(call.record, &call.args).unwrap_or_else(|| call.wait())
}

/// `rt_sigqueueinfo`, `pidfd_send_signal`.
pub fn queue(call: &mut ProgramCall) -> isize {
    send(call, [1, 2], false)
}

/// `rt_tgsigqueueinfo`.
pub fn queue_for_thread(call: &mut ProgramCall) -> isize {
    send(call, [2, 3], true)
}

/// Sends a signal with information. `places` are the arguments that have both.
fn send(call: &mut ProgramCall, places: [usize; 2], for_thread: bool) -> isize {
    let (record, nr) = (call.record, call.nr);
    // SAFETY: what the call names is the gate's own.
    let make = |args: &[usize; 6]| unsafe { signals::call(record, nr, args) };
    signals::make_up(&call.args, places, for_thread, make).unwrap_or_else(|| call.wait())
}
