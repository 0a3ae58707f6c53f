//! The raw `ioctl` system call, for requests whose result struct counts on errors too (rustix drops it then).
use crate::Errno;

/// `ioctl(fd, request, arg)` as one instruction: no `errno`, no libc.
///
/// # Safety
/// - `arg` must point to the struct that `request` reads and writes, alive and exclusively borrowed for the call.
#[cfg(target_arch = "x86_64")]
pub unsafe fn ioctl(fd: i32, request: u64, arg: *mut core::ffi::c_void) -> Result<i64, Errno> {
    let ret: i64;
    // SAFETY: the system call clobbers rcx and r11 only, and memory behind `arg`, which the caller vouches for.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") 16i64 => ret, in("rdi") fd as i64, in("rsi") request, in("rdx") arg,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    errno_of(ret)
}

/// `ioctl(fd, request, arg)` as one instruction: no `errno`, no libc.
///
/// # Safety
/// - `arg` must point to the struct that `request` reads and writes, alive and exclusively borrowed for the call.
#[cfg(target_arch = "aarch64")]
pub unsafe fn ioctl(fd: i32, request: u64, arg: *mut core::ffi::c_void) -> Result<i64, Errno> {
    let ret: i64;
    // SAFETY: `svc 0` changes x0 and memory behind `arg` only, and the caller vouches for `arg`.
    unsafe {
        core::arch::asm!("svc 0", in("x8") 29u64, inlateout("x0") fd as i64 => ret, in("x1") request, in("x2") arg, options(nostack));
    }
    errno_of(ret)
}

fn errno_of(ret: i64) -> Result<i64, Errno> {
    if ret < 0 { Err(Errno::from_raw_os_error(-ret as i32)) } else { Ok(ret) }
}

/// Writes text to standard error, as one piece if it fits 512 bytes. For warnings from inside the engine.
pub fn warn(parts: &[&str]) {
    let mut line = [0u8; 512];
    let mut len = 0;
    for byte in parts.iter().flat_map(|p| p.bytes()).take(line.len()) {
        line[len] = byte;
        len += 1;
    }
    // SAFETY: descriptor 2 is only written to; if the program has closed it, the write fails and nothing is lost but
    // the warning.
    let stderr = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, &line[..len]);
}
