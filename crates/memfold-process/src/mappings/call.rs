//! What these calls have in common.
use crate::program::ManagedProgram;
use core::mem::ManuallyDrop;
use core::ops::{Deref, Range};
use memfold::known::TOP;
use memfold_os::units::PAGE_SIZE;

/// The raw call, with these arguments.
pub type MakeCall<'a> = &'a mut (dyn FnMut(&[usize; 6]) -> isize + Send);

/// Something of the engine's heap, which is given back as [`ManagedProgram::on_behalf`] says.
pub struct HeapLoan<'a, T: Send> {
    program: &'a ManagedProgram,
    what: ManuallyDrop<T>,
}

impl<T: Send> HeapLoan<'_, T> {
    /// `what`.
    pub fn new(program: &ManagedProgram, what: T) -> HeapLoan<'_, T> {
        HeapLoan { program, what: ManuallyDrop::new(what) }
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
        // SAFETY: once, and nobody uses it afterwards.
        self.program.on_behalf(|| unsafe { ManuallyDrop::drop(what) });
    }
}

/// Whole pages of a range of bytes; `None` if the kernel takes it for nothing or refuses it.
pub fn whole(start: usize, len: usize) -> Option<Range<usize>> {
    let end = start.checked_add(len.checked_next_multiple_of(PAGE_SIZE)?)?;
    (start.is_multiple_of(PAGE_SIZE) && len > 0 && end <= TOP).then_some(start..end)
}

/// The end of the pages that a range of bytes reaches into.
pub fn end_of(start: usize, len: usize) -> usize {
    start.saturating_add(len).min(TOP).next_multiple_of(PAGE_SIZE)
}
