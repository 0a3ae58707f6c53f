//! Puts all of numpy's large arrays, in every thread, in folded memory.
//!
//! A handler that is set applies to one context only. A new thread begins with an empty context,
//! and uses numpy's own handler. So this module replaces the functions of numpy's own handler in
//! place. Existing arrays are freed through the new functions too, which identify the owner by the
//! address.
use crate::engine::Engine;
use crate::handler::{Allocator, Api, Folding};
use libc::c_void;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr};

/// One installation. None is ever freed, because its arrays may live until the process ends.
struct Installed {
    folding: Folding,
    active: AtomicBool,
    /// numpy's own functions.
    original: Allocator,
    /// The installation before it, whose arrays may still exist.
    older: *const Installed,
}

static NEWEST: AtomicPtr<Installed> = AtomicPtr::new(null_mut());

fn newest() -> &'static Installed {
    // SAFETY: the functions below are in numpy's handler only after one was stored, which is never
    // freed.
    unsafe { &*NEWEST.load(Acquire) }
}

/// Returns the installation whose heap has an address.
fn owner(at: *mut c_void) -> Option<&'static Installed> {
    let mut next: *const Installed = newest();
    while !next.is_null() {
        // SAFETY: installations are never freed.
        let this = unsafe { &*next };
        if this.folding.owns(at) {
            return Some(this);
        }
        next = this.older;
    }
    None
}

fn folded(bytes: usize) -> Option<*mut c_void> {
    let newest = newest();
    if newest.active.load(Relaxed) { newest.folding.malloc(bytes) } else { None }
}

unsafe extern "C" fn malloc(ctx: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy's own function, with its own `ctx`.
    folded(bytes).unwrap_or_else(|| unsafe { (newest().original.malloc)(ctx, bytes) })
}

unsafe extern "C" fn calloc(ctx: *mut c_void, count: usize, size: usize) -> *mut c_void {
    let block = count.checked_mul(size).and_then(folded);
    // SAFETY: these are numpy's own functions, with their own `ctx`.
    block.unwrap_or_else(|| unsafe { (newest().original.calloc)(ctx, count, size) })
}

unsafe extern "C" fn realloc(ctx: *mut c_void, at: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy calls it for memory of its handler that the caller owns: of one of the heaps,
    // or of the C library, which numpy's own functions use.
    unsafe {
        if let Some(owner) = owner(at) {
            return owner.folding.realloc(at, bytes);
        }
        let newest = newest();
        let block =
            if newest.active.load(Relaxed) { newest.folding.take_over(at, bytes) } else { None };
        block.unwrap_or_else(|| (newest.original.realloc)(ctx, at, bytes))
    }
}

unsafe extern "C" fn free(ctx: *mut c_void, at: *mut c_void, bytes: usize) {
    // SAFETY: numpy calls it for memory of its handler that it gives up: of one of the heaps, or of
    // the C library.
    unsafe {
        match owner(at) {
            Some(owner) => owner.folding.free(at),
            None => (newest().original.free)(ctx, at, bytes),
        }
    }
}

/// Makes numpy allocate at least `threshold` bytes from an engine from now on, in every thread
/// without its own handler.
#[pyfunction]
pub fn install(py: Python<'_>, engine: &Engine, threshold: usize) -> PyResult<()> {
    let handler = Api::get(py)?.default_handler();
    if handler.is_null() {
        return Err(PyErr::fetch(py));
    }
    let older = NEWEST.load(Acquire);
    // SAFETY: installations are never freed.
    let before = unsafe { older.as_ref() };
    if before.is_some_and(|before| before.active.load(Relaxed)) {
        return Err(PyRuntimeError::new_err(
            "memfold is installed already: call memfold.uninstall() first",
        ));
    }
    // SAFETY: numpy's own handler, which stays in place.
    let current = unsafe { (*handler).allocator };
    let original = before.map_or(current, |before| before.original);
    let folding = Folding { shared: engine.shared.clone(), threshold: threshold.max(1) };
    let new = Installed { folding, active: AtomicBool::new(true), original, older };
    NEWEST.store(Box::into_raw(Box::new(new)), Release);
    if before.is_none() {
        // The freeing functions come before the allocating ones, so that memory of a heap never
        // reaches numpy's own `free`. SAFETY: numpy's own handler is a variable of its module,
        // which does not write to it any more; its users hold the GIL, and so does this thread.
        unsafe {
            (&raw mut (*handler).allocator.free).write_volatile(free);
            (&raw mut (*handler).allocator.realloc).write_volatile(realloc);
            (&raw mut (*handler).allocator.calloc).write_volatile(calloc);
            (&raw mut (*handler).allocator.malloc).write_volatile(malloc);
        }
    }
    Ok(())
}

/// Ends it for new arrays; existing ones stay folded. Returns whether there was anything to end.
#[pyfunction]
pub fn uninstall() -> bool {
    // SAFETY: installations are never freed.
    let newest = unsafe { NEWEST.load(Acquire).as_ref() };
    newest.is_some_and(|newest| newest.active.swap(false, Relaxed))
}
