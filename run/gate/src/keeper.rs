//! The interface to the owner of the program's memory.
use memfold_os::Errno;
use memfold_os::raw::system_call;

/// A range of the program's memory that a call names.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NamedSpan {
    /// The first address.
    pub start: usize,
    /// The length in bytes.
    pub len: usize,
    /// True if the kernel may write to the range.
    pub write: bool,
}

impl NamedSpan {
    /// Returns the range, or `None` if it is empty or reaches past the end of the address space.
    pub fn new(start: usize, len: usize, write: bool) -> Option<NamedSpan> {
        (len > 0 && start.checked_add(len).is_some()).then_some(NamedSpan { start, len, write })
    }
}

/// A walk over the ranges that a call names. It calls its argument with each range. There may be a
/// million.
pub type Names<'a> = &'a dyn Fn(&mut dyn FnMut(NamedSpan));

/// The error of a call that fails with ENOMEM, because there is no memory to note what it holds.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoHoldRoom;

/// The error of an access to an address where nothing is mapped, or which may not be written to.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BadAddress;

/// A fault of the program, or of the gate when it touches the program's memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeeperFault {
    /// The address that was touched.
    pub address: usize,
    /// True if the access was a write.
    pub write: bool,
    /// True if the page is resident and write-protected.
    pub protected: bool,
}

/// The number of a hold that [`HoldKeeper::hold`] returned.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeeperHold(pub u32);

/// A request of the program that is refused, or after which the process isn't managed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RefusedCall {
    /// A system call by `int 0x80` fails with ENOSYS.
    Int80,
    /// A task has asked to be traced by its parent. From now on it isn't managed.
    Traced,
    /// A thread has asked for SECCOMP_MODE_STRICT. From now on the process isn't managed, and the
    /// end of its last thread doesn't end it.
    Strict,
    /// A thread has asked for a filter that refuses calls which the keeper needs. From now on the
    /// process isn't managed, and the end of its last thread doesn't end it.
    Filter,
    /// The kernel or a filter refuses to arm a new thread or process. The task ends, with all
    /// threads of its process.
    Task(Errno),
}

/// The thread of the keeper that calls [`crate::serve_errands`].
#[derive(Copy, Clone)]
pub struct ErrandServer {
    /// Wakes it.
    pub ring: fn(),
    /// Returns a number that stands for the process that serves: less than 2^30, and another one
    /// for each process. 0 while that process has ended and no other serves.
    /// Follows the process through copies and `execve` to its end.
    pub life: fn() -> u32,
}

/// A call of the gate or the keeper, which a filter of the program may refuse.
#[derive(Copy, Clone, Debug)]
pub struct KeeperCall {
    /// The call's number.
    pub number: i64,
    /// Its first arguments; the others are 0.
    pub args: [usize; 4],
    /// True if the call may fail, so that the filter may refuse it with an error.
    pub may_fail: bool,
}

impl KeeperCall {
    /// Returns a call that must succeed.
    pub const fn needed(number: i64, args: [usize; 4]) -> KeeperCall {
        KeeperCall { number, args, may_fail: false }
    }

    /// Returns a call that may fail.
    pub const fn tried(number: i64, args: [usize; 4]) -> KeeperCall {
        KeeperCall { number, args, may_fail: true }
    }
}

/// Another process, on whose memory the program makes a call.
pub struct OtherProcess<'a> {
    /// The number that the program has for it, in its own PID namespace.
    pub number: u32,
    /// Reads words at an address of that process. Returns whether it has read all.
    pub read: &'a dyn Fn(usize, &mut [u64]) -> bool,
}

/// The owner of the program's memory. Each part answers for one purpose, so a keeper that has
/// nothing to do for it shares a part that does nothing.
pub struct Keeper {
    /// Holds what system calls name.
    pub holds: &'static dyn HoldKeeper,
    /// Serves faults, and changes what is mapped.
    pub pages: &'static dyn PageKeeper,
    /// Follows the process through copies and `execve` to its end.
    pub life: &'static dyn LifeKeeper,
    /// Works for children that share the memory.
    pub children: &'static dyn ChildKeeper,
    /// Is told of rights that the program gives up.
    pub rights: &'static dyn RightsKeeper,
    /// Knows the keeper's own threads.
    pub threads: &'static dyn ThreadKeeper,
}

/// What system calls name of the memory: it is held while they run.
pub trait HoldKeeper: Sync {
    /// Returns whether `[start, start + len)` may hold managed memory. The gate asks this for each
    /// call that names memory, so it takes no lock and only a few loads. It may return `true` for
    /// other memory, but never `false` for managed memory.
    fn concerns(&self, start: usize, len: usize) -> bool;

    /// Makes the managed part of the ranges resident, and keeps it so until
    /// [`HoldKeeper::release`]. Returns `None` if no range is managed. Calls `names` once. Calls
    /// `touch` (address, whether to write) for each page, with no lock held. An error of `touch` is
    /// ignored, because the kernel will fail with EFAULT itself. `thread` is the number of the
    /// calling thread. Living threads have different numbers.
    ///
    /// # Errors
    /// There is no memory to note the hold. Nothing is held then.
    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom>;

    /// Ends a hold.
    fn release(&self, hold: KeeperHold);

    /// Makes a call on `parts` of the memory of another process by `make`, and returns its result.
    /// If that memory has a keeper too which can hold it, it is held until `make` returns. `make`
    /// is given the number of bytes that are held, from the first on; 0 if none are. It is called
    /// once.
    /// `write` is whether the call writes there.
    fn lent(
        &self,
        process: OtherProcess,
        parts: &[[usize; 2]],
        write: bool,
        make: &mut dyn FnMut(usize) -> isize,
    ) -> isize;

    /// Returns the most bytes that one piece of a call should name, if the call is made in pieces.
    fn piece_bytes(&self) -> usize;

    /// Checks a call that has failed with EFAULT although all that its row names was held. `nr` and
    /// `name` are the call's number and name. `words` are its arguments and the first words of what
    /// it names. If one of them points to managed memory that is folded, the table lacks something.
    fn refused(&self, nr: usize, name: &str, words: &[usize]);
}

/// The pages of the program: which are managed, and which are resident.
pub trait PageKeeper: Sync {
    /// Returns whether folded memory may be mapped without access, so that a touch raises SIGSEGV
    /// (SEGV_ACCERR).
    fn hides(&self) -> bool;

    /// Returns whether folded pages may be guard pages, a touch of which raises SIGSEGV (SEGV_MAPERR).
    fn guards(&self) -> bool {
        false
    }

    /// Serves a fault: SIGBUS with BUS_ADRERR, or the SIGSEGV of [`PageKeeper::hides`] or [`PageKeeper::guards`]. Returns
    /// whether the page is now resident, and writable if the fault was a write.
    fn fault(&self, fault: KeeperFault) -> bool;

    /// Makes a call that changes mappings or frees memory, and returns its result. The keeper calls
    /// `make` at most once, with these arguments or others.
    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize;

    /// Excludes a range from folding for good. The gate passes the stacks of threads, their TLS,
    /// robust lists and alternate stacks when it learns of them.
    fn never_fold(&self, start: usize, len: usize);

    /// Stops all eviction if `keep` is true, because the process is about to end. Memory that is
    /// resident, or is touched from now on, stays resident. If `keep` is false, the process goes on
    /// and eviction with it.
    fn keep_all(&self, keep: bool);

    /// Makes all memory resident for good if `keep` is true, so that no access raises a signal. The
    /// caller is about to be traced. Returns `false` if that isn't possible, and then changes
    /// nothing. If `keep` is false, memory may be folded again.
    fn keep_home(&self, keep: bool) -> bool;
}

/// The life of the process: copies of it, the programs that it executes, and its end.
pub trait LifeKeeper: Sync {
    /// Notes that the process is about to be copied. It comes before [`LifeKeeper::begin_copy`],
    /// while the caller holds no lock.
    fn expect_copy(&self);

    /// Prepares for a copy of the process. From now until [`LifeKeeper::end_copy`] the keeper's
    /// state doesn't change.
    fn begin_copy(&self);

    /// Ends [`LifeKeeper::begin_copy`] after the copy. `made` is 0 in the child, where the gate
    /// works again by then. In the parent any thread may call this. In the child its only thread
    /// calls it.
    fn end_copy(&self, made: isize);

    /// Makes `execve` or `execveat` by `make`, with these arguments or others. Returns only if the
    /// call fails, with the result of the last try.
    fn execute(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize;

    /// Returns whether a descriptor is one of the engine's.
    fn owns_descriptor(&self, fd: i32) -> bool;

    /// Notes that the process is about to end.
    fn ends(&self);
}

/// Children that share the memory, as those of `vfork` do, and the thread of the keeper that works
/// for them. [`NoServer`] has no such thread.
pub trait ChildKeeper: Sync {
    /// Notes that the process is about to have a child that shares its memory. [`crate::child`]
    /// distinguishes calls of the child from those of the process.
    fn has_child(&self);

    /// Notes that a child that shares the memory has ended, or executes another program. `number`
    /// is what [`crate::child`] returned in the child. The parent calls this.
    fn has_no_child(&self, number: usize);

    /// Returns the thread that calls [`crate::serve_errands`], or `None` if there is none. If its
    /// process has ended, the calling child first takes the place of that process, or gives the
    /// keeper up.
    fn server(&self) -> Option<ErrandServer>;

    /// Returns whether a copy may have to wait for a thread of the program. Then another thread
    /// holds the locks during the copy.
    fn waits_in_copy(&self) -> bool;

    /// Returns whether the memory has been copied since [`LifeKeeper::begin_copy`]. The thread of
    /// [`ChildKeeper::server`] asks this while another thread makes the copy.
    fn is_copied(&self) -> bool;
}

/// Rights that the program gives up, and what the keeper can't do after that. [`AnyRights`] is for
/// a keeper that needs none.
pub trait RightsKeeper: Sync {
    /// Gives the keeper its last chance to begin. After the call that follows it may be unable to.
    /// The process is about to share its memory with another task, not counting a child of vfork,
    /// or to give up a right. A keeper that has begun, or never will, does nothing.
    fn last_chance(&self);

    /// Notes that the calling thread may have given up users, groups or capabilities.
    fn give_up_rights(&self);

    /// Notes that the calling thread or its child is about to be in another network namespace.
    fn leaves_network(&self);

    /// Notes that the calling thread may come to have a filter of system calls, which programs that
    /// it executes inherit.
    fn filters(&self);

    /// Notes that the calling thread is about to set a filter of system calls. A filter may kill
    /// any thread, so from now on a thread may end without a call.
    fn filtered(&self);

    /// Calls `each` with the calls that the keeper makes in threads with a filter of the program.
    /// `of_all` is whether threads of the keeper may have the filter too.
    fn each_call(&self, of_all: bool, each: &mut dyn FnMut(&KeeperCall));

    /// Returns whether [`RightsKeeper::retire`] can end the keeper's work.
    fn can_retire(&self) -> bool;

    /// Ends the keeper's work in this process for good: it folds nothing any more, and has no
    /// threads. All memory is resident, by [`PageKeeper::keep_home`]. No call passes the gate any
    /// more.
    fn retire(&self);

    /// Reports a refused request, because the program may not know the reason.
    fn tells(&self, what: RefusedCall);
}

/// The threads of the keeper in the process, and what they change for the program. [`NoThreads`] is
/// for a keeper without any.
pub trait ThreadKeeper: Sync {
    /// Returns the number of the keeper's own threads in this process.
    fn count(&self) -> usize;

    /// Returns whether the thread with this number is one of the keeper's own.
    fn owns_thread(&self, number: u32) -> bool;

    /// Handles the alarm of a thread of the keeper
    /// ([`memfold_os::thread::alarm::CpuAlarm`]). That thread calls it in its signal handler. It is
    /// called only once [`crate::takes_alarms`] returns `true`.
    fn alarm(&self);

    /// Ends alarms for good. On return no thread of the keeper has SIGSYS open, whose action is
    /// about to become the program's again.
    fn end_alarms(&self);

    /// Makes a call of the program's only thread that the kernel may refuse to a process of several
    /// threads (EINVAL, EUSERS). The keeper calls `make`. If the kernel refuses, it may call `make`
    /// once more, while it has no threads of its own.
    fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize;

    /// Returns the soft and the hard limit that this process had, and sets them to `new` if that is
    /// given.
    ///
    /// # Errors
    /// The errors of `prlimit`.
    fn limit(&self, resource: u32, new: Option<[u64; 2]>) -> Result<[u64; 2], Errno>;
}

/// A keeper that has no thread which works for children. They do the work themselves.
pub struct NoServer;

impl ChildKeeper for NoServer {
    fn has_child(&self) {}

    fn has_no_child(&self, _number: usize) {}

    fn server(&self) -> Option<ErrandServer> {
        None
    }

    fn waits_in_copy(&self) -> bool {
        false
    }

    fn is_copied(&self) -> bool {
        false
    }
}

/// A keeper that needs no right of the program. So none is missed, and it never has to retire.
pub struct AnyRights;

impl RightsKeeper for AnyRights {
    fn last_chance(&self) {}

    fn give_up_rights(&self) {}

    fn leaves_network(&self) {}

    fn filters(&self) {}

    fn filtered(&self) {}

    fn each_call(&self, _of_all: bool, _each: &mut dyn FnMut(&KeeperCall)) {}

    fn can_retire(&self) -> bool {
        false
    }

    fn retire(&self) {}

    fn tells(&self, _what: RefusedCall) {}
}

/// A keeper that has no thread in the process, and changes none of its limits.
pub struct NoThreads;

impl ThreadKeeper for NoThreads {
    fn count(&self) -> usize {
        0
    }

    fn owns_thread(&self, _number: u32) -> bool {
        false
    }

    fn alarm(&self) {}

    fn end_alarms(&self) {}

    fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        make()
    }

    fn limit(&self, resource: u32, new: Option<[u64; 2]>) -> Result<[u64; 2], Errno> {
        let (mut before, new) = ([0u64; 2], new.as_ref().map_or(0, |new| &raw const *new as usize));
        let args = [0, resource as usize, new, &raw mut before as usize, 0, 0];
        // SAFETY: `new` is 0 or the address of two words that the kernel only reads. `before` has
        // room for the two words that it writes. Both live until the call returns.
        unsafe { system_call(libc::SYS_prlimit64, args) }.map(|_| before)
    }
}
