//! The first engine thread. It makes the engine, and then looks at the program's size. It also does
//! errands for threads of the program that need the engine's own descriptors, and lends memory to
//! other processes.
use crate::diagnostics;
use crate::diagnostics::unserved::unserved;
use crate::size::pace::LookPause;
use alloc::string::String;
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use memfold_engine::config::Config;
use memfold_engine::holds::HoldId;
use memfold_gate::takes_alarms;
use memfold_os::Errno;
use memfold_os::raw::set_signals_blocked;
use memfold_os::sync::Mutex;
use memfold_os::thread::alarm::{ALARM_OPEN, CpuAlarm};
use memfold_os::thread::{bare, process_id, yield_now};
use memfold_run::member;
use memfold_run::table::lending::{LeaseId, REQUESTS};
use memfold_stats::Stats;
use rustix::thread::{Timespec, futex};

/// Held by the thread whose errand is done, so that there is one errand at a time.
static LINE: Mutex<()> = Mutex::new(());
/// The address of the errand (`*mut &mut dyn FnMut()`); 0 if there is none.
static ERRAND: AtomicUsize = AtomicUsize::new(0);
/// Incremented to wake the first engine thread. `IS_RUNG` is whether it is to look then.
static BELL: AtomicU32 = AtomicU32::new(0);
static IS_RUNG: AtomicBool = AtomicBool::new(false);
/// Whether it rests for longer than [`REST_NS`], or is about to.
static RESTS: AtomicBool = AtomicBool::new(false);
/// Whether that thread has SIGSYS open for its alarm, or is about to.
static IS_OPEN: AtomicBool = AtomicBool::new(false);
/// Whether it may open SIGSYS no more.
static ALARMS_END: AtomicBool = AtomicBool::new(false);
/// A pause of so much is a long rest, nanoseconds.
const REST_NS: u64 = 20_000_000;
/// CPU time of the process after which a rest ends, nanoseconds.
const WORK_NS: u64 = 50_000;
/// The longest rest while memory is held for other processes, nanoseconds.
const LENT_NS: u64 = 5_000_000;
/// The longest rest if the kernel has no timer for that, nanoseconds.
const BLIND_NS: u64 = 50_000_000;
const SECOND_NS: u64 = 1_000_000_000;
/// Incremented by the first engine thread when it is ready, and after each errand.
static DONE: AtomicU32 = AtomicU32::new(0);

/// The process that the engine serves. A child of vfork has the same memory, but is another one.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Whether the first engine thread must end. `GOES_ON` is whether it continues after [`stop`].
static ENDS: AtomicBool = AtomicBool::new(false);
static GOES_ON: AtomicBool = AtomicBool::new(false);
/// Whether the engine has ended for good.
static HAS_ENDED: AtomicBool = AtomicBool::new(false);

/// What is held for each request of other processes.
pub type LentMemory = [Option<(LeaseId, HoldId)>; REQUESTS];

/// The work of the first engine thread.
pub struct EngineLife {
    /// Makes the engine.
    pub create: fn(Config, &'static Stats) -> Result<(), String>,
    /// Returns whether there is an engine, made by this process or by the parent that it is a copy
    /// of.
    pub exists: fn() -> bool,
    /// Begins with the engine of the parent in a child of fork.
    pub begin_as_child: fn(&'static Stats),
    /// Continues with the engine after [`stop`].
    pub go_on: fn(&'static Stats),
    /// Makes the calling child of vfork continue with the engine of its parent, whose process has
    /// ended, or without it.
    pub inherit: fn(),
    /// Runs once before the first look.
    pub prepare: fn(),
    /// Holds memory that other processes have asked for, and releases what they have used.
    pub lend: fn(&mut LentMemory),
    /// Releases all memory that is held for other processes.
    pub end_lending: fn(&mut LentMemory),
    /// Looks at the program's size. It is given whether a thread of this process has asked for it.
    /// Returns the time until the next look.
    pub look: fn(bool) -> LookPause,
}

struct GivenConfig(UnsafeCell<Option<Config>>);
// SAFETY: the cell is written before the first engine thread starts. Then only that thread uses it.
unsafe impl Sync for GivenConfig {}
static CONFIG: GivenConfig = GivenConfig(UnsafeCell::new(None));
static LIFE: AtomicPtr<EngineLife> = AtomicPtr::new(core::ptr::null_mut());

/// Starts the engine. Waits until this process is managed, or turns out to be unmanageable. Called
/// once, by the only thread.
pub fn start(config: Config, life: &'static EngineLife) {
    LIFE.store((&raw const *life).cast_mut(), SeqCst);
    // SAFETY: no engine thread runs yet, and the caller is the only thread.
    unsafe { *CONFIG.0.get() = Some(config) };
    PROCESS.store(process_id(), SeqCst);
    let round = DONE.load(SeqCst);
    match bare::start_first(c"memfold-adopt", run, 0) {
        Ok(()) => wait_past(&DONE, round),
        Err(e) => unserved(format_args!("Starting the engine failed: {e}")),
    }
}

/// Starts the engine again in a child of fork, where it is quiesced, and waits as [`start`] does.
///
/// # Safety
/// - The process has just been copied by a fork and has one thread, the caller.
pub unsafe fn start_in_child() {
    // SAFETY: the caller promises that it is the only thread.
    unsafe { start_anew() };
}

/// Starts the engine again in a child of vfork, as it was in the process that has ended.
///
/// # Safety
/// - No thread of the process that had the engine lives.
pub unsafe fn start_in_heir() {
    ENDS.store(false, SeqCst);
    GOES_ON.store(true, SeqCst);
    // SAFETY: by the caller's promise no engine thread lives.
    unsafe { start_anew() };
}

/// Makes the calling child of vfork [`EngineLife::inherit`].
pub fn inherit() {
    // SAFETY: the pointer is null, or `start` stored a `&'static`.
    if let Some(life) = unsafe { LIFE.load(SeqCst).as_ref() } {
        (life.inherit)();
    }
}

/// # Safety
/// - No engine thread that was started before lives in this memory.
unsafe fn start_anew() {
    // Errands for the former process are not for this one. SAFETY: a thread that has the lock waits
    // for an engine thread, and those have ended by the caller's promise. So it has ended too.
    unsafe { LINE.reset() };
    ERRAND.store(0, SeqCst);
    PROCESS.store(process_id(), SeqCst);
    let round = DONE.load(SeqCst);
    // SAFETY: the caller promises that no engine thread lives.
    if let Err(e) = unsafe { bare::restart_first() } {
        diagnostics::die(format_args!("Starting the engine in a child process failed: {e}"));
    }
    wait_past(&DONE, round);
}

/// Returns whether the caller belongs to the process that the engine serves.
pub fn is_of_this_process() -> bool {
    PROCESS.load(SeqCst) == process_id()
}

/// Ends the first engine thread, and waits until it and the others are gone. The others must have
/// been told to end.
pub fn stop() {
    ENDS.store(true, SeqCst);
    look_now();
    bare::await_end();
}

/// Starts the first engine thread again, which starts the others. Waits until it is ready.
///
/// # Errors
/// EAGAIN: no more threads can be started.
///
/// # Safety
/// - [`stop`] has returned.
pub unsafe fn start_again() -> Result<(), Errno> {
    GOES_ON.store(true, SeqCst);
    let round = DONE.load(SeqCst);
    // SAFETY: the caller promises that `stop` has returned, so the first engine thread has ended.
    unsafe { bare::start_first_again() }?;
    wait_past(&DONE, round);
    Ok(())
}

/// Ends all engine threads for good, as [`stop`] does. No errand is done any more.
pub fn end() {
    let _line = LINE.lock();
    HAS_ENDED.store(true, SeqCst);
    stop();
}

/// Returns whether the engine's threads have ended for good.
pub fn has_ended() -> bool {
    HAS_ENDED.load(SeqCst)
}

/// Runs `errand` in the first engine thread, and waits until it is done. Does nothing if the engine
/// has ended.
pub fn have_done(mut errand: impl FnMut() + Send) {
    let _line = LINE.lock();
    if has_ended() {
        return;
    }
    let mut errand: &mut dyn FnMut() = &mut errand;
    let round = DONE.load(SeqCst);
    ERRAND.store(&raw mut errand as usize, SeqCst);
    look_now();
    wait_past(&DONE, round);
}

/// Makes the first engine thread look at the program's size without delay.
pub fn look_now() {
    IS_RUNG.store(true, SeqCst);
    note_ring();
    let _ = futex::wake(bell().0, bell().1, 1);
}

/// Ends alarms for good. On return the first engine thread has SIGSYS blocked.
pub fn end_alarms() {
    ALARMS_END.store(true, SeqCst);
    // The thread says that it opens SIGSYS before it looks whether it may.
    while IS_OPEN.load(SeqCst) {
        look_now();
        yield_now();
    }
}

/// Makes the first engine thread look without delay if it rests for long: memory may grow.
pub fn end_rest() {
    if RESTS.load(SeqCst) {
        look_now();
    }
}

/// Ends the rest of the calling thread, the first of the engine, because the program works. Called
/// by its signal handler.
pub fn end_own_rest() {
    note_ring();
}

/// The thread that waits changes the futex only between two looks: it reads [`BELL`] after the
/// change, and so sees this increment, or this thread sees the new futex.
fn note_ring() {
    BELL.fetch_add(1, SeqCst);
    if let Some(bell) = member::bell() {
        bell.fetch_add(1, SeqCst);
    }
}

/// Returns the futex on which the first engine thread sleeps: that of the process's slot, which
/// other processes wake, or without a slot its own.
fn bell() -> (&'static AtomicU32, futex::Flags) {
    member::bell().map_or((&BELL, futex::Flags::PRIVATE), |bell| (bell, futex::Flags::empty()))
}

fn wait_past(word: &AtomicU32, value: u32) {
    while word.load(SeqCst) == value {
        let _ = futex::wait(word, futex::Flags::PRIVATE, value, None);
    }
}

fn tell() {
    DONE.fetch_add(1, SeqCst);
    let _ = futex::wake(&DONE, futex::Flags::PRIVATE, i32::MAX as u32);
}

/// Runs the first engine thread. In a child of fork it begins again, with the engine that it finds.
fn run(_: usize) {
    // SAFETY: `start` stored a `&'static` before it started this thread.
    let life = unsafe { &*LIFE.load(SeqCst) };
    if GOES_ON.swap(false, SeqCst) {
        (life.go_on)(member::claim());
    } else if (life.exists)() {
        (life.begin_as_child)(member::claim());
    } else {
        // SAFETY: `start` wrote the cell before it started this thread, and only this thread uses
        // it since.
        let config = unsafe { (*CONFIG.0.get()).take() }.expect("`start` was given the settings");
        if let Err(why) = (life.create)(config, member::claim()) {
            unserved(format_args!("{why}"));
            return tell();
        }
    }
    tell();
    (life.prepare)();
    // Making an engine takes more of the stack than anything that follows.
    bare::trim_stack();
    let mut alarm = CpuAlarm::default();
    // A child of fork holds nothing for other processes.
    let mut leases = [None; REQUESTS];
    // A child of fork finds its parent's value.
    IS_OPEN.store(false, SeqCst);
    loop {
        let (futex, flags) = bell();
        let (rung, round) = (BELL.load(SeqCst), futex.load(SeqCst));
        if ENDS.swap(false, SeqCst) {
            (life.end_lending)(&mut leases);
            return;
        }
        let errand = ERRAND.swap(0, SeqCst);
        if errand != 0 {
            // SAFETY: `have_done` waits until `tell` was called, so the errand and its pointer live
            // until then.
            unsafe { (*(errand as *mut &mut dyn FnMut()))() };
            tell();
            // The errand may have changed the futex.
            continue;
        }
        (life.lend)(&mut leases);
        let mut pause = (life.look)(IS_RUNG.swap(false, SeqCst));
        if leases.iter().any(Option::is_some) {
            // A borrower that has used the memory doesn't wake this thread.
            pause = LookPause { ns: pause.ns.min(LENT_NS), ends_with_work: false };
        }
        let rests = pause.ns > REST_NS;
        RESTS.store(rests, SeqCst);
        if (!rests || member::begin_rest()) && BELL.load(SeqCst) == rung {
            rest(futex, flags, round, pause, &mut alarm);
        }
        if rests {
            member::end_rest();
        }
        RESTS.store(false, SeqCst);
    }
}

/// Sleeps until the futex is not `seen` any more, or the pause is over.
fn rest(futex: &AtomicU32, flags: futex::Flags, seen: u32, pause: LookPause, alarm: &mut CpuAlarm) {
    IS_OPEN.store(pause.ends_with_work && takes_alarms(), SeqCst);
    let may = IS_OPEN.load(SeqCst) && !ALARMS_END.load(SeqCst);
    let has_alarm = may && alarm.set(WORK_NS);
    let is_blind = pause.ends_with_work && !has_alarm;
    let ns = if is_blind { pause.ns.min(BLIND_NS) } else { pause.ns };
    let time = Timespec { tv_sec: (ns / SECOND_NS) as i64, tv_nsec: (ns % SECOND_NS) as i64 };
    if has_alarm {
        // The handler of the alarm changes the futex, so no alarm is missed before the wait.
        set_signals_blocked(ALARM_OPEN);
    }
    let _ = futex::wait(futex, flags, seen, Some(&time));
    if has_alarm {
        set_signals_blocked(u64::MAX);
        alarm.clear();
    }
    IS_OPEN.store(false, SeqCst);
}
