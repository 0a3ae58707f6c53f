//! numpy's memory handlers (NEP 49), which allocate the bytes of arrays. The handler in force is a
//! context variable. Each array keeps the handler that made it, and frees its bytes through it.
use crate::engine::{Engine, Shared};
use libc::{c_char, c_void};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ptr::{copy_nonoverlapping, null, null_mut};
use std::sync::Arc;

/// `PyDataMemAllocator` of numpy's `ndarraytypes.h`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct Allocator {
    pub ctx: *mut c_void,
    pub malloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    pub calloc: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    pub realloc: unsafe extern "C" fn(*mut c_void, *mut c_void, usize) -> *mut c_void,
    pub free: unsafe extern "C" fn(*mut c_void, *mut c_void, usize),
}

/// `PyDataMem_Handler`.
#[repr(C)]
pub struct Handler {
    name: [c_char; 127],
    version: u8,
    pub allocator: Allocator,
}

/// The name of a capsule with a handler.
const CAPSULE: *const c_char = c"mem_handler".as_ptr();
/// Slots of numpy's table of functions, and the version that first had these three (1.22).
const GET_VERSION: usize = 211;
const SET_HANDLER: usize = 304;
const DEFAULT_HANDLER: usize = 306;
const VERSION_MIN: u32 = 0xf;

/// numpy's table of functions.
#[derive(Copy, Clone)]
pub struct Api(*const *const c_void);

impl Api {
    /// Returns the table of the installed numpy, and imports numpy if needed.
    pub fn get(py: Python<'_>) -> PyResult<Api> {
        let numpy = py.import("numpy")?;
        let too_old = |cause: Option<PyErr>| {
            let version = numpy.getattr("__version__").map(|is| is.to_string()).unwrap_or_default();
            let error = PyRuntimeError::new_err(format!(
                "memfold needs numpy 1.22 or newer, not {version}: pip install --upgrade numpy"
            ));
            error.set_cause(py, cause);
            error
        };
        let module = "numpy._core._multiarray_umath";
        let capsule = py
            .import(module)
            .or_else(|_| py.import("numpy.core._multiarray_umath"))
            .and_then(|module| module.getattr("_ARRAY_API"))
            .map_err(|cause| too_old(Some(cause)))?;
        // SAFETY: the object is a capsule; for anything else an exception is set and the result is
        // null.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), null()) };
        if table.is_null() {
            return Err(PyErr::fetch(py));
        }
        let api = Api(table as *const *const c_void);
        // SAFETY: this slot has had this function since numpy 1.0.
        let version = unsafe {
            std::mem::transmute::<*const c_void, extern "C" fn() -> u32>(*api.0.add(GET_VERSION))()
        };
        if version < VERSION_MIN {
            return Err(too_old(None));
        }
        Ok(api)
    }

    /// Returns numpy's own handler, which is in force where no other was set.
    pub fn default_handler(self) -> *mut Handler {
        // SAFETY: from 1.22 on this slot is a pointer to a variable with the capsule of numpy's own
        // handler. It lives as long as numpy, which is never unloaded.
        unsafe {
            ffi::PyCapsule_GetPointer(
                **self.0.add(DEFAULT_HANDLER).cast::<*const *mut ffi::PyObject>(),
                CAPSULE,
            )
            .cast()
        }
    }
}

/// Allocations of at least `threshold` bytes come from a heap. Smaller ones, and those that the
/// heap refuses, come from the former allocator. With a threshold of 0, an allocation that the heap
/// refuses fails.
pub struct Folding {
    pub shared: Arc<Shared>,
    pub threshold: usize,
}

impl Folding {
    pub fn malloc(&self, bytes: usize) -> Option<*mut c_void> {
        if bytes < self.threshold {
            return None;
        }
        // The heap refuses in a child of fork, and past the end of the address space.
        self.shared.heap.alloc(bytes.max(1)).ok().map(|at| at.as_ptr().cast())
    }

    /// Returns whether an allocation that the heap refuses may come from elsewhere.
    fn may_pass_on(&self) -> bool {
        self.threshold > 0
    }

    /// Changes the length of an allocation of the heap.
    ///
    /// # Safety
    /// - No other thread uses it.
    pub unsafe fn realloc(&self, at: *mut c_void, bytes: usize) -> *mut c_void {
        // SAFETY: as the caller says.
        let address = unsafe { self.shared.heap.resize(at as usize, bytes.max(1)) };
        address.map_or(null_mut(), |at| at.as_ptr().cast())
    }

    /// Moves memory of the C library into the heap, if its new length is large.
    ///
    /// # Safety
    /// - It is the C library's `malloc`'s, and nothing else uses it.
    pub unsafe fn take_over(&self, at: *mut c_void, bytes: usize) -> Option<*mut c_void> {
        if at.is_null() {
            return None;
        }
        let new = self.malloc(bytes)?;
        // SAFETY: the caller promises both; both have this many bytes.
        unsafe {
            copy_nonoverlapping(
                at.cast::<u8>(),
                new.cast(),
                bytes.min(libc::malloc_usable_size(at)),
            );
            libc::free(at);
        }
        Some(new)
    }

    pub fn owns(&self, at: *mut c_void) -> bool {
        self.shared.heap.owns(at as usize)
    }

    /// Frees memory of the heap. A child of fork does not have it, so it does nothing there.
    ///
    /// # Safety
    /// - It is not used any more.
    pub unsafe fn free(&self, at: *mut c_void) {
        // SAFETY: as the caller says.
        let _ = unsafe { self.shared.heap.free(at as usize) };
    }
}

/// A handler of this package, in a capsule.
#[repr(C)]
struct Own {
    /// The part that numpy reads. It comes first, because the capsule's pointer is that of a
    /// handler to numpy.
    handler: Handler,
    folding: Folding,
    /// numpy's own handler, for allocations that are not folded. Its functions may change (see
    /// `install`), but it stays in place.
    others: *const Handler,
}

impl Own {
    fn others(&self) -> Allocator {
        // SAFETY: it lives as long as numpy, and is only changed by threads that are attached to
        // Python, as this one is.
        unsafe { (*self.others).allocator }
    }

    /// # Safety
    /// - `ctx` is that of a handler of [`make_handler`], whose capsule is alive: the array that is
    ///   being made or freed keeps it.
    unsafe fn of<'a>(ctx: *mut c_void) -> &'a Own {
        // SAFETY: the caller promises a handler's `ctx`, which is only read.
        unsafe { &*ctx.cast() }
    }
}

unsafe extern "C" fn malloc(ctx: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy calls it with its own `ctx`.
    let own = unsafe { Own::of(ctx) };
    let others = own.others();
    match own.folding.malloc(bytes) {
        Some(at) => at,
        // SAFETY: numpy's own function, with its own `ctx`.
        None if own.folding.may_pass_on() => unsafe { (others.malloc)(others.ctx, bytes) },
        None => null_mut(),
    }
}

unsafe extern "C" fn calloc(ctx: *mut c_void, count: usize, size: usize) -> *mut c_void {
    // SAFETY: numpy calls it with its own `ctx`.
    let own = unsafe { Own::of(ctx) };
    let others = own.others();
    match count.checked_mul(size).and_then(|bytes| own.folding.malloc(bytes)) {
        Some(at) => at,
        // SAFETY: numpy calls it with its own `ctx`.
        None if own.folding.may_pass_on() => unsafe { (others.calloc)(others.ctx, count, size) },
        None => null_mut(),
    }
}

unsafe extern "C" fn realloc(ctx: *mut c_void, at: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: numpy calls it with its own `ctx`, for memory of this handler that the caller owns.
    // Memory that is not in the heap belongs to numpy's own handler, which allocates it with the C
    // library.
    unsafe {
        let own = Own::of(ctx);
        let others = own.others();
        if own.folding.owns(at) {
            return own.folding.realloc(at, bytes);
        }
        let is_plain = !crate::engine::is_folded(at as usize);
        let block = if is_plain { own.folding.take_over(at, bytes) } else { None };
        block.unwrap_or_else(|| (others.realloc)(others.ctx, at, bytes))
    }
}

/// Frees memory. The size is ignored: for an empty array numpy passes another one than it
/// allocated.
unsafe extern "C" fn free(ctx: *mut c_void, at: *mut c_void, bytes: usize) {
    // SAFETY: numpy calls it with its own `ctx`, for memory of this handler that it gives up.
    unsafe {
        let own = Own::of(ctx);
        let others = own.others();
        if own.folding.owns(at) {
            own.folding.free(at)
        } else {
            (others.free)(others.ctx, at, bytes)
        }
    }
}

unsafe extern "C" fn drop_own(capsule: *mut ffi::PyObject) {
    // SAFETY: called once, at the end of a capsule that `make_handler` made of a box.
    unsafe { drop(Box::from_raw(ffi::PyCapsule_GetPointer(capsule, CAPSULE).cast::<Own>())) };
}

/// Makes a handler, in a capsule, that gives numpy memory of an engine for allocations of at least
/// `threshold` bytes.
#[pyfunction]
pub fn make_handler(py: Python<'_>, engine: &Engine, threshold: usize) -> PyResult<Py<PyAny>> {
    let others = Api::get(py)?.default_handler();
    if others.is_null() {
        return Err(PyErr::fetch(py));
    }
    let mut name = [0; 127];
    name.iter_mut().zip(b"memfold").for_each(|(to, from)| *to = *from as c_char);
    let allocator = Allocator { ctx: null_mut(), malloc, calloc, realloc, free };
    let folding = Folding { shared: engine.shared.clone(), threshold };
    let own = Box::into_raw(Box::new(Own {
        handler: Handler { name, version: 1, allocator },
        folding,
        others,
    }));
    // SAFETY: it was just made, and nothing else has it yet.
    let capsule = unsafe {
        (*own).handler.allocator.ctx = own.cast();
        ffi::PyCapsule_New(own.cast(), CAPSULE, Some(drop_own))
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

/// Makes numpy allocate by a handler, in this context, from now on. Returns the former handler.
#[pyfunction]
pub fn set_handler(py: Python<'_>, handler: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    // SAFETY: any object may be asked.
    if unsafe { ffi::PyCapsule_IsValid(handler.as_ptr(), CAPSULE) } == 0 {
        return Err(PyValueError::new_err("not a memory handler of numpy's"));
    }
    type Set = unsafe extern "C" fn(*mut ffi::PyObject) -> *mut ffi::PyObject;
    let api = Api::get(py)?;
    // SAFETY: this slot has this function from 1.22 on; it takes a borrowed capsule of a handler.
    let previous = unsafe {
        std::mem::transmute::<*const c_void, Set>(*api.0.add(SET_HANDLER))(handler.as_ptr())
    };
    // SAFETY: a new reference, or null with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, previous) }.map(Bound::unbind)
}
