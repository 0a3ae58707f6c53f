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
pub use keeper::{BadAddress, Ending, Fault, Hold, Keeper, Names, NoRoom, Refused, Span};
pub use threads::{all_are_gone, child, first_has_exited, hand_over, serve_errands};
pub use touch::{read_bytes, touch, write_bytes};

use core::sync::atomic::Ordering::SeqCst;
use memfold_sys::Errno;
use memfold_sys::raw::{set_signals_blocked, system_call};
use memfold_sys::thread::use_no_counter;

/// Why a process can't be gated.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// No room for a stack.
    NoMemory,
    /// The executable segment that holds the gate can't be found.
    NoRange,
    /// The kernel has no Syscall User Dispatch, or doesn't allow it.
    NoDispatch(Errno),
    /// Handlers can't be installed.
    NoHandlers(Errno),
    /// A thread can't be had: it stands on its alternate stack, or the kernel holds it.
    Unreachable,
    /// A runtime has stacks that a signal's frame doesn't fit.
    SmallStacks,
    /// Somebody else is about it.
    Busy,
}

/// Arms the process: from now on each system call of the calling thread, and of all threads and
/// processes that come of it, passes the gate. Hot sites of libc come by a jump, which costs a
/// thirtieth of a trap.
///
/// # Errors
/// Why not; then nothing passes it.
///
/// # Safety
/// - Called once, in a process that has one thread but for threads of the engine's, which have all
///   signals blocked and touch no memory that `keeper` serves.
/// - The keeper makes no system call but by instructions in the same executable segment.
pub unsafe fn start(keeper: &'static dyn Keeper) -> Result<(), WhyNot> {
    if !user_dispatch::find_range() {
        return Err(WhyNot::NoRange);
    }
    let record = record::ThreadRecord::take().ok_or(WhyNot::NoMemory)?;
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

/// Gives the calling thread an alternate stack; returns the one before. EPERM: it stands on that.
fn set_alternate(stack: &frame::AlternateStack) -> Result<frame::AlternateStack, Errno> {
    let mut before = frame::AlternateStack::NONE;
    let args = [&raw const *stack as usize, &raw mut before as usize, 0, 0, 0, 0];
    // SAFETY: a slot's, which is the thread's for good, or the program's own.
    unsafe { system_call(libc::SYS_sigaltstack, args) }.map(|_| before)
}

/// Calls `with` while the calling thread's system calls don't pass the gate: the threads that it
/// starts never will, which is how those of the engine's are started. Signals wait until it is over.
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
