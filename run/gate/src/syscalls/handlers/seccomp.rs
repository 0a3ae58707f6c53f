//! Serves calls that set filters of system calls, and strict mode.
use crate::call_state::CALLED_OFF;
use crate::keeper::RefusedCall;
use crate::signals;
use crate::syscalls::handlers::filter;
use crate::syscalls::handlers::rights::give_up_rights;
use crate::syscalls::handlers::threads::pass_by;
use crate::syscalls::plain::raw;
use crate::syscalls::row::ProgramCall;
use crate::threads;

/// Serves `seccomp` and `prctl(PR_SET_SECCOMP)`.
pub fn seccomp(call: &mut ProgramCall) -> isize {
    if filter::wants_strict(call.nr, &call.args) {
        return be_strict(call);
    }
    match filter::set_by(call.nr, &call.args) {
        Some(at) => set_filter(call, at),
        None => give_up_rights(call),
    }
}

/// Sets the filter at `at`. If the program has one thread, a filter for all threads is set for that
/// thread only, because the keeper's threads aren't the program's. If the filter refuses a call
/// that the gate or the keeper needs, both end their work first.
fn set_filter(call: &mut ProgramCall, at: usize) -> isize {
    call.keeper.rights.filters();
    const ALL_THREADS: usize =
        (libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_TSYNC_ESRCH) as usize;
    let mut is_for_all = call.nr as i64 == libc::SYS_seccomp && call.args[1] & ALL_THREADS != 0;
    if is_for_all && call.is_alone() {
        is_for_all = false;
        call.args[1] &= !ALL_THREADS;
        call.context.regs.rsi = call.args[1] as u64;
    }
    if filter::refuses_own(call.keeper.rights, at, is_for_all) {
        return shut_in(call, RefusedCall::Filter);
    }
    call.keeper.rights.last_chance();
    call.keeper.rights.filtered();
    call.wait()
}

/// Serves SECCOMP_MODE_STRICT. From then on the kernel allows the caller to read, write, return
/// from handlers and end. It kills the caller for any other call that the gate would make.
fn be_strict(call: &mut ProgramCall) -> isize {
    // The kernel refuses strict mode to a thread with a filter.
    let has = [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0];
    if raw(libc::SYS_prctl as usize, &has) != 0 {
        return call.raw();
    }
    shut_in(call, RefusedCall::Strict)
}

/// Serves a caller that asks the kernel to refuse calls that the gate or the keeper needs. Makes all
/// memory resident. The program then makes this call again, which doesn't pass the gate.
///
/// The first process continues without gate and keeper. A keeper that can't end its work stays, and
/// so does that of a child of vfork, which is its parent's: only the caller is disarmed then. This
/// call must be the first such one, because even a return from a handler may be refused after it.
fn shut_in(call: &mut ProgramCall, how: RefusedCall) -> isize {
    let (keeper, record, is_alone) = (call.keeper, call.record, call.is_alone());
    signals::block_all();
    if !threads::keep_home(keeper, record, true) {
        return -(libc::ENOMEM as isize);
    }
    if record.is_of_first_process() {
        keeper.rights.tells(how);
    } else {
        // The child's parent waits until the child executes a program or ends. Then the memory is
        // managed again.
        record.traced.set(true);
    }
    if record.is_of_first_process() && keeper.rights.can_retire() {
        keeper.threads.end_alarms();
        threads::retire(record);
        keeper.rights.retire();
    } else {
        pass_by(call, is_alone);
    }
    CALLED_OFF
}
