//! The owner of an object in shared memory, and whether it still runs. The kernel notes that in the
//! memory itself.
//!
//! The owner's word holds the number of its thread. When that thread ends, for any reason, or its
//! process executes another program, the kernel marks the word (robust futexes,
//! `Documentation/locking/robust-futexes.rst`). So no process is looked up by its number. That
//! number differs in each PID namespace, and after a change of user the look-up may not be
//! permitted.
use crate::Errno;
use crate::raw::system_call;
use crate::thread::thread_id;
use core::mem::size_of;
use core::sync::atomic::{
    AtomicU32, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};

/// The bits of the word that hold the number (`FUTEX_TID_MASK`); the kernel clears them and sets
/// `FUTEX_OWNER_DIED`.
const THREAD: u32 = 0x3fff_ffff;

/// `FUTEX_OWNER_DIED`.
const ENDED: u32 = 0x4000_0000;

/// The owner of an object.
#[repr(transparent)]
#[derive(Default)]
pub struct RobustOwner(AtomicU32);

/// The list that the kernel reads when the owner ends. It has one entry (`struct robust_list_head`,
/// then the entry). It is in the shared memory too, where an OOM killer frees no page before it is
/// read. Its addresses are those of the owner's mapping.
#[repr(C)]
#[derive(Default)]
pub struct RobustList {
    first: AtomicU64,
    /// From the entry to the word, bytes.
    offset: AtomicU64,
    pending: AtomicU64,
    entry: AtomicU64,
}

/// The states of a [`RobustOwner`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum OwnerState {
    /// It never had an owner.
    Free,
    /// It has an owner.
    Held,
    /// Its owner has ended.
    Ended,
}

impl RobustOwner {
    /// Returns its present state.
    pub fn state(&self) -> OwnerState {
        match self.0.load(Acquire) {
            0 => OwnerState::Free,
            word if word & THREAD != 0 => OwnerState::Held,
            _ => OwnerState::Ended,
        }
    }

    /// Returns the number of the thread that has it, or 0.
    pub fn thread(&self) -> u32 {
        self.0.load(Acquire) & THREAD
    }

    /// Claims it for the calling thread, until that ends, if it has no owner. Returns whether it
    /// had none. If a thread is killed before this returns, it may stay held for good.
    ///
    /// # Errors
    /// The errors of `set_robust_list`: ENOSYS on a kernel without it.
    ///
    /// # Safety
    /// - The calling thread has no robust list that is needed: libc doesn't know the thread, or it
    ///   uses no robust mutex.
    /// - `self` and `will` stay mapped where they are as long as the thread lives, and no other
    ///   owner uses `will`.
    pub unsafe fn claim(&self, will: &RobustList) -> Result<bool, Errno> {
        let before = self.0.load(Acquire);
        let is_free = before & THREAD == 0;
        if !is_free || self.0.compare_exchange(before, thread_id(), AcqRel, Relaxed).is_err() {
            return Ok(false);
        }
        let (head, entry) = (will as *const RobustList as usize, &raw const will.entry as usize);
        let word = self as *const RobustOwner as usize;
        will.first.store(entry as u64, Relaxed);
        will.offset.store(word.wrapping_sub(entry) as u64, Relaxed);
        will.pending.store(0, Relaxed);
        will.entry.store(head as u64, Relaxed);
        // SAFETY: the list has the kernel's layout. By the caller's promise it stays as long as the
        // thread lives.
        let result = unsafe {
            system_call(libc::SYS_set_robust_list, [head, 3 * size_of::<u64>(), 0, 0, 0, 0])
        };
        if result.is_err() {
            self.0.store(before, Relaxed);
        }
        result.map(|_| true)
    }

    /// Releases it, before the calling thread ends, which has claimed it.
    ///
    /// # Errors
    /// The errors of [`RobustOwner::claim`].
    pub fn leave(&self) -> Result<(), Errno> {
        let args = [0, 3 * size_of::<u64>(), 0, 0, 0, 0];
        // SAFETY: the thread has no list from now on.
        unsafe { system_call(libc::SYS_set_robust_list, args) }?;
        self.0.store(ENDED, Release);
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::boxed::Box;

    #[test]
    fn word_is_held_until_its_owners_thread_ends() {
        let (owner, will): (&RobustOwner, &RobustList) =
            (Box::leak(Box::default()), Box::leak(Box::default()));
        assert_eq!(owner.state(), OwnerState::Free);
        for leaves in [false, true, false] {
            let take = move || {
                // SAFETY: both are leaked, and the thread uses no robust mutex.
                let claim = unsafe { owner.claim(will) };
                // SAFETY: both are leaked, and the thread uses no robust mutex.
                let state = (owner.state(), unsafe { owner.claim(Box::leak(Box::default())) });
                if leaves {
                    owner.leave().unwrap();
                    assert_eq!(owner.state(), OwnerState::Ended);
                }
                (claim, state.0, state.1)
            };
            let outcome = std::thread::spawn(take).join().unwrap();
            assert_eq!(outcome, (Ok(true), OwnerState::Held, Ok(false)));
            // The kernel marks it as the thread ends, which may be just after it was joined.
            while owner.state() == OwnerState::Held {
                std::thread::yield_now();
            }
            assert_eq!(owner.state(), OwnerState::Ended);
        }
    }
}
