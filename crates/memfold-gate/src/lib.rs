//! The gate. Every system call of a program passes here. The gate keeps the memory that a call
//! names resident until the call returns. It needs x86-64 Linux 5.11 or newer.
//!
//! The gate doesn't know how memory is paged. It asks the owner of the memory through [`Keeper`].
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
pub use patch::note_entry;
pub use record::{ProgramPlace, TakenPlace};
pub use threads::{all_are_gone, child, first_has_exited, hand_over, serve_errands};
pub use touch::{read_bytes, touch, write_bytes};

use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::SeqCst;
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::use_no_counter;

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
    /// A thread can't be interrupted: it stays on its alternate stack, or in the kernel.
    Unreachable,
    /// A language runtime has stacks that are too small for a signal frame.
    SmallStacks,
    /// Another thread is arming the process.
    Busy,
}

/// Arms the process. From now on each system call of the calling thread passes the gate, and so do
/// the calls of all threads and processes that it makes. Call sites of libc, and of the program's own
/// code after [`note_entry`], are patched to enter the gate by a jump if they are used often. A jump
/// costs a thirtieth of a trap.
///
/// # Errors
/// The process can't be armed. No call passes the gate then.
///
/// # Safety
/// - This is called once.
/// - The process has one thread, not counting threads of the engine. Those have all signals blocked
///   and touch no memory that `keeper` serves.
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
    // SAFETY: the process has one thread besides those of the engine. They block all signals and
    // don't use the gate, so no other thread uses the cell.
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
        ALARMS.store(true, SeqCst);
    }
    set_signals_blocked(if armed.is_ok() { before & !actions::PROTECTED } else { before });
    armed
}

/// Whether SIGSYS is the gate's.
static ALARMS: AtomicBool = AtomicBool::new(false);

/// Returns whether threads of the keeper may open SIGSYS for their alarms ([`Keeper::alarm`]).
pub fn takes_alarms() -> bool {
    ALARMS.load(SeqCst)
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
    let made = with();
    let armed = user_dispatch::arm();
    assert!(armed.is_ok(), "what was armed can be armed again");
    set_signals_blocked(before);
    made
}
