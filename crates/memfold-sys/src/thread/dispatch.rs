//! Syscall User Dispatch (Linux 5.11, x86-64;
//! `Documentation/admin-guide/syscall-user-dispatch.rst`): the place inside a call of libc where it
//! copies the process, which no handler of libc's is called at.
//!
//! Between [`begin`] and that copy each system call of one thread comes as SIGSYS to a handler
//! here, which makes the call.
use crate::Errno;
use crate::raw::{copies, set_signals_blocked, system_call};
use crate::thread::thread_id;
use core::ffi::c_int;
use core::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst};
use libc::{c_void, siginfo_t, ucontext_t};

/// What the kernel reads at each system call: it is made, or becomes a signal
/// (`include/uapi/linux/prctl.h`).
static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;
const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
const OFF: usize = 0;
const ON: usize = 1;
/// `si_code` of such a signal (`include/uapi/asm-generic/siginfo.h`).
const SYS_USER_DISPATCH: c_int = 2;

/// The thread's `pthread_self`, which takes no system call; 0 if there is none.
static THREAD: AtomicUsize = AtomicUsize::new(0);
/// `fn(bool)`: what is called after the copy.
static AFTER: AtomicUsize = AtomicUsize::new(0);
/// The signals that the thread has blocked, as far as libc and the program can see. In truth it has
/// all but SIGSYS.
static BLOCKED: AtomicU64 = AtomicU64::new(0);
/// The program's own action for SIGSYS.
static THEIRS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// The kernel's `struct sigaction`.
#[repr(C)]
struct Action {
    handler: usize,
    flags: usize,
    restorer: usize,
    mask: u64,
}

const SA_RESTORER: usize = 0x0400_0000;

/// Whether [`begin`] can work here.
pub fn probe() -> bool {
    // SAFETY: what is off is switched off.
    unsafe { system_call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, OFF, 0, 0, 0, 0]) }.is_ok()
}

/// Has a handler of SIGSYS make the calling thread's system calls up to the first that copies the
/// process. After that one, and when it is all over, `after` is called in the parent (also if the
/// copy failed) with false, in the child with true. All signals stay blocked until then, after
/// which those in `blocked` are.
///
/// # Errors
/// The kernel has no such thing, or the process may not use it: then nothing has changed.
///
/// # Safety
/// - The caller has blocked all signals, and calls [`end`] if no copy was made.
/// - There is one such thread at a time, also for the other's `after`.
pub unsafe fn begin(blocked: u64, after: fn(bool)) -> Result<(), Errno> {
    THREAD.store(own_thread(), SeqCst);
    AFTER.store(after as usize, SeqCst);
    BLOCKED.store(blocked, SeqCst);
    SELECTOR.store(ALLOW, SeqCst);
    let ours = Action {
        handler: on_signal as *const () as usize,
        flags: libc::SA_SIGINFO as usize | SA_RESTORER,
        restorer: restore as *const () as usize,
        mask: u64::MAX,
    };
    let mut theirs = Action { handler: 0, flags: 0, restorer: 0, mask: 0 };
    set_action(&ours, &mut theirs)?;
    let words = [theirs.handler as u64, theirs.flags as u64, theirs.restorer as u64, theirs.mask];
    THEIRS.iter().zip(words).for_each(|(to, word)| to.store(word, SeqCst));
    // The return from the handler is made with the selector at BLOCK: it alone is exempt by its
    // address.
    let args = [
        PR_SET_SYSCALL_USER_DISPATCH,
        ON,
        ours.restorer,
        RESTORE_BYTES,
        SELECTOR.as_ptr() as usize,
        0,
    ];
    // SAFETY: the selector is static.
    if let Err(e) = unsafe { system_call(libc::SYS_prctl, args) } {
        end();
        return Err(e);
    }
    set_signals_blocked(!(1 << (libc::SIGSYS - 1)));
    SELECTOR.store(BLOCK, SeqCst);
    Ok(())
}

/// Ends it without a copy. Without a [`begin`] it does nothing. SIGSYS stays open for the caller to
/// block.
pub fn end() {
    if THREAD.swap(0, SeqCst) == 0 {
        return;
    }
    SELECTOR.store(ALLOW, SeqCst);
    // SAFETY: back to how system calls usually go. In a child of fork it is so already.
    let _ =
        unsafe { system_call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, OFF, 0, 0, 0, 0]) };
    let _ = set_action(&theirs(), core::ptr::null_mut());
}

fn theirs() -> Action {
    let [handler, flags, restorer, mask] = [0, 1, 2, 3].map(|at: usize| THEIRS[at].load(SeqCst));
    Action { handler: handler as usize, flags: flags as usize, restorer: restorer as usize, mask }
}

fn set_action(new: *const Action, old: *mut Action) -> Result<(), Errno> {
    // SAFETY: both are the kernel's structs, or nothing; the handlers are [`on_signal`] and what
    // the program has set itself.
    unsafe {
        system_call(
            libc::SYS_rt_sigaction,
            [libc::SIGSYS as usize, new as usize, old as usize, 8, 0, 0],
        )
    }
    .map(drop)
}

fn own_thread() -> usize {
    // SAFETY: has no conditions.
    unsafe { libc::pthread_self() as usize }
}

const RESTORE_BYTES: usize = 16;

/// The return from the handler, in at most [`RESTORE_BYTES`].
#[unsafe(naked)]
unsafe extern "C" fn restore() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!("mov eax, {number}", "syscall", "ud2", number = const libc::SYS_rt_sigreturn);
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!("mov x8, {number}", "svc 0", "udf 0", number = const libc::SYS_rt_sigreturn);
}

/// The number and the arguments of the system call that the thread was about to make.
fn call_of(context: &ucontext_t) -> (i64, [usize; 6]) {
    #[cfg(target_arch = "x86_64")]
    let word = |register: c_int| context.uc_mcontext.gregs[register as usize];
    #[cfg(target_arch = "x86_64")]
    use libc::{REG_R8, REG_R9, REG_R10, REG_RAX as NUMBER, REG_RDI, REG_RDX, REG_RSI};
    #[cfg(target_arch = "x86_64")]
    const ARGS: [c_int; 6] = [REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9];
    #[cfg(target_arch = "aarch64")]
    let word = |register: usize| context.uc_mcontext.regs[register] as i64;
    #[cfg(target_arch = "aarch64")]
    const NUMBER: usize = 8;
    #[cfg(target_arch = "aarch64")]
    const ARGS: [usize; 6] = [0, 1, 2, 3, 4, 5];
    (word(NUMBER), ARGS.map(|register| word(register) as usize))
}

/// Lets the thread find its result.
fn give_result(context: &mut ucontext_t, result: i64) {
    #[cfg(target_arch = "x86_64")]
    (context.uc_mcontext.gregs[libc::REG_RAX as usize] = result);
    #[cfg(target_arch = "aarch64")]
    (context.uc_mcontext.regs[0] = result.cast_unsigned());
}

/// Makes the system call that the thread was about to make.
unsafe extern "C" fn on_signal(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's, for a handler with SA_SIGINFO.
    let (code, frame) = unsafe { ((*info).si_code, &mut *context.cast::<ucontext_t>()) };
    if code != SYS_USER_DISPATCH || own_thread() != THREAD.load(SeqCst) {
        // SAFETY: the arguments are passed on.
        return unsafe { give_to_program(signal, info, context) };
    }
    SELECTOR.store(ALLOW, SeqCst);
    let (number, args) = call_of(frame);
    // SAFETY: the call that libc was about to make, for the same thread. A copy of the process goes
    // on here on its copy of this stack, and gets back to libc by its copy of the signal's frame.
    let result = unsafe {
        match number {
            libc::SYS_rt_sigprocmask => set_mask(args),
            _ => system_call(number, args),
        }
    };
    let result = result.unwrap_or_else(|e| -i64::from(e.raw_os_error()));
    give_result(frame, result);
    // SAFETY: `clone3` reads its arguments at that address, and has just done so.
    if !unsafe { copies(number, args) } {
        SELECTOR.store(BLOCK, SeqCst);
        return;
    }
    let blocked = BLOCKED.load(SeqCst);
    // SAFETY: `begin` stored a function of this type.
    let after = unsafe { core::mem::transmute::<usize, fn(bool)>(AFTER.load(SeqCst)) };
    end();
    after(result == 0);
    // SAFETY: the kernel's set of signals is the first word of libc's.
    unsafe { (&raw mut frame.uc_sigmask).cast::<u64>().write(blocked) };
}

/// `rt_sigprocmask`, of the signals that the thread is to have blocked in the end.
///
/// # Safety
/// - As `rt_sigprocmask`'s arguments, readable and writable.
unsafe fn set_mask([how, new, old, bytes, ..]: [usize; 6]) -> Result<i64, Errno> {
    if bytes != size_of::<u64>() {
        return Err(Errno::INVAL);
    }
    let before = BLOCKED.load(SeqCst);
    if new != 0 {
        // SAFETY: the caller's promise.
        let set = unsafe { (new as *const u64).read_unaligned() };
        BLOCKED.store(
            match how as c_int {
                libc::SIG_BLOCK => before | set,
                libc::SIG_UNBLOCK => before & !set,
                libc::SIG_SETMASK => set,
                _ => return Err(Errno::INVAL),
            },
            SeqCst,
        );
    }
    if old != 0 {
        // SAFETY: the caller's promise.
        unsafe { (old as *mut u64).write_unaligned(before) };
    }
    Ok(0)
}

/// A SIGSYS that is none of ours: as the program has it.
///
/// # Safety
/// - The arguments are those of a handler.
unsafe fn give_to_program(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let action = theirs();
    match action.handler {
        libc::SIG_IGN => {}
        libc::SIG_DFL => {
            // It ends the process as soon as this handler has returned.
            let _ = set_action(&action, core::ptr::null_mut());
            let process = rustix::process::getpid().as_raw_nonzero().get() as usize;
            // SAFETY: a signal to the calling thread.
            let _ = unsafe {
                system_call(
                    libc::SYS_tgkill,
                    [process, thread_id() as usize, signal as usize, 0, 0, 0],
                )
            };
        }
        handler => {
            type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
            // SAFETY: the program has set it for this signal. One that takes the number alone
            // ignores the rest.
            unsafe { core::mem::transmute::<usize, Handler>(handler)(signal, info, context) }
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU32;

    static ENDED: AtomicU32 = AtomicU32::new(0);

    fn after(in_child: bool) {
        ENDED.fetch_add(if in_child { 100 } else { 1 }, SeqCst);
    }

    const USR1: u64 = 1 << (libc::SIGUSR1 - 1);

    #[test]
    fn the_copy_inside_libcs_fork_is_caught_in_both_and_nothing_else_is_changed() {
        if !probe() {
            eprintln!("skipped: this kernel has no Syscall User Dispatch");
            return;
        }
        let _alone = crate::FORKS.lock();
        let before = set_signals_blocked(u64::MAX);
        for turn in 1..=3 {
            set_signals_blocked(u64::MAX);
            // SAFETY: all signals are blocked, and no other thread of the tests does this.
            unsafe { begin(USR1, after).unwrap() };
            let parent = rustix::process::getpid();
            // SAFETY: the child makes system calls only.
            let pid = unsafe { libc::fork() };
            let mask = set_signals_blocked(u64::MAX);
            if pid == 0 {
                let right = ENDED.load(SeqCst) == 100 + turn - 1 && mask == USR1;
                let right =
                    right && rustix::process::getppid() == Some(parent) && THREAD.load(SeqCst) == 0;
                // SAFETY: ends the child.
                unsafe { libc::_exit(if right { 5 } else { 6 }) };
            }
            let mut status = 0;
            // SAFETY: waits for the child.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert_eq!((libc::WEXITSTATUS(status), ENDED.load(SeqCst), mask), (5, turn, USR1));
        }
        // SAFETY: as above; it ends without a copy.
        unsafe { begin(0, after).unwrap() };
        // libc and the program see the mask that they would see without this.
        let mask = set_signals_blocked(USR1);
        end();
        assert_eq!((mask, ENDED.load(SeqCst)), (0, 3));
        set_signals_blocked(before);
    }
}
