//! [`ForkCell`]: a value that changes only while the process has one thread.
use core::cell::UnsafeCell;
use core::ops::Deref;

/// A value that all threads read. It is changed only while there is one thread: at the start, or in
/// a child of fork, which takes over its parent's state.
pub struct ForkCell<T>(UnsafeCell<T>);

// SAFETY: it is shared by `&T`. By the contract of `change` the thread that changes it is the only
// one, so a former value is also dropped by the only thread.
unsafe impl<T: Send + Sync> Sync for ForkCell<T> {}

impl<T> ForkCell<T> {
    /// Makes a cell with this value.
    pub const fn new(value: T) -> ForkCell<T> {
        ForkCell(UnsafeCell::new(value))
    }

    /// Returns the value for changing.
    ///
    /// # Safety
    /// - The caller is the only thread of the process, and has no reference to the value.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn change(&self) -> &mut T {
        // SAFETY: by the caller's promise this is the only reference, and the only thread.
        unsafe { &mut *self.0.get() }
    }
}

impl<T> Deref for ForkCell<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: by the contract of `change` the value isn't changed while another reference
        // lives.
        unsafe { &*self.0.get() }
    }
}
