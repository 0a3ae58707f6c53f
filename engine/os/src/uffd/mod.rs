//! userfaultfd: a small layer over the ioctls of `include/uapi/linux/userfaultfd.h`.
//!
//! The result field of COPY, ZEROPAGE and MOVE counts on errors too: a call may complete a part of
//! the range and then fail. [`Partial`] carries both, so no error is taken for progress.
use crate::Errno;
use crate::memory::zone::Zone;
use crate::raw::{self, ioctl, system_call};
use crate::thread::wait_readable;
use crate::units::PAGE_SIZE;
use core::mem::size_of;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::mm::UserfaultfdFlags;

/// Kernel features by the names of the header.
pub mod feature {
    /// Faults on write-protected pages are reported.
    pub const WP: u64 = 1 << 0;
    /// Memory that mremap moves stays registered. The call waits until a thread has read a message
    /// ([`Uffd::next_move`](super::Uffd::next_move)).
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// A fault raises SIGBUS in the faulting thread; no message.
    pub const SIGBUS: u64 = 1 << 7;
    /// Missing pages can be write-protected too.
    pub const WP_UNPOPULATED: u64 = 1 << 13;
    /// UFFDIO_MOVE exists (Linux 6.8).
    pub const MOVE: u64 = 1 << 16;
    /// The features that gate delivery needs.
    pub const GATE: u64 = SIGBUS | WP | EVENT_REMAP;
}

pub(crate) mod copy_out;
pub mod drop;
pub mod space;

const fn request(dir: u64, nr: u64, size: usize) -> u64 {
    dir << 30 | (size as u64) << 16 | 0xAA << 8 | nr
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const API: u64 = request(READ_WRITE, 0x3F, size_of::<ApiArg>());
const REGISTER: u64 = request(READ_WRITE, 0x00, size_of::<RegisterArg>());
const UNREGISTER: u64 = request(READ, 0x01, size_of::<RangeArg>());
const WAKE: u64 = request(READ, 0x02, size_of::<RangeArg>());
const COPY: u64 = request(READ_WRITE, 0x03, size_of::<CopyArg>());
const ZEROPAGE: u64 = request(READ_WRITE, 0x04, size_of::<ZeropageArg>());
const MOVE: u64 = request(READ_WRITE, 0x05, size_of::<CopyArg>());
const WRITEPROTECT: u64 = request(READ_WRITE, 0x06, size_of::<ProtectArg>());
/// Requests of threads that serve their own faults.
pub const REQUESTS: [u64; 4] = [COPY, ZEROPAGE, MOVE, WRITEPROTECT];
/// `USERFAULTFD_IOC_NEW` on /dev/userfaultfd.
const DEVICE_NEW: u64 = 0xAA00;

#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}
#[repr(C)]
struct RangeArg {
    start: u64,
    len: u64,
}
#[repr(C)]
struct RegisterArg {
    range: RangeArg,
    mode: u64,
    ioctls: u64,
}
/// `uffdio_copy` and `uffdio_move` have the same fields in the same order.
#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}
#[repr(C)]
struct ZeropageArg {
    range: RangeArg,
    mode: u64,
    done: i64,
}
#[repr(C)]
struct ProtectArg {
    range: RangeArg,
    mode: u64,
}

/// A request that stopped early: `done` bytes from the start of the range succeeded, then the
/// kernel returned `errno`.
///
/// After `done > 0` the kernel returns EAGAIN for any cause. Repeat the call for the rest to get
/// the cause.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Bytes that succeeded.
    pub done: usize,
    /// Why it stopped.
    pub errno: Errno,
}

/// Why no userfaultfd is available.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The kernel was built without userfaultfd, or a sandbox pretends so.
    Missing,
    /// No permission: neither the system call nor /dev/userfaultfd is open to this user.
    Forbidden,
    /// The kernel lacks requested features; the mask names them ([`feature`]).
    Lacks(u64),
    /// Another error.
    Other(Errno),
}

impl From<Errno> for OpenError {
    fn from(e: Errno) -> OpenError {
        OpenError::Other(e)
    }
}

impl core::fmt::Display for OpenError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            OpenError::Missing => f.write_str(
                "this kernel has no userfaultfd (CONFIG_USERFAULTFD), or a sandbox hides it (gVisor has none)",
            ),
            OpenError::Forbidden => f.write_str(
                "no permission to use userfaultfd: run `sysctl vm.unprivileged_userfaultfd=1` as root, or give this user \
                 read and write access to /dev/userfaultfd, or grant CAP_SYS_PTRACE; in a container, give it \
                 the device or allow the system call in the seccomp profile (Docker's default blocks it): `memfold check`",
            ),
            OpenError::Lacks(mask) => write!(f, "this kernel's userfaultfd lacks features {mask:#x}"),
            OpenError::Other(e) => write!(f, "userfaultfd: {e}"),
        }
    }
}

/// A fault that a userfaultfd reports: a thread waits for a page.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// The address that was touched.
    pub address: usize,
    /// The page is mapped, but write-protected.
    pub protected: bool,
}

/// The ways to get a userfaultfd.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum UffdSource {
    /// The system call, which needs CAP_SYS_PTRACE or the sysctl for faults inside system calls.
    Call,
    /// /dev/userfaultfd, which needs only its permissions.
    Device,
}

/// An open userfaultfd.
pub struct Uffd {
    fd: OwnedFd,
    features: u64,
    user_only: bool,
}

impl Uffd {
    /// Opens a userfaultfd and enables `features`. With `user_only`, faults that the kernel takes
    /// inside system calls are not served (they fail with EFAULT), which needs no privilege.
    ///
    /// # Errors
    /// An [`OpenError`] with the cause.
    pub fn open(features: u64, user_only: bool) -> Result<Uffd, OpenError> {
        let offer = Uffd::open_raw(true)?.handshake(0)?;
        if features & !offer != 0 {
            return Err(OpenError::Lacks(features & !offer));
        }
        let mut uffd = Uffd::open_raw(user_only)?;
        uffd.handshake(features)?;
        uffd.features = features;
        uffd.user_only = user_only;
        Ok(uffd)
    }

    /// Moves the descriptor to a number from `least` on.
    ///
    /// # Errors
    /// EMFILE: no number is free.
    pub fn at_least(mut self, least: i32) -> Result<Uffd, Errno> {
        self.fd = raw::renumber(self.fd, least)?;
        Ok(self)
    }

    /// Opens its own userfaultfd in a child of fork, which can't use its parent's. It has the same
    /// features and the same number, and no registered range yet.
    ///
    /// # Errors
    /// An [`OpenError`] with the cause.
    pub fn reopen(&self) -> Result<(), OpenError> {
        raw::reopen(&self.fd, || Ok(Uffd::open(self.features, self.user_only)?.fd))
    }

    /// Returns the features that this kernel offers ([`feature`]).
    ///
    /// # Errors
    /// An [`OpenError`] with the cause.
    pub fn probe() -> Result<u64, OpenError> {
        Uffd::open_raw(true)?.handshake(0)
    }

    /// Opens it by the system call, or else by the device. The device has permissions of its own,
    /// instead of the sysctl. A sandbox that refuses the call (EPERM in Docker's profile, ENOSYS in
    /// others) may permit the device.
    fn open_raw(user_only: bool) -> Result<Uffd, OpenError> {
        let refusal = match Uffd::open_by(UffdSource::Call, user_only) {
            Ok(uffd) => return Ok(uffd),
            Err(e @ (Errno::PERM | Errno::ACCESS | Errno::NOSYS)) => e,
            Err(e) => return Err(OpenError::Other(e)),
        };
        Uffd::open_by(UffdSource::Device, user_only).map_err(|e| match (refusal, e) {
            (Errno::NOSYS, Errno::NOENT | Errno::NODEV | Errno::NXIO) => OpenError::Missing,
            _ => OpenError::Forbidden,
        })
    }

    fn open_by(way: UffdSource, user_only: bool) -> Result<Uffd, Errno> {
        use rustix::fs::{Mode, OFlags, open};
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        let flags = if user_only { flags | UserfaultfdFlags::from_bits_retain(1) } else { flags };
        if way == UffdSource::Call {
            // SAFETY: opening a descriptor touches no memory; each later call proves its own
            // conditions.
            let fd = unsafe { rustix::mm::userfaultfd(flags)? };
            return Ok(Uffd { fd, features: 0, user_only });
        }
        let device = open(c"/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        // SAFETY: this request takes flags in place of a pointer and touches no memory.
        let fd = unsafe { ioctl(device.as_raw_fd(), DEVICE_NEW, flags.bits() as usize as *mut _)? };
        // SAFETY: the kernel has just made this descriptor for this call, so it has no other owner.
        Ok(Uffd { fd: unsafe { OwnedFd::from_raw_fd(fd as i32) }, features: 0, user_only })
    }

    /// Returns whether a userfaultfd is available in one way.
    ///
    /// # Errors
    /// The kernel's: EPERM (sysctl, or a sandbox), ENOSYS, ENOENT and EACCES of the device.
    pub fn can_open(way: UffdSource, user_only: bool) -> Result<(), Errno> {
        Uffd::open_by(way, user_only).map(drop)
    }

    fn handshake(&self, features: u64) -> Result<u64, OpenError> {
        let mut arg = ApiArg { api: 0xAA, features, ioctls: 0 };
        // SAFETY: `arg` is the struct of this request.
        match unsafe { ioctl(self.fd.as_raw_fd(), API, (&raw mut arg).cast()) } {
            Ok(_) => Ok(arg.features),
            Err(Errno::PERM) => Err(OpenError::Forbidden),
            Err(e) => Err(OpenError::Other(e)),
        }
    }

    /// Returns the enabled features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns the descriptor, for poll.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Registers `[start, start + len)` for missing pages, and with `protect` for write protection.
    ///
    /// # Errors
    /// EINVAL (not anonymous, or not page-aligned), EBUSY (another userfaultfd has it), ENOMEM.
    ///
    /// # Safety
    /// - From now on a touch of a missing page in the range waits for the thread that serves this
    ///   descriptor. There must be one, and it must never touch the range itself.
    pub unsafe fn register(&self, start: usize, len: usize, protect: bool) -> Result<(), Errno> {
        let range = RangeArg { start: start as u64, len: len as u64 };
        let mut arg = RegisterArg { range, mode: 1 | (protect as u64) << 1, ioctls: 0 };
        // SAFETY: `arg` is the struct of this request; the caller vouches for the effects of
        // registration.
        unsafe { ioctl(self.fd.as_raw_fd(), REGISTER, (&raw mut arg).cast()) }.map(drop)
    }

    /// Ends the registration of a range and wakes the threads that wait in it. Missing pages read
    /// as zeros from now on.
    ///
    /// # Errors
    /// EINVAL if the range holds a mapping that can't be registered.
    pub fn unregister(&self, start: usize, len: usize) -> Result<(), Errno> {
        let mut arg = RangeArg { start: start as u64, len: len as u64 };
        // SAFETY: `arg` is the struct of this request.
        unsafe { ioctl(self.fd.as_raw_fd(), UNREGISTER, (&raw mut arg).cast()) }.map(drop)
    }

    /// Wakes the threads that wait for pages of a range; they look again.
    pub fn wake(&self, start: usize, len: usize) {
        let mut arg = RangeArg { start: start as u64, len: len as u64 };
        // SAFETY: `arg` is the struct of this request.
        let _ = unsafe { ioctl(self.fd.as_raw_fd(), WAKE, (&raw mut arg).cast()) };
    }

    /// Copies `len` bytes from `src` into fresh pages at `dst`. With `wake`, wakes the threads that
    /// wait there.
    ///
    /// # Errors
    /// - EEXIST: a page is present.
    /// - EAGAIN: an event must be read first, or a part was done.
    /// - ENOENT: nothing is mapped there any more, or the range lies in two areas.
    /// - ENOMEM, ESRCH.
    ///
    /// # Safety
    /// - `src` must be readable for `len` bytes.
    /// - The pages at `dst` become these bytes for the whole process: the caller must hold the
    ///   right to define them.
    pub unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        // UFFDIO_COPY_MODE_DONTWAKE is 1.
        // SAFETY: by the caller's promise `src` is readable, and the bytes at `dst` may be defined.
        unsafe { self.copy_mode(dst, src, len, !wake as u64) }
    }

    /// Copies like [`Uffd::copy`], but the fresh pages are write-protected from the first moment
    /// on. The range is registered for protection. Wakes no thread.
    ///
    /// # Errors
    /// The errors of [`Uffd::copy`].
    ///
    /// # Safety
    /// - The conditions of [`Uffd::copy`].
    pub unsafe fn copy_protected(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
    ) -> Result<(), Partial> {
        // UFFDIO_COPY_MODE_WP is 2.
        // SAFETY: by the caller's promise `src` is readable, and the bytes at `dst` may be defined.
        unsafe { self.copy_mode(dst, src, len, 1 | 2) }
    }

    /// # Safety
    /// - The conditions of [`Uffd::copy`].
    unsafe fn copy_mode(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        mode: u64,
    ) -> Result<(), Partial> {
        let mut arg = CopyArg { dst: dst as u64, src: src as u64, len: len as u64, mode, done: 0 };
        // SAFETY: `arg` is the struct of this request; the caller vouches for `src` and `dst`.
        let ret = unsafe { ioctl(self.fd.as_raw_fd(), COPY, (&raw mut arg).cast()) };
        partial(ret, arg.done)
    }

    /// Maps the zero page at `dst`, `len` bytes of it, and wakes the threads that wait there.
    ///
    /// # Errors
    /// The errors of [`Uffd::copy`].
    ///
    /// # Safety
    /// - The pages at `dst` become zeros for the whole process: the caller must hold the right to
    ///   define them.
    pub unsafe fn zero(&self, dst: usize, len: usize) -> Result<(), Partial> {
        let range = RangeArg { start: dst as u64, len: len as u64 };
        let mut arg = ZeropageArg { range, mode: 0, done: 0 };
        // SAFETY: `arg` is the struct of this request; the caller vouches for `dst`.
        let ret = unsafe { ioctl(self.fd.as_raw_fd(), ZEROPAGE, (&raw mut arg).cast()) };
        partial(ret, arg.done)
    }

    /// Moves the pages of `[src, src + len)` to `dst`, without copying. `dst` must be empty and
    /// registered here. With `wake`, wakes the threads that wait at `dst`. `src` is empty
    /// afterwards.
    ///
    /// # Errors
    /// - EEXIST: `dst` holds a page.
    /// - ENOENT: `src` lacks a page, or nothing is mapped.
    /// - EBUSY: a page is shared by fork or pinned.
    /// - EAGAIN: an event must be read first, or a part was done.
    /// - EINVAL: an area isn't private, anonymous and writable, the two differ in protection, or
    ///   one of the ranges lies in two areas.
    ///
    /// # Safety
    /// - The caller must hold the right to change both ranges for the whole process.
    pub unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: bool,
    ) -> Result<(), Partial> {
        // UFFDIO_MOVE_MODE_DONTWAKE is 1.
        let mode = !wake as u64;
        let mut arg = CopyArg { dst: dst as u64, src: src as u64, len: len as u64, mode, done: 0 };
        // SAFETY: `arg` is the struct of this request; the caller vouches for both ranges.
        let ret = unsafe { ioctl(self.fd.as_raw_fd(), MOVE, (&raw mut arg).cast()) };
        partial(ret, arg.done)
    }

    /// Write-protects a range, or ends the protection and wakes its writers.
    ///
    /// # Errors
    /// EAGAIN (an event waits to be read), ENOENT (the range isn't registered for protection).
    pub fn protect(&self, start: usize, len: usize, on: bool) -> Result<(), Errno> {
        let range = RangeArg { start: start as u64, len: len as u64 };
        let mut arg = ProtectArg { range, mode: on as u64 };
        // SAFETY: `arg` is the struct of this request. Protection only delays writers; it changes
        // no byte.
        unsafe { ioctl(self.fd.as_raw_fd(), WRITEPROTECT, (&raw mut arg).cast()) }.map(drop)
    }

    /// Reads one report, without sleeping.
    ///
    /// # Errors
    /// EAGAIN when there is none, EINTR.
    pub fn read(&self) -> Result<FaultReport, Errno> {
        self.read_message()?.decode().ok_or(Errno::AGAIN)
    }

    /// Waits until mremap has moved registered memory, and reads the kernel's message, so that the
    /// thread in that call continues. Returns the address from which the memory was moved. The
    /// descriptor has [`feature::EVENT_REMAP`].
    pub fn next_move(&self) -> usize {
        loop {
            wait_readable(&self.fd, None);
            if let Ok(UffdMessage { event: UffdMessage::REMAP, arg: [from, ..], .. }) =
                self.read_message()
            {
                return from as usize;
            }
        }
    }

    /// Moves a page of the engine, so that [`Uffd::next_move`] returns its address in another
    /// thread. Gives that address to `before` first. Waits until the message has been read.
    ///
    /// # Errors
    /// The errors of reserving and registering a zone, and of mremap: ENOMEM.
    pub fn move_own_page(&self, before: impl FnOnce(usize)) -> Result<(), Errno> {
        const FLAGS: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
        let zone = Zone::reserve(2 * PAGE_SIZE, PAGE_SIZE)?;
        let (from, to) = (zone.start(), zone.start() + PAGE_SIZE);
        // SAFETY: no thread touches the page, so no fault there needs to be served.
        unsafe { self.register(from, PAGE_SIZE, false)? };
        before(from);
        let args = [from, PAGE_SIZE, PAGE_SIZE, FLAGS as usize, to, 0];
        // SAFETY: both pages are in the zone, which stays mapped, and hold nothing.
        unsafe { system_call(libc::SYS_mremap, args) }.map(drop)
    }

    fn read_message(&self) -> Result<UffdMessage, Errno> {
        let mut message = UffdMessage::default();
        // SAFETY: `Message` is plain integers without padding, so its bytes may be overwritten with
        // any values.
        let bytes = unsafe {
            core::slice::from_raw_parts_mut(
                (&raw mut message).cast::<u8>(),
                size_of::<UffdMessage>(),
            )
        };
        let n = rustix::io::read(&self.fd, bytes)?;
        if n != size_of::<UffdMessage>() {
            return Err(Errno::AGAIN);
        }
        Ok(message)
    }
}

fn partial(ret: Result<i64, Errno>, done: i64) -> Result<(), Partial> {
    ret.map(drop).map_err(|errno| Partial { done: done.max(0) as usize, errno })
}

#[repr(C)]
#[derive(Default)]
struct UffdMessage {
    event: u8,
    reserved: [u8; 7],
    arg: [u64; 3],
}
const _: () = assert!(size_of::<UffdMessage>() == 32);

impl UffdMessage {
    /// UFFD_EVENT_REMAP.
    const REMAP: u8 = 0x14;

    fn decode(&self) -> Option<FaultReport> {
        const FAULT: u8 = 0x12;
        const PROTECTED: u64 = 2;
        let [flags, address, _] = self.arg;
        (self.event == FAULT)
            .then_some(FaultReport { address: address as usize, protected: flags & PROTECTED != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_numbers_are_the_kernels() {
        assert_eq!(API, 0xc018_aa3f);
        assert_eq!(REGISTER, 0xc020_aa00);
        assert_eq!(UNREGISTER, 0x8010_aa01);
        assert_eq!(COPY, 0xc028_aa03);
        assert_eq!(ZEROPAGE, 0xc020_aa04);
        assert_eq!(MOVE, 0xc028_aa05);
        assert_eq!(WRITEPROTECT, 0xc018_aa06);
    }

    /// Makes the kernel answer `number` with an error in the calling thread, for good.
    fn refuse(number: i64, errno: Errno) {
        let code = |code: u32| code as u16;
        let mut filter = [
            // The number is the first word of a filter's data.
            libc::sock_filter {
                code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS),
                jt: 0,
                jf: 0,
                k: 0,
            },
            libc::sock_filter {
                code: code(libc::BPF_JMP | libc::BPF_JEQ),
                jt: 0,
                jf: 1,
                k: number as u32,
            },
            libc::sock_filter {
                code: code(libc::BPF_RET),
                jt: 0,
                jf: 0,
                k: libc::SECCOMP_RET_ERRNO | errno.raw_os_error() as u32,
            },
            libc::sock_filter {
                code: code(libc::BPF_RET),
                jt: 0,
                jf: 0,
                k: libc::SECCOMP_RET_ALLOW,
            },
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        let at = &raw const program as usize;
        // SAFETY: the filter is alive during the call, which copies it; both calls affect only this
        // thread.
        unsafe {
            raw::system_call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as usize, 1, 0, 0, 0, 0])
                .unwrap();
            let args = [libc::SECCOMP_SET_MODE_FILTER as usize, 0, at, 0, 0, 0];
            raw::system_call(libc::SYS_seccomp, args).unwrap();
        }
    }

    #[test]
    fn open_tries_the_device_when_a_sandbox_refuses_the_call() {
        let by_device = Uffd::can_open(UffdSource::Device, true);
        for errno in [Errno::PERM, Errno::NOSYS] {
            let in_sandbox = move || {
                refuse(libc::SYS_userfaultfd, errno);
                (Uffd::can_open(UffdSource::Call, true), Uffd::probe())
            };
            let (call, probed) = std::thread::spawn(in_sandbox).join().unwrap();
            assert_eq!(call, Err(errno));
            match (by_device, probed) {
                (Ok(()), found) => assert!(found.is_ok_and(|features| features & feature::WP != 0)),
                (Err(Errno::NOENT), found) if errno == Errno::NOSYS => {
                    assert_eq!(found, Err(OpenError::Missing));
                }
                (Err(_), found) => assert_eq!(found, Err(OpenError::Forbidden)),
            }
        }
    }

    #[test]
    fn a_move_that_meets_a_hole_reports_what_it_did() {
        let uffd = Uffd::open(feature::MOVE, true).expect("userfaultfd with MOVE");
        let (a, b) = (
            Zone::reserve(16 * PAGE_SIZE, PAGE_SIZE).unwrap(),
            Zone::reserve(16 * PAGE_SIZE, PAGE_SIZE).unwrap(),
        );
        for page in [0usize, 1, 3] {
            // SAFETY: the page is inside the zone, which is not registered yet.
            unsafe { *a.as_ptr().add(page * PAGE_SIZE) = 40 + page as u8 };
        }
        // SAFETY: the test touches only pages of `b` that it has moved there.
        unsafe {
            uffd.register(b.start(), b.len(), false).unwrap();
            let err = uffd.move_pages(b.start(), a.start(), 4 * PAGE_SIZE, true).unwrap_err();
            assert_eq!(err.done, 2 * PAGE_SIZE);
            let rest = uffd
                .move_pages(b.start() + 2 * PAGE_SIZE, a.start() + 2 * PAGE_SIZE, PAGE_SIZE, true)
                .unwrap_err();
            assert_eq!(rest, Partial { done: 0, errno: Errno::NOENT });
            assert_eq!((*b.as_ptr(), *b.as_ptr().add(PAGE_SIZE)), (40, 41));
            let twice =
                uffd.copy(b.start(), a.as_ptr().add(3 * PAGE_SIZE), PAGE_SIZE, true).unwrap_err();
            assert_eq!(twice, Partial { done: 0, errno: Errno::EXIST });
        }
    }
}
