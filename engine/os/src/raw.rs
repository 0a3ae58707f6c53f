//! Raw system calls. `ioctl` is for requests whose result struct counts on errors too (rustix drops
//! it then).
use crate::Errno;
use crate::units::PAGE_SIZE;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicPtr, Ordering::Relaxed};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::IoSliceMut;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Makes `ioctl(fd, request, arg)` as one instruction, without `errno` and libc.
///
/// # Safety
/// - `arg` must point to the struct that `request` reads and writes, alive and exclusively borrowed
///   for the call.
pub unsafe fn ioctl(fd: i32, request: u64, arg: *mut core::ffi::c_void) -> Result<i64, Errno> {
    let ret: i64;
    // SAFETY: the system call clobbers only rcx, r11 and memory behind `arg`, which the caller
    // vouches for.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") 16i64 => ret, in("rdi") fd as i64, in("rsi") request, in("rdx") arg,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    errno_of(ret)
}

/// Makes one `recvmsg`. Returns the number of received bytes, 0 at a stream's end, and the
/// descriptor that was sent with them, if one was.
///
/// # Errors
/// The errors of recvmsg.
pub fn receive_with_file(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let (count, [first, second]) = receive_with_files(socket, bytes)?;
    Ok((count, second.or(first)))
}

/// Makes one `recvmsg`, and returns the first two descriptors.
///
/// # Errors
/// The errors of recvmsg.
pub fn receive_with_files(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> Result<(usize, [Option<OwnedFd>; 2]), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = [None, None];
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = message {
            descriptors.iter_mut().zip(files).for_each(|(to, file)| *to = Some(file));
        }
    }
    Ok((message.bytes, descriptors))
}

/// Bytes of a cache line of the processor.
pub const LINE_BYTES: usize = 64;

/// Prefetches the line at `at`, which may be any address, without waiting for it.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: it is a hint: it changes no register or memory of the program, and never faults.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
}

/// Returns the present end of the program's heap (`brk`).
pub fn program_break() -> usize {
    // SAFETY: an address that can't be the end changes nothing; the call returns the present end.
    unsafe { system_call(libc::SYS_brk, [0; 6]) }.unwrap_or(0) as usize
}

/// Makes any system call as one instruction, without `errno` and libc.
///
/// # Safety
/// - The conditions of the system call.
pub unsafe fn system_call(number: i64, args: [usize; 6]) -> Result<i64, Errno> {
    let ret: i64;
    // SAFETY: the system call clobbers only rcx, r11 and the memory that the caller vouches for.
    unsafe {
        core::arch::asm!("syscall", inlateout("rax") number => ret, in("rdi") args[0], in("rsi") args[1],
            in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    errno_of(ret)
}

/// Returns whether the page at `addr` is in memory. Returns `false` where nothing is mapped, and
/// for a page that the kernel has swapped out. Where swap matters, use
/// [`crate::maps::pagemap::Pagemap::is_populated`].
pub fn is_resident(addr: usize) -> bool {
    let (page, mut state) = (addr & !(PAGE_SIZE - 1), 0u8);
    // SAFETY: `state` has room for the one byte of one page. An unmapped address is an error.
    let result = unsafe {
        system_call(libc::SYS_mincore, [page, PAGE_SIZE, &raw mut state as usize, 0, 0, 0])
    };
    result.is_ok() && state & 1 != 0
}

/// Makes the kernel populate the page at `addr`, for reading or for writing. Returns whether it
/// did. It never waits for the thread that serves the page's userfaultfd, if that serves only the
/// program's own accesses.
pub fn populates(addr: usize, write: bool) -> bool {
    populates_all(addr & !(PAGE_SIZE - 1), PAGE_SIZE, write)
}

/// Makes the kernel populate all pages of a range, as [`populates`] does. `start` is the start of a
/// page. Returns whether it populated all.
pub fn populates_all(start: usize, len: usize, write: bool) -> bool {
    let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
    let args = [start, len, advice as usize, 0, 0, 0];
    // SAFETY: the advice changes no byte.
    unsafe { system_call(libc::SYS_madvise, args) }.is_ok()
}

/// Copies bytes of this process as far as their pages are present and readable, and touches none.
/// It never waits for the thread that serves their userfaultfd. Returns the number of bytes.
///
/// # Errors
/// The errors of `process_vm_readv`: EFAULT if the first page can't be read, EPERM or ENOSYS in a
/// sandbox.
///
/// # Safety
/// - `to` is writable for `len` bytes.
pub unsafe fn read_if_there(from: usize, to: *mut u8, len: usize) -> Result<usize, Errno> {
    let own = rustix::process::getpid().as_raw_nonzero().get() as usize;
    let (local, remote) = ([to as usize, len], [from, len]);
    let args = [own, local.as_ptr() as usize, 1, remote.as_ptr() as usize, 1, 0];
    // SAFETY: both are laid out as an `iovec`; the caller promises room.
    unsafe { system_call(libc::SYS_process_vm_readv, args) }.map(|count| count as usize)
}

/// Writes to the word at `addr`, a multiple of 4, if its page is present and writable, and changes
/// no byte. Returns whether it did. It never waits for the thread that serves the page's
/// userfaultfd.
///
/// FUTEX_WAKE_OP adds zero to the word in one atomic operation. If the page is missing, the kernel
/// faults it in without permission to wait (`fault_in_user_writeable`), so a userfaultfd returns an
/// error.
pub fn write_if_there(addr: usize) -> bool {
    const ADD_ZERO: usize = 1 << 28;
    let nobody = 0u32;
    let operation = (libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: `nobody` is alive, and no thread waits there. The word may be at any address: the
    // kernel checks it, and keeps its value.
    unsafe {
        system_call(libc::SYS_futex, [&raw const nobody as usize, operation, 0, 0, addr, ADD_ZERO])
    }
    .is_ok()
}

pub(crate) fn errno_of(ret: i64) -> Result<i64, Errno> {
    if ret < 0 { Err(Errno::from_raw_os_error(-ret as i32)) } else { Ok(ret) }
}

/// Blocks exactly these signals (bit n - 1 for signal n) in the calling thread, also libc's own
/// two. Returns the signals that were blocked before.
pub fn set_signals_blocked(blocked: u64) -> u64 {
    change_mask(libc::SIG_SETMASK, blocked)
}

fn change_mask(how: i32, signals: u64) -> u64 {
    let mut before = 0u64;
    let (new, old) = (&raw const signals as usize, &raw mut before as usize);
    // SAFETY: both masks are local and of the kernel's size.
    let _ = unsafe { system_call(libc::SYS_rt_sigprocmask, [how as usize, new, old, 8, 0, 0]) };
    before
}

/// Signals that the thread's own instructions raise. If one is blocked, the kernel ends the process
/// instead. With the gate, each system call of libc is a SIGSYS.
const SYNCHRONOUS: u64 =
    1 << (libc::SIGSYS - 1) | 1 << (libc::SIGBUS - 1) | 1 << (libc::SIGSEGV - 1);

/// Blocks all signals but SIGSYS, SIGBUS and SIGSEGV in the calling thread, until the same thread
/// drops it. A handler of the program could touch memory whose fault waits for a lock that the
/// thread holds.
pub struct SignalsBlocked {
    before: u64,
    /// Keeps it in its thread.
    _thread: PhantomData<*const ()>,
}

impl SignalsBlocked {
    /// Blocks them from now on.
    #[allow(clippy::new_without_default)]
    pub fn new() -> SignalsBlocked {
        SignalsBlocked { before: change_mask(libc::SIG_BLOCK, !SYNCHRONOUS), _thread: PhantomData }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        set_signals_blocked(self.before);
    }
}

/// Replaces `old` by `new`, under the number of `old`.
///
/// # Errors
/// The errors of dup3.
pub fn replace(old: &OwnedFd, new: OwnedFd) -> Result<(), Errno> {
    if old.as_raw_fd() == new.as_raw_fd() {
        // The number was free, because the old descriptor was not inherited. `old` owns it from now
        // on.
        core::mem::forget(new);
        return Ok(());
    }
    let args =
        [new.as_raw_fd() as usize, old.as_raw_fd() as usize, libc::O_CLOEXEC as usize, 0, 0, 0];
    // SAFETY: both are open or, as for `old` in a child of fork, only numbers; `old` continues to
    // own the descriptor at its number.
    unsafe { system_call(libc::SYS_dup3, args) }.map(drop)
}

/// Opens a file in a child of fork in place of `old`, which is its parent's, also if no other
/// number is free. If it can't be opened, `old` keeps its number.
///
/// # Errors
/// The errors of `open` or dup3.
pub fn reopen<E: From<Errno> + PartialEq>(
    old: &OwnedFd,
    mut open: impl FnMut() -> Result<OwnedFd, E>,
) -> Result<(), E> {
    let mut file = open();
    if file.as_ref().is_err_and(|e| *e == E::from(Errno::MFILE)) {
        // SAFETY: `replace` puts another file there, and until then no thread uses it.
        let result =
            unsafe { system_call(libc::SYS_close, [old.as_raw_fd() as usize, 0, 0, 0, 0, 0]) };
        file = result.map_err(E::from).and_then(|_| open());
    }
    Ok(replace(old, file?)?)
}

/// Moves a file to a number from `least` on, which is closed on exec.
///
/// # Errors
/// EMFILE: no number is free.
pub fn renumber(old: OwnedFd, least: i32) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(&old, least)
}

/// Writes to the program's standard error, also from a thread whose table of descriptors is not the
/// program's. If the program has closed it, nothing is written.
pub fn write_stderr(text: &[u8]) {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
    let its = pidfd_open(getpid(), PidfdFlags::empty())
        .and_then(|own| pidfd_getfd(&own, 2, PidfdGetfdFlags::empty()));
    if let Ok(stderr) = its {
        let _ = rustix::io::write(&stderr, text);
        return;
    }
    // SAFETY: descriptor 2 is only written to. If it is closed, the write fails, and only the text
    // is lost.
    let stderr = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, text);
}

/// The function that gets warnings; null for standard error.
static WARNER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Sends warnings from inside the engine to `warner` instead of standard error.
pub fn set_warner(warner: fn(&[u8])) {
    WARNER.store(warner as *mut (), Relaxed);
}

/// The function that ends the process; null for a panic.
static ENDER: AtomicPtr<()> = AtomicPtr::new(core::ptr::null_mut());

/// Makes [`end`] call `ender` with the reason.
pub fn set_ender(ender: fn(&str) -> !) {
    ENDER.store(ender as *mut (), Relaxed);
}

/// Ends the process for a reason that its user chose, which is no bug of the engine.
///
/// # Panics
/// If [`set_ender`] was not called.
pub fn end(why: &str) -> ! {
    match ENDER.load(Relaxed) {
        ender if ender.is_null() => panic!("memfold: {why}"),
        // SAFETY: only `set_ender` stores it, from a function of this type.
        ender => unsafe { core::mem::transmute::<*mut (), fn(&str) -> !>(ender)(why) },
    }
}

/// Passes a warning to the function of [`set_warner`], or writes it to standard error. It is one
/// write if it fits 512 bytes. For warnings from inside the engine.
pub fn warn(parts: &[&str]) {
    let mut line = [0u8; 512];
    let mut len = 0;
    for byte in parts.iter().flat_map(|p| p.bytes()).take(line.len()) {
        line[len] = byte;
        len += 1;
    }
    match WARNER.load(Relaxed) {
        warner if warner.is_null() => write_stderr(&line[..len]),
        // SAFETY: only `set_warner` stores it, from a function of this type.
        warner => unsafe { core::mem::transmute::<*mut (), fn(&[u8])>(warner)(&line[..len]) },
    }
}
