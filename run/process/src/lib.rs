//! Management of one program: each fault is handled by the thread that faults, and each system call
//! of the program passes the gate. This crate is the gate's keeper.
//!
//! # What holds
//! - **Nothing that a call names leaves the page table, or becomes write-protected, until the call
//!   is over** (`engine/engine/src/holds.rs`). That begins before anything is managed. Calls in progress at
//!   the adoption have published what they name, and missing pages of it are made present before
//!   it is registered. From then on the kernel's own faults are not handled.
//! - **Areas change with the call** (`mappings/change.rs`, `engine/engine/src/mappings/calls.rs`). All
//!   calls that change mappings take `ProgramMemory::state`, so only one runs at a time. They make
//!   the call with the engine's areas locked. So the engine's areas are never older or newer than
//!   the kernel's map.
//! - **Memory that may be managed, now or later, is known** (`engine/engine/src/known.rs`). For all other
//!   memory a call passes after one load.
//! - A thread that holds `state` may fault, because handling a fault takes no lock above the areas.
//!   A thread that holds the areas must not fault, and touches none of the program's memory.
//! - Below `--adopt-at`, a program's calls pass and nothing is registered until it maps more than
//!   the limit allows (`Adoption::expect`). A small program has no engine yet
//!   (`deferred.rs`).
//!
//! # Descriptors
//! The thread that faults uses the userfaultfd. So the userfaultfd is in the program's table, with
//! a high number that the program can't close. It is also in the table of the engine's threads,
//! under the same number, because it is opened before the first of them starts.
//!
//! # What isn't managed
//! - memory from before the engine, but for zero-initialised static memory (`marks/statics.rs`)
//! - stacks of threads, and the memory that the gate reports
//! - memory that is locked, kept from dumps, zeros for children, or open to merging by
//!   PR_SET_MEMORY_MERGE
//! - areas smaller than 64 KiB that continue no managed one, while all of them have less than 1 MiB
#![cfg_attr(not(test), no_std)]
// Tests use sets of one range.
#![cfg_attr(test, allow(clippy::single_range_in_vec_init, clippy::cloned_ref_to_slice_refs))]
extern crate alloc;

/// Returns the address of a symbol of libc; 0 if there is no libc in this process.
macro_rules! weak_address {
    ($symbol:literal) => {{
        let place: usize;
        // SAFETY: it reads an address that the dynamic linker stored before this code ran. It is 0
        // if nothing defines the symbol, because the reference is weak.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $symbol),
                concat!("mov {place}, qword ptr [rip + ", $symbol, "@GOTPCREL]"),
                place = out(reg) place,
                options(nostack, preserves_flags)
            );
        }
        place
    }};
}

// Bottom first: a module imports only from modules listed above it.
pub mod diagnostics;
mod initial_stack;
mod loader;
mod heap;
mod request;
mod size;
mod threads;
mod marks;
mod paging;
mod engine;
mod program;
mod adoption;
mod restart;
mod limits;
mod mappings;
mod fork;
mod heir;
mod residency;
mod execution;
mod sampling;
mod deferred;
mod borrower;
mod keeper;
#[cfg(test)]
mod fixture;

use crate::diagnostics::unserved::unserved;
use crate::execution::environment;
use crate::initial_stack::InitialStack;
use crate::program::{LackingEngine, get};
use alloc::string::String;
use core::ffi::c_char;
use memfold_engine::config::Config;
use memfold_os::memory::arena::ZoneAllocator;
use memfold_os::probe::{RING, dispatches, killing_calls};
use memfold_run::member;

/// Loads the program for which the kernel has executed this library, and begins in it as [`begin`]
/// does. Returns the address at which the program begins. Its stack pointer must be `stack` then.
/// A program that can't be loaded ends with a message.
///
/// # Safety
/// - `stack` is the stack pointer with which the kernel started this process.
/// - The library is relocated, and the caller is the only thread.
pub unsafe fn load(stack: *mut usize, arena: &'static ZoneAllocator) -> usize {
    heap::note(arena);
    loader::protect_own_relocations();
    // SAFETY: the kernel leaves the number of arguments and then their array. The caller promises
    // that this is its stack, and that there is no other thread.
    let stack = unsafe { InitialStack::new(*stack, stack.add(1).cast()) };
    let config = request::read(&stack);
    let entry = loader::load(&stack).unwrap_or_else(|error| error.end());
    begin_with(config, &stack);
    entry
}

/// Begins in a program that is about to run: reads its request, if there is one, and starts what it
/// asks for. The constructor calls it with the arguments of `main` and the arena behind the global
/// allocator.
///
/// # Safety
/// - `arguments` is the array that the kernel left, and has `count` arguments.
/// - No other thread runs code of this library.
pub unsafe fn begin(count: usize, arguments: *mut *mut c_char, arena: &'static ZoneAllocator) {
    heap::note(arena);
    // SAFETY: the caller promises that this is the kernel's array, and that no other thread of this
    // library uses it.
    let stack = unsafe { InitialStack::new(count, arguments) };
    begin_with(request::read(&stack), &stack);
}

fn begin_with(request: Result<Option<Config>, String>, stack: &InitialStack) {
    match request {
        Ok(None) => {}
        Ok(Some(config)) => {
            if let Some(call) = killing_call(&config) {
                let why = "a seccomp filter kills the process that calls";
                return unserved(format_args!("{why} {call}"));
            }
            start(config, stack)
        }
        Err(why) => diagnostics::die(format_args!("MEMFOLD_RUN: {why}")),
    }
}

/// Returns the first call of the engine for which a seccomp filter would kill this process.
fn killing_call(config: &Config) -> Option<&'static str> {
    if !size::process_size::is_filtered() {
        return None;
    }
    let mut calls = killing_calls().into_iter();
    calls.find(|call| *call != RING || config.swap.is_some())
}

/// Publishes the figures for the last time before the program ends. A child of vfork that calls
/// `exit` publishes nothing, because the figures are its parent's.
pub fn finish() {
    // A thread with a filter may make none of these calls.
    if let Some(program) = get().filter(|_| !engine::has_ended() && engine::is_of_this_process()) {
        program.publish_last(|| program.account().publish_totals());
    }
}

/// Loads all folded memory, past the limit if necessary. Keeps it in memory until [`fold`], or
/// until a program of several threads forks. Returns `false` if this process is not managed.
pub fn unfold() -> bool {
    let Some(program) = get() else { return false };
    engine::have_done(|| program.pager().fork().freeze());
    true
}

/// Ends [`unfold`]: memory is folded as before. Returns `false` if this process is not managed.
pub fn fold() -> bool {
    get().map(|program| program.pager().fork().thaw()).is_some()
}

/// Starts the gate, and the engine unless it can wait. If one of them is unavailable, the program
/// does not begin, or runs unmanaged (`diagnostics::unserved`).
fn start(config: Config, stack: &InitialStack) {
    if !dispatches() {
        let why = "Syscall User Dispatch (Linux 5.11) is missing, or a sandbox hides it";
        return unserved(format_args!("{why}"));
    }
    // This takes a lock of libc, which a thread that waits in `process` may hold.
    let may_wait = deferred::may_wait(&config);
    memfold_gate::note_entry(stack.auxiliary(libc::AT_ENTRY).unwrap_or_default());
    // SAFETY: the constructor calls this once, and nothing is managed before `keep`. The engine's
    // threads start below, by calls of this library, which is one executable segment. The keeper's
    // calls are instructions of this library too. Calls that it makes through libc come from inside
    // the gate, which lets them through.
    let process = match unsafe { memfold_gate::start(&keeper::KEEPER) } {
        Ok(process) => process,
        Err(why) => return unserved(format_args!("The gate is unavailable: {why}")),
    };
    // A process waits for its engine only while it has one thread.
    let waits = may_wait && !process.has_others();
    if let Err(LackingEngine(why)) = prepare(&config, waits) {
        return unserved(format_args!("{why}"));
    }
    if waits {
        deferred::wait(config);
    } else {
        engine::start(config, &deferred::LIFE);
        // Without an engine the reason was reported already.
        if get().is_none() {
            return;
        }
    }
    environment::take(stack, !process.has_others());
    process.keep();
}

/// Opens what must be in the program's own descriptor table. If the engine can wait, only checks
/// that this is possible, unless a process of the run has checked it already.
fn prepare(config: &Config, may_wait: bool) -> Result<(), LackingEngine> {
    if !may_wait {
        return program::open(config);
    }
    if !member::has_gate() {
        program::try_open(config)?;
        member::note_gate();
    }
    Ok(())
}
