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
//!
//! The parent's process may end first, and the serving thread with it, even in the middle of an
//! errand. The child sees that by the serving thread's life ([`ErrandServer::life`]), which is part
//! of the errand's state. No event tells it, so a child that waits looks from time to time.
use crate::keeper::ErrandServer;
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use memfold_os::raw::system_call;
use memfold_os::thread::yield_now;

/// The lowest bits of the state. The others are the life of the thread that has taken the errand.
const KIND: u32 = 3;
const NONE: u32 = 0;
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
/// The serving thread waits for the task's call.
const ASKED: u32 = 3;

/// Time between two looks whether the serving thread lives, nanoseconds.
const LOOK_NS: libc::c_long = 5_000_000;

/// Returns the state of an errand that a thread with this life has taken.
fn taken(kind: u32, life: u32) -> u32 {
    kind | life << 2
}

/// The errand of one task.
#[repr(C)]
pub struct VforkErrand {
    state: AtomicU32,
    /// The address of a `&mut dyn FnMut()`, which is the work.
    what: AtomicUsize,
}

fn wake(word: &AtomicU32) {
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
    let args = [word.as_ptr() as usize, operation, (u32::MAX >> 1) as usize, 0, 0, 0];
    // SAFETY: the futex word lies in a slot, which stays mapped.
    let _ = unsafe { system_call(libc::SYS_futex, args) };
}

/// Waits until the word has another value than `value`, for [`LOOK_NS`] at most.
fn wait(word: &AtomicU32, value: u32) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: LOOK_NS };
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    let args = [word.as_ptr() as usize, operation, value as usize, &raw const time as usize, 0, 0];
    // SAFETY: the futex word lies in a slot, which stays mapped. `time` lives until the call
    // returns.
    let _ = unsafe { system_call(libc::SYS_futex, args) };
}

impl VforkErrand {
    /// Makes the slot free of errands.
    pub fn clear(&self) {
        self.state.store(NONE, SeqCst);
    }

    /// Posts an errand and waits until it is done. `what` is the address of a `&mut dyn FnMut()`.
    /// The caller calls `make` when the errand asks for it. Returns `false` if the process of the
    /// serving thread has ended first. Then the errand may be half done, and a thread that has
    /// begun it may still run for a moment.
    pub fn post(&self, what: usize, server: &ErrandServer, make: &mut dyn FnMut()) -> bool {
        self.what.store(what, SeqCst);
        self.state.store(POSTED, SeqCst);
        (server.ring)();
        loop {
            let (state, life) = (self.state.load(SeqCst), (server.life)());
            let is_gone = match state & KIND {
                NONE => return true,
                // Another process may serve from now on, and finds the errand.
                POSTED => life == 0,
                _ => state >> 2 != life,
            };
            if is_gone {
                if self.state.compare_exchange(state, NONE, SeqCst, SeqCst).is_ok() {
                    return false;
                }
            } else if state & KIND == ASKED {
                make();
                self.answer();
            } else {
                wait(&self.state, state);
            }
        }
    }

    /// Makes the task call its `make` in the middle of the errand. Returns when that is done, when
    /// `is_over` returns true, or when the task has died. It polls, because no event covers all
    /// three.
    pub fn ask(&self, is_over: &dyn Fn() -> bool) {
        let word = self.state.load(SeqCst) & !KIND | ASKED;
        self.state.store(word, SeqCst);
        wake(&self.state);
        while self.state.load(SeqCst) == word && !is_over() {
            yield_now();
        }
    }

    /// Ends [`VforkErrand::ask`]: the call was made, or the task has died.
    fn answer(&self) {
        let state = self.state.load(SeqCst);
        if state & KIND == ASKED {
            let _ = self.state.compare_exchange(state, state & !KIND | TAKEN, SeqCst, SeqCst);
        }
    }

    /// Waits until no thread uses the errand. The task has died, so an errand that no thread has
    /// begun is dropped. The caller belongs to the process of the serving thread.
    pub fn finish(&self) {
        let _ = self.state.compare_exchange(POSTED, NONE, SeqCst, SeqCst);
        loop {
            let state = self.state.load(SeqCst);
            match state & KIND {
                NONE => return,
                ASKED => self.answer(),
                _ => wait(&self.state, state),
            }
        }
    }

    /// Does the errand if one is posted. `life` is that of the calling thread.
    pub fn serve(&self, life: u32) {
        if self.state.compare_exchange(POSTED, taken(TAKEN, life), SeqCst, SeqCst).is_err() {
            return;
        }
        let what = self.what.load(SeqCst) as *mut &mut dyn FnMut();
        // SAFETY: `post` stored the address of a `&mut dyn FnMut()`. It stays valid while the state
        // isn't NONE: the task waits until then. If the task has died, its memory is shared with
        // its parent, which keeps the slot until then. The exchange above lets only one thread get
        // here. If this process has ended, the task waits until this thread executes no
        // instruction any more, before it continues.
        unsafe { (*what)() };
        self.state.store(NONE, SeqCst);
        wake(&self.state);
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

    const SERVER: ErrandServer = ErrandServer { ring: || {}, life: || 7 };

    /// Serves until one errand was done.
    fn serve_one(errand: &VforkErrand, done: &AtomicBool) {
        while !done.load(SeqCst) {
            errand.serve(7);
            yield_now();
        }
    }

    #[test]
    fn task_makes_its_call_in_the_middle_of_its_errand() {
        let (errand, is_done, result) = (errand(), AtomicBool::new(false), AtomicU32::new(0));
        scope(|s| {
            s.spawn(|| serve_one(&errand, &is_done));
            let mut what = || {
                assert_eq!(result.load(SeqCst), 0);
                errand.ask(&|| false);
                assert_eq!(result.swap(2, SeqCst), 1);
                is_done.store(true, SeqCst);
            };
            let mut what: &mut dyn FnMut() = &mut what;
            assert!(errand.post(&raw mut what as usize, &SERVER, &mut || result.store(1, SeqCst)));
        });
        assert_eq!((result.load(SeqCst), errand.state.load(SeqCst)), (2, NONE));
    }

    /// Tests that an errand whose task doesn't make its call goes on. With `is_gone` the parent
    /// gives the task up. Otherwise the serving thread stops waiting.
    fn goes_on_without_the_call(is_gone: bool) {
        let (errand, is_done, has_begun) =
            (&errand(), &AtomicBool::new(false), &AtomicBool::new(false));
        let (end, ends) = channel::<()>();
        scope(|s| {
            s.spawn(move || serve_one(errand, is_done));
            s.spawn(move || {
                let mut what = || {
                    errand.ask(&|| !is_gone && has_begun.load(SeqCst));
                    is_done.store(true, SeqCst);
                };
                let mut what: &mut dyn FnMut() = &mut what;
                assert!(errand.post(&raw mut what as usize, &SERVER, &mut || {
                    has_begun.store(true, SeqCst);
                    ends.recv().unwrap();
                }));
            });
            while is_gone && !has_begun.load(SeqCst) {
                yield_now();
            }
            if is_gone {
                errand.finish();
            }
            while !is_done.load(SeqCst) {
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

    #[test]
    fn errand_of_an_ended_process_is_given_up() {
        static LIFE: AtomicU32 = AtomicU32::new(7);
        let server = ErrandServer { ring: || {}, life: || LIFE.load(SeqCst) };
        let (errand, has_begun, end) =
            (&errand(), &AtomicBool::new(false), &AtomicBool::new(false));
        scope(|s| {
            let mut what = || {
                has_begun.store(true, SeqCst);
                while !end.load(SeqCst) {
                    yield_now();
                }
            };
            // The thread that has begun the errand never ends it in time, as if it were killed.
            s.spawn(|| {
                while !has_begun.load(SeqCst) {
                    errand.serve(7);
                }
            });
            s.spawn(|| {
                while !has_begun.load(SeqCst) {
                    yield_now();
                }
                LIFE.store(0, SeqCst);
            });
            let mut what: &mut dyn FnMut() = &mut what;
            assert!(!errand.post(&raw mut what as usize, &server, &mut || {}));
            end.store(true, SeqCst);
        });
        assert!(!errand.post(0, &server, &mut || {}), "no thread would do it");
        assert_eq!(errand.state.load(SeqCst), NONE);
    }

    #[test]
    fn posted_errand_waits_for_the_next_process_that_serves() {
        static LIFE: AtomicU32 = AtomicU32::new(7);
        // Another process has taken over when the task looks for the first time.
        let server = ErrandServer { ring: || LIFE.store(8, SeqCst), life: || LIFE.load(SeqCst) };
        let (errand, is_done) = (&errand(), &AtomicBool::new(false));
        scope(|s| {
            s.spawn(|| {
                while !is_done.load(SeqCst) {
                    errand.serve(8);
                }
            });
            let mut what = || is_done.store(true, SeqCst);
            let mut what: &mut dyn FnMut() = &mut what;
            assert!(errand.post(&raw mut what as usize, &server, &mut || {}));
        });
        assert!(is_done.load(SeqCst));
    }
}
