//! The library that `memfold run` loads into a program.
//!
//! Its constructor runs after libc's and before the program's `main`. Nothing here uses the
//! program's `malloc`, stdio or thread-local storage: all of them will be under management.
#![no_std]
extern crate alloc;

use core::ffi::{c_char, c_int};
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
static CONSTRUCTOR: extern "C" fn(c_int, *mut *mut c_char) = construct;

/// glibc calls constructors with the arguments of `main`.
extern "C" fn construct(count: c_int, arguments: *mut *mut c_char) {
    match order::read() {
        Ok(None) => {}
        Ok(Some(mut order)) => {
            calls::marks::find();
            calls::ahead::find();
            calls::moved::find();
            calls::userfault::find();
            if order.config.delivery == Delivery::Gate {
                // SAFETY: glibc's own, of the constructor, which runs before there are threads.
                match unsafe { gate::start(order, count as usize, arguments) } {
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

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = finish;

/// Brings the figures up to date once more before the program ends.
extern "C" fn finish() {
    let gated = gate::get().map(|gated| &gated.pager);
    if let Some(pager) = program::get().map(|program| &program.pager).or(gated) {
        pager.publish();
        pager.stats().need_bytes.store(0, core::sync::atomic::Ordering::Relaxed);
        slots::set_need(0);
    }
}
