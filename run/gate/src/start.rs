//! Arms a process.
//!
//! **Promise**: no armed thread ever runs beside an unarmed one. A program mostly has one thread when
//! the preload library's constructor runs. But constructors of other libraries may have run before,
//! and have started threads: OpenBLAS and jemalloc do. Those are interrupted, and wait
//! (`arm_running.rs`) until the [`ArmedProcess`] is dropped.
//!
//! The linker flag `-z initfirst` would make the constructor run before all others. It isn't used:
//! ThreadSanitizer refuses to start if the engine has reserved addresses before it, and the flag has
//! no effect if another library has it too, such as libpthread before glibc 2.34.
use crate::actions::{self, PROTECTED};
use crate::arm_running;
use crate::frame::AlternateStack;
use crate::keeper::Keeper;
use crate::patch;
use crate::record::{GateThread, KEEPER};
use crate::signals::{HANDLER, give_back, take_over};
use crate::syscalls::has_no_counter;
use crate::threads::robust_list;
use crate::trap::{on_patched, on_signal};
use crate::user_dispatch;
use crate::{WhyNot, set_alternate};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use memfold_os::Errno;
use memfold_os::raw::{set_signals_blocked, system_call};
use memfold_os::thread::{process_id, thread_count, use_no_counter};

/// Whether SIGSYS is the gate's.
static ALARMS: AtomicBool = AtomicBool::new(false);

/// Returns whether threads of the keeper may open SIGSYS for their alarms ([`crate::ThreadKeeper::alarm`]).
pub fn takes_alarms() -> bool {
    ALARMS.load(SeqCst)
}

/// The process that is being armed. A child of fork finds its parent's value there.
static ARMING: AtomicU32 = AtomicU32::new(0);

/// A process whose calling thread is armed. All other threads wait until this is dropped. They are
/// armed then if [`ArmedProcess::keep`] was called. Otherwise the whole process is unarmed again.
#[must_use]
pub struct ArmedProcess {
    record: &'static GateThread,
    /// The caller's signal mask.
    mask: u64,
    /// The caller's alternate stack.
    alternate: AlternateStack,
    has_others: bool,
    is_kept: bool,
}

/// Arms the process. From now on each system call of the calling thread passes the gate. The calls
/// of all other threads do so when the [`ArmedProcess`] is dropped, and so do those of all threads
/// and processes that they make. Call sites of libc, and of the program's own code after
/// [`crate::note_entry`], are patched to enter the gate by a jump if they are used often. A jump
/// costs a thirtieth of a trap.
///
/// # Errors
/// The process can't be armed. No call passes the gate then.
///
/// # Safety
/// - It isn't called again after the process was kept.
/// - The process has no thread of the engine yet. Threads that must not pass the gate are started
///   by [`crate::apart`] afterwards, or by a call of the gate's own segment.
/// - The keeper makes system calls only by instructions in the same executable segment.
/// - The keeper manages no memory until the process is kept.
pub unsafe fn start(keeper: &'static Keeper) -> Result<ArmedProcess, WhyNot> {
    let (own, arming) = (process_id(), ARMING.load(SeqCst));
    if arming == own || ARMING.compare_exchange(arming, own, SeqCst, SeqCst).is_err() {
        return Err(WhyNot::Busy);
    }
    // SAFETY: the exchange above lets only one thread get here. The rest is the caller's promise.
    unsafe { start_alone(keeper) }.inspect_err(|_| ARMING.store(0, SeqCst))
}

/// Does the work of [`start`].
///
/// # Safety
/// - The conditions of [`start`] hold.
/// - No other thread calls this until [`ARMING`] is 0 again.
unsafe fn start_alone(keeper: &'static Keeper) -> Result<ArmedProcess, WhyNot> {
    // SAFETY: by the caller's promise this is the only thread that arms.
    unsafe { arm_running::begin() };
    if !user_dispatch::find_range() {
        return Err(WhyNot::NoRange);
    }
    let record = GateThread::take().ok_or(WhyNot::NoMemory)?;
    if has_no_counter() {
        use_no_counter();
    }
    let mask = set_signals_blocked(u64::MAX);
    // SAFETY: the caller keeps the conditions of `start`, and all signals are blocked.
    let outcome = unsafe { arm(keeper, record, mask) };
    match outcome {
        Ok((alternate, has_others)) => {
            Ok(ArmedProcess { record, mask, alternate, has_others, is_kept: false })
        }
        Err(why) => {
            record.give_back();
            set_signals_blocked(mask);
            Err(why)
        }
    }
}

/// Makes all other threads wait, and arms the calling thread. Returns its previous alternate stack,
/// and whether there are other threads. On an error all threads continue as they were.
///
/// # Safety
/// - The conditions of [`start`] hold.
/// - The calling thread has all signals blocked, and no other thread arms the process.
unsafe fn arm(
    keeper: &'static Keeper,
    record: &'static GateThread,
    mask: u64,
) -> Result<(AlternateStack, bool), WhyNot> {
    record.claim();
    record.blocked.set(mask & PROTECTED);
    record.robust.store(robust_list(), SeqCst);
    let theirs = set_alternate(&record.stack()).map_err(WhyNot::NoHandlers)?;
    record.alternate.set(theirs);
    let has_others = has_others().and_then(|has_others| {
        if has_others {
            arm_running::stop()?;
        }
        // SAFETY: either there is no other thread, or `stop` has succeeded, so that all others wait
        // in the handler. The rest is the caller's promise.
        let outcome = unsafe { arm_caller(keeper, record, has_others) };
        if outcome.is_err() && has_others {
            arm_running::let_go(false);
        }
        outcome.map(|()| has_others)
    });
    if has_others.is_err() {
        let _ = set_alternate(&theirs);
    }
    has_others.map(|has_others| (theirs, has_others))
}

/// Returns whether the process has other threads.
///
/// # Errors
/// Another process uses the same memory, or the number of threads can't be known.
fn has_others() -> Result<bool, WhyNot> {
    // `unshare(CLONE_VM)` changes nothing. It succeeds if no other thread and no other process uses
    // the caller's memory, and otherwise fails with EINVAL (`kernel/fork.c`, `check_unshare_flags`).
    let unshare = || {
        let args = [libc::CLONE_VM as usize, 0, 0, 0, 0, 0];
        // SAFETY: the call takes no pointers, and changes nothing.
        unsafe { system_call(libc::SYS_unshare, args) }
    };
    if unshare().is_ok() {
        return Ok(false);
    }
    match thread_count() {
        // A thread that was about to end is gone by now. So another process uses the memory if the
        // call fails again. A sandbox refuses the call with other errors.
        Some(1) if unshare() == Err(Errno::INVAL) => Err(WhyNot::Unreachable),
        Some(count) => Ok(count > 1),
        None => Err(WhyNot::Unreachable),
    }
}

/// Arms the calling thread, and makes the gate's handler take all signals of the process.
///
/// # Safety
/// - All other threads wait in the handler of `arm_running`, if there are any.
/// - The conditions of [`start`] hold.
unsafe fn arm_caller(
    keeper: &'static Keeper,
    record: &GateThread,
    has_others: bool,
) -> Result<(), WhyNot> {
    user_dispatch::arm().map_err(WhyNot::NoDispatch)?;
    // SAFETY: all other threads wait in the handler, which doesn't use the cell.
    unsafe { KEEPER.set(keeper) };
    HANDLER.store(on_signal as *const () as usize, SeqCst);
    if let Err(e) = take_over(record) {
        disarm_caller(record, has_others);
        return Err(WhyNot::NoHandlers(e));
    }
    if has_others {
        arm_running::keep_handler(record);
    }
    Ok(())
}

/// Undoes [`arm_caller`].
fn disarm_caller(record: &GateThread, has_others: bool) {
    give_back(record);
    if has_others {
        arm_running::keep_handler(record);
    }
    user_dispatch::disarm();
}

impl ArmedProcess {
    /// Returns whether the process has other threads.
    pub fn has_others(&self) -> bool {
        self.has_others
    }

    /// Arms all other threads, and lets them continue.
    pub fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ArmedProcess {
    fn drop(&mut self) {
        if !self.is_kept {
            disarm_caller(self.record, self.has_others);
            let _ = set_alternate(&self.alternate);
            self.record.give_back();
        }
        if self.has_others {
            arm_running::let_go(self.is_kept);
        }
        if self.is_kept {
            patch::allow(on_patched);
            ALARMS.store(true, SeqCst);
        }
        ARMING.store(0, SeqCst);
        set_signals_blocked(if self.is_kept { self.mask & !actions::PROTECTED } else { self.mask });
    }
}
