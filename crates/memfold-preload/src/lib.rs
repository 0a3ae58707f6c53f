//! The library that `memfold run` loads into a program.
//!
//! Its constructor runs after libc's and before the program's `main`. Nothing here uses the
//! program's `malloc`, stdio or thread-local storage: all of them will be under management.
#![no_std]
extern crate alloc;

use memfold::config::Delivery;

// Bottom first: a module imports only from modules listed above it.
mod slots;
mod say;
mod heap;
mod order;
mod proc;
mod share;
mod engine;
mod program;
#[cfg(target_arch = "x86_64")]
mod gate;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_gate.rs"]
mod gate;
mod fork;
mod calls;
mod inspect;

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = construct;

extern "C" fn construct() {
    match order::read() {
        Ok(None) => {}
        Ok(Some(mut order)) => {
            if let Some(call) = killing_call(&order) {
                let why = "a seccomp filter kills the process that calls";
                return say::unserved::unserved(format_args!("{why} {call}"));
            }
            calls::marks::find();
            calls::ahead::find();
            calls::moved::find();
            calls::userfault::find();
            if order.config.delivery == Delivery::Gate {
                match gate::start(order) {
                    None => return,
                    Some(by_thread) => order = by_thread,
                }
            }
            // First, so that it runs after the program's own handlers of fork.
            fork::install();
            engine::start(order, &program::LIFE);
        }
        Err(why) => say::die(format_args!("MEMFOLD_RUN: {why}")),
    }
}

/// The first call that a seccomp filter would kill this process for, and that the engine makes.
fn killing_call(order: &order::Order) -> Option<&'static str> {
    if !proc::is_filtered() {
        return None;
    }
    // SAFETY: the constructor is called before the program has threads.
    let mut calls = unsafe { memfold_sys::probe::killing_calls() }.into_iter();
    calls.find(|call| *call != memfold_sys::probe::RING || order.config.swap.is_some())
}

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = finish;

/// Brings the figures up to date once more before the program ends.
extern "C" fn finish() {
    let gated = gate::get().map(|gated| &gated.pager);
    if let Some(pager) = program::get().map(|program| &program.pager).or(gated) {
        pager.publish();
        slots::note_totals();
        pager.stats().need_bytes.store(0, core::sync::atomic::Ordering::Relaxed);
        slots::set_need(0);
    }
}
