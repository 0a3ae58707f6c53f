//! The library that `memfold run` loads into a program.
//!
//! It defines no function of libc's: the gate sees the program's system calls themselves. Its
//! constructor runs after libc's and before the program's `main`. Constructors of other libraries
//! may run before and start threads, which are armed too (`run/gate/src/start.rs`). Nothing here
//! uses the program's `malloc`, stdio or thread-local storage: all of them will be under management.
#![no_std]
extern crate alloc;

use core::ffi::{c_char, c_int};

// Bottom first: a module imports only from modules listed above it.
mod bytes;
mod heap;
mod panic;
mod inspect;
mod executed;

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn(c_int, *mut *mut c_char) = construct;

/// glibc calls constructors with the arguments of `main`.
extern "C" fn construct(count: c_int, arguments: *mut *mut c_char) {
    // SAFETY: glibc passes the array that the kernel left, and calls each constructor once. Other
    // threads run code of this library only when they are armed, which `begin` does last.
    unsafe { memfold_process::begin(count as usize, arguments, heap::arena()) }
}

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = finish;

extern "C" fn finish() {
    memfold_process::finish();
}
