//! What a child of `vfork` has another task do. It shares the memory, and may be killed at any
//! instruction: a lock that it held then would stay taken. So what needs locks of the keeper's is done
//! by a thread of the keeper's, and a parent whose child is gone waits for what is under way
//! (`threads/behalf.rs`).
//!
//! The errand is stored in the child's slot. The parent gives the slot back when no thread uses the
//! errand any more. A child whose parent doesn't wait for it keeps its slot.
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_sys::raw::system_call;

const NONE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;

/// An errand of one task.
#[repr(C)]
pub struct Errand {
    state: AtomicU32,
    /// The address of a `&mut dyn FnMut()`.
    what: AtomicUsize,
}

fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the word stays.
    let _ = unsafe {
        system_call(libc::SYS_futex, [word.as_ptr() as usize, operation, value as usize, 0, 0, 0])
    };
}

impl Errand {
    /// There is none.
    pub fn clear(&self) {
        self.state.store(NONE, SeqCst);
    }

    /// Has it done by who serves them, whom `ring` tells of it; waits until it is. `what` is the address of
    /// a `&mut dyn FnMut()`.
    pub fn post(&self, what: usize, ring: fn()) {
        self.what.store(what, SeqCst);
        self.state.store(POSTED, SeqCst);
        ring();
        self.wait();
    }

    /// The task is gone: none of its is under way any more.
    pub fn finish(&self) {
        let _ = self.state.compare_exchange(POSTED, NONE, SeqCst, SeqCst);
        self.wait();
    }

    fn wait(&self) {
        loop {
            let state = self.state.load(SeqCst);
            if state == NONE {
                return;
            }
            futex(&self.state, libc::FUTEX_WAIT, state);
        }
    }

    /// Does it, if there is one.
    pub fn serve(&self) {
        if self.state.compare_exchange(POSTED, TAKEN, SeqCst, SeqCst).is_err() {
            return;
        }
        let what = self.what.load(SeqCst) as *mut &mut dyn FnMut();
        // SAFETY: the task waits, or is gone and its slot is kept as long as the state is this.
        unsafe { (*what)() };
        self.state.store(NONE, SeqCst);
        futex(&self.state, libc::FUTEX_WAKE, u32::MAX >> 1);
    }
}
