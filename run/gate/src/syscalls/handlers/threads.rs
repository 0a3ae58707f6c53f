//! Serves calls that make, end or replace a thread or a process, or change what the kernel keeps
//! for one.
use crate::keeper::RefusedCall;
use crate::signals;
use crate::syscalls::handlers::namespaces;
use crate::syscalls::plain::raw;
use crate::syscalls::row::{ProgramCall, value};
use crate::threads;
use crate::threads::child;
use crate::user_dispatch::{self, ProgramDispatch};
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::raw::system_call;
use memfold_os::thread::use_no_counter;

/// The option of `prctl` that tells whether the kernel refuses the time stamp counter to the
/// calling thread, by SIGSEGV.
const PR_GET_TSC: usize = 25;
pub const PR_SET_TSC: usize = 26;
pub const PR_TSC_SIGSEGV: usize = 2;

/// Returns whether the kernel refuses the time stamp counter to the calling thread. The thread may
/// have inherited that from the program before.
pub fn has_no_counter() -> bool {
    let mut state = 0u32;
    let args = [PR_GET_TSC, &raw mut state as usize, 0, 0, 0, 0];
    // SAFETY: `state` has room for the answer, and lives until the call returns.
    let result = unsafe { system_call(libc::SYS_prctl, args) };
    result.is_ok() && state as usize == PR_TSC_SIGSEGV
}

/// Serves a `prctl(PR_SET_TSC)` that refuses the time stamp counter.
pub fn refuse_counter(call: &mut ProgramCall) -> isize {
    use_no_counter();
    call.wait()
}

/// Serves `clone`, `clone3`, `fork` and `vfork`.
pub fn clone(call: &mut ProgramCall) -> isize {
    threads::clone(call.keeper, call.record, call.context, call.nr, &call.args)
}

/// Serves `execve` and `execveat`.
pub fn execute(call: &mut ProgramCall) -> isize {
    let (row, args, caller) = (call.row(), call.args, call.caller());
    caller.held(row, &args, || {
        threads::execute(call.keeper, call.record, call.context, call.nr, &args)
    })
}

/// Serves `exit`.
pub fn exit(call: &mut ProgramCall) -> isize {
    threads::exit(call.keeper, call.record, call.args[0])
}

/// Serves `exit_group`.
pub fn exit_group(call: &mut ProgramCall) -> isize {
    threads::keep_locks(call.keeper, call.record);
    call.keeper.life.ends();
    call.raw()
}

/// Serves `unshare` and `setns`.
pub fn change_namespaces(call: &mut ProgramCall) -> isize {
    if call.nr as i64 == libc::SYS_setns || call.args[0] & libc::CLONE_NEWNET as usize != 0 {
        call.keeper.rights.leaves_network();
    }
    if !call.is_alone() {
        return call.wait();
    }
    signals::block_all();
    namespaces::alone(call.keeper.threads, call.nr, &call.args, raw)
}

/// Serves `arch_prctl`, which may set `fs`.
pub fn set_registers(call: &mut ProgramCall) -> isize {
    call.record.fs.set(0);
    call.wait()
}

/// Serves `set_tid_address`.
pub fn set_tid_address(call: &mut ProgramCall) -> isize {
    never_fold(call, call.args[0], 4)
}

/// Serves `rseq`.
pub fn set_rseq(call: &mut ProgramCall) -> isize {
    never_fold(call, call.args[0], call.args[1])
}

/// Serves `set_robust_list`.
pub fn set_robust_list(call: &mut ProgramCall) -> isize {
    let result = never_fold(call, call.args[0], call.args[1]);
    if result >= 0 {
        call.record.robust.store(call.args[0], SeqCst);
    }
    result
}

/// Makes a call after which the kernel may write to a range at any time. Excludes the range from
/// folding.
fn never_fold(call: &ProgramCall, start: usize, len: usize) -> isize {
    let result = call.raw();
    if result >= 0 && start != 0 {
        call.keeper.pages.never_fold(start, len);
    }
    result
}

/// Serves `prctl(PR_SET_SYSCALL_USER_DISPATCH)`.
pub fn set_dispatch(call: &mut ProgramCall) -> isize {
    signals::block_all();
    value(ProgramDispatch::of(&call.args).map(|own| call.record.dispatch.set(own)))
}

/// Serves `ptrace(PTRACE_TRACEME)`. From now on each signal stops the caller. The parent may wait
/// in vfork, or not know the gate's signals. So the gate raises none until the caller executes
/// another program: all memory is resident, and the calls of the only thread don't pass the gate.
/// The program that it executes isn't managed, because the environment has nothing of memfold.
pub fn be_traced(call: &mut ProgramCall) -> isize {
    let (keeper, record) = (call.keeper, call.record);
    if !call.is_alone() {
        return call.wait();
    }
    signals::block_all();
    if !threads::keep_home(keeper, record, true) {
        return -(libc::ENOMEM as isize);
    }
    let result = call.raw();
    if result < 0 {
        threads::keep_home(keeper, record, false);
        return result;
    }
    keeper.rights.tells(RefusedCall::Traced);
    if child().is_none() {
        // The program's action for SIGSYS would get them.
        keeper.threads.end_alarms();
    }
    pass_by(call, true);
    result
}

/// Disarms the caller. From now on its calls don't pass the gate, and neither do calls from patched
/// sites. If it is the only thread, the kernel gets the program's signal actions back.
pub fn pass_by(call: &mut ProgramCall, is_alone: bool) {
    call.record.fs.set(0);
    user_dispatch::disarm();
    if is_alone {
        signals::give_back(call.record);
        call.context.mask |= call.record.blocked.get();
        call.context.stack = call.record.alternate.get();
    }
}
