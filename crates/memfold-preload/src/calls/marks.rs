//! Marks that keep memory from being folded, set after it was adopted: locks, and what children or
//! core dumps must not get. The marked part comes home and leaves management before the call
//! returns.
use crate::calls::ahead::{Madvise, populate};
use crate::calls::real::{Real, next};
use crate::engine;
use crate::fork;
use crate::gate;
use crate::program::{self, Program};
use core::ffi::{c_int, c_uint, c_void};
use core::mem::transmute;
use libc::iovec;
use memfold_sys::Errno;
use memfold_sys::memory::zone::{lock_again, unlock_all};
use memfold_sys::raw::system_call;
use memfold_sys::units::PAGE_SIZE;

type Mlock = unsafe extern "C" fn(*const c_void, usize) -> c_int;
type Mlock2 = unsafe extern "C" fn(*const c_void, usize, c_uint) -> c_int;
type Mlockall = unsafe extern "C" fn(c_int) -> c_int;
type BySyscall =
    unsafe extern "C" fn(libc::c_long, c_int, *const iovec, usize, c_int, c_uint) -> libc::c_long;
type Munlockall = unsafe extern "C" fn() -> c_int;

static REAL_MADVISE: Real = Real::new(c"madvise");
static REAL_MLOCK: Real = Real::new(c"mlock");
static REAL_MLOCK2: Real = Real::new(c"mlock2");
static REAL_MLOCKALL: Real = Real::new(c"mlockall");
static REAL_MUNLOCK: Real = Real::new(c"munlock");
static REAL_MUNLOCKALL: Real = Real::new(c"munlockall");

/// Linux 6.13, `include/uapi/asm-generic/mman-common.h`.
const MADV_GUARD_INSTALL: c_int = 102;

/// Past every address of a program.
const TOP: usize = 1 << 56;

/// Looks the real functions up: the program's allocator may call them at any time.
pub fn find() {
    for real in
        [&REAL_MADVISE, &REAL_MLOCK, &REAL_MLOCK2, &REAL_MLOCKALL, &REAL_MUNLOCK, &REAL_MUNLOCKALL]
    {
        real.get();
    }
}

/// Makes a call that marks `[start, start + len)`. If it succeeds, what is managed there leaves
/// management. With `inherited`, children of fork get the part, as far as the program has not said
/// otherwise.
fn mark(start: usize, len: usize, inherited: bool, call: impl FnOnce() -> c_int) -> c_int {
    match program::get() {
        None => call(),
        Some(program) => mark_and_then(program, start, len, inherited, call, || {}),
    }
}

/// As [`mark`]; the first engine thread does `then` at the end, if the call succeeds.
fn mark_and_then(
    program: &'static Program,
    start: usize,
    len: usize,
    inherited: bool,
    call: impl FnOnce() -> c_int,
    mut then: impl FnMut() + Send,
) -> c_int {
    program.paused(|| {
        program.note_marks();
        let result = call();
        let first = start & !(PAGE_SIZE - 1);
        let last = start.saturating_add(len).min(TOP).next_multiple_of(PAGE_SIZE);
        if result == 0 && first < last {
            engine::have_done(|| {
                program.release(first, last, inherited);
                then();
            });
        }
        result
    })
}

/// The program's `madvise`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int {
    // SAFETY: libc's `madvise` is of this type.
    let real = unsafe { transmute::<*mut c_void, Madvise>(REAL_MADVISE.get()) };
    // SAFETY: the caller's promise.
    let call = || unsafe { real(at, len, advice) };
    match advice {
        libc::MADV_DONTDUMP if program::get().is_some_and(Program::folds_dont_dump) => call(),
        libc::MADV_DONTFORK => mark(at as usize, len, false, call),
        libc::MADV_DONTDUMP | libc::MADV_WIPEONFORK | libc::MADV_MERGEABLE => {
            mark(at as usize, len, true, call)
        }
        libc::MADV_DOFORK => undo_dont_fork(call),
        // SAFETY: the caller's promise.
        libc::MADV_POPULATE_READ | libc::MADV_POPULATE_WRITE => unsafe {
            populate(real, at, len, advice)
        },
        libc::MADV_FREE if program::get().is_some_and(Program::has_adopted) => {
            let result = call();
            if result == 0 {
                // Pages that it leaves where they are would not be the engine's any more: it is
                // told that they end. So they end now. SAFETY: the program has given up the bytes.
                unsafe { real(at, len, libc::MADV_DONTNEED) };
            }
            result
        }
        MADV_GUARD_INSTALL => {
            let result = call();
            if result == 0 {
                // It discards pages and reports nothing, so what is folded would come back when the
                // guards go. This is reported, and leaves the guards (madvise(2)). SAFETY: the
                // bytes there are gone for the program.
                unsafe { real(at, len, libc::MADV_DONTNEED) };
            }
            result
        }
        libc::MADV_DODUMP | libc::MADV_KEEPONFORK | libc::MADV_UNMERGEABLE => unmark(call),
        _ => call(),
    }
}

/// The program's `process_madvise`: as libc's. What it may do to this process (Linux 6.13) is done
/// as by [`madvise`].
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn process_madvise(
    process: c_int,
    ranges: *const iovec,
    count: usize,
    advice: c_int,
    flags: c_uint,
) -> isize {
    if gate::is_on() {
        // SAFETY: libc's `syscall` is of this type as far as the machine's calling convention goes;
        // the caller's promise. Its own instruction, so that the gate sees it.
        return unsafe {
            let real = transmute::<*mut c_void, BySyscall>(next(c"syscall"));
            real(libc::SYS_process_madvise, process, ranges, count, advice, flags) as isize
        };
    }
    // Older C libraries have none.
    let real = |count| {
        let args = [process as usize, ranges as usize, count, advice as usize, flags as usize, 0];
        // SAFETY: the arguments of this system call, the caller's.
        unsafe { system_call(libc::SYS_process_madvise, args) }
            .map_or_else(fail, |done| done as isize)
    };
    let for_others =
        [libc::MADV_COLD, libc::MADV_PAGEOUT, libc::MADV_WILLNEED, libc::MADV_COLLAPSE]
            .contains(&advice);
    // What the kernel refuses to do to another process it says without any range, too; and what it
    // would refuse of the ranges.
    if for_others || count > libc::UIO_MAXIOV as usize || real(0) != 0 {
        return real(count);
    }
    let mut done = 0;
    for n in 0..count {
        // SAFETY: the caller's promise.
        let iovec { iov_base, iov_len } = unsafe { ranges.add(n).read() };
        // SAFETY: likewise.
        if unsafe { madvise(iov_base, iov_len, advice) } != 0 {
            return if done > 0 { done } else { -1 };
        }
        done += iov_len as isize;
    }
    done
}

/// What libc returns for a system call that has failed.
fn fail(errno: Errno) -> isize {
    // SAFETY: the caller is a thread of the program's, which has an `errno`.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
    -1
}

/// Makes a call that takes a mark off.
fn unmark(call: impl FnOnce() -> c_int) -> c_int {
    let result = call();
    if let Some(program) = program::get() {
        program.note_unmarked();
    }
    result
}

/// MADV_DOFORK: what is managed stays out of children that are made past libc, as it was before.
/// Those of fork get it.
fn undo_dont_fork(call: impl FnOnce() -> c_int) -> c_int {
    let Some(program) = program::get() else { return call() };
    program.paused(|| {
        let result = call();
        fork::at_rest(program, Program::keep_from_children);
        program.note_unmarked();
        result
    })
}

/// The program's `mlock`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(at: *const c_void, len: usize) -> c_int {
    // SAFETY: libc's `mlock` is of this type; the caller's promise.
    mark(at as usize, len, true, || unsafe {
        transmute::<*mut c_void, Mlock>(REAL_MLOCK.get())(at, len)
    })
}

/// The program's `mlock2`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(at: *const c_void, len: usize, flags: c_uint) -> c_int {
    // SAFETY: libc's `mlock2` is of this type; the caller's promise.
    mark(at as usize, len, true, || unsafe {
        transmute::<*mut c_void, Mlock2>(REAL_MLOCK2.get())(at, len, flags)
    })
}

/// The program's `mlockall`: as libc's, but the engine's own memory stays as it is.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    // SAFETY: libc's `mlockall` is of this type; it changes no byte.
    let real = |flags| unsafe { transmute::<*mut c_void, Mlockall>(REAL_MLOCKALL.get())(flags) };
    let Some(program) = program::get().filter(|_| flags & libc::MCL_CURRENT != 0) else {
        return mark(0, 0, true, || real(flags));
    };
    // The kernel marks everything and brings nothing in: it would fill the engine's frames, and
    // wait for ever for them.
    let call = || {
        let result = real(flags | libc::MCL_ONFAULT);
        if result == 0 {
            unlock_all();
        }
        result
    };
    if flags & libc::MCL_ONFAULT != 0 {
        return mark_and_then(program, 0, TOP, true, call, || {});
    }
    let result = mark_and_then(program, 0, TOP, true, call, || program.lock_all());
    if result == 0 && flags & libc::MCL_FUTURE != 0 {
        // What comes later is to be brought in at once after all.
        return real(libc::MCL_FUTURE);
    }
    result
}

/// The program's `munlock`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlock(at: *const c_void, len: usize) -> c_int {
    // SAFETY: libc's `munlock` is of this type; the caller's promise.
    unmark(|| unsafe { transmute::<*mut c_void, Mlock>(REAL_MUNLOCK.get())(at, len) })
}

/// The program's `munlockall`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munlockall() -> c_int {
    unmark(|| {
        // SAFETY: libc's `munlockall` is of this type; it changes no byte.
        let result = unsafe { transmute::<*mut c_void, Munlockall>(REAL_MUNLOCKALL.get())() };
        lock_again();
        result
    })
}
