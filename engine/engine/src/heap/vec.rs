//! A growable array in folded memory.
use crate::heap::{GRANULE_BYTES, Heap};
use crate::region::Error;
use core::marker::PhantomData;
use core::ops::{Deref, DerefMut};
use core::ptr::{NonNull, drop_in_place, slice_from_raw_parts_mut};

/// A vector whose elements lie in folded memory. It is like `Vec`, but growing can fail. Elements
/// are found by slice methods.
///
/// Memory that the elements point to (the text of a `String`) is ordinary memory.
///
/// ```
/// # use memfold_engine::{FoldedVec, Heap, Memory};
/// # fn main() -> Result<(), memfold_engine::Error> {
/// let heap = Heap::new(&Memory::builder().resident_bytes(64 << 20).build()?);
/// let mut squares = FoldedVec::new(&heap);
/// for n in 0..100_000u64 {
///     squares.push(n * n)?;
/// }
/// assert_eq!(squares[300], 90_000);
/// assert_eq!(squares.iter().rev().take(2).sum::<u64>(), 99_999 * 99_999 + 99_998 * 99_998);
/// # Ok(())
/// # }
/// ```
pub struct FoldedVec<T> {
    heap: Heap,
    start: NonNull<T>,
    len: usize,
    capacity: usize,
    owns: PhantomData<T>,
}

// SAFETY: it owns its elements as a `Vec` does, and the heap may be used from any thread.
unsafe impl<T: Send> Send for FoldedVec<T> {}
// SAFETY: a shared borrow gives only shared borrows of elements, as with `Vec`, and the heap may be
// used from any thread.
unsafe impl<T: Sync> Sync for FoldedVec<T> {}

impl<T> FoldedVec<T> {
    const SIZED: () = assert!(size_of::<T>() > 0 && align_of::<T>() <= GRANULE_BYTES);

    /// Makes an empty vector, which takes nothing until it grows.
    pub fn new(heap: &Heap) -> FoldedVec<T> {
        let () = Self::SIZED;
        FoldedVec {
            heap: heap.clone(),
            start: NonNull::dangling(),
            len: 0,
            capacity: 0,
            owns: PhantomData,
        }
    }

    /// Makes an empty vector with address space for so many elements. Memory is taken as they are
    /// pushed.
    ///
    /// # Errors
    /// The errors of [`FoldedVec::reserve`].
    pub fn with_capacity(heap: &Heap, capacity: usize) -> Result<FoldedVec<T>, Error> {
        let mut vec = FoldedVec::new(heap);
        vec.reserve(capacity)?;
        Ok(vec)
    }

    /// Returns how many elements it has address space for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes room for so many more elements.
    ///
    /// # Errors
    /// No address space; a child of fork. The vector is unchanged then.
    pub fn reserve(&mut self, more: usize) -> Result<(), Error> {
        let least = self.len.saturating_add(more);
        if least <= self.capacity {
            return Ok(());
        }
        let bytes = least.max(self.capacity.saturating_mul(2)).saturating_mul(size_of::<T>());
        let start = match self.capacity {
            0 => self.heap.alloc(bytes)?,
            // SAFETY: `&mut self` excludes other users of the piece, and the new address replaces
            // the old one at once.
            _ => unsafe { self.heap.resize(self.start.as_ptr() as usize, bytes)? },
        };
        self.start = start.cast();
        self.capacity = bytes.next_multiple_of(GRANULE_BYTES) / size_of::<T>();
        Ok(())
    }

    /// Adds an element at the end.
    ///
    /// # Errors
    /// The errors of [`FoldedVec::reserve`]; the value is dropped then.
    pub fn push(&mut self, value: T) -> Result<(), Error> {
        self.reserve(1)?;
        // SAFETY: there is room for one more, aligned as a granule is.
        unsafe { self.start.add(self.len).write(value) };
        self.len += 1;
        Ok(())
    }

    /// Removes the last element, and returns it.
    pub fn pop(&mut self) -> Option<T> {
        self.len = self.len.checked_sub(1)?;
        // SAFETY: it was written by `push`, and lies past the end from now on.
        Some(unsafe { self.start.add(self.len).read() })
    }

    /// Adds copies of all elements of a slice at the end.
    ///
    /// # Errors
    /// The errors of [`FoldedVec::reserve`].
    pub fn extend_from_slice(&mut self, values: &[T]) -> Result<(), Error>
    where
        T: Copy,
    {
        self.reserve(values.len())?;
        // SAFETY: there is room; `values` is borrowed while `self` is borrowed mutably, so they
        // don't overlap.
        unsafe {
            self.start
                .add(self.len)
                .copy_from_nonoverlapping(NonNull::from(values).cast(), values.len())
        };
        self.len += values.len();
        Ok(())
    }

    /// Drops all elements from the `len`th on. Keeps the capacity.
    pub fn truncate(&mut self, len: usize) {
        let Some(gone) = self.len.checked_sub(len) else { return };
        self.len = len;
        // SAFETY: these elements were written, and lie past the end from now on.
        unsafe { drop_in_place(slice_from_raw_parts_mut(self.start.add(len).as_ptr(), gone)) };
    }

    /// Returns the heap that it lies in, for hints.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }
}

impl<T> Deref for FoldedVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` elements are written. The pointer is aligned and not null, also
        // when there are none.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for FoldedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the first `len` elements are written. The pointer is aligned and not null, also
        // when there are none. `&mut self` makes the borrow unique.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for FoldedVec<T> {
    fn drop(&mut self) {
        // A child of fork doesn't have the elements.
        if self.capacity > 0 && self.heap.is_at_home() {
            self.truncate(0);
            // SAFETY: `&mut self` excludes other users, and all elements have been dropped.
            let _ = unsafe { self.heap.free(self.start.as_ptr() as usize) };
        }
    }
}
