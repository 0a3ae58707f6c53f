//! Memory for a key: a page that is locked in memory, left out of core dumps, private to this
//! process, and wiped at the end.
use crate::Errno;
use crate::memory::zone::{Zone, set_inherited};
use crate::raw;
use crate::units::PAGE_SIZE;
use core::marker::PhantomData;
use core::mem::{MaybeUninit, needs_drop, size_of};
use core::ops::Deref;
use core::sync::atomic::{Ordering::SeqCst, compiler_fence};

/// Making a key uses at most so many bytes of stack below its caller's frame.
const STACK_BYTES: usize = 32 << 10;

/// A secret value. A child of fork doesn't have it: touching it there is a segmentation fault.
pub struct Secret<T> {
    zone: Zone,
    of: PhantomData<T>,
}

// SAFETY: it owns its value, and shares it only by `&T`.
unsafe impl<T: Send> Send for Secret<T> {}
// SAFETY: it shares its value only by `&T`.
unsafe impl<T: Sync> Sync for Secret<T> {}

impl<T> Secret<T> {
    const FITS: () = assert!(!needs_drop::<T>() && align_of::<T>() <= PAGE_SIZE);

    /// Stores the result of `make`, and wipes the stack that `make` used. If the kernel doesn't
    /// lock a page (RLIMIT_MEMLOCK), warns and continues.
    ///
    /// # Errors
    /// No memory.
    pub fn new(make: impl FnOnce() -> Result<T, Errno>) -> Result<Secret<T>, Errno> {
        let () = Self::FITS;
        let zone = Zone::reserve(size_of::<T>().max(1).next_multiple_of(PAGE_SIZE), PAGE_SIZE)?;
        zone.keep_from_children();
        if zone.lock().is_err() {
            raw::warn(&[
                "memfold: warning: A key cannot be locked in memory (RLIMIT_MEMLOCK), so the kernel may \
                 write it to its own swap. Raise the limit: ulimit -l\n",
            ]);
        }
        let secret = Secret { zone, of: PhantomData };
        let outcome = fill(secret.zone.as_ptr().cast(), make);
        wipe_stack();
        outcome.map(|()| secret)
    }
}

impl<T> Secret<T> {
    /// Lets children of fork get the value, until [`Secret::end_copy`].
    pub fn begin_copy(&self) {
        set_inherited(self.zone.start(), self.zone.start() + self.zone.len(), true);
    }

    /// Ends [`Secret::begin_copy`], in the parent, and in a child that has the value.
    pub fn end_copy(&self) {
        self.zone.keep_from_children();
    }

    /// Locks the value in memory, if possible, in a child of fork that has it.
    pub fn lock_again(&self) {
        let _ = self.zone.lock();
    }
}

/// Makes the value in a frame of its own, which ends before the stack below its caller's is wiped.
#[inline(never)]
fn fill<T>(to: *mut T, make: impl FnOnce() -> Result<T, Errno>) -> Result<(), Errno> {
    let value = make()?;
    // SAFETY: `Secret::new` has reserved enough for one value, aligned, that no other thread uses.
    unsafe { to.write(value) };
    Ok(())
}

/// Overwrites the stack below the caller's frame, which earlier calls have used.
#[inline(never)]
fn wipe_stack() {
    let mut stack = MaybeUninit::<[u8; STACK_BYTES]>::uninit();
    wipe(stack.as_mut_ptr().cast(), STACK_BYTES);
}

/// Overwrites bytes with zeros, though they are not read again.
fn wipe(at: *mut u8, len: usize) {
    for n in 0..len {
        // SAFETY: the callers own these bytes.
        unsafe { at.add(n).write_volatile(0) };
    }
    compiler_fence(SeqCst);
}

/// Overwrites bytes that were a key with zeros.
pub fn wipe_bytes(bytes: &mut [u8]) {
    wipe(bytes.as_mut_ptr(), bytes.len());
}

impl<T> Deref for Secret<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` has put a value into the zone, which this owns, and no `&mut` to it exists.
        unsafe { &*self.zone.as_ptr().cast::<T>() }
    }
}

impl<T> Drop for Secret<T> {
    fn drop(&mut self) {
        wipe(self.zone.as_ptr(), self.zone.len());
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::maps::{each_detailed, flag};
    use core::ops::ControlFlow::Continue;

    #[test]
    fn a_secret_is_locked_out_of_dumps_and_out_of_children() {
        let secret = Secret::new(|| Ok([7u8; 100])).unwrap();
        let (at, mut count) = (secret.zone.start(), 0);
        each_detailed(|area, about| {
            if area.start <= at && at < area.end {
                count = about.flags & (flag::LOCKED | flag::DONT_DUMP | flag::DONT_FORK);
            }
            Continue(())
        })
        .unwrap();
        assert_eq!(count, flag::LOCKED | flag::DONT_DUMP | flag::DONT_FORK);
        assert_eq!(*secret, [7; 100]);
    }

    #[test]
    fn failure_to_make_a_secret_is_reported() {
        assert_eq!(Secret::<[u8; 8]>::new(|| Err(Errno::NOSYS)).err(), Some(Errno::NOSYS));
    }

    #[test]
    fn a_secret_is_wiped() {
        let mut bytes = [9u8; 64];
        wipe_bytes(&mut bytes);
        assert_eq!(bytes, [0; 64]);
        let secret = core::mem::ManuallyDrop::new(Secret::new(|| Ok([9u8; 64])).unwrap());
        let at = secret.zone.as_ptr();
        // `drop` does this too, and gives the page back.
        wipe(at, secret.zone.len());
        // SAFETY: the page is still mapped.
        assert!((0..PAGE_SIZE).all(|n| unsafe { at.add(n).read() } == 0));
    }
}
