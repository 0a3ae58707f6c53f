//! Probes: each feature is tried, on memory and descriptors made for it. The kernel's answer is
//! returned unchanged.
use crate::Errno;
use crate::maps::lookup;
use crate::maps::pagemap::Pagemap;
use crate::memory::zone::Zone;
use crate::protection::{Protection, ProtectionSpace};
use crate::raw::{self, is_resident, system_call};
use crate::thread::yield_now;
use crate::transfer::uring::has_uring;
use crate::uffd::space::Space;
use crate::uffd::{OpenError, Uffd, feature};
use crate::units::PAGE_SIZE;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use rustix::fd::AsRawFd;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

/// How often [`hides`] tries to take a page.
const TRIES: usize = 1000;

/// Makes a zone of one page, written to.
fn page(byte: u8) -> Result<Zone, Errno> {
    let zone = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
    // SAFETY: the page is inside the zone, which no other thread knows.
    unsafe { zone.as_ptr().write(byte) };
    Ok(zone)
}

/// Returns whether UFFDIO_MOVE moves a page from one address to another.
///
/// # Errors
/// No userfaultfd, or the kernel's error: EINVAL before Linux 6.8.
pub fn moves() -> Result<(), OpenError> {
    let uffd = Uffd::open(feature::MOVE, true)?;
    let (from, to) = (
        page(77).map_err(OpenError::Other)?,
        Zone::reserve(PAGE_SIZE, PAGE_SIZE).map_err(OpenError::Other)?,
    );
    // SAFETY: this function owns both; `to` is touched only when the page is present.
    unsafe {
        uffd.register(to.start(), PAGE_SIZE, false).map_err(OpenError::Other)?;
        let outcome = uffd.move_pages(to.start(), from.start(), PAGE_SIZE, true);
        outcome.map_err(|partial| OpenError::Other(partial.errno))?;
        assert!(to.as_ptr().read() == 77, "memfold: UFFDIO_MOVE has lost a byte");
    }
    Ok(())
}

/// Returns whether pages can be populated.
pub fn populates() -> bool {
    page(1).is_ok_and(|zone| raw::populates(zone.start(), true))
}

/// Returns whether memory of the process can be read without touching it.
///
/// # Errors
/// The kernel's: EPERM or ENOSYS in a sandbox.
pub fn reads_itself() -> Result<(), Errno> {
    let (zone, mut byte) = (page(77)?, 0u8);
    // SAFETY: there is room for the one byte.
    unsafe { raw::read_if_there(zone.start(), &raw mut byte, 1)? };
    if byte == 77 { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// Checks whether folded pages can be guard pages ([`Protection::with_guards`]).
///
/// # Errors
/// The kernel's.
pub fn guards() -> Result<(), Errno> {
    Protection::open()?.with_guards().map(drop)
}

/// Returns whether memory can be paged by its protection: bytes are put into inaccessible memory,
/// and shown. `true`: the kernel forces access for that (`proc_mem.force_override`). `false`: the
/// bytes are moved there, which is slower.
///
/// # Errors
/// The kernel's: ENOENT without /proc.
pub fn hides() -> Result<bool, Errno> {
    let (zone, target) = (page(77)?, page(78)?);
    let (protection, pagemap) = (Protection::open()?, Pagemap::open()?);
    let forces = protection.forces();
    let space = ProtectionSpace::new(Arc::new(protection), Arc::new(pagemap));
    let [home_page, to] = [zone.start(), target.start()];
    // SAFETY: this function owns both, and no thread touches the hidden page.
    unsafe {
        // The kernel may keep a page for a moment that another CPU has in a batch.
        let mut tries = 0;
        while space.take_by_copy(home_page, to as *mut u8, PAGE_SIZE) < PAGE_SIZE {
            tries += 1;
            if tries == TRIES {
                return Err(Errno::OPNOTSUPP);
            }
            yield_now();
        }
        space.copy(home_page, to as *const u8, PAGE_SIZE, false).map_err(|_| Errno::IO)?;
        assert!(zone.as_ptr().read() == 77, "memfold: Paging by protection has lost a byte");
    }
    Ok(forces)
}

/// Returns whether PAGEMAP_SCAN finds a populated page.
///
/// # Errors
/// The kernel's: ENOTTY before Linux 6.7, ENOENT without /proc.
pub fn scans() -> Result<(), Errno> {
    let zone = page(1)?;
    let mut is_populated = false;
    let (start, end) = (zone.start(), zone.start() + PAGE_SIZE);
    Pagemap::open()?.scan_populated(start, end, |_, _| is_populated = true)?;
    if is_populated { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// Returns whether PROCMAP_QUERY is supported. Without it, the whole map is read.
///
/// # Errors
/// The kernel's: ENOTTY before Linux 6.11.
pub fn queries_maps() -> Result<(), Errno> {
    lookup::probe()
}

/// Returns whether `process_madvise(MADV_DONTNEED)` drops pages of the process itself, many ranges
/// at once.
///
/// # Errors
/// The kernel's: EINVAL before Linux 6.13, EPERM or ENOSYS in a sandbox.
pub fn drops_batches() -> Result<(), Errno> {
    let own = pidfd_open(getpid(), PidfdFlags::empty())?;
    let zones = [page(1)?, page(2)?];
    let ranges = zones.each_ref().map(|zone| [zone.start(), PAGE_SIZE]);
    let args = [
        own.as_raw_fd() as usize,
        ranges.as_ptr() as usize,
        ranges.len(),
        libc::MADV_DONTNEED as usize,
        0,
        0,
    ];
    // SAFETY: the ranges are two zones of this function, whose bytes are not needed.
    unsafe { system_call(libc::SYS_process_madvise, args)? };
    if zones.iter().any(|zone| is_resident(zone.start())) { Err(Errno::OPNOTSUPP) } else { Ok(()) }
}

/// Returns whether the process may use Syscall User Dispatch.
pub fn dispatches() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
    // SAFETY: the call switches dispatch off, and it is off already.
    unsafe { system_call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0]) }.is_ok()
}

/// Returns whether pages can be writable and executable at one time, as pages of code are while they
/// are patched.
///
/// # Errors
/// EACCES: MDWE or SELinux forbids it. EPERM: a seccomp filter does.
pub fn patches() -> Result<(), Errno> {
    let zone = page(1)?;
    let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let args = [zone.start(), PAGE_SIZE, access as usize, 0, 0, 0];
    // SAFETY: the page is a zone of this function, and nothing runs there.
    unsafe { system_call(libc::SYS_mprotect, args) }.map(drop)
}

/// Returns whether io_uring is available.
///
/// # Errors
/// ENOSYS or EPERM: the kernel has none, or permits none.
pub fn rings() -> Result<(), Errno> {
    has_uring()
}

/// A system call without effect.
pub struct ProbeCall {
    /// Its name.
    pub name: &'static str,
    number: i64,
    args: [usize; 6],
}

/// A number that no descriptor has.
const NONE: usize = usize::MAX;

/// Calls of memfold that sandboxes refuse. Their arguments make each fail, or do nothing, if it
/// reaches the kernel.
pub const CALLS: &[ProbeCall] = &[
    // Flags that don't exist, beside those that need no privilege.
    ProbeCall {
        name: "userfaultfd",
        number: libc::SYS_userfaultfd,
        args: [0x4000_0001, 0, 0, 0, 0, 0],
    },
    ProbeCall {
        name: "process_madvise",
        number: libc::SYS_process_madvise,
        args: [NONE, 0, 0, 0, 0, 0],
    },
    ProbeCall {
        name: "pidfd_open",
        number: libc::SYS_pidfd_open,
        args: [0, 0x4000_0000, 0, 0, 0, 0],
    },
    ProbeCall { name: "pidfd_getfd", number: libc::SYS_pidfd_getfd, args: [NONE, 0, 0, 0, 0, 0] },
    ProbeCall { name: "membarrier", number: libc::SYS_membarrier, args: [0; 6] },
    ProbeCall {
        name: "prctl",
        number: libc::SYS_prctl,
        args: [libc::PR_GET_DUMPABLE as usize, 0, 0, 0, 0, 0],
    },
    ProbeCall { name: "ioctl", number: libc::SYS_ioctl, args: [NONE, 0, 0, 0, 0, 0] },
    ProbeCall { name: "memfd_create", number: libc::SYS_memfd_create, args: [0; 6] },
    ProbeCall { name: "io_uring_setup", number: libc::SYS_io_uring_setup, args: [0; 6] },
];

impl ProbeCall {
    /// Returns the error with which a sandbox, or a kernel that lacks it, refuses the call.
    pub fn refusal(&self) -> Option<Errno> {
        // SAFETY: no argument is an address.
        let result = unsafe { system_call(self.number, self.args) };
        result.err().filter(|e| matches!(*e, Errno::PERM | Errno::ACCESS | Errno::NOSYS))
    }
}

/// The call that makes an io_uring.
pub const RING: &str = "io_uring_setup";

/// Returns calls that a sandbox may answer by killing: those of [`CALLS`], two that differ by their
/// arguments or are made only by some runs, and one that may also be refused.
fn deadly() -> impl Iterator<Item = (&'static str, i64, [usize; 6])> {
    const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
    let own = getpid().as_raw_nonzero().get() as usize;
    let more = [
        // This switches dispatch off, and it is off already.
        (
            "prctl(PR_SET_SYSCALL_USER_DISPATCH)",
            libc::SYS_prctl,
            [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0],
        ),
        ("process_vm_readv", libc::SYS_process_vm_readv, [own, 0, 0, 0, 0, 0]),
        ("unshare", libc::SYS_unshare, [libc::CLONE_VM as usize, 0, 0, 0, 0, 0]),
    ];
    CALLS.iter().map(|call| (call.name, call.number, call.args)).chain(more)
}

/// Returns the names of the calls that end the process which makes them. A seccomp filter
/// (`Seccomp: 2` in /proc/self/status) can do that; without one no call is tried. A child makes the
/// calls, and another child continues after each call that has killed one.
pub fn killing_calls() -> Vec<&'static str> {
    let mut deadly_calls = Vec::new();
    let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize;
    let page = [0, PAGE_SIZE, (libc::PROT_READ | libc::PROT_WRITE) as usize, flags, NONE, 0];
    // SAFETY: the page is new, and both processes access it only as an atomic.
    let Ok(at) = (unsafe { system_call(libc::SYS_mmap, page) }) else { return deadly_calls };
    // SAFETY: the page is mapped until the end of this function.
    let mark = unsafe { &*(at as *const AtomicU32) };
    let calls: Vec<_> = deadly().collect();
    while (mark.load(SeqCst) as usize) < calls.len() {
        // SAFETY: the child shares only the page with this process, and makes only system calls. It
        // needs no lock that another thread of this process may have held.
        match unsafe { system_call(libc::SYS_clone, [0; 6]) } {
            // SAFETY: this is the child, which ends there.
            Ok(0) => unsafe { make(&calls, mark) },
            Ok(child) if is_killed(child) => {
                // A child may end before the first call.
                let Some(last) = (mark.load(SeqCst) as usize).checked_sub(1) else { break };
                deadly_calls.push(calls[last].0);
            }
            _ => break,
        }
    }
    // SAFETY: the page is not used any more.
    let _ = unsafe { system_call(libc::SYS_munmap, [at as usize, PAGE_SIZE, 0, 0, 0, 0]) };
    deadly_calls
}

/// Makes those calls that are not made yet, and ends the process without a core dump.
///
/// # Safety
/// - The process is a child for this purpose only.
unsafe fn make(calls: &[(&str, i64, [usize; 6])], made: &AtomicU32) -> ! {
    let limit = [0u64; 2];
    let limit = [0, libc::RLIMIT_CORE as usize, limit.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the first call sets a limit; no argument of the next calls is an address.
    unsafe {
        let _ = system_call(libc::SYS_prlimit64, limit);
        while let Some((_, number, args)) = calls.get(made.fetch_add(1, SeqCst) as usize) {
            let _ = system_call(*number, *args);
        }
        loop {
            let _ = system_call(libc::SYS_exit_group, [0; 6]);
        }
    }
}

/// Waits for the end of a child, and returns whether a signal ended it.
fn is_killed(child: i64) -> bool {
    let mut status = 0i32;
    let wait = [child as usize, &raw mut status as usize, libc::__WALL as usize, 0, 0, 0];
    // SAFETY: there is room for the status.
    while unsafe { system_call(libc::SYS_wait4, wait) } == Err(Errno::INTR) {}
    libc::WIFSIGNALED(status)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn each_try_is_answered_and_leaves_nothing_behind() {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let _alone = crate::FORKS.lock();
        assert!(moves().is_ok() && scans().is_ok() && populates(), "the engine needs them");
        assert!(hides().is_ok());
        for probe in [queries_maps, drops_batches, reads_itself, rings] {
            let answer = probe();
            let known = [Errno::PERM, Errno::NOSYS, Errno::INVAL, Errno::NOTTY];
            assert!(answer.is_ok() || answer.is_err_and(|e| known.contains(&e)), "{answer:?}");
        }
        // Other tests open descriptors meanwhile, but none leaves hundreds open.
        let before = descriptors();
        for _ in 0..500 {
            CALLS.iter().for_each(|call| {
                call.refusal();
            });
        }
        assert!(descriptors() < before + 200);
    }
}
