//! What works here: each thing is tried, on memory and descriptors made for it, and the kernel's
//! answer is given as it is.
use crate::Errno;
use crate::maps::lookup;
use crate::maps::pagemap::Pagemap;
use crate::memory::zone::Zone;
use crate::protection::{Protection, ProtectionSpace};
use crate::raw::{self, is_resident, system_call};
use crate::transfer::uring::has_uring;
use crate::uffd::space::Space;
use crate::uffd::{OpenError, Uffd, feature};
use crate::units::PAGE_SIZE;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use rustix::fd::AsRawFd;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

/// A zone of one page, written to.
fn page(byte: u8) -> Result<Zone, Errno> {
    let zone = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
    // SAFETY: inside the zone, which nobody else knows of.
    unsafe { zone.as_ptr().write(byte) };
    Ok(zone)
}

/// Whether UFFDIO_MOVE takes a page from one address to another.
///
/// # Errors
/// No userfaultfd, or what the kernel says: EINVAL before Linux 6.8.
pub fn moves() -> Result<(), OpenError> {
    let uffd = Uffd::open(feature::MOVE, true)?;
    let (from, to) = (
        page(77).map_err(OpenError::Other)?,
        Zone::reserve(PAGE_SIZE, PAGE_SIZE).map_err(OpenError::Other)?,
    );
    // SAFETY: both are ours; `to` is touched only when the page is there.
    unsafe {
        uffd.register(to.start(), PAGE_SIZE, false).map_err(OpenError::Other)?;
        let moved = uffd.move_pages(to.start(), from.start(), PAGE_SIZE, true);
        moved.map_err(|partial| OpenError::Other(partial.errno))?;
        assert!(to.as_ptr().read() == 77, "memfold: UFFDIO_MOVE has lost a byte");
    }
    Ok(())
}

/// Whether pages can be made present.
pub fn populates() -> bool {
    page(1).is_ok_and(|zone| raw::populates(zone.start(), true))
}

/// Whether memory of the process can be read without touching it.
///
/// # Errors
/// What the kernel says: EPERM or ENOSYS in a sandbox.
pub fn reads_itself() -> Result<(), Errno> {
    let (zone, mut byte) = (page(77)?, 0u8);
    // SAFETY: there is room for the one byte.
    unsafe { raw::read_if_there(zone.start(), &raw mut byte, 1)? };
    if byte == 77 { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// Whether memory can be paged by its protection: bytes put where there is no access, and shown. Returns
/// whether the kernel forces access for that (`proc_mem.force_override`); else they are moved there,
/// which is slower.
///
/// # Errors
/// What the kernel says: ENOENT without /proc.
pub fn hides() -> Result<bool, Errno> {
    let (zone, shown) = (page(77)?, page(78)?);
    let (protection, pagemap) = (Protection::open()?, Pagemap::open()?);
    let forces = protection.forces();
    let space = ProtectionSpace::new(Arc::new(protection), Arc::new(pagemap));
    let [home, to] = [zone.start(), shown.start()];
    // SAFETY: both are ours, and nobody touches what is hidden.
    unsafe {
        if space.take_by_copy(home, to as *mut u8, PAGE_SIZE) < PAGE_SIZE {
            return Err(Errno::OPNOTSUPP);
        }
        space.copy(home, to as *const u8, PAGE_SIZE, false).map_err(|_| Errno::IO)?;
        assert!(zone.as_ptr().read() == 77, "memfold: Paging by protection has lost a byte");
    }
    Ok(forces)
}

/// Whether PAGEMAP_SCAN finds a page that is there.
///
/// # Errors
/// What the kernel says: ENOTTY before Linux 6.7, ENOENT without /proc.
pub fn scans() -> Result<(), Errno> {
    let zone = page(1)?;
    let mut found = false;
    let (start, end) = (zone.start(), zone.start() + PAGE_SIZE);
    Pagemap::open()?.scan_populated(start, end, |_, _| found = true)?;
    if found { Ok(()) } else { Err(Errno::OPNOTSUPP) }
}

/// Whether PROCMAP_QUERY is there; without, the whole map is read.
///
/// # Errors
/// What the kernel says: ENOTTY before Linux 6.11.
pub fn queries_maps() -> Result<(), Errno> {
    lookup::probe()
}

/// Whether `process_madvise(MADV_DONTNEED)` drops pages of the process itself, many ranges at once.
///
/// # Errors
/// What the kernel says: EINVAL before Linux 6.13, EPERM or ENOSYS in a sandbox.
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
    // SAFETY: the ranges are two zones of ours, which hold nothing that is wanted.
    unsafe { system_call(libc::SYS_process_madvise, args)? };
    if zones.iter().any(|zone| is_resident(zone.start())) { Err(Errno::OPNOTSUPP) } else { Ok(()) }
}

/// Whether the process may ask for Syscall User Dispatch.
pub fn dispatches() -> bool {
    const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
    // SAFETY: what is off is switched off.
    unsafe { system_call(libc::SYS_prctl, [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0]) }.is_ok()
}

/// Whether an io_uring can be had.
///
/// # Errors
/// ENOSYS or EPERM: the kernel has none, or not for us.
pub fn rings() -> Result<(), Errno> {
    has_uring()
}

/// A system call that is asked for nothing.
pub struct ProbeCall {
    /// Its name.
    pub name: &'static str,
    number: i64,
    args: [usize; 6],
}

/// No descriptor has it.
const NONE: usize = usize::MAX;

/// The calls that sandboxes refuse and that memfold makes, with arguments by which each fails, or
/// does nothing, if it gets as far as the kernel.
pub const CALLS: &[ProbeCall] = &[
    // Flags that don't exist, beside those for which nobody asks for a privilege.
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
    /// The error with which a sandbox, or a kernel that lacks it, keeps the call from us.
    pub fn refusal(&self) -> Option<Errno> {
        // SAFETY: no argument is the address of anything.
        let result = unsafe { system_call(self.number, self.args) };
        result.err().filter(|e| matches!(*e, Errno::PERM | Errno::ACCESS | Errno::NOSYS))
    }
}

/// The call that asks for an io_uring.
pub const RING: &str = "io_uring_setup";

/// Calls that a sandbox may answer by killing: those of [`CALLS`], and two that are told apart by
/// their arguments or made only by some runs.
fn deadly() -> impl Iterator<Item = (&'static str, i64, [usize; 6])> {
    const PR_SET_SYSCALL_USER_DISPATCH: usize = 59;
    let own = getpid().as_raw_nonzero().get() as usize;
    let more = [
        // What is off is switched off.
        (
            "prctl(PR_SET_SYSCALL_USER_DISPATCH)",
            libc::SYS_prctl,
            [PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0, 0],
        ),
        ("process_vm_readv", libc::SYS_process_vm_readv, [own, 0, 0, 0, 0, 0]),
    ];
    CALLS.iter().map(|call| (call.name, call.number, call.args)).chain(more)
}

/// The calls, by name, that end the process which makes them. A seccomp filter (`Seccomp: 2` in
/// /proc/self/status) can do that; without one there is nothing to ask. A child makes them, and
/// another goes on behind each that has killed one.
///
/// # Safety
/// - The calling process has one thread.
pub unsafe fn killing_calls() -> Vec<&'static str> {
    let mut killing = Vec::new();
    let flags = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize;
    let page = [0, PAGE_SIZE, (libc::PROT_READ | libc::PROT_WRITE) as usize, flags, NONE, 0];
    // SAFETY: a new page, which both sides only see as an atomic.
    let Ok(at) = (unsafe { system_call(libc::SYS_mmap, page) }) else { return killing };
    // SAFETY: it is there until the end of this function.
    let made = unsafe { &*(at as *const AtomicU32) };
    let calls: Vec<_> = deadly().collect();
    while (made.load(SeqCst) as usize) < calls.len() {
        // SAFETY: the child shares nothing but the page with us, and makes only system calls.
        match unsafe { system_call(libc::SYS_clone, [0; 6]) } {
            // SAFETY: this is the child, which ends there.
            Ok(0) => unsafe { make(&calls, made) },
            Ok(child) if is_killed(child) => {
                // It may end before the first.
                let Some(last) = (made.load(SeqCst) as usize).checked_sub(1) else { break };
                killing.push(calls[last].0);
            }
            _ => break,
        }
    }
    // SAFETY: nobody has the page any more.
    let _ = unsafe { system_call(libc::SYS_munmap, [at as usize, PAGE_SIZE, 0, 0, 0, 0]) };
    killing
}

/// Makes those calls that are not made yet, and ends the process without a core dump.
///
/// # Safety
/// - The process is a child for nothing else.
unsafe fn make(calls: &[(&str, i64, [usize; 6])], made: &AtomicU32) -> ! {
    let limit = [0u64; 2];
    let limit = [0, libc::RLIMIT_CORE as usize, limit.as_ptr() as usize, 0, 0, 0];
    // SAFETY: it is a limit; of what is called next no argument is the address of anything.
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

/// Waits for the end of a child; whether a signal ended it.
fn is_killed(child: i64) -> bool {
    let mut status = 0i32;
    let wait = [child as usize, &raw mut status as usize, libc::__WALL as usize, 0, 0, 0];
    // SAFETY: there is room for the status.
    while unsafe { system_call(libc::SYS_wait4, wait) } == Err(Errno::INTR) {}
    libc::WIFSIGNALED(status)
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_tried_is_answered_and_nothing_is_left_behind() {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let _alone = crate::FORKS.lock();
        assert!(moves().is_ok() && scans().is_ok() && populates(), "the engine needs them");
        assert!(hides().is_ok());
        for probe in [queries_maps, drops_batches, reads_itself, rings] {
            let answer = probe();
            let known = [Errno::PERM, Errno::NOSYS, Errno::INVAL, Errno::NOTTY];
            assert!(answer.is_ok() || answer.is_err_and(|e| known.contains(&e)), "{answer:?}");
        }
        // Other tests open descriptors meanwhile, but none leaves hundreds.
        let before = descriptors();
        for _ in 0..500 {
            CALLS.iter().for_each(|call| {
                call.refusal();
            });
        }
        assert!(descriptors() < before + 200);
    }
}
