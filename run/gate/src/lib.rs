//! The gate. Every system call of a program passes here. The gate keeps the memory that a call
//! names resident until the call returns. It needs x86-64 Linux 5.11 or newer.
//!
//! The gate doesn't know how memory is paged. It asks the owner of the memory through [`Keeper`].
#![cfg_attr(not(test), no_std)]

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
mod start;

pub use keeper::{
    AnyRights, BadAddress, ChildKeeper, ErrandServer, HoldKeeper, Keeper, KeeperCall, KeeperFault,
    KeeperHold, LifeKeeper, NamedSpan, Names, NoHoldRoom, NoServer, NoThreads, OtherProcess,
    PageKeeper, RefusedCall, RightsKeeper, ThreadKeeper,
};
pub use patch::{keep_room, note_entry};
pub use record::{ProgramPlace, TakenPlace};
pub use start::{ArmedProcess, start, takes_alarms};
pub use threads::{
    all_are_gone, child, first_has_exited, hand_over, is_at_rest, serve_errands, succeed,
};
pub use touch::{read_bytes, touch, write_bytes};

use core::fmt::{self, Display, Formatter};
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};

/// The reason why a process can't be armed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// There is no memory for the stacks of handlers, or there are too many threads.
    NoMemory,
    /// The executable segment of the gate wasn't found.
    NoRange,
    /// The kernel has no Syscall User Dispatch, or refuses it.
    NoDispatch(Errno),
    /// The kernel refuses the gate's signal handlers or alternate stack.
    NoHandlers(Errno),
    /// A thread can't be interrupted: it stays in the kernel, or blocks the signal. Or a process that
    /// isn't known uses the memory.
    Unreachable,
    /// Another thread is arming the process.
    Busy,
}

impl Display for WhyNot {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            WhyNot::NoMemory => f.write_str("no memory for a stack"),
            WhyNot::NoRange => f.write_str("the engine is part of the program, not of a library"),
            WhyNot::NoDispatch(e) => write!(f, "no Syscall User Dispatch (Linux 5.11): {e}"),
            WhyNot::NoHandlers(e) => write!(f, "signal handlers: {e}"),
            WhyNot::Unreachable => {
                f.write_str("a thread or process that uses the memory already can't be interrupted")
            }
            WhyNot::Busy => f.write_str("another thread is arming the process"),
        }
    }
}

/// Sets the calling thread's alternate stack, and returns the previous one.
///
/// # Errors
/// EPERM if the thread runs on its alternate stack.
fn set_alternate(stack: &frame::AlternateStack) -> Result<frame::AlternateStack, Errno> {
    let mut before = frame::AlternateStack::NONE;
    let args = [&raw const *stack as usize, &raw mut before as usize, 0, 0, 0, 0];
    // SAFETY: both structs live until the call returns. The new stack is that of the thread's slot,
    // which no other code uses while the thread lives, or one that the program itself had set.
    unsafe { system_call(libc::SYS_sigaltstack, args) }.map(|_| before)
}

/// Calls `with` while the calling thread is disarmed, and returns its result. Threads that `with`
/// starts stay unarmed. The engine starts its own threads in this way. All signals but the gate's
/// own are blocked meanwhile.
///
/// # Safety
/// - `with` passes the kernel no memory that the keeper serves.
/// - The process is armed.
///
/// # Panics
/// If the kernel refuses to arm the thread again.
pub unsafe fn apart<T>(with: impl FnOnce() -> T) -> T {
    let before = set_signals_blocked(!actions::PROTECTED);
    user_dispatch::disarm();
    let result = with();
    let outcome = user_dispatch::arm();
    assert!(outcome.is_ok(), "what was armed can be armed again");
    set_signals_blocked(before);
    result
}
