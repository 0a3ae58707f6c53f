//! The gate: every system call of a program passes here. The memory that a call names is kept resident
//! until the call returns (x86-64 Linux 5.11 or newer).
//!
//! The gate knows no pager. It asks the owner of the memory through [`Keeper`].
#![cfg_attr(not(test), no_std)]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

// Bottom first: a module imports only from modules listed above it.
mod keeper;
pub mod image;
mod entry;
mod frame;
mod touch;
mod user_dispatch;
mod actions;
mod errand;
mod record;
mod patch;
mod call_state;
mod signals;
mod threads;
pub mod syscalls;
mod dispatcher;
mod trap;
mod arm_running;

pub use arm_running::start_late;
pub use keeper::{
    BadAddress, Ending, Keeper, KeeperFault, KeeperHold, NamedSpan, Names, NoHoldRoom, RefusedCall,
};
pub use threads::{all_are_gone, child, first_has_exited, hand_over, serve_errands};
pub use touch::{read_bytes, touch, write_bytes};

use core::sync::atomic::Ordering::SeqCst;
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::use_no_counter;

/// Why a process can't be armed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// There is no memory for a stack.
    NoMemory,
    /// The executable segment of the gate can't be found.
    NoRange,
    /// The kernel has no Syscall User Dispatch, or doesn't allow it.
    NoDispatch(Errno),
    /// Handlers can't be installed.
    NoHandlers(Errno),
    /// A thread doesn't come: it stays on its alternate stack, or in the kernel.
    Unreachable,
    /// A runtime has stacks that are too small for a signal's frame.
    SmallStacks,
    /// Another thread is arming the process.
    Busy,
}

/// Arms the process. From now on each system call of the calling thread passes the gate, and so do
/// those of all threads and processes that it makes. Hot sites of libc enter by a jump, which costs
/// a thirtieth of a trap.
///
/// # Errors
/// The process can't be armed. No call passes the gate then.
///
/// # Safety
/// - Called once, in a process that has one thread but for threads of the engine's, which have all
///   signals blocked and touch no memory that `keeper` serves.
/// - The keeper makes system calls only by instructions in the same executable segment.
pub unsafe fn start(keeper: &'static dyn Keeper) -> Result<(), WhyNot> {
    if !user_dispatch::find_range() {
        return Err(WhyNot::NoRange);
    }
    let record = record::GateThread::take().ok_or(WhyNot::NoMemory)?;
    if syscalls::has_no_counter() {
        use_no_counter();
    }
    let before = set_signals_blocked(u64::MAX);
    // SAFETY: the caller's promise.
    unsafe { record::KEEPER.set(keeper) };
    signals::HANDLER.store(trap::on_signal as *const () as usize, SeqCst);
    record.claim();
    record.blocked.set(before & actions::PROTECTED);
    record.robust.store(threads::robust_list(), SeqCst);
    let armed = set_alternate(&record.stack())
        .map(|theirs| record.alternate.set(theirs))
        .and_then(|()| signals::take_over(record))
        .map_err(WhyNot::NoHandlers)
        .and_then(|()| user_dispatch::arm().map_err(WhyNot::NoDispatch));
    if armed.is_ok() {
        patch::allow(trap::on_patched);
    }
    set_signals_blocked(if armed.is_ok() { before & !actions::PROTECTED } else { before });
    armed
}

/// Sets the calling thread's alternate stack, and returns the one before. Fails with EPERM if the
/// thread stands on that.
fn set_alternate(stack: &frame::AlternateStack) -> Result<frame::AlternateStack, Errno> {
    let mut before = frame::AlternateStack::NONE;
    let args = [&raw const *stack as usize, &raw mut before as usize, 0, 0, 0, 0];
    // SAFETY: a slot's, which is the thread's for good, or the program's own.
    unsafe { system_call(libc::SYS_sigaltstack, args) }.map(|_| before)
}

/// Calls `with` while the calling thread is disarmed. Threads that `with` starts stay unarmed: so
/// the engine starts its own. Signals are blocked meanwhile.
///
/// # Safety
/// - `with` hands the kernel no memory that the keeper serves.
/// - The process is armed.
pub unsafe fn apart<T>(with: impl FnOnce() -> T) -> T {
    let before = set_signals_blocked(!actions::PROTECTED);
    user_dispatch::disarm();
    let made = with();
    let armed = user_dispatch::arm();
    assert!(armed.is_ok(), "what was armed can be armed again");
    set_signals_blocked(before);
    made
}
