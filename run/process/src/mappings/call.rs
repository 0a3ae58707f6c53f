//! Helpers for these calls.
use crate::program::ProgramThreads;
use core::mem::ManuallyDrop;
use core::ops::{Deref, Range};
use memfold_engine::known::TOP;
use memfold_os::units::PAGE_SIZE;

/// Makes the raw call with these arguments.
pub type MakeCall<'a> = &'a mut (dyn FnMut(&[usize; 6]) -> isize + Send);

/// The result of a call for which there is no memory, or no mapping.
pub const NO_MEMORY: isize = -(libc::ENOMEM as isize);

/// A value in the engine's heap, which is freed by [`ProgramThreads::on_behalf`].
pub struct HeapLoan<'a, T: Send> {
    threads: &'a ProgramThreads,
    what: ManuallyDrop<T>,
}

impl<T: Send> HeapLoan<'_, T> {
    pub fn new(threads: &ProgramThreads, what: T) -> HeapLoan<'_, T> {
        HeapLoan { threads, what: ManuallyDrop::new(what) }
    }
}

impl<T: Send> Deref for HeapLoan<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.what
    }
}

impl<T: Send> Drop for HeapLoan<'_, T> {
    fn drop(&mut self) {
        let what = &mut self.what;
        // SAFETY: this drops the value once, and nothing uses it afterwards.
        self.threads.try_on_behalf(|| unsafe { ManuallyDrop::drop(what) });
    }
}

/// Returns the pages of a range of bytes. Returns `None` if the range is empty, or if the kernel
/// refuses it.
pub fn whole(start: usize, len: usize) -> Option<Range<usize>> {
    let end = start.checked_add(len.checked_next_multiple_of(PAGE_SIZE)?)?;
    (start.is_multiple_of(PAGE_SIZE) && len > 0 && end <= TOP).then_some(start..end)
}

/// Returns the end of the pages into which a range of bytes reaches.
pub fn end_of(start: usize, len: usize) -> usize {
    start.saturating_add(len).min(TOP).next_multiple_of(PAGE_SIZE)
}
