//! Calls that would show a narrowed affinity or pass it on: those that make threads or processes,
//! execute programs, or deal with affinities; and those after which the engine might not be allowed
//! to give it back, as the thread is another user's. What is kept on a CPU is let go first
//! ([`memfold::delivery::program::Watcher::release_cpu`]), then libc's function goes on with the
//! same arguments: these here are jumps, as some are variadic, and vfork returns twice. `fork`,
//! `clone`, `pthread_create` and `syscall` do the same where they are defined.
use crate::calls::real::Real;
use crate::program;
use core::ffi::c_void;

/// Lets go what is kept on a CPU.
pub fn release() {
    if let Some(program) = program::get() {
        program.release_cpu();
    }
}

extern "C" fn release_before(real: &'static Real) -> *mut c_void {
    release();
    real.get()
}

macro_rules! release_before {
    ($($name:ident $real:ident)*) => {
        $(
            static $real: Real = Real::new(match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            });

            /// The program's: as libc's.
            ///
            /// # Safety
            /// - As libc's.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[cfg(target_arch = "x86_64")]
            pub unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "push rdi",
                    "push rsi",
                    "push rdx",
                    "push rcx",
                    "push r8",
                    "push r9",
                    "push rax",
                    "lea rdi, [rip + {real}]",
                    "call {before}",
                    "mov r11, rax",
                    "pop rax",
                    "pop r9",
                    "pop r8",
                    "pop rcx",
                    "pop rdx",
                    "pop rsi",
                    "pop rdi",
                    "jmp r11",
                    real = sym $real,
                    before = sym release_before,
                )
            }

            /// The program's: as libc's.
            ///
            /// # Safety
            /// - As libc's.
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            #[cfg(target_arch = "aarch64")]
            pub unsafe extern "C" fn $name() {
                core::arch::naked_asm!(
                    "stp x29, x30, [sp, #-80]!",
                    "stp x0, x1, [sp, #16]",
                    "stp x2, x3, [sp, #32]",
                    "stp x4, x5, [sp, #48]",
                    "stp x6, x7, [sp, #64]",
                    "adrp x0, {real}",
                    "add x0, x0, :lo12:{real}",
                    "bl {before}",
                    "mov x16, x0",
                    "ldp x0, x1, [sp, #16]",
                    "ldp x2, x3, [sp, #32]",
                    "ldp x4, x5, [sp, #48]",
                    "ldp x6, x7, [sp, #64]",
                    "ldp x29, x30, [sp], #80",
                    "br x16",
                    real = sym $real,
                    before = sym release_before,
                )
            }
        )*

        /// Looks libc's functions up, as far as it has them: some are called where no lock may be
        /// waited for.
        pub fn find() {
            for real in [$(&$real),*] {
                real.look_up();
            }
        }
    };
}

release_before! {
    vfork VFORK
    posix_spawn POSIX_SPAWN
    posix_spawnp POSIX_SPAWNP
    system SYSTEM
    popen POPEN
    wordexp WORDEXP
    execve EXECVE
    execv EXECV
    execvp EXECVP
    execvpe EXECVPE
    execl EXECL
    execlp EXECLP
    execle EXECLE
    fexecve FEXECVE
    execveat EXECVEAT
    thrd_create THRD_CREATE
    sched_getaffinity SCHED_GETAFFINITY
    sched_setaffinity SCHED_SETAFFINITY
    pthread_getaffinity_np PTHREAD_GETAFFINITY_NP
    pthread_setaffinity_np PTHREAD_SETAFFINITY_NP
    pthread_getattr_np PTHREAD_GETATTR_NP
    setuid SETUID
    seteuid SETEUID
    setreuid SETREUID
    setresuid SETRESUID
}
