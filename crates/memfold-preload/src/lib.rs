//! The library that `memfold run` loads into a program.
//!
//! Its constructor runs after libc's and before the program's `main`. Nothing here uses the
//! program's `malloc`, stdio or thread-local storage: all of them will be under management.
#![no_std]
extern crate alloc;

// Bottom first: a module imports only from modules listed above it.
mod slots;
mod say;
mod heap;
mod order;
mod proc;
mod program;
mod engine;
mod go;
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
            order.config.keep_cpu &= !go::is_there();
            // First, so that it runs after the program's own handlers of fork.
            fork::install();
            calls::marks::find();
            calls::ahead::find();
            calls::moved::find();
            calls::userfault::find();
            calls::release::find();
            engine::start(order);
        }
        Err(why) => say::die(format_args!("MEMFOLD_RUN: {why}")),
    }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = finish;

/// Brings the figures up to date once more before the program ends.
extern "C" fn finish() {
    if let Some(program) = program::get() {
        program.pager.publish();
        program.pager.stats().need_bytes.store(0, core::sync::atomic::Ordering::Relaxed);
        slots::set_need(0);
    }
}
