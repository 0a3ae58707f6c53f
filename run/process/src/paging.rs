//! How the kernel reports touches of folded pages: by a userfaultfd, or by the protection of memory
//! if there is none (`memfold_os::protection`).
//!
//! Memory that mremap moves stays registered, because the userfaultfd has UFFD_FEATURE_EVENT_REMAP.
//! For that, the kernel lets the thread in mremap wait until its message has been read. An engine
//! thread reads these messages. It takes no lock, because the waiting thread may hold all of them.
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use core::ops::Range;
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use memfold_engine::config::{Config, PagingKind};
use memfold_engine::delivery::background::EngineThread;
use memfold_gate::KeeperCall;
use memfold_os::Errno;
use memfold_os::maps::pagemap::{PAGEMAP_SCAN, Pagemap};
use memfold_os::protection::{Protection, ProtectionSpace};
use memfold_os::thread::bare;
use memfold_os::uffd::space::{Space, UffdSpace};
use memfold_os::uffd::{REQUESTS, Uffd, feature};
use memfold_os::units::PAGE_SIZE;
use rustix::fd::OwnedFd;

const WAIT: usize = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
const WAKE: usize = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;

/// Calls in threads of the program, whatever the kind of paging.
const BY_BOTH: [KeeperCall; 8] = [
    KeeperCall::needed(libc::SYS_futex, [0, WAIT, 0, 0]),
    KeeperCall::needed(libc::SYS_futex, [0, WAKE, 0, 0]),
    KeeperCall::needed(libc::SYS_sched_yield, [0; 4]),
    KeeperCall::needed(libc::SYS_clock_gettime, [0; 4]),
    KeeperCall::needed(libc::SYS_pread64, [0; 4]),
    KeeperCall::needed(libc::SYS_madvise, [0, 0, libc::MADV_DONTNEED as usize, 0]),
    KeeperCall::needed(libc::SYS_madvise, [0, 0, libc::MADV_POPULATE_WRITE as usize, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, PAGEMAP_SCAN as usize, 0, 0]),
];

const BY_USERFAULT: [KeeperCall; 4] = [
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[0] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[1] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[2] as usize, 0, 0]),
    KeeperCall::needed(libc::SYS_ioctl, [0, REQUESTS[3] as usize, 0, 0]),
];

const BY_PROTECTION: [KeeperCall; 2] = [
    KeeperCall::needed(libc::SYS_pwrite64, [0; 4]),
    KeeperCall::needed(libc::SYS_mprotect, [0; 4]),
];

const NEW: usize = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
const ACCESS: usize = (libc::PROT_READ | libc::PROT_WRITE) as usize;

/// Further calls of the engine's own threads, which have no handler of SIGSYS.
const BY_ENGINE_THREADS: [KeeperCall; 30] = [
    KeeperCall::needed(libc::SYS_mmap, [0, PAGE_SIZE, ACCESS, NEW]),
    KeeperCall::needed(libc::SYS_munmap, [0; 4]),
    KeeperCall::needed(libc::SYS_mprotect, [0; 4]),
    KeeperCall::needed(libc::SYS_exit, [0; 4]),
    KeeperCall::needed(libc::SYS_clone, [ENGINE_THREAD, 0, 0, 0]),
    KeeperCall::needed(libc::SYS_tgkill, [0; 4]),
    KeeperCall::needed(libc::SYS_poll, [0; 4]),
    KeeperCall::needed(libc::SYS_read, [0; 4]),
    KeeperCall::tried(libc::SYS_process_madvise, [0; 4]),
    KeeperCall::tried(libc::SYS_prctl, [libc::PR_SET_NAME as usize, 0, 0, 0]),
    KeeperCall::tried(libc::SYS_nanosleep, [0; 4]),
    KeeperCall::tried(libc::SYS_clock_nanosleep, [0; 4]),
    KeeperCall::tried(libc::SYS_open, [0; 4]),
    KeeperCall::tried(libc::SYS_openat, [0; 4]),
    KeeperCall::tried(libc::SYS_close, [0; 4]),
    KeeperCall::tried(libc::SYS_stat, [0; 4]),
    KeeperCall::tried(libc::SYS_newfstatat, [0; 4]),
    KeeperCall::tried(libc::SYS_getpriority, [0; 4]),
    KeeperCall::tried(libc::SYS_setpriority, [0; 4]),
    KeeperCall::tried(libc::SYS_getrusage, [0; 4]),
    KeeperCall::tried(libc::SYS_mlock2, [0; 4]),
    KeeperCall::tried(libc::SYS_munlock, [0; 4]),
    KeeperCall::tried(libc::SYS_mincore, [0; 4]),
    KeeperCall::tried(libc::SYS_getpid, [0; 4]),
    KeeperCall::tried(libc::SYS_getdents64, [0; 4]),
    KeeperCall::tried(libc::SYS_rt_sigprocmask, [0; 4]),
    KeeperCall::tried(libc::SYS_timer_create, [0; 4]),
    KeeperCall::tried(libc::SYS_timer_settime, [0; 4]),
    KeeperCall::tried(libc::SYS_timer_delete, [0; 4]),
    KeeperCall::tried(libc::SYS_gettid, [0; 4]),
];

/// The flags with which an engine thread starts another one.
const ENGINE_THREAD: usize = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_FILES) as usize;

/// Calls `each` with the system calls that are made in threads of the program. With `of_all` also
/// with those of the engine's threads.
pub fn each_call(by_protection: bool, of_all: bool, each: &mut dyn FnMut(&KeeperCall)) {
    let of_kind: &[KeeperCall] = if by_protection { &BY_PROTECTION } else { &BY_USERFAULT };
    let of_engine: &[KeeperCall] = if of_all { &BY_ENGINE_THREADS } else { &[] };
    BY_BOTH.iter().chain(of_kind).chain(of_engine).for_each(each);
}

/// The name of the thread that reads messages of moves.
const READS_MOVES: &core::ffi::CStr = c"memfold-moves";

/// The address from which the last message for that thread comes.
static LAST_MOVE: AtomicUsize = AtomicUsize::new(0);

/// The means by which touches of folded pages are reported.
pub enum Paging {
    /// Missing pages of registered memory raise SIGBUS.
    Userfault(Arc<Uffd>),
    /// Folded pages are hidden, so a touch raises SIGSEGV.
    Protection(Arc<Protection>),
}

impl Paging {
    /// Opens the kind that the settings ask for. Its descriptor gets a number of at least `least`.
    ///
    /// # Errors
    /// A message that says why it is unavailable.
    pub fn open(config: &Config, least: i32) -> Result<Paging, String> {
        let number = |e: Errno| format!("Numbering a descriptor failed: {e}");
        if config.paging.hides() {
            let mut protection = Protection::open().map_err(|e| format!("/proc/self/mem: {e}"))?;
            if config.paging == PagingKind::Guard {
                let with_guards = protection.with_guards();
                protection =
                    with_guards.map_err(|e| format!("Guard pages are unavailable: {e}"))?;
            }
            return Ok(Paging::Protection(Arc::new(protection.at_least(least).map_err(number)?)));
        }
        let moves = if config.use_move { feature::MOVE } else { 0 };
        let uffd = Uffd::open(feature::GATE | moves, true).map_err(|e| format!("{e}"))?;
        Ok(Paging::Userfault(Arc::new(uffd.at_least(least).map_err(number)?)))
    }

    pub fn fd(&self) -> &OwnedFd {
        match self {
            Paging::Userfault(uffd) => uffd.fd(),
            Paging::Protection(protection) => protection.fd(),
        }
    }

    /// Returns the address space as the engine changes it.
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

    /// Returns the engine thread that reads messages of moves. There must be one before memory of the
    /// program is registered. `self` is never freed.
    pub fn reader_of_moves(&self) -> Option<EngineThread> {
        fn main(arg: usize) {
            // SAFETY: `reader_of_moves` passes the address of a `Paging` that is never freed.
            unsafe { &*(arg as *const Paging) }.read_moves();
        }
        let arg = &raw const *self as usize;
        (!self.hides()).then_some(EngineThread { name: READS_MOVES, main, arg })
    }

    /// Reads messages of moves until [`Paging::stop_reading_moves`].
    pub fn read_moves(&self) {
        let Paging::Userfault(uffd) = self else { return };
        while uffd.next_move() != LAST_MOVE.load(SeqCst) {}
    }

    /// Ends the thread that reads messages of moves, if it has been started. No other thread may
    /// move registered memory until it is started again.
    ///
    /// # Errors
    /// The errors of [`Uffd::move_own_page`].
    pub fn stop_reading_moves(&self) -> Result<(), Errno> {
        match self {
            Paging::Userfault(uffd) if bare::is_started(READS_MOVES) => {
                uffd.move_own_page(|from| LAST_MOVE.store(from, SeqCst))
            }
            _ => Ok(()),
        }
    }

    /// Registers the engine's frames, but not for write protection: a protected page that the kernel
    /// has swapped out keeps its protection when it is moved to a frame (`move_swap_pte` in
    /// `mm/userfaultfd.c`). The engine writes to frames, and nothing would serve that fault.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register_frames(&self, start: usize, len: usize) -> Result<(), Errno> {
        match self {
            // SAFETY: the engine never touches its frames while they are empty, so no fault there
            // needs handling.
            Paging::Userfault(uffd) => unsafe { uffd.register(start, len, false) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// Registers a range of the program in a child of fork. Hidden memory needs nothing, because it
    /// is hidden in the child too.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register_in_child(&self, range: &Range<usize>, protects: bool) -> Result<(), Errno> {
        match self {
            // SAFETY: faults are handled from now on, and this is the only thread.
            Paging::Userfault(uffd) => unsafe { uffd.register(range.start, range.len(), protects) },
            Paging::Protection(_) => Ok(()),
        }
    }

    /// Ends the registration of a range of the program. All of its memory must be resident or new.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unregister(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(uffd) => uffd.unregister(range.start, range.len()),
            Paging::Protection(protection) => {
                protection.show(range);
                Ok(())
            }
        }
    }

    /// Hides all of `range` if this kind hides memory. The range must hold nothing of the
    /// program's, or be about to move.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn hide(&self, range: &Range<usize>) -> Result<(), Errno> {
        match self {
            Paging::Userfault(_) => Ok(()),
            Paging::Protection(protection) => protection.hide(range),
        }
    }

    /// Returns whether hidden memory can be shown only from the start of a mapping on: see
    /// [`Protection::is_tight`].
    pub fn is_tight(&self) -> bool {
        matches!(self, Paging::Protection(protection) if protection.is_tight())
    }

    /// Returns whether memory is hidden.
    pub fn hides(&self) -> bool {
        matches!(self, Paging::Protection(_))
    }

    /// Returns whether folded pages are guard pages.
    pub fn guards(&self) -> bool {
        matches!(self, Paging::Protection(protection) if protection.guards())
    }

    /// Puts a page of zeros where a page is missing that is registered and not managed. Returns
    /// `false` if the page isn't missing or isn't registered.
    pub fn fills(&self, page: usize) -> bool {
        match self {
            // SAFETY: a missing page that is registered and not managed is a new one, so the
            // program expects zeros there.
            Paging::Userfault(uffd) => unsafe { uffd.zero(page, PAGE_SIZE) }.is_ok(),
            Paging::Protection(_) => false,
        }
    }

    /// Puts zeros where a registered page is missing, or shows a hidden page. Returns whether it
    /// succeeded.
    pub fn opens(&self, page: usize) -> bool {
        match self {
            Paging::Userfault(_) => self.fills(page),
            Paging::Protection(_) => self.unregister(&(page..page + PAGE_SIZE)).is_ok(),
        }
    }

    /// Ends the write protection of a page. Hidden memory has none.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unprotect(&self, page: usize) -> Result<(), Errno> {
        match self {
            Paging::Userfault(uffd) => uffd.protect(page, PAGE_SIZE, false),
            Paging::Protection(_) => Err(Errno::NOSYS),
        }
    }

    /// Opens a userfaultfd or a protection of its own in a child of fork, in place of the parent's.
    ///
    /// # Errors
    /// A message that says why it is unavailable.
    pub fn reopen(&self) -> Result<(), String> {
        match self {
            Paging::Userfault(uffd) => uffd.reopen().map_err(|e| format!("{e}")),
            Paging::Protection(protection) => protection.reopen().map_err(|e| match e {
                Errno::ACCESS => UNDUMPABLE.into(),
                e => format!("/proc/self/mem: {e}"),
            }),
        }
    }
}

/// Why a child of fork can't use page protection, and what to do.
const UNDUMPABLE: &str = "page protection needs /proc/self/mem, which the kernel opens only for a \
     process that may be dumped. This one has changed its user or group, or called \
     prctl(PR_SET_DUMPABLE, 0). Allow userfaultfd (see `memfold check`), or let the program call \
     prctl(PR_SET_DUMPABLE, 1) after that";
