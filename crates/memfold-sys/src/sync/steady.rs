//! [`ForkCell`]: what changes in a child of fork only.
use core::cell::UnsafeCell;
use core::ops::Deref;

/// A value that all threads read, and that is changed only while there is one thread: in a child of
/// fork, which takes over what its parent had.
pub struct ForkCell<T>(UnsafeCell<T>);

// SAFETY: it is shared by `&T`; who changes it is alone, by the contract of `change`, and so is
// where what it puts there is dropped.
unsafe impl<T: Send + Sync> Sync for ForkCell<T> {}

impl<T> ForkCell<T> {
    /// With this value.
    pub const fn new(value: T) -> ForkCell<T> {
        ForkCell(UnsafeCell::new(value))
    }

    /// The value for changing.
    ///
    /// # Safety
    /// - The caller is the only thread of the process, and has no reference to the value.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn change(&self) -> &mut T {
        // SAFETY: by the caller's promise.
        unsafe { &mut *self.0.get() }
    }
}

impl<T> Deref for ForkCell<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: nobody changes it while another reference lives.
        unsafe { &*self.0.get() }
    }
}
