//! All of numpy's large arrays, in every thread, in folded memory.
//!
//! A handler that is set counts in one context only, and a new thread begins with an empty one:
//! numpy's own handler serves it. So the functions of numpy's own handler are replaced where they
//! stand. Arrays that exist already come back to these functions too, which tell by the address
//! what is whose.
use crate::engine::Engine;
use crate::handler::{Allocator, Api, Folding};
use libc::c_void;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr};

/// One installation. None is ever freed: arrays of it may live until the process ends.
struct Installed {
    folding: Folding,
    active: AtomicBool,
    /// numpy's own functions.
    original: Allocator,
    /// The one before it, whose arrays may still be there.
    older: *const Installed,
}

static NEWEST: AtomicPtr<Installed> = AtomicPtr::new(null_mut());

fn newest() -> &'static Installed {
    // SAFETY: the functions below are in numpy's handler only since one was stored, which is never
    // freed.
    unsafe { &*NEWEST.load(Acquire) }
}

/// The installation whose heap has an address.
fn owner(at: *mut c_void) -> Option<&'static Installed> {
    let mut next: *const Installed = newest();
    while !next.is_null() {
        // SAFETY: never freed.
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
    let folded = count.checked_mul(size).and_then(folded);
    // SAFETY: as in `malloc`.
    folded.unwrap_or_else(|| unsafe { (newest().original.calloc)(ctx, count, size) })
}

unsafe extern "C" fn realloc(ctx: *mut c_void, at: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy calls it for memory of its handler that the caller owns: of one of the heaps,
    // or of the C library, as numpy's own functions give it.
    unsafe {
        if let Some(owner) = owner(at) {
            return owner.folding.realloc(at, bytes);
        }
        let newest = newest();
        let taken =
            if newest.active.load(Relaxed) { newest.folding.take_over(at, bytes) } else { None };
        taken.unwrap_or_else(|| (newest.original.realloc)(ctx, at, bytes))
    }
}

unsafe extern "C" fn free(ctx: *mut c_void, at: *mut c_void, bytes: usize) {
    // SAFETY: as in `realloc`; numpy gives it up.
    unsafe {
        match owner(at) {
            Some(owner) => owner.folding.free(at),
            None => (newest().original.free)(ctx, at, bytes),
        }
    }
}

/// From now on numpy takes memory of at least `threshold` bytes from an engine, in every thread
/// without a handler of its own.
#[pyfunction]
pub fn install(py: Python<'_>, engine: &Engine, threshold: usize) -> PyResult<()> {
    let handler = Api::get(py)?.default_handler();
    if handler.is_null() {
        return Err(PyErr::fetch(py));
    }
    let older = NEWEST.load(Acquire);
    // SAFETY: what was installed is never freed.
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
        // What frees comes before what allocates, so that nothing of a heap ever meets numpy's own
        // `free`. SAFETY: numpy's own handler is a variable of its module, which it writes to no
        // more; its users hold the GIL, as we do.
        unsafe {
            (&raw mut (*handler).allocator.free).write_volatile(free);
            (&raw mut (*handler).allocator.realloc).write_volatile(realloc);
            (&raw mut (*handler).allocator.calloc).write_volatile(calloc);
            (&raw mut (*handler).allocator.malloc).write_volatile(malloc);
        }
    }
    Ok(())
}

/// Ends it for new arrays; those that exist stay as they are. Whether there was anything to end.
#[pyfunction]
pub fn uninstall() -> bool {
    // SAFETY: what was installed is never freed.
    let newest = unsafe { NEWEST.load(Acquire).as_ref() };
    newest.is_some_and(|newest| newest.active.swap(false, Relaxed))
}
