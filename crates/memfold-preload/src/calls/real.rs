//! The C library's own definitions of functions that this library defines too.
use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The next definition of a symbol after this library's: libc's. Ends the process if there is
/// none.
pub fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if symbol.is_null() {
        crate::say::die(format_args!("the C library has no {}", name.to_str().unwrap_or("?")));
    }
    symbol
}

/// A definition that is looked up once: the dynamic linker takes locks for it.
pub struct Real {
    name: &'static CStr,
    at: AtomicUsize,
}

impl Real {
    /// That of `name`, not looked up yet.
    pub const fn new(name: &'static CStr) -> Real {
        Real { name, at: AtomicUsize::new(0) }
    }

    /// Its address.
    pub fn get(&self) -> *mut c_void {
        let at = self.at.load(Relaxed);
        if at != 0 {
            return at as *mut c_void;
        }
        let found = next(self.name);
        self.at.store(found as usize, Relaxed);
        found
    }
}
