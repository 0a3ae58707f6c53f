//! Bare threads: engine threads inside a foreign program that its C library doesn't know of.
//!
//! The program has the same number of threads for libc. So a program of one thread keeps its
//! unlocked `malloc` and stdio, and a main thread that ends by `pthread_exit` ends the process. A
//! bare thread needs no memory of the program's heap, so it can be started where that heap is
//! folded: in a child of fork. It has a stack and a thread block of its own, and blocks every
//! signal. It must not call functions of libc that use thread-local storage.
//!
//! Bare threads share a table of descriptors that is not the program's. They keep descriptors that
//! the program closes, and don't keep the program's pipes open.
use crate::Errno;
use crate::clock::thread_cpu_ns;
use crate::memory::zone::{Zone, counts_reservations};
use crate::raw::{self, system_call};
use crate::sync::StaticMutex;
use crate::thread::identity::ThreadRights;
use crate::thread::{
    each_thread, is_runnable, process_id, sleep_ns, thread_id, waited_ns, yield_now,
};
use crate::units::PAGE_SIZE;
use core::ffi::CStr;
use core::mem::{forget, size_of};
use core::ops::Range;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering::SeqCst};
use rustix::mm::{MprotectFlags, mprotect};
use rustix::thread::futex;

/// Most bare threads.
pub const THREADS_MAX: usize = 160;
const STACK_BYTES: usize = 512 << 10;
/// Bytes below the thread pointer. On x86-64 libc's own thread-local variables have their places
/// here, but bare threads don't use them.
const TLS_BYTES: usize = 64 << 10;

/// A child of fork retries so often to start a thread, with pauses of so many nanoseconds: for 10
/// s.
const TRIES: usize = 1000;
const PAUSE_NS: u64 = 10_000_000;

/// Address space of a thread: the end of the stack, the stack, the thread block, the record.
const THREAD_BYTES: usize = PAGE_SIZE + STACK_BYTES + TLS_BYTES + 2 * PAGE_SIZE;

/// Addresses reserved for future threads: the start of the next one, and their number.
static SPARE: StaticMutex<(usize, usize)> = StaticMutex::new((0, 0));

/// The record of a thread. It is in the thread's own zone, so that a child of fork finds it.
struct ThreadRecord {
    name: &'static CStr,
    main: fn(usize),
    arg: usize,
    /// Whether it has a table of descriptors of its own, which it shares with the threads that it
    /// starts. So it is the first thread, or a brief one.
    own_files: bool,
    stack_top: usize,
    thread_pointer: usize,
    /// For a brief thread ([`once`]): 1 until the kernel, at its end, sets it to 0.
    runs: AtomicU32,
    /// Its number; 0 before it is started.
    number: AtomicU32,
}

impl ThreadRecord {
    fn is_brief(&self) -> bool {
        self.runs.load(SeqCst) != 0
    }

    /// Returns the word that the kernel sets to 0 when the thread ends.
    fn cleared_at_end(&self) -> Option<&AtomicU32> {
        match (self.is_brief(), self.own_files) {
            (true, _) => Some(&self.runs),
            (false, true) => Some(&LIFE),
            (false, false) => None,
        }
    }
}

/// Addresses of records, 0 where there is none. They are removed only if a thread could not be
/// started.
static RECORDS: [AtomicUsize; THREADS_MAX] = [const { AtomicUsize::new(0) }; THREADS_MAX];
static COUNT: AtomicUsize = AtomicUsize::new(0);

const _: () = assert!(size_of::<ThreadRecord>() <= PAGE_SIZE);

/// The number of the first thread's process among all that had this memory: 1, 2, ... 0 once the
/// process has ended. The kernel stores the 0 while it ends the thread, if another task still has
/// the memory.
static LIFE: AtomicU32 = AtomicU32::new(0);
/// The greatest number of `LIFE`.
static LIVES: AtomicU32 = AtomicU32::new(0);
/// `LIFE` is at most this.
pub const LIFE_MAX: u32 = (1 << 30) - 1;

/// Returns a number that stands for the process of the bare threads, and never comes back. Returns
/// 0 if the process has ended, or executes another program, and the caller is a task that shares
/// the memory.
///
/// Each thread of the process has a fatal signal by then. It may still run for a moment: see
/// [`await_last_instructions`].
pub fn life() -> u32 {
    LIFE.load(SeqCst)
}

fn begin_life() {
    LIFE.store(LIVES.fetch_add(1, SeqCst) % LIFE_MAX + 1, SeqCst);
}

/// Waits until no thread of a process that has ended executes an instruction any more. Called when
/// [`life`] has returned 0, so each of them has a fatal signal, and doesn't return from the kernel.
/// The barrier interrupts each CPU that executes one of them.
///
/// # Errors
/// EINVAL, ENOSYS, or the error of a filter: the kernel has no such barrier.
pub fn await_last_instructions() -> Result<(), Errno> {
    /// `MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED` and `MEMBARRIER_CMD_PRIVATE_EXPEDITED`.
    const COMMANDS: [usize; 2] = [1 << 4, 1 << 3];
    COMMANDS.into_iter().try_for_each(|command| {
        // SAFETY: the call has no pointers and changes no memory.
        unsafe { system_call(libc::SYS_membarrier, [command, 0, 0, 0, 0, 0]) }.map(drop)
    })
}

/// The program's descriptors that bare threads keep, under the same numbers: ascending, then zeros.
static KEPT: [AtomicU32; KEPT_MAX] = [const { AtomicU32::new(0) }; KEPT_MAX];
/// Most of these.
pub const KEPT_MAX: usize = 16;

/// Makes the first bare thread keep the program's descriptors with these numbers, none of them 0.
/// Call it before that thread is started.
///
/// # Panics
/// If they are more than [`KEPT_MAX`].
pub fn keep_descriptors(numbers: &mut [u32]) {
    assert!(numbers.len() <= KEPT_MAX);
    numbers.sort_unstable();
    let all = numbers.iter().copied().chain(core::iter::repeat(0));
    KEPT.iter().zip(all).for_each(|(cell, number)| cell.store(number, SeqCst));
}

/// Returns the number of threads that run in this process.
pub fn count() -> usize {
    COUNT.load(SeqCst)
}

/// Returns the records of all started threads, which run again in a child of fork.
fn records() -> impl Iterator<Item = usize> {
    RECORDS.iter().map(|record| record.load(SeqCst)).filter(|record| *record != 0)
}

/// Returns the numbers of all bare threads of this process; 0 for one that does not run.
fn numbers() -> impl Iterator<Item = u32> {
    // SAFETY: records are never freed.
    records().map(|record| unsafe { (*(record as *const ThreadRecord)).number.load(SeqCst) })
}

/// Returns the nanoseconds that the bare threads of this process have run. Ended ones don't count.
pub fn cpu_ns() -> u64 {
    numbers().filter(|number| *number != 0).map(thread_cpu_ns).sum()
}

/// Returns whether a bare thread with this name runs, or is about to. It may not be ending.
pub fn is_started(name: &CStr) -> bool {
    // SAFETY: records are never freed.
    let mut names = records().map(|record| unsafe { &*(record as *const ThreadRecord) });
    names.any(|record| record.name == name && record.number.load(SeqCst) != 0)
}

/// Returns the nanoseconds for which the threads of this process that aren't bare have waited for a
/// CPU although they could run. A thread that ended doesn't count.
pub fn others_waited_ns() -> u64 {
    let mut sum = 0;
    let _ = each_thread(|thread| sum += if has(thread) { 0 } else { waited_ns(thread) });
    sum
}

/// Returns whether a thread of this process that isn't bare runs now, or waits for a CPU. The kernel
/// counts such a wait only when it ends.
pub fn others_can_run() -> bool {
    let mut can = false;
    let _ = each_thread(|thread| can |= !has(thread) && is_runnable(thread));
    can
}

/// Returns whether the thread of this process with this number is a bare one.
pub fn has(number: u32) -> bool {
    count() > 0 && numbers().any(|own| own == number)
}

/// Waits until the kernel has no bare thread any more. Called by another thread, when all have been
/// requested to end.
pub fn await_end() {
    await_each(records(), yield_now);
}

/// Waits until the kernel has no bare thread with such a name, except for the first, which may call
/// this. Calls `meanwhile` again and again.
pub fn await_others_end(which: impl Fn(&CStr) -> bool, meanwhile: impl FnMut()) {
    // SAFETY: records are never freed.
    let is_one = |record: &usize| unsafe { which((*(*record as *const ThreadRecord)).name) };
    await_each(records().skip(1).filter(is_one), meanwhile);
}

fn await_each(records: impl Iterator<Item = usize>, mut meanwhile: impl FnMut()) {
    for record in records {
        // SAFETY: records are never freed.
        let number = unsafe { &(*(record as *const ThreadRecord)).number };
        let args = [process_id() as usize, number.load(SeqCst) as usize, 0, 0, 0, 0];
        // SAFETY: signal 0 is not sent: the call checks whether there is such a thread.
        while args[1] != 0 && unsafe { system_call(libc::SYS_tgkill, args) }.is_ok() {
            meanwhile();
        }
        number.store(0, SeqCst);
    }
    // The kernel takes a thread off its lists under a lock, which this call takes too. So the last
    // thread is off all of them.
    let _ = rustix::process::getpriority_pgrp(None);
}

/// Returns whether the calling thread may start others. It may not if its children are to have
/// another PID or time namespace. Starts none: it requests one with its own number, which isn't
/// free.
pub fn may_be_started() -> bool {
    const FLAGS: i32 = libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
    let number = thread_id();
    // `struct clone_args` up to `set_tid_size`.
    let args = [FLAGS as usize, 0, 0, 0, 0, 0, 0, 0, &raw const number as usize, 1];
    let args = [args.as_ptr() as usize, size_of_val(&args), 0, 0, 0, 0];
    // SAFETY: the struct has one number, of a thread that runs. No other thread can have it, so the
    // call fails. Kernels without this field refuse a struct that has it.
    let result = unsafe { system_call(libc::SYS_clone3, args) };
    result != Err(Errno::INVAL)
}

/// Reserves addresses for `count` threads that may be started later, so that they don't take gaps
/// between the program's mappings. Called once. Where addresses count as memory, nothing is
/// reserved before it is needed.
///
/// # Errors
/// The errors of reserving a zone.
pub fn reserve(count: usize) -> Result<(), Errno> {
    if !counts_reservations() {
        let zone = Zone::reserve(count * THREAD_BYTES, PAGE_SIZE)?;
        *SPARE.lock() = (zone.start(), count);
        forget(zone);
    }
    Ok(())
}

fn take_spare() -> Option<usize> {
    let mut spare = SPARE.lock();
    let (start, count) = *spare;
    *spare = (start + THREAD_BYTES, count.checked_sub(1)?);
    Some(start)
}

/// Returns the spare addresses that were taken last, of a thread that could not be started.
fn give_back_spare(start: usize) {
    let mut spare = SPARE.lock();
    if spare.0 == start + THREAD_BYTES {
        *spare = (start, spare.1 + 1);
    }
}

/// Starts `main(arg)` on the first bare thread, with only three descriptors of /dev/null. It starts
/// the others.
///
/// # Errors
/// EAGAIN: no more threads. The errors of reserving its zone.
pub fn start_first(name: &'static CStr, main: fn(usize), arg: usize) -> Result<(), Errno> {
    begin_life();
    start_as(name, main, arg, true)
}

/// Starts `main(arg)` on a further bare thread. Called by a bare thread, whose descriptors it
/// shares.
///
/// # Errors
/// The errors of [`start_first`].
pub fn start(name: &'static CStr, main: fn(usize), arg: usize) -> Result<(), Errno> {
    start_as(name, main, arg, false)
}

/// Runs `work` on a brief thread, and waits until it has ended. The thread has the caller's user,
/// root directory and seccomp filters. It has no descriptors, and no other thread gets those that
/// it opens.
///
/// # Errors
/// EAGAIN: no more threads. The errors of reserving its zone. `work` was not run then.
pub fn once<R: Send>(name: &'static CStr, work: impl FnOnce() -> R + Send) -> Result<R, Errno> {
    let (mut work, mut result) = (Some(work), None);
    let mut main = || result = work.take().map(|work| work());
    let mut main: &mut dyn FnMut() = &mut main;
    let zone = Zone::reserve(THREAD_BYTES, PAGE_SIZE)?;
    let record = place(zone.start(), name, call, &raw mut main as usize, true)?;
    // SAFETY: the record was just written, and its thread does not run. It is in the zone, which is
    // dropped when the thread has ended.
    let runs = unsafe { &(*(record as *const ThreadRecord)).runs };
    runs.store(1, SeqCst);
    // SAFETY: the record was just written, and its thread does not run.
    unsafe { run(record)? };
    while runs.load(SeqCst) != 0 {
        // The kernel's wake at the end of a thread is not a private one.
        let _ = futex::wait(runs, futex::Flags::empty(), 1, None);
    }
    Ok(result.expect("it was done"))
}

/// Calls the `&mut dyn FnMut()` at an address.
fn call(at: usize) {
    // SAFETY: `once` waits until this has returned.
    unsafe { (*(at as *mut &mut dyn FnMut()))() }
}

fn start_as(
    name: &'static CStr,
    main: fn(usize),
    arg: usize,
    own_files: bool,
) -> Result<(), Errno> {
    let (spare, mut zone) = (take_spare(), None);
    let start = match spare {
        Some(start) => start,
        None => zone.insert(Zone::reserve(THREAD_BYTES, PAGE_SIZE)?).start(),
    };
    let record_at = place(start, name, main, arg, own_files)?;
    let index = COUNT.fetch_add(1, SeqCst);
    let result = if index < THREADS_MAX {
        RECORDS[index].store(record_at, SeqCst);
        // SAFETY: the record was just written, and its thread does not run.
        unsafe { run(record_at) }
    } else {
        Err(Errno::AGAIN)
    };
    match result {
        Ok(()) => forget(zone),
        Err(_) => {
            if index < THREADS_MAX {
                RECORDS[index].store(0, SeqCst);
            }
            COUNT.fetch_sub(1, SeqCst);
            spare.inspect(|&start| give_back_spare(start));
        }
    }
    result
}

/// Makes the record of a thread whose zone begins at `start`, and returns its address.
///
/// # Errors
/// The errors of mprotect.
fn place(
    start: usize,
    name: &'static CStr,
    main: fn(usize),
    arg: usize,
    own_files: bool,
) -> Result<usize, Errno> {
    let record_at = start + THREAD_BYTES - PAGE_SIZE;
    let thread_pointer = record_at - PAGE_SIZE;
    let stack_top = stack_below(record_at).end;
    // SAFETY: this is the lowest page of a zone that is not used yet: the end of the stack.
    unsafe { mprotect(start as *mut _, PAGE_SIZE, MprotectFlags::empty())? };
    let (runs, number) = (AtomicU32::new(0), AtomicU32::new(0));
    let record =
        ThreadRecord { name, main, arg, own_files, stack_top, thread_pointer, runs, number };
    // SAFETY: the zone's last page, which is not used yet, is large enough. The page before it is
    // the thread block. Its first word points to itself (x86-64's ABI), and its third does so in
    // glibc's.
    unsafe {
        (record_at as *mut ThreadRecord).write(record);
        (thread_pointer as *mut usize).write(thread_pointer);
        (thread_pointer as *mut usize).add(2).write(thread_pointer);
    }
    Ok(record_at)
}

/// Returns the stack of the thread that has its record at `record`: see [`THREAD_BYTES`].
fn stack_below(record: usize) -> Range<usize> {
    let start = record + PAGE_SIZE - THREAD_BYTES + PAGE_SIZE;
    start..start + STACK_BYTES
}

/// Returns the stack that holds an address, if it is a bare thread's.
fn stack_of(at: usize) -> Option<Range<usize>> {
    records().map(stack_below).find(|stack| stack.contains(&at))
}

/// Returns whether the calling thread is a bare one, and runs on its own stack.
pub fn is_current() -> bool {
    let byte = 0u8;
    stack_of(&raw const byte as usize).is_some()
}

/// Frees the memory below the used part of the calling thread's stack. The caller is a bare thread.
pub fn trim_stack() {
    let byte = 0u8;
    // Some pages remain for later calls, and for this call.
    let end = ((&raw const byte as usize) & !(PAGE_SIZE - 1)).saturating_sub(2 * PAGE_SIZE);
    if let Some(Range { start, .. }) = stack_of(end) {
        // SAFETY: the range is below the stack pointer of this thread, where only 128 bytes are in
        // use, which are kept.
        let _ = unsafe {
            rustix::mm::madvise(start as *mut _, end - start, rustix::mm::Advice::LinuxDontNeed)
        };
    }
}

/// Starts the first bare thread again, from the beginning of its `main`, in a process that has no
/// bare thread: a child of fork, or a task that shares the memory with a process that has ended.
///
/// # Errors
/// EAGAIN: no more threads.
///
/// # Safety
/// - No bare thread that was started before runs in this memory.
pub unsafe fn restart_first() -> Result<(), Errno> {
    begin_life();
    COUNT.store(records().count(), SeqCst);
    // SAFETY: by the caller's promise the record's thread doesn't run.
    unsafe { run_again(RECORDS[0].load(SeqCst)) }
}

/// Starts the first bare thread again, from the beginning of its `main`, in the process in which
/// all have ended.
///
/// # Errors
/// EAGAIN: no more threads.
///
/// # Safety
/// - [`await_end`] has returned.
pub unsafe fn start_first_again() -> Result<(), Errno> {
    COUNT.store(records().count(), SeqCst);
    // SAFETY: its thread has ended, by the caller's promise.
    unsafe { run_again(RECORDS[0].load(SeqCst)) }.inspect_err(|_| COUNT.store(0, SeqCst))
}

/// Starts all other bare threads again, each from the beginning of its `main`. Called in a child of
/// fork, or where all had ended.
///
/// # Errors
/// EAGAIN: no more threads.
///
/// # Safety
/// - The caller is the first bare thread, and the others have ended, or were not copied by a fork.
pub unsafe fn restart_others() -> Result<(), Errno> {
    // SAFETY: their threads were not copied, or have ended.
    records().skip(1).try_for_each(|record| unsafe { run_again(record) })
}

/// The rights that starting threads take first, if it isn't null, and the number that have taken
/// them.
static RIGHTS: AtomicPtr<ThreadRights> = AtomicPtr::new(core::ptr::null_mut());
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Starts the others like [`restart_others`]. All of them and the caller have no more than `rights`
/// when this returns. They are started with the caller's rights, because with fewer the kernel
/// might refuse.
///
/// # Errors
/// EAGAIN: no more threads.
///
/// # Panics
/// If the kernel refuses to take a right.
///
/// # Safety
/// - The caller is the first bare thread, and [`await_others_end`] has returned.
pub unsafe fn restart_others_with(rights: &ThreadRights) -> Result<(), Errno> {
    TAKEN.store(0, SeqCst);
    RIGHTS.store((&raw const *rights).cast_mut(), SeqCst);
    // SAFETY: by the caller's promise the others have ended.
    unsafe { restart_others() }?;
    while TAKEN.load(SeqCst) < records().skip(1).count() {
        yield_now();
    }
    RIGHTS.store(core::ptr::null_mut(), SeqCst);
    take(rights);
    Ok(())
}

fn take(rights: &ThreadRights) {
    rights.take().expect("the kernel takes a right that the program has given up");
}

/// Starts a thread like [`run`]. While the machine or the user has as many threads as it may have,
/// it waits for others to end, because the child can't continue without.
///
/// # Safety
/// - `record` is the address of a record whose thread does not run.
unsafe fn run_again(record: usize) -> Result<(), Errno> {
    for _ in 1..TRIES {
        // SAFETY: by the caller's promise the record's thread does not run, also after a failure.
        match unsafe { run(record) } {
            Err(Errno::AGAIN) => sleep_ns(PAUSE_NS),
            result => return result,
        }
    }
    // SAFETY: the last call has failed, so the record's thread does not run.
    unsafe { run(record) }
}

/// # Safety
/// - `record` is the address of a record whose thread does not run.
unsafe fn run(record: usize) -> Result<(), Errno> {
    // SAFETY: by the caller's promise it is the address of a record.
    let about = unsafe { &*(record as *const ThreadRecord) };
    // Without CLONE_SYSVSEM, which would give the process a list of semaphores to undo (SEM_UNDO).
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SETTLS
        | libc::CLONE_PARENT_SETTID
        | if about.own_files { 0 } else { libc::CLONE_FILES }
        | if about.cleared_at_end().is_some() { libc::CLONE_CHILD_CLEARTID } else { 0 };
    // SAFETY: the stack and the thread block lie in the thread's own zone, which is not in use now.
    // All signals are blocked around the call, so the new thread begins with all of them blocked.
    unsafe {
        let before = raw::set_signals_blocked(u64::MAX);
        let result = clone_onto(flags as usize, about.stack_top, about.thread_pointer, record);
        raw::set_signals_blocked(before);
        result.map(drop)
    }
}

/// # Safety
/// - `stack_top` and `tls` are those of the record at `record`, which is not in use.
unsafe fn clone_onto(
    flags: usize,
    stack_top: usize,
    tls: usize,
    record: usize,
) -> Result<i64, Errno> {
    let ret: i64;
    // SAFETY: by the caller's promise it is a record.
    let record_ref = unsafe { &*(record as *const ThreadRecord) };
    let number = record_ref.number.as_ptr();
    let cleared_word = record_ref.cleared_at_end().map_or(core::ptr::null_mut(), AtomicU32::as_ptr);
    // SAFETY: the new thread touches only its own stack and never returns from `entry`; in the
    // caller the system call clobbers rcx and r11.
    unsafe {
        let top = (stack_top as *mut usize).sub(2);
        top.write(record);
        core::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "pop rdi",
            "pop rax",
            "call {entry}",
            "ud2",
            "2:",
            entry = sym entry,
            inlateout("rax") libc::SYS_clone => ret,
            in("rdi") flags, in("rsi") top, in("rdx") number, in("r10") cleared_word, in("r8") tls,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    raw::errno_of(ret)
}

// `extern "C"`: a panic can't leave this function; it ends the process with a message.
extern "C" fn entry(record: usize) -> ! {
    // SAFETY: `run` was given a record, which lives as long as the process.
    let about = unsafe { &*(record as *const ThreadRecord) };
    if about.own_files {
        close_everything();
    }
    let _ = rustix::thread::set_name(about.name);
    if !about.is_brief() {
        // SAFETY: the pointer is null, or that of `restart_others_with`, which waits for this
        // thread.
        if let Some(rights) = unsafe { RIGHTS.load(SeqCst).as_ref() } {
            take(rights);
            TAKEN.fetch_add(1, SeqCst);
        }
    }
    (about.main)(about.arg);
    if !about.is_brief() {
        COUNT.fetch_sub(1, SeqCst);
        // It ends because it was requested to, and the process goes on.
        // SAFETY: 0 is no address: the kernel clears nothing at the thread's end.
        let _ = unsafe { system_call(libc::SYS_set_tid_address, [0; 6]) };
    }
    loop {
        // SAFETY: the call ends only the calling thread; its stack stays.
        let _ = unsafe { system_call(libc::SYS_exit, [0; 6]) };
    }
}

/// Closes all descriptors of the calling thread's own table, except for those to keep, and opens
/// /dev/null as 0, 1 and 2.
fn close_everything() {
    use rustix::fs::{Mode, OFlags, open};
    let close = |from: u32, to: u32| {
        let range = [from as usize, to as usize, 0, 0, 0, 0];
        // SAFETY: the table is a copy that no other thread uses, and this thread has opened no file
        // yet.
        let _ = (from <= to).then(|| unsafe { system_call(libc::SYS_close_range, range) });
    };
    let mut from = 0;
    for number in KEPT.iter().map(|cell| cell.load(SeqCst)).filter(|number| *number != 0) {
        close(from, number - 1);
        from = number + 1;
    }
    close(from, u32::MAX);
    for _ in 0..3 {
        if let Ok(null) = open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            forget(null);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    static DONE: AtomicU32 = AtomicU32::new(0);

    fn first(arg: usize) {
        assert_eq!(arg, 17);
        assert!(is_current());
        // The descriptors of the test are not in this table, nor those made here in the test's.
        assert!(rustix::io::fcntl_getfd(unsafe_fd(3)).is_err());
        start(c"bare-second", second, 18).unwrap();
    }

    fn second(arg: usize) {
        assert_eq!(arg, 18);
        raw::warn(&["a bare thread can say this\n"]);
        DONE.store(1, SeqCst);
    }

    fn unsafe_fd(number: i32) -> rustix::fd::BorrowedFd<'static> {
        // SAFETY: the descriptor is only queried.
        unsafe { rustix::fd::BorrowedFd::borrow_raw(number) }
    }

    #[test]
    fn brief_thread_has_its_own_table_and_returns_its_result() {
        let before = std::fs::File::open("/proc/self/maps").unwrap();
        for n in 0..100 {
            let work = || {
                use std::os::fd::AsRawFd;
                let has_it = rustix::io::fcntl_getfd(unsafe_fd(before.as_raw_fd())).is_ok();
                forget(rustix::fs::open(c"/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()));
                (n + 1, has_it)
            };
            assert_eq!(once(c"bare-brief", work).unwrap(), (n + 1, false));
        }
        let directory = std::fs::read_dir("/proc/self/fd").unwrap();
        let leads_to = |of: std::fs::DirEntry| std::fs::read_link(of.path()).ok();
        let root = std::path::Path::new("/");
        assert!(!directory.filter_map(|of| leads_to(of.ok()?)).any(|path| path == root));
    }

    #[test]
    fn bare_threads_start_one_another_and_end() {
        assert!(!is_current());
        start_first(c"bare-first", first, 17).unwrap();
        assert!(!is_current());
        let begin = std::time::Instant::now();
        while DONE.load(SeqCst) == 0 || count() > 0 {
            assert!(begin.elapsed().as_secs() < 20, "a bare thread did not end");
            std::thread::yield_now();
        }
    }
}
