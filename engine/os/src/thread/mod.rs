//! Engine threads: signals blocked, pinned on demand, never unwinding.
pub mod identity;
pub mod bare;
pub mod alarm;
pub mod delegate_queue;
pub mod owner;

use crate::Errno;
#[cfg(feature = "shuttle")]
pub use crate::clock::pass_ns;
pub use crate::clock::{cpu_ns, now_ns, process_cpu_ns, use_no_counter};
use crate::raw::system_call;
use crate::text::TextBuffer;
use core::ffi::CStr;

/// A running engine thread. If it is dropped, the thread continues.
pub struct Thread {
    id: libc::pthread_t,
}

struct ThreadStart {
    main: fn(usize),
    arg: usize,
}

impl Thread {
    /// Starts `main(arg)` on a thread of its own, named `name` (15 bytes), with every signal
    /// blocked. A panic in `main` ends the process.
    ///
    /// glibc allocates the thread's stack and TLS: start threads before any memory of the program
    /// is managed.
    ///
    /// # Errors
    /// EAGAIN: no more threads.
    pub fn start(name: &CStr, main: fn(usize), arg: usize) -> Result<Thread, Errno> {
        let start = alloc::boxed::Box::into_raw(alloc::boxed::Box::new(ThreadStart { main, arg }));
        let mut id: libc::pthread_t = 0;
        // SAFETY: the signal sets are local. The new thread takes over `start`, which no other
        // thread touches; if creation fails, this thread takes it back. All signals are blocked
        // around creation so that the new thread inherits the full mask (glibc keeps its own two
        // internal signals open).
        unsafe {
            let mut all: libc::sigset_t = core::mem::zeroed();
            let mut before: libc::sigset_t = core::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            let err = libc::pthread_create(&mut id, core::ptr::null(), entry, start.cast());
            libc::pthread_sigmask(libc::SIG_SETMASK, &before, core::ptr::null_mut());
            if err != 0 {
                drop(alloc::boxed::Box::from_raw(start));
                return Err(Errno::from_raw_os_error(err));
            }
            libc::pthread_setname_np(id, name.as_ptr());
        }
        Ok(Thread { id })
    }

    /// Waits until the thread has ended.
    pub fn join(self) {
        // SAFETY: the thread was made joinable by `start` and is joined at most once, as `join`
        // takes `self`.
        unsafe { libc::pthread_join(self.id, core::ptr::null_mut()) };
    }
}

// `extern "C"`: a panic can't leave this function; it ends the process with a message.
extern "C" fn entry(start: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: `start` is the box that `Thread::start` gave to this thread alone.
    let ThreadStart { main, arg } =
        *unsafe { alloc::boxed::Box::from_raw(start.cast::<ThreadStart>()) };
    main(arg);
    core::ptr::null_mut()
}

/// Pins the calling thread to a CPU. If the system doesn't permit that CPU, the thread stays where
/// it is.
pub fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Gives the calling thread a lower priority for CPUs: nice 10, a tenth of the weight of 0
/// (`sched(7)`).
pub fn stand_back() {
    const NICE: i32 = 10;
    // Refused only if the thread has a larger value, which is a lower priority already.
    let _ = rustix::process::setpriority_process(None, NICE);
}

/// Returns the calling thread's number.
pub fn thread_id() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get() as u32
}

/// Returns the calling process's number.
pub fn process_id() -> u32 {
    rustix::process::getpid().as_raw_nonzero().get() as u32
}

fn open_stat(thread: u32) -> Option<rustix::fd::OwnedFd> {
    let path: TextBuffer<48> = TextBuffer::of(format_args!("/proc/self/task/{thread}/stat"));
    open_to_read(path.as_c_str().ok()?)
}

fn open_to_read(path: &CStr) -> Option<rustix::fd::OwnedFd> {
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path, flags, rustix::fs::Mode::empty()).ok()
}

/// Calls `each` with the number of each thread of the process.
///
/// # Errors
/// `/proc/self/task` can't be opened.
pub fn each_thread(mut each: impl FnMut(u32)) -> Result<(), Errno> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let at = libc::AT_FDCWD as usize;
    let path = c"/proc/self/task".as_ptr() as usize;
    // SAFETY: the path is a constant that ends with a null byte.
    let directory = unsafe { system_call(libc::SYS_openat, [at, path, flags as usize, 0, 0, 0]) }?;
    let mut buffer = [0u64; 256];
    let bytes = size_of_val(&buffer);
    loop {
        let args = [directory as usize, buffer.as_mut_ptr() as usize, bytes, 0, 0, 0];
        // SAFETY: the kernel writes at most `bytes` bytes, the size of `buffer`.
        let Ok(count @ 1..) = (unsafe { system_call(libc::SYS_getdents64, args) }) else { break };
        // SAFETY: `buffer` has at least `count` bytes, which the kernel has written. `u8` needs no
        // alignment, and nothing writes to `buffer` while `entries` is used.
        let entries =
            unsafe { core::slice::from_raw_parts(buffer.as_ptr().cast::<u8>(), count as usize) };
        let mut at = 0;
        // `struct linux_dirent64`: inode, offset, the entry's length, its kind, its name.
        while at + 19 < entries.len() {
            let len = usize::from(u16::from_ne_bytes([entries[at + 16], entries[at + 17]]));
            let name = entries[at + 19..at + len].split(|byte| *byte == 0).next();
            let name = name.and_then(|name| core::str::from_utf8(name).ok());
            if let Some(thread) = name.and_then(|name| name.parse().ok()) {
                each(thread);
            }
            at += len;
        }
    }
    // SAFETY: the descriptor was opened above and isn't used after this.
    let _ = unsafe { system_call(libc::SYS_close, [directory as usize, 0, 0, 0, 0, 0]) };
    Ok(())
}

/// Returns the nanoseconds for which a thread of this process has waited for a CPU although it could
/// run; 0 if the kernel doesn't tell.
fn waited_ns(thread: u32) -> u64 {
    let path: TextBuffer<48> = TextBuffer::of(format_args!("/proc/self/task/{thread}/schedstat"));
    let mut text = [0u8; 64];
    let mut read_stat = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
        let file =
            rustix::fs::open(path.as_c_str().ok()?, flags, rustix::fs::Mode::empty()).ok()?;
        let len = rustix::io::read(&file, &mut text).ok()?;
        core::str::from_utf8(&text[..len]).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    read_stat().unwrap_or(0)
}

/// Returns whether a thread of this process runs, or waits for a CPU. Returns `false` also if that is
/// unknown.
fn is_runnable(thread: u32) -> bool {
    let mut stat = [0u8; 512];
    read_stat(thread, &mut stat).is_some_and(|len| stat_field(&stat[..len], 3) == Some("R"))
}

/// Returns whether a thread of this process sleeps so that a signal could wake it. It does so while
/// it waits for a lock, or for its own fault to be served. It doesn't in the middle of a system
/// call such as `fork`. Returns `false` also if that is unknown.
pub fn is_asleep(thread: u32) -> bool {
    let mut stat = [0u8; 512];
    read_stat(thread, &mut stat).is_some_and(|len| stat_field(&stat[..len], 3) == Some("S"))
}

/// Reads proc_pid_stat(5) of a thread of this process; returns the number of bytes.
pub fn read_stat(thread: u32, stat: &mut [u8]) -> Option<usize> {
    rustix::io::pread(&open_stat(thread)?, stat, 0).ok()
}

/// Returns the number of threads of this process, by the kernel's count. Returns `None` without /proc.
pub fn thread_count() -> Option<usize> {
    const NUM_THREADS: usize = 20;
    let mut stat = [0u8; 512];
    let file = open_to_read(c"/proc/self/stat")?;
    let len = rustix::io::pread(&file, &mut stat, 0).ok()?;
    stat_field(&stat[..len], NUM_THREADS)?.parse().ok()
}

/// Returns field `number` of proc_pid_stat(5), from 3 on; `None` if there is no such field. The
/// name, field 2, may contain any bytes, also blanks and brackets.
pub fn stat_field(stat: &[u8], number: usize) -> Option<&str> {
    let end = stat.windows(2).rposition(|pair| pair == b") ")?;
    core::str::from_utf8(&stat[end + 2..]).ok()?.split(' ').nth(number - 3)
}

/// Returns the number of CPUs that the calling thread may run on (at least 1).
pub fn cpus() -> usize {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count() as usize).max(1)
}

/// Calls `each` with every CPU that the calling thread may run on.
pub fn each_cpu(mut each: impl FnMut(usize)) {
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).for_each(&mut each);
    }
}

/// Returns the CPU that runs the caller now: in a model, one of four, by the number of the task.
#[cfg(feature = "shuttle")]
pub fn current_cpu() -> usize {
    shuttle::current::try_get_current_task().map_or(0, |task| usize::from(task) % 4)
}

/// Returns the CPU that runs the caller now. It is a hint, because it may change at once.
#[cfg(not(feature = "shuttle"))]
pub fn current_cpu() -> usize {
    rustix::thread::sched_getcpu()
}

/// Sleeps for `ns` nanoseconds, or less if a signal arrives.
#[cfg(feature = "shuttle")]
pub fn sleep_ns(ns: u64) {
    pass_ns(ns);
    yield_now();
}

/// Sleeps for `ns` nanoseconds, or less if a signal arrives.
#[cfg(not(feature = "shuttle"))]
pub fn sleep_ns(ns: u64) {
    let time = rustix::time::Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    };
    let _ = rustix::thread::nanosleep(&time);
}

/// Lets other threads of this CPU run.
pub fn yield_now() {
    #[cfg(feature = "shuttle")]
    shuttle::thread::yield_now();
    #[cfg(not(feature = "shuttle"))]
    rustix::thread::sched_yield();
}

/// Returns what the kernel tells of the processor: `AT_HWCAP` and `AT_HWCAP2` of the auxiliary
/// vector.
pub fn capabilities() -> (usize, usize) {
    rustix::param::linux_hwcap()
}

/// Returns the memory of the machine, bytes.
pub fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * info.mem_unit as u64
}

/// Decodes the processor's error code of a page fault: whether it was a write, and whether the page
/// was mapped but write-protected. Bit 0: the page was mapped. Bit 1: it was a write
/// (`arch/x86/include/asm/trap_pf.h`).
pub const fn access_of(error: u64) -> (bool, bool) {
    let write = error & 2 != 0;
    (write, write && error & 1 != 0)
}

/// The kernel's information about a SIGBUS.
pub struct SigbusInfo {
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
}

impl SigbusInfo {
    /// Returns the address that was touched.
    pub fn addr(&self) -> usize {
        // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler, and SIGBUS fills in
        // the address.
        unsafe { (*self.info).si_addr() as usize }
    }

    /// Returns whether it was a write, and whether the page was mapped but write-protected. If the
    /// kind of access is unknown, it counts as a write.
    pub fn access(&self) -> (bool, bool) {
        // SAFETY: the kernel passes a valid context to an SA_SIGINFO handler, with the processor's
        // error code of a page fault.
        let error = unsafe {
            let context = self.context.cast::<libc::ucontext_t>();
            (*context).uc_mcontext.gregs[libc::REG_ERR as usize]
        };
        access_of(error as u64)
    }
}

/// The SIGBUS action that was in force before.
pub struct PreviousAction(libc::sigaction);

// SAFETY: a sigaction is plain data.
unsafe impl Send for PreviousAction {}

static ON_SIGBUS: core::sync::atomic::AtomicUsize = core::sync::atomic::AtomicUsize::new(0);

/// Installs `handler` for every SIGBUS of the process; all signals are blocked while it runs.
/// `note` gets the action that was in force, before that is replaced. It isn't called if this
/// handler is in force already.
pub fn set_sigbus(handler: fn(&SigbusInfo), note: impl FnOnce(PreviousAction)) {
    ON_SIGBUS.store(handler as usize, core::sync::atomic::Ordering::SeqCst);
    // SAFETY: both structs are local, and zeros are a valid one; the new action names a handler of
    // the SA_SIGINFO form.
    unsafe {
        let mut new: libc::sigaction = core::mem::zeroed();
        let mut old: libc::sigaction = core::mem::zeroed();
        libc::sigaction(libc::SIGBUS, core::ptr::null(), &mut old);
        new.sa_sigaction =
            trampoline as extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        // On the thread's own stack: alternate stacks (Rust's is 8 KiB) are too small for a codec.
        new.sa_flags = libc::SA_SIGINFO;
        libc::sigfillset(&mut new.sa_mask);
        if old.sa_sigaction != new.sa_sigaction {
            note(PreviousAction(old));
            libc::sigaction(libc::SIGBUS, &new, core::ptr::null_mut());
        }
    }
}

extern "C" fn trampoline(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = ON_SIGBUS.load(core::sync::atomic::Ordering::SeqCst);
    // SAFETY: `set_sigbus` stored a function of this type before it installed the trampoline.
    let handler: fn(&SigbusInfo) = unsafe { core::mem::transmute(handler) };
    handler(&SigbusInfo { signal, info, context });
}

impl PreviousAction {
    /// Takes the former action. If that is the default one, the handler is removed and the fault
    /// happens again, which ends the process.
    pub fn call(&self, info: &SigbusInfo) {
        let old = &self.0;
        if old.sa_sigaction == libc::SIG_DFL || old.sa_sigaction == libc::SIG_IGN {
            // SAFETY: the call restores an action that was installed before.
            unsafe { libc::sigaction(libc::SIGBUS, old, core::ptr::null_mut()) };
        } else if old.sa_flags & libc::SA_SIGINFO != 0 {
            // SAFETY: SA_SIGINFO says that the stored value is a function of this type.
            let f: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { core::mem::transmute(old.sa_sigaction) };
            f(info.signal, info.info, info.context);
        } else {
            // SAFETY: without SA_SIGINFO the stored value is a function of this type.
            let f: extern "C" fn(i32) = unsafe { core::mem::transmute(old.sa_sigaction) };
            f(info.signal);
        }
    }
}

/// Sleeps until a descriptor is readable, or `limit_ns` is over. Returns whether it is readable.
pub fn wait_readable(fd: &rustix::fd::OwnedFd, limit_ns: Option<u64>) -> bool {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let limit = limit_ns.map(|ns| rustix::time::Timespec {
        tv_sec: (ns / 1_000_000_000) as i64,
        tv_nsec: (ns % 1_000_000_000) as i64,
    });
    rustix::event::poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_their_waits_are_found() {
        let mut all = alloc::vec::Vec::new();
        each_thread(|thread| all.push(thread)).unwrap();
        assert!(all.contains(&thread_id()) && all.contains(&process_id()), "{all:?}");
        assert_eq!(waited_ns(i32::MAX as u32), 0);
        let (begin, own) = (now_ns(), thread_id());
        // Two threads for each CPU wait for one another.
        let work = || while now_ns() - begin < 300_000_000 {};
        std::thread::scope(|scope| {
            (1..2 * cpus()).for_each(|_| _ = scope.spawn(work));
            work();
        });
        assert!(waited_ns(own) > 0 && bare::others_waited_ns() >= waited_ns(own));
        assert!(is_runnable(own) && bare::others_can_run());
    }

    #[test]
    fn a_name_with_brackets_and_blanks_is_not_mistaken_for_fields() {
        let stat = format!("7 (a) b ) R {} 5 {}", "1 ".repeat(35).trim_end(), "2 2 2");
        assert_eq!(stat_field(stat.as_bytes(), 39), Some("5"));
        assert_eq!(stat_field(b"7 (\xff) a) S 1", 3), Some("S"));
    }
}
