//! The program's `syscall`: the calls that this library defines under their own names are the same
//! by number.
use crate::calls::real::next;
use crate::calls::{ahead, lent, marks, moved, userfault};
use crate::fork::Copying;
use core::ffi::{c_int, c_long, c_uint, c_ulong, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use memfold_sys::raw::copies;
use memfold_sys::uffd::registration;

type Syscall = unsafe extern "C" fn(c_long, usize, usize, usize, usize, usize, usize) -> c_long;

/// libc's `syscall`, once it has been looked up.
static REAL: AtomicUsize = AtomicUsize::new(0);

/// What `syscall` does for the calls that matter here, and the first time.
unsafe extern "C" fn slowly(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let mut real = REAL.load(Relaxed) as *mut c_void;
    if real.is_null() {
        real = next(c"syscall");
        REAL.store(real as usize, Relaxed);
    }
    // SAFETY: the arguments are the caller's, of the types that the system call by this number
    // takes.
    unsafe {
        match number {
            libc::SYS_mmap => {
                return ahead::mmap(
                    a as *mut c_void,
                    b,
                    c as c_int,
                    d as c_int,
                    e as c_int,
                    f as i64,
                ) as c_long;
            }
            libc::SYS_madvise => return marks::madvise(a as *mut c_void, b, c as c_int) as c_long,
            libc::SYS_process_madvise => {
                return marks::process_madvise(
                    a as c_int,
                    b as *const libc::iovec,
                    c,
                    d as c_int,
                    e as c_uint,
                ) as c_long;
            }
            libc::SYS_mremap => {
                return moved::mremap(a as *mut c_void, b, c, d as c_int, e as *mut c_void)
                    as c_long;
            }
            libc::SYS_mlock => return marks::mlock(a as *const c_void, b) as c_long,
            libc::SYS_mlock2 => return marks::mlock2(a as *const c_void, b, c as c_uint) as c_long,
            libc::SYS_mlockall => return marks::mlockall(a as c_int) as c_long,
            // Others may return more than libc's `ioctl` does.
            libc::SYS_ioctl if registration(b as u64, c as *const c_void).is_some() => {
                return userfault::ioctl(a as c_int, b as c_ulong, c as *mut c_void) as c_long;
            }
            libc::SYS_vmsplice => {
                return lent::vmsplice(a as c_int, b as *const libc::iovec, c, d as c_uint)
                    as c_long;
            }
            libc::SYS_setsockopt => {
                return lent::setsockopt(
                    a as c_int,
                    b as c_int,
                    c as c_int,
                    d as *const c_void,
                    e as u32,
                ) as c_long;
            }
            _ => {}
        }
    }
    // SAFETY: libc's `syscall` is of this type as far as the machine's calling convention goes.
    let real = unsafe { core::mem::transmute::<*mut c_void, Syscall>(real) };
    // SAFETY: the arguments are the caller's.
    if !unsafe { copies(number, [a, b, c, d, e, f]) } {
        // SAFETY: likewise.
        return unsafe { real(number, a, b, c, d, e, f) };
    }
    let copying = Copying::begin();
    // SAFETY: likewise. The child goes on in its copy of this frame.
    let pid = unsafe { real(number, a, b, c, d, e, f) };
    copying.end(pid == 0);
    pid
}

/// The program's `syscall`: as libc's. It is variadic, which Rust can't define, so it is a jump:
/// for the numbers here to [`slowly`], for the others to libc's.
macro_rules! define_syscall {
    ($($number:ident)*) => {
        /// # Safety
        /// - As libc's.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn syscall() {
            core::arch::naked_asm!(
                $(concat!("cmp rdi, {", stringify!($number), "}"), "je 2f",)*
                "mov rax, qword ptr [rip + {real}]",
                "test rax, rax",
                "jz 2f",
                "jmp rax",
                "2: jmp {slowly}",
                $($number = const libc::$number,)*
                real = sym REAL,
                slowly = sym slowly,
            )
        }
    };
}

#[cfg(target_arch = "x86_64")]
define_syscall! {
    SYS_mmap SYS_madvise SYS_process_madvise SYS_mremap SYS_mlock SYS_mlock2 SYS_mlockall SYS_vmsplice SYS_setsockopt SYS_fork SYS_clone SYS_clone3
    SYS_ioctl
}

/// The program's `syscall`: as libc's.
///
/// # Safety
/// - As libc's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
#[cfg(target_arch = "aarch64")]
pub unsafe extern "C" fn syscall() {
    core::arch::naked_asm!("b {slowly}", slowly = sym slowly)
}
