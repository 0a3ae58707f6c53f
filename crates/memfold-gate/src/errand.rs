//! Work that another thread does for a child of `vfork`.
//!
//! The child shares the memory, and may be killed at any instruction. A lock that it held then
//! would stay locked. So a thread of the keeper does what needs the keeper's locks. If the child
//! has died, its parent waits until such work is over (`threads/behalf.rs`).
//!
//! The errand lies in the child's slot. The parent gives the slot back when no thread uses the
//! errand any more. A child whose parent doesn't wait for it keeps its slot.
//!
//! Some calls must be made by the child itself while the keeper's locks are held. The child makes
//! them in the middle of an errand ([`VforkErrand::ask`]). The serving thread holds the locks, and
//! releases them even if the child has died or waits for long.
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_os::raw::system_call;
use memfold_os::thread::yield_now;

const NONE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
/// The serving thread waits for the task's call.
const ASKED: u32 = 3;

/// The errand of one task.
#[repr(C)]
pub struct VforkErrand {
    state: AtomicU32,
    /// The address of a `&mut dyn FnMut()`, which is the work.
    what: AtomicUsize,
}

fn futex(word: &AtomicU32, operation: i32, value: u32) {
    let operation = (operation | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the futex word lies in a slot, which stays mapped.
    let _ = unsafe {
        system_call(libc::SYS_futex, [word.as_ptr() as usize, operation, value as usize, 0, 0, 0])
    };
}

impl VforkErrand {
    /// Makes the slot free of errands.
    pub fn clear(&self) {
        self.state.store(NONE, SeqCst);
    }

    /// Posts an errand and waits until it is done. `what` is the address of a `&mut dyn FnMut()`.
    /// `ring` wakes the serving thread. The caller calls `make` when the errand asks for it.
    pub fn post(&self, what: usize, ring: fn(), make: &mut dyn FnMut()) {
        self.what.store(what, SeqCst);
        self.state.store(POSTED, SeqCst);
        ring();
        loop {
            match self.state.load(SeqCst) {
                NONE => return,
                ASKED => {
                    make();
                    self.answer();
                }
                state => futex(&self.state, libc::FUTEX_WAIT, state),
            }
        }
    }

    /// Makes the task call its `make` in the middle of the errand. Returns when that is done, when
    /// `is_over` returns true, or when the task has died. It polls, because no event covers all
    /// three.
    pub fn ask(&self, is_over: &dyn Fn() -> bool) {
        self.state.store(ASKED, SeqCst);
        futex(&self.state, libc::FUTEX_WAKE, u32::MAX >> 1);
        while self.state.load(SeqCst) == ASKED && !is_over() {
            yield_now();
        }
    }

    /// Ends [`VforkErrand::ask`]: the call was made, or the task has died.
    fn answer(&self) {
        let _ = self.state.compare_exchange(ASKED, TAKEN, SeqCst, SeqCst);
    }

    /// Waits until no thread uses the errand. The task has died, so an errand that no thread has
    /// begun is dropped.
    pub fn finish(&self) {
        let _ = self.state.compare_exchange(POSTED, NONE, SeqCst, SeqCst);
        loop {
            match self.state.load(SeqCst) {
                NONE => return,
                ASKED => self.answer(),
                state => futex(&self.state, libc::FUTEX_WAIT, state),
            }
        }
    }

    /// Does the errand if one is posted.
    pub fn serve(&self) {
        if self.state.compare_exchange(POSTED, TAKEN, SeqCst, SeqCst).is_err() {
            return;
        }
        let what = self.what.load(SeqCst) as *mut &mut dyn FnMut();
        // SAFETY: `post` stored the address of a `&mut dyn FnMut()`. It stays valid while the state
        // isn't NONE: the task waits until then. If the task has died, its memory is shared with
        // its parent, which keeps the slot until then. The exchange above lets only one thread get
        // here.
        unsafe { (*what)() };
        self.state.store(NONE, SeqCst);
        futex(&self.state, libc::FUTEX_WAKE, u32::MAX >> 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::thread::scope;

    fn errand() -> VforkErrand {
        VforkErrand { state: AtomicU32::new(NONE), what: AtomicUsize::new(0) }
    }

    /// Serves until one errand was done.
    fn serve_one(errand: &VforkErrand, done: &AtomicBool) {
        while !done.load(SeqCst) {
            errand.serve();
            yield_now();
        }
    }

    #[test]
    fn task_makes_its_call_in_the_middle_of_its_errand() {
        let (errand, done, made) = (errand(), AtomicBool::new(false), AtomicU32::new(0));
        scope(|s| {
            s.spawn(|| serve_one(&errand, &done));
            let mut what = || {
                assert_eq!(made.load(SeqCst), 0);
                errand.ask(&|| false);
                assert_eq!(made.swap(2, SeqCst), 1);
                done.store(true, SeqCst);
            };
            let mut what: &mut dyn FnMut() = &mut what;
            errand.post(&raw mut what as usize, || {}, &mut || made.store(1, SeqCst));
        });
        assert_eq!((made.load(SeqCst), errand.state.load(SeqCst)), (2, NONE));
    }

    /// Tests that an errand whose task doesn't make its call goes on. With `is_gone` the parent
    /// gives the task up. Otherwise the serving thread stops waiting.
    fn goes_on_without_the_call(is_gone: bool) {
        let (errand, done, begun) = (&errand(), &AtomicBool::new(false), &AtomicBool::new(false));
        let (end, ends) = channel::<()>();
        scope(|s| {
            s.spawn(move || serve_one(errand, done));
            s.spawn(move || {
                let mut what = || {
                    errand.ask(&|| !is_gone && begun.load(SeqCst));
                    done.store(true, SeqCst);
                };
                let mut what: &mut dyn FnMut() = &mut what;
                errand.post(&raw mut what as usize, || {}, &mut || {
                    begun.store(true, SeqCst);
                    ends.recv().unwrap();
                });
            });
            while is_gone && !begun.load(SeqCst) {
                yield_now();
            }
            if is_gone {
                errand.finish();
            }
            while !done.load(SeqCst) {
                yield_now();
            }
            end.send(()).unwrap();
        });
        assert_eq!(errand.state.load(SeqCst), NONE);
    }

    #[test]
    fn errand_ends_though_its_task_is_gone_in_a_call() {
        goes_on_without_the_call(true);
    }

    #[test]
    fn errand_ends_though_its_task_still_waits_in_a_call() {
        goes_on_without_the_call(false);
    }
}
