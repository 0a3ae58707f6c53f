//! What makes, ends or replaces a thread or a process, and what the kernel keeps of one.
use crate::keeper::{Ending, RefusedCall};
use crate::signals;
use crate::syscalls::handlers::namespaces;
use crate::syscalls::plain::raw;
use crate::syscalls::row::{ProgramCall, value};
use crate::threads;
use crate::user_dispatch::{self, ProgramDispatch};
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::raw::system_call;
use memfold_os::thread::use_no_counter;

/// `prctl`: whether the processor's counter is refused to the calling thread, by SIGSEGV.
const PR_GET_TSC: usize = 25;
pub const PR_SET_TSC: usize = 26;
pub const PR_TSC_SIGSEGV: usize = 2;

/// Whether the processor's counter is refused to the calling thread. It may have that of the program
/// before it.
pub fn has_no_counter() -> bool {
    let mut state = 0u32;
    let args = [PR_GET_TSC, &raw mut state as usize, 0, 0, 0, 0];
    // SAFETY: there is room for the answer.
    let asked = unsafe { system_call(libc::SYS_prctl, args) };
    asked.is_ok() && state as usize == PR_TSC_SIGSEGV
}

/// `prctl(PR_SET_TSC)` that refuses the counter.
pub fn refuse_counter(call: &mut ProgramCall) -> isize {
    use_no_counter();
    call.wait()
}

/// `clone`, `clone3`, `fork`, `vfork`.
pub fn clone(call: &mut ProgramCall) -> isize {
    threads::clone(call.keeper, call.record, call.context, call.nr, &call.args)
}

/// `execve`, `execveat`.
pub fn execute(call: &mut ProgramCall) -> isize {
    let (row, args, caller) = (call.row(), call.args, call.caller());
    caller.held(row, &args, || {
        threads::execute(call.keeper, call.record, call.context, call.nr, &args)
    })
}

/// `exit`.
pub fn exit(call: &mut ProgramCall) -> isize {
    threads::exit(call.keeper, call.record, call.args[0])
}

/// `exit_group`.
pub fn exit_group(call: &mut ProgramCall) -> isize {
    threads::keep_locks(call.keeper, call.record);
    call.keeper.ends(Ending::Process);
    call.raw()
}

/// `unshare`, `setns`.
pub fn change_namespaces(call: &mut ProgramCall) -> isize {
    if !call.is_alone() {
        return call.wait();
    }
    signals::block_all();
    namespaces::alone(call.keeper, call.nr, &call.args, raw)
}

/// `arch_prctl`, which may set `fs`.
pub fn set_registers(call: &mut ProgramCall) -> isize {
    call.record.fs.set(0);
    call.wait()
}

/// `set_tid_address`.
pub fn set_tid_address(call: &mut ProgramCall) -> isize {
    never_fold(call, call.args[0], 4)
}

/// `rseq`.
pub fn set_rseq(call: &mut ProgramCall) -> isize {
    never_fold(call, call.args[0], call.args[1])
}

/// `set_robust_list`.
pub fn set_robust_list(call: &mut ProgramCall) -> isize {
    let done = never_fold(call, call.args[0], call.args[1]);
    if done >= 0 {
        call.record.robust.store(call.args[0], SeqCst);
    }
    done
}

/// Makes a call after which the kernel may write to a range at any time, and excludes the range
/// from folding.
fn never_fold(call: &ProgramCall, start: usize, len: usize) -> isize {
    let done = call.raw();
    if done >= 0 && start != 0 {
        call.keeper.never_fold(start, len);
    }
    done
}

/// `prctl(PR_SET_SYSCALL_USER_DISPATCH)`.
pub fn set_dispatch(call: &mut ProgramCall) -> isize {
    signals::block_all();
    value(ProgramDispatch::of(&call.args).map(|own| call.record.dispatch.set(own)))
}

/// Serves `ptrace(PTRACE_TRACEME)`. Each signal stops the caller from now on. The parent may wait
/// in vfork, or know nothing of the gate's signals. So the gate raises none until the caller
/// executes another program: all memory is resident, and the calls of the only thread don't pass
/// the gate. The program that it executes isn't managed, as the environment has nothing of
/// memfold's.
pub fn be_traced(call: &mut ProgramCall) -> isize {
    let (keeper, record) = (call.keeper, call.record);
    if !call.is_alone() {
        return call.wait();
    }
    signals::block_all();
    if !threads::keep_home(keeper, record, true) {
        return -(libc::ENOMEM as isize);
    }
    let made = call.raw();
    if made < 0 {
        threads::keep_home(keeper, record, false);
        return made;
    }
    keeper.tells(RefusedCall::Traced);
    pass_by(call, true);
    made
}

/// Disarms the caller: its calls don't pass the gate from now on, nor do those of patched sites. If
/// it is the only thread, the kernel gets the program's signal actions back.
pub fn pass_by(call: &mut ProgramCall, is_alone: bool) {
    call.record.fs.set(0);
    user_dispatch::disarm();
    if is_alone {
        signals::give_back(call.record);
        call.context.mask |= call.record.blocked.get();
        call.context.stack = call.record.alternate.get();
    }
}
