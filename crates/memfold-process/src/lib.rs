//! Faults are served by the thread that faults, and each system call of the
//! program passes the gate, whose keeper this is.
//!
//! # What holds
//! - **Nothing that a call names leaves the page table, or becomes write-protected, until the call
//!   is over** (`memfold/holds.rs`). That begins before anything is managed: calls that are under
//!   way at the adoption have published what they name, and what of it is missing is brought in
//!   before it is registered, as the kernel's own faults find nobody from then on.
//! - **Areas change with the call** (`mappings/change.rs`, `memfold/address_space/calls.rs`): all calls that
//!   change mappings take `ManagedProgram::state`, so one at a time, and make the call with the engine's
//!   areas locked. So what the engine believes is never older or newer than the kernel's map.
//! - **Where something may be managed, now or later, is known** (`memfold/known.rs`): for the rest a call
//!   passes after a load.
//! - Who holds `state` may meet faults: serving one takes no lock that is above the areas. Who holds
//!   the areas must not, and touches none of the program's memory.
//! - A program below `--adopt-at` has its calls pass, and nothing registered, until it maps more than
//!   the limit allows (`ManagedProgram::expect`); a small one has no engine yet (`deferred.rs`).
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
#![cfg_attr(not(test), no_std)]
// Sets of one range.
#![cfg_attr(test, allow(clippy::single_range_in_vec_init, clippy::cloned_ref_to_slice_refs))]
extern crate alloc;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("memfold run needs the gate, which is for x86-64");

// Bottom first: a module imports only from modules listed above it.
pub mod diagnostics;
mod heap;
mod request;
mod size;
mod marks;
mod paging;
mod engine;
mod threads;
mod program;
mod adopt;
mod limits;
mod mappings;
mod fork;
mod execution;
mod deferred;
mod keeper;
#[cfg(test)]
mod fixture;

use crate::diagnostics::unserved::unserved;
use crate::execution::{environment, executes};
use crate::program::{LackingEngine, get};
use core::ffi::c_char;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use memfold::config::Config;
use memfold_os::memory::arena::ZoneAllocator;
use memfold_os::probe::{RING, dispatches, killing_calls};
use memfold_run::member;

/// Begins in a program that is about to begin: reads what it was asked for, if anything, and starts
/// what that asks for. Called by the constructor, with the arguments of `main`, and the arena behind
/// the global allocator.
///
/// # Safety
/// - `arguments` is the array that the kernel left, with `count` of them, and there is one thread.
pub unsafe fn begin(count: usize, arguments: *mut *mut c_char, arena: &'static ZoneAllocator) {
    heap::note(arena);
    match request::read() {
        Ok(None) => {}
        Ok(Some(config)) => {
            if let Some(call) = killing_call(&config) {
                let why = "a seccomp filter kills the process that calls";
                return unserved(format_args!("{why} {call}"));
            }
            // SAFETY: the caller's promise.
            unsafe { start(config, count, arguments) }
        }
        Err(why) => diagnostics::die(format_args!("MEMFOLD_RUN: {why}")),
    }
}

/// The first call that a seccomp filter would kill this process for, and that the engine makes.
fn killing_call(config: &Config) -> Option<&'static str> {
    if !size::process_size::is_filtered() {
        return None;
    }
    // SAFETY: the constructor is called before the program has threads.
    let mut calls = unsafe { killing_calls() }.into_iter();
    calls.find(|call| *call != RING || config.swap.is_some())
}

/// Brings the figures up to date once more before the program ends.
pub fn finish() {
    // Who has a filter may make none of these calls.
    if let Some(program) = get().filter(|program| !program.shut_in.load(SeqCst)) {
        let pager = &program.pager;
        pager.gauges().publish();
        member::note_totals();
        pager.stats().need_bytes.store(0, Relaxed);
        member::set_need(0);
    }
}

/// Brings everything folded back, past the limit if need be, and keeps it in memory until [`fold`] or
/// the next fork of a program of several threads. `false`: this process is not managed.
pub fn unfold() -> bool {
    let Some(program) = get() else { return false };
    engine::have_done(|| program.pager.fork().freeze());
    true
}

/// Ends [`unfold`]: memory is folded as before. `false`: this process is not managed.
pub fn fold() -> bool {
    get().map(|program| program.pager.fork().thaw()).is_some()
}

/// Starts the gate, and the engine, unless that can wait. Where it can't be had, the program does not
/// begin, or runs unmanaged: see `unserved`.
///
/// # Safety
/// - As for [`begin`].
unsafe fn start(config: Config, count: usize, arguments: *mut *mut c_char) {
    let room = deferred::room(&config);
    if let Err(LackingEngine(why)) = prepare(&config, room > 0) {
        return unserved(format_args!("{why}"));
    }
    if room > 0 {
        deferred::wait(config, room);
    } else {
        engine::start(config, &deferred::LIFE);
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
fn prepare(config: &Config, may_wait: bool) -> Result<(), LackingEngine> {
    if !dispatches() {
        let why = "Syscall User Dispatch (Linux 5.11) is missing, or a sandbox hides it";
        return Err(LackingEngine(why.into()));
    }
    if !may_wait {
        return program::open(config);
    }
    if !member::has_gate() {
        program::try_open(config)?;
        member::note_gate();
    }
    Ok(())
}
