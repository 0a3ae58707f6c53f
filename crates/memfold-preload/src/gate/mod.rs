//! Faults are served by the thread that faults, and each system call of the
//! program passes the gate, whose keeper this is.
//!
//! # What holds
//! - **Nothing that a call names leaves the page table, or becomes write-protected, until the call
//!   is over** (`memfold/holds.rs`). That begins before anything is managed: calls that are under
//!   way at the adoption have published what they name, and what of it is missing is brought in
//!   before it is registered, as the kernel's own faults find nobody from then on.
//! - **Areas change with the call** (`change.rs`, `memfold/address_space/calls.rs`): all calls that
//!   change mappings take `Gated::state`, so one at a time, and make the call with the engine's
//!   areas locked. So what the engine believes is never older or newer than the kernel's map.
//! - **Where something may be managed, now or later, is known** (`memfold/known.rs`): for the rest a call
//!   passes after a load.
//! - Who holds `state` may meet faults: serving one takes no lock that is above the areas. Who holds
//!   the areas must not, and touches none of the program's memory.
//! - A program below `--adopt-at` has its calls pass, and nothing registered, until it maps more than
//!   the limit allows (`Gated::expect`); a small one has no engine yet (`deferred.rs`).
//!
//! # Descriptors
//! The thread that faults uses the userfaultfd, so it is in the program's table, with high numbers
//! that the program can't close; and in that of the engine's threads, which is another, under the
//! same numbers: it is opened before the first of them.
//!
//! # What isn't managed
//! What was there when the library was loaded; stacks (MAP_STACK, and what the gate reports); what
//! is locked, kept from dumps, zeros for children, open to merging; what is smaller than 64 KiB and
//! continues nothing.
mod ranges;
mod paging;
mod threads;
mod gated;
mod adopt;
mod advice;
mod given;
mod limits;
mod change;
mod copy;
mod deferred;
mod environment;
mod executes;
mod keeper;

use crate::engine;
use crate::order::Order;
use crate::say::unserved::unserved;
use crate::slots;
use core::ffi::c_char;
use memfold_sys::probe::dispatches;

use gated::Lacking;
pub use gated::get;

/// Starts the gate, and the engine, unless that can wait. Where it can't be had, the program does not
/// begin, or runs unmanaged: see `unserved`. Called by the constructor, with the arguments of `main`.
///
/// # Safety
/// - `arguments` is the array that the kernel left, with `count` of them, and there is one thread.
pub unsafe fn start(order: Order, count: usize, arguments: *mut *mut c_char) {
    let room = deferred::room(&order);
    if let Err(Lacking(why)) = prepare(&order, room > 0) {
        return unserved(format_args!("{why}"));
    }
    if room > 0 {
        deferred::wait(order, room);
    } else {
        engine::start(order, &deferred::LIFE);
        // If there is none, it was told why.
        if get().is_none() {
            return;
        }
    }
    // SAFETY: the constructor is called once, before the program has threads; the engine's threads
    // are bare ones. The keeper's calls are instructions of this library, which is one executable
    // segment, or libc's from inside the gate, which lets them through.
    match unsafe { memfold_gate::start(&keeper::KEEPER) } {
        Ok(()) => {
            executes::note_linker();
            // SAFETY: the caller's promise.
            unsafe { environment::take(count, arguments) };
        }
        Err(why) => unserved(format_args!("The gate is unavailable: {why:?}")),
    }
}

/// Opens what needs the program's own table of descriptors; where the engine can wait, that is
/// tried, until it has been once in the run.
fn prepare(order: &Order, may_wait: bool) -> Result<(), Lacking> {
    if !dispatches() {
        let why = "Syscall User Dispatch (Linux 5.11) is missing, or a sandbox hides it";
        return Err(Lacking(why.into()));
    }
    if !may_wait {
        return gated::open(&order.config);
    }
    if !slots::has_gate() {
        gated::try_open(&order.config)?;
        slots::note_gate();
    }
    Ok(())
}
