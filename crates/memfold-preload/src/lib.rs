//! The library that `memfold run` loads into a program.
//!
//! It defines no function of libc's: the gate sees the program's system calls themselves. Its
//! constructor runs after libc's and before the program's `main`. Nothing here uses the
//! program's `malloc`, stdio or thread-local storage: all of them will be under management.
#![no_std]
extern crate alloc;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("memfold run needs the gate, which supports only x86-64");

use core::ffi::{c_char, c_int};
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

// Bottom first: a module imports only from modules listed above it.
mod bytes;
mod slots;
mod say;
mod heap;
mod order;
mod proc;
mod share;
mod engine;
mod gate;
mod inspect;

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *mut *mut c_char) = construct;

/// glibc calls constructors with the arguments of `main`.
extern "C" fn construct(count: c_int, arguments: *mut *mut c_char) {
    match order::read() {
        Ok(None) => {}
        Ok(Some(order)) => {
            if let Some(call) = killing_call(&order) {
                let why = "A seccomp filter kills any process that calls";
                return say::unserved::unserved(format_args!("{why} {call}"));
            }
            // SAFETY: glibc's own, of the constructor, which runs before there are threads.
            unsafe { gate::start(order, count as usize, arguments) }
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
    // Who has a filter may make none of these calls.
    if let Some(gated) = gate::get().filter(|gated| !gated.shut_in.load(SeqCst)) {
        let pager = &gated.pager;
        pager.publish();
        slots::note_totals();
        pager.stats().need_bytes.store(0, Relaxed);
        slots::set_need(0);
    }
}
