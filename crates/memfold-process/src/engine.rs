//! The first engine thread: makes the engine, then looks at the program's size, and does what needs
//! the engine's own descriptors for threads of the program.
use crate::diagnostics;
use crate::diagnostics::unserved::unserved;
use alloc::string::String;
use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::SeqCst;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use memfold::config::Config;
use memfold::stats::Stats;
use memfold_os::Errno;
use memfold_os::sync::Mutex;
use memfold_os::thread::bare;
use memfold_run::member;
use rustix::thread::{Timespec, futex};

/// One errand at a time.
static LINE: Mutex<()> = Mutex::new(());
/// The address of the errand (`*mut &mut dyn FnMut()`); 0 if there is none.
static ERRAND: AtomicUsize = AtomicUsize::new(0);
/// Raised to wake the first engine thread.
static BELL: AtomicU32 = AtomicU32::new(0);
/// Raised by it: when it is ready, and at the end of each errand.
static DONE: AtomicU32 = AtomicU32::new(0);

/// Whether the first engine thread is to end, and whether it goes on where it had ended.
static ENDS: AtomicBool = AtomicBool::new(false);
static GOES_ON: AtomicBool = AtomicBool::new(false);

/// What the first engine thread does, as faults are delivered.
pub struct EngineLife {
    /// Makes the engine.
    pub create: fn(Config, &'static Stats) -> Result<(), String>,
    /// Whether that has been done, in this process or in the parent that it is a copy of.
    pub exists: fn() -> bool,
    /// Puts the engine of a child of fork to use.
    pub begin_as_child: fn(&'static Stats),
    /// Goes on with the engine after [`stop`].
    pub go_on: fn(&'static Stats),
    /// Before the first look.
    pub prepare: fn(),
    /// Looks at the program's size; gives the time until the next look, nanoseconds.
    pub look: fn() -> i64,
}

struct GivenConfig(UnsafeCell<Option<Config>>);
// SAFETY: written before the engine's first thread starts, taken by that thread.
unsafe impl Sync for GivenConfig {}
static CONFIG: GivenConfig = GivenConfig(UnsafeCell::new(None));
static LIFE: AtomicPtr<EngineLife> = AtomicPtr::new(core::ptr::null_mut());

/// Starts the engine, and waits until this process is under management, or is found not to be
/// served. Called once, by the only thread.
pub fn start(config: Config, life: &'static EngineLife) {
    LIFE.store((&raw const *life).cast_mut(), SeqCst);
    // SAFETY: no engine thread runs yet.
    unsafe { *CONFIG.0.get() = Some(config) };
    let seen = DONE.load(SeqCst);
    match bare::start_first(c"memfold-adopt", run, 0) {
        Ok(()) => wait_past(&DONE, seen),
        Err(e) => unserved(format_args!("Starting the engine failed: {e}")),
    }
}

/// Starts it again in a child of fork, at rest, and waits likewise.
///
/// # Safety
/// - The process has just been copied by a fork and has one thread, the caller.
pub unsafe fn start_in_child() {
    // What other threads of the parent had the engine do is not for this one.
    // SAFETY: nobody in this process holds it.
    unsafe { LINE.reset() };
    ERRAND.store(0, SeqCst);
    let seen = DONE.load(SeqCst);
    // SAFETY: the caller's promise.
    if let Err(e) = unsafe { bare::restart_first() } {
        diagnostics::die(format_args!("Starting the engine in a child of fork failed: {e}"));
    }
    wait_past(&DONE, seen);
}

/// Ends the first engine thread, and waits until it is gone, with the others: they were told to end.
pub fn stop() {
    ENDS.store(true, SeqCst);
    look_now();
    bare::await_end();
}

/// Starts it again, which starts the others, and waits until it is ready.
///
/// # Errors
/// EAGAIN: no more threads.
///
/// # Safety
/// - [`stop`] has returned.
pub unsafe fn start_again() -> Result<(), Errno> {
    GOES_ON.store(true, SeqCst);
    let seen = DONE.load(SeqCst);
    // SAFETY: the caller's promise.
    unsafe { bare::start_first_again() }?;
    wait_past(&DONE, seen);
    Ok(())
}

/// Has the first engine thread do something, and waits until it is done.
pub fn have_done(mut errand: impl FnMut() + Send) {
    let _line = LINE.lock();
    let mut errand: &mut dyn FnMut() = &mut errand;
    let seen = DONE.load(SeqCst);
    ERRAND.store(&raw mut errand as usize, SeqCst);
    look_now();
    wait_past(&DONE, seen);
}

/// Has the first engine thread look at the program's size without delay.
pub fn look_now() {
    BELL.fetch_add(1, SeqCst);
    let _ = futex::wake(&BELL, futex::Flags::PRIVATE, 1);
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

/// The thread's life. In a child of fork it begins again, with the program that it finds.
fn run(_: usize) {
    // SAFETY: `start` stored a `&'static`.
    let life = unsafe { &*LIFE.load(SeqCst) };
    if GOES_ON.swap(false, SeqCst) {
        (life.go_on)(member::claim());
    } else if (life.exists)() {
        (life.begin_as_child)(member::claim());
    } else {
        // SAFETY: `start` has left it to this thread.
        let config = unsafe { (*CONFIG.0.get()).take() }.expect("`start` was given the settings");
        if let Err(why) = (life.create)(config, member::claim()) {
            unserved(format_args!("{why}"));
            return tell();
        }
    }
    tell();
    (life.prepare)();
    // Making an engine takes more of it than all that comes.
    bare::trim_stack();
    loop {
        let bell = BELL.load(SeqCst);
        if ENDS.swap(false, SeqCst) {
            return;
        }
        let errand = ERRAND.swap(0, SeqCst);
        if errand != 0 {
            // SAFETY: `have_done` waits until it has been told, so what it points to lives until
            // then.
            unsafe { (*(errand as *mut &mut dyn FnMut()))() };
            tell();
        }
        let time = Timespec { tv_sec: 0, tv_nsec: (life.look)() };
        let _ = futex::wait(&BELL, futex::Flags::PRIVATE, bell, Some(&time));
    }
}
