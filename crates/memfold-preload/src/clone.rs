//! Ways to copy the process that pass by `pthread_atfork`: `_Fork`, `clone` and `syscall`, which take the same steps here.
//! What makes the system call itself gets no managed memory in its child: see [`memfold_sys::zone::set_inherited`].
use crate::fork::Copying;
use core::ffi::{CStr, c_int, c_long, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

type Fork = unsafe extern "C" fn() -> libc::pid_t;
type Main = unsafe extern "C" fn(*mut c_void) -> c_int;
type Clone =
    unsafe extern "C" fn(Main, *mut c_void, c_int, *mut c_void, *mut c_void, *mut c_void, *mut c_void) -> c_int;
type Syscall = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;

/// The next definition of a symbol after this library's: libc's. Ends the process if there is none.
pub fn next(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if symbol.is_null() {
        crate::say::die(format_args!("the C library has no {}", name.to_str().unwrap_or("?")));
    }
    symbol
}

/// The program's `_Fork`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    // SAFETY: libc's `_Fork` is of this type.
    let real = unsafe { core::mem::transmute::<*mut c_void, Fork>(next(c"_Fork")) };
    let copying = Copying::begin();
    // SAFETY: the caller's promise.
    let pid = unsafe { real() };
    copying.end(pid == 0);
    pid
}

struct Start {
    main: Main,
    arg: *mut c_void,
    copying: Copying,
}

/// The program's `clone`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    main: Main,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: *mut c_void,
    tls: *mut c_void,
    child_tid: *mut c_void,
) -> c_int {
    // SAFETY: libc's `clone` is of this type, its last three parameters being optional ones of the same class.
    let real = unsafe { core::mem::transmute::<*mut c_void, Clone>(next(c"clone")) };
    if flags & libc::CLONE_VM != 0 {
        // SAFETY: the caller's promise.
        return unsafe { real(main, stack, flags, arg, parent_tid, tls, child_tid) };
    }
    let mut start = Start { main, arg, copying: Copying::begin() };
    // SAFETY: the caller's promise. The child has a copy of this frame, which ends only after `real` has returned here.
    let pid = unsafe { real(entry, stack, flags, (&raw mut start).cast(), parent_tid, tls, child_tid) };
    start.copying.end(false);
    pid
}

unsafe extern "C" fn entry(start: *mut c_void) -> c_int {
    // SAFETY: the child's copy of the frame of `clone`, which nothing else in this process uses.
    let Start { main, arg, copying } = unsafe { start.cast::<Start>().read() };
    copying.end(true);
    // SAFETY: as the caller of `clone` promised. libc would end the calling thread only, and the engine's would go on.
    unsafe { libc::_exit(main(arg)) }
}

/// libc's `syscall`, once it has been looked up.
static REAL_SYSCALL: AtomicUsize = AtomicUsize::new(0);

/// What `syscall` does for the calls that copy a process, and the first time.
unsafe extern "C" fn syscall_slowly(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let real = next(c"syscall");
    REAL_SYSCALL.store(real as usize, Relaxed);
    // SAFETY: libc's `syscall` is of this type as far as the machine's calling convention goes.
    let real = unsafe { core::mem::transmute::<*mut c_void, Syscall>(real) };
    // SAFETY: the arguments are the caller's.
    if !unsafe { copies(number, a, b) } {
        // SAFETY: likewise.
        return unsafe { real(number, a, b, c, d, e, f) };
    }
    let copying = Copying::begin();
    // SAFETY: likewise. The child goes on in its copy of this frame.
    let pid = unsafe { real(number, a, b, c, d, e, f) };
    copying.end(pid == 0);
    pid
}

/// Whether a system call makes a process with a copy of this one's memory, on a copy of the caller's stack.
///
/// # Safety
/// - For `clone3`, `a` is the address of its arguments or of nothing.
unsafe fn copies(number: c_long, a: usize, b: usize) -> bool {
    let shares = |flags: u64| flags & libc::CLONE_VM as u64 != 0;
    match number {
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => true,
        libc::SYS_clone => !shares(a as u64) && b == 0,
        // The arguments begin with the flags; the stack is the sixth of them.
        // SAFETY: the caller's promise; what the kernel would refuse to read is refused here too.
        libc::SYS_clone3 => unsafe { a != 0 && !shares(*(a as *const u64)) && *(a as *const u64).add(5) == 0 },
        _ => false,
    }
}

/// The program's `syscall`: as libc's. It is variadic, which Rust can't define, so it is a jump, mostly to libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[cfg(target_arch = "x86_64")]
pub unsafe extern "C" fn syscall() {
    core::arch::naked_asm!(
        "cmp rdi, {clone}",
        "je 2f",
        "cmp rdi, {fork}",
        "je 2f",
        "cmp rdi, {clone3}",
        "je 2f",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2: jmp {slowly}",
        clone = const libc::SYS_clone,
        fork = const libc::SYS_fork,
        clone3 = const libc::SYS_clone3,
        real = sym REAL_SYSCALL,
        slowly = sym syscall_slowly,
    )
}

/// The program's `syscall`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[cfg(target_arch = "aarch64")]
pub unsafe extern "C" fn syscall() {
    core::arch::naked_asm!("b {slowly}", slowly = sym syscall_slowly)
}
