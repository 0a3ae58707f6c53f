//! How the kernel tells of touches of what is away: by a userfaultfd, or, where none can be had, by
//! the protection of memory (`memfold_os::protection`).
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::ops::Range;
use memfold::config::Config;
use memfold_os::Errno;
use memfold_os::maps::pagemap::{PAGEMAP_SCAN, Pagemap};
use memfold_os::protection::{Protection, ProtectionSpace};
use memfold_os::uffd::space::{Space, UffdSpace};
use memfold_os::uffd::{REQUESTS, Uffd, feature};
use memfold_os::units::PAGE_SIZE;
use rustix::fd::OwnedFd;

const WAIT: usize = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
const WAKE: usize = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;

const BY_USERFAULT: [(i64, usize); 11] = [
    (libc::SYS_futex, WAIT),
    (libc::SYS_futex, WAKE),
    (libc::SYS_sched_yield, 0),
    (libc::SYS_clock_gettime, 0),
    (libc::SYS_pread64, 0),
    (libc::SYS_madvise, 0),
    (libc::SYS_ioctl, REQUESTS[0] as usize),
    (libc::SYS_ioctl, REQUESTS[1] as usize),
    (libc::SYS_ioctl, REQUESTS[2] as usize),
    (libc::SYS_ioctl, REQUESTS[3] as usize),
    (libc::SYS_ioctl, PAGEMAP_SCAN as usize),
];

const BY_PROTECTION: [(i64, usize); 9] = [
    (libc::SYS_futex, WAIT),
    (libc::SYS_futex, WAKE),
    (libc::SYS_sched_yield, 0),
    (libc::SYS_clock_gettime, 0),
    (libc::SYS_pread64, 0),
    (libc::SYS_pwrite64, 0),
    (libc::SYS_mprotect, 0),
    (libc::SYS_madvise, 0),
    (libc::SYS_ioctl, PAGEMAP_SCAN as usize),
];

/// See the module.
pub enum Paging {
    /// Missing pages of what is registered raise SIGBUS.
    Userfault(Arc<Uffd>),
    /// What is away is hidden: a touch raises SIGSEGV.
    Protection(Arc<Protection>),
}

impl Paging {
    /// Opens what the settings ask for, under a number from `least` on.
    ///
    /// # Errors
    /// Why it can't be had.
    pub fn open(config: &Config, least: i32) -> Result<Paging, String> {
        let number = |e: Errno| format!("Numbering a descriptor failed: {e}");
        if config.by_protection {
            let protection = Protection::open().map_err(|e| format!("/proc/self/mem: {e}"))?;
            return Ok(Paging::Protection(Arc::new(protection.at_least(least).map_err(number)?)));
        }
        let moves = if config.use_move { feature::MOVE } else { 0 };
        let uffd = Uffd::open(feature::GATE | moves, true).map_err(|e| format!("{e}"))?;
        Ok(Paging::Userfault(Arc::new(uffd.at_least(least).map_err(number)?)))
    }

    /// Its descriptor.
    pub fn fd(&self) -> &OwnedFd {
        match self {
            Paging::Userfault(uffd) => uffd.fd(),
            Paging::Protection(protection) => protection.fd(),
        }
    }

    /// The address space as the engine changes it.
    pub fn space(&self, pagemap: &Arc<Pagemap>) -> Box<dyn Space> {
        match self {
            Paging::Userfault(uffd) => {
                Box::new(UffdSpace::with_free(uffd.clone(), pagemap.clone()))
            }
            Paging::Protection(protection) => {
                Box::new(ProtectionSpace::new(protection.clone(), pagemap.clone()))
            }
        }
    }

    /// Registers the engine's frames, which it never touches while they are empty.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn register_frames(&self, start: usize, len: usize) -> Result<(), Errno> {
        match self {
            // SAFETY: as said.
            Paging::Userfault(uffd) => unsafe { uffd.register(start, len, false) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// In a child of fork, where `range` of the parent's is to go on being told of: what was hidden
    /// there is so in the child.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn register_in_child(&self, range: &Range<usize>, protects: bool) -> Result<(), Errno> {
        match self {
            // SAFETY: faults are served from now on, and this is the only thread.
            Paging::Userfault(uffd) => unsafe { uffd.register(range.start, range.len(), protects) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// What is missing of a range of the program's is told of no more: all of it is there, or new.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn unregister(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(uffd) => uffd.unregister(range.start, range.len()),
            Paging::Protection(protection) => {
                protection.show(range);
                Ok(())
            }
        }
    }

    /// Where memory is hidden: does so with all of `range`, which holds nothing of the program's, or
    /// is about to move.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn hide(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(_) => Ok(()),
            Paging::Protection(protection) => protection.hide(range),
        }
    }

    /// The system calls that are made in threads of the program, with their second arguments.
    pub fn calls(&self) -> &'static [(i64, usize)] {
        match self {
            Paging::Userfault(_) => &BY_USERFAULT,
            Paging::Protection(_) => &BY_PROTECTION,
        }
    }

    /// Whether memory is hidden.
    pub fn hides(&self) -> bool {
        matches!(self, Paging::Protection(_))
    }

    /// Puts a page of zeros where one is missing that is registered and not managed. `false`: it
    /// wasn't missing, or isn't registered.
    pub fn fills(&self, page: usize) -> bool {
        match self {
            // SAFETY: where something is registered and not managed, a missing page is a new one.
            Paging::Userfault(uffd) => unsafe { uffd.zero(page, PAGE_SIZE) }.is_ok(),
            Paging::Protection(_) => false,
        }
    }

    /// In a child of fork: opens its own in place of its parent's.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn reopen(&self) -> Result<(), String> {
        match self {
            Paging::Userfault(uffd) => uffd.reopen().map_err(|e| format!("{e}")),
            Paging::Protection(protection) => {
                protection.reopen().map_err(|e| format!("/proc/self/mem: {e}"))
            }
        }
    }
}
