//! The owner of the program's memory, as the gate sees it.
use memfold_os::Errno;
use memfold_os::raw::system_call;

/// A range of the program's memory that a call names.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NamedSpan {
    /// First address.
    pub start: usize,
    /// Bytes.
    pub len: usize,
    /// The kernel writes there.
    pub write: bool,
}

impl NamedSpan {
    /// Returns the range unless it is empty or reaches past the end of the address space.
    pub fn new(start: usize, len: usize, write: bool) -> Option<NamedSpan> {
        (len > 0 && start.checked_add(len).is_some()).then_some(NamedSpan { start, len, write })
    }
}

/// A walk over the ranges that a call names: it calls its argument with each. There may be a
/// million.
pub type Names<'a> = &'a dyn Fn(&mut dyn FnMut(NamedSpan));

/// There is no memory to note what a call holds, so the call fails with ENOMEM.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoHoldRoom;

/// Nothing is mapped at an address, or it may not be written to.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BadAddress;

/// A fault of the program's, or of a touch by the gate.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeeperFault {
    /// The address that was touched.
    pub address: usize,
    /// It was a write.
    pub write: bool,
    /// The page is resident and write-protected.
    pub protected: bool,
}

/// The number of a hold of [`Keeper::hold`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KeeperHold(pub u32);

/// The thing that is about to end.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The program: it executes another one.
    Exec,
    /// The program does not end after all: `execve` has failed.
    ExecFailed,
    /// The calling thread.
    Thread,
    /// The process.
    Process,
}

/// A request of the program's that is refused, or after which it isn't managed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum RefusedCall {
    /// A system call by `int 0x80` fails with ENOSYS.
    Int80,
    /// A task has asked to be traced by its parent. It isn't managed from now on.
    Traced,
    /// A thread has asked for SECCOMP_MODE_STRICT. The process isn't managed from now on, and its
    /// last thread doesn't end it.
    Strict,
    /// A thread has asked for a filter that refuses calls which the keeper needs. The process isn't
    /// managed from now on, and its last thread doesn't end it.
    Filter,
    /// The kernel, or a filter, refuses a new thread or process its dispatch. The task ends.
    Task(Errno),
}

/// The owner of the program's memory.
pub trait Keeper: Sync {
    /// Whether `[start, start + len)` may hold managed memory. It is asked for each call that names
    /// memory, so it takes no lock and only a few loads. It may be wrong in one way: `true` for
    /// other memory.
    fn concerns(&self, start: usize, len: usize) -> bool;

    /// Makes the managed part of the ranges resident, and keeps it so until [`Keeper::release`].
    /// `names` is called once. Returns `None` if no range is managed. Calls `touch` (address, to
    /// write) for each page, with no lock held. An error of it is ignored: the kernel will fail
    /// with EFAULT itself. `thread` is the number of the calling thread. Living threads have
    /// different ones.
    ///
    /// # Errors
    /// Nothing is held.
    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<KeeperHold>, NoHoldRoom>;

    /// Ends a hold.
    fn release(&self, hold: KeeperHold);

    /// The most bytes that one piece of a call in pieces should name.
    fn piece_bytes(&self) -> usize;

    /// A call, by number and name, has failed with EFAULT though all that its row names was held.
    /// `words` are its arguments and the first words of what it names. If one leads to managed
    /// memory that is folded, the table lacks something.
    fn refused(&self, nr: usize, name: &str, words: &[usize]);

    /// Makes a call that changes mappings or gives memory up, and returns its result. The keeper
    /// calls `make` at most once, with these arguments or others.
    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize;

    /// The process is about to be copied. Until [`Keeper::end_copy`] the keeper's state doesn't
    /// change.
    fn begin_copy(&self);

    /// The process was copied. `made` is 0 in the child, where the gate runs again by then. Any
    /// thread calls it in the parent, and the only one in the child.
    fn end_copy(&self, made: isize);

    /// Whether a copy may wait for a thread of the program, so that another thread has the locks
    /// meanwhile.
    fn waits_in_copy(&self) -> bool {
        false
    }

    /// Whether the memory has been copied since [`Keeper::begin_copy`]. Asked by the thread of
    /// [`Keeper::server`] while another makes the copy.
    fn is_copied(&self) -> bool {
        false
    }

    /// Whether folded memory may be mapped without access, so that a touch is a SIGSEGV
    /// (SEGV_ACCERR).
    fn hides(&self) -> bool {
        false
    }

    /// Serves a fault: SIGBUS with BUS_ADRERR, or the SIGSEGV of [`Keeper::hides`]. `true`: the
    /// page is resident, and writable if the fault was a write.
    fn fault(&self, fault: KeeperFault) -> bool;

    /// A call follows after which the keeper may not be able to begin. The process is about to
    /// share its memory with another task, not counting a child of vfork, or to give up a right. A
    /// keeper that has begun, or never will, does nothing.
    fn last_chance(&self) {}

    /// The calling thread may have given up users, groups or capabilities.
    fn give_up_rights(&self) {}

    /// The calling thread is about to set a filter of system calls. A filter may kill any thread,
    /// so a thread may end without a call.
    fn filtered(&self) {}

    /// The calls that the keeper makes in threads of the program, with their second arguments.
    fn calls(&self) -> &'static [(i64, usize)] {
        &[]
    }

    /// The process is about to have a child that shares its memory. [`crate::child`] tells the
    /// child's calls from the process's own.
    fn has_child(&self) {}

    /// A child that shares the memory has ended, or executes another program. [`crate::child`] has
    /// returned this number for it. The parent calls it.
    fn has_no_child(&self, _number: usize) {}

    /// Returns a function that has a thread of the keeper's call [`crate::serve_errands`]. `None`:
    /// there is no such thread.
    fn server(&self) -> Option<fn()> {
        None
    }

    /// Memory that must never be folded: stacks of threads, their TLS, robust lists, alternate
    /// stacks, as they become known.
    fn never_fold(&self, start: usize, len: usize);

    /// Whether a descriptor is the engine's own.
    fn owns_descriptor(&self, fd: i32) -> bool;

    /// Makes a call of the program's only thread that the kernel may refuse (EINVAL, EUSERS) to a
    /// process of several threads. The keeper calls `make`, and once more while it has no threads
    /// of its own.
    fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        make()
    }

    /// Returns a limit of this process (soft, hard), and sets it if there is a new one.
    ///
    /// # Errors
    /// As `prlimit`.
    fn limit(&self, resource: u32, new: Option<[u64; 2]>) -> Result<[u64; 2], Errno> {
        let (mut before, new) = ([0u64; 2], new.as_ref().map_or(0, |new| &raw const *new as usize));
        let args = [0, resource as usize, new, &raw mut before as usize, 0, 0];
        // SAFETY: both are there.
        unsafe { system_call(libc::SYS_prlimit64, args) }.map(|_| before)
    }

    /// The keeper's own threads in this process.
    fn threads(&self) -> usize {
        0
    }

    /// Whether the thread with this number is one of the keeper's own.
    fn owns_thread(&self, _number: u32) -> bool {
        false
    }

    /// Reports what was refused, as the program may not know why.
    fn tells(&self, _what: RefusedCall) {}

    /// Makes `execve` or `execveat` by `make`, with these arguments or others. Returns the result
    /// of the last try, which has failed.
    fn execute(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        make(args)
    }

    /// Stops all eviction, because the process is about to end. What is resident stays so, and what
    /// is touched from now on. `false`: the process goes on, and eviction with it.
    fn keep_all(&self, _keep: bool) {}

    /// Makes all memory resident for good, so that no access raises a signal: the caller is about
    /// to be traced. Returns `false` if that isn't possible. Then nothing has changed. With `keep`
    /// false, memory may be folded again.
    fn keep_home(&self, _keep: bool) -> bool {
        true
    }

    /// A thread, the process or the program is about to end.
    fn ends(&self, how: Ending);
}
