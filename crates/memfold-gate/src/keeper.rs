//! The owner of the program's memory, as the gate sees it.
use memfold_sys::Errno;
use memfold_sys::raw::system_call;

/// A range of the program's memory that a call names.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// First address.
    pub start: usize,
    /// Bytes.
    pub len: usize,
    /// The kernel writes there.
    pub write: bool,
}

impl Span {
    /// A range that isn't empty, and doesn't reach past the end of the address space.
    pub fn new(start: usize, len: usize, write: bool) -> Option<Span> {
        (len > 0 && start.checked_add(len).is_some()).then_some(Span { start, len, write })
    }
}

/// Calls what it is given with each range that a call names. A call may name a million.
pub type Names<'a> = &'a dyn Fn(&mut dyn FnMut(Span));

/// There is no memory to note what a call holds: it can't be made (ENOMEM).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// Nothing is mapped at an address, or it may not be written to.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BadAddress;

/// A fault of the program's, or of a touch of the gate's.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What was touched.
    pub address: usize,
    /// It was a write.
    pub write: bool,
    /// The page is there, and write-protected.
    pub protected: bool,
}

/// A hold of [`Keeper::hold`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hold(pub u32);

/// What is about to end.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The program: it executes another one.
    Exec,
    /// It does not after all.
    ExecFailed,
    /// The calling thread.
    Thread,
    /// The process.
    Process,
}

/// What isn't done as the program wants it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A system call by `int 0x80`: ENOSYS.
    Int80,
    /// A task asks to be traced by its parent: it isn't managed from now on.
    Traced,
    /// A thread has asked for SECCOMP_MODE_STRICT: the process isn't managed from now on, and its last
    /// thread doesn't end it.
    Strict,
    /// A thread has asked for a filter that refuses what the keeper needs: likewise.
    Filter,
    /// A thread or a process whose dispatch the kernel, or a filter, refuses: it ends.
    Task(Errno),
}

/// The owner of the program's memory.
pub trait Keeper: Sync {
    /// Whether `[start, start + len)` may hold managed memory. Lock-free, a few loads: it is asked
    /// for each call that names memory. Never a false no.
    fn concerns(&self, start: usize, len: usize) -> bool;

    /// Keeps present what of the ranges that `names` names (called once) is managed, until
    /// [`Keeper::release`]; `None` if nothing of it is. Calls `touch` (address, to write) with no
    /// lock held for each page; an error of it is passed over, as the kernel will say EFAULT
    /// itself. `thread` is the number of the calling thread: those that live have different ones.
    ///
    /// # Errors
    /// Nothing is held.
    fn hold(
        &self,
        names: Names,
        thread: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Result<Option<Hold>, NoRoom>;

    /// Ends a hold.
    fn release(&self, hold: Hold);

    /// Most bytes that one piece of a call in pieces should name.
    fn piece_bytes(&self) -> usize;

    /// A call (its number, its name) has said EFAULT, though what it is known to name was held.
    /// `words` are those of its arguments and of what it names: one that leads to managed memory
    /// which isn't there says that the table of calls lacks something.
    fn refused(&self, nr: usize, name: &str, words: &[usize]);

    /// A call that changes mappings or gives memory up. The keeper makes it by `make`, at most
    /// once, with these arguments or others, and returns its result.
    fn change(
        &self,
        nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize;

    /// The process is about to be copied: until [`Keeper::end_copy`] what the keeper has stays as it
    /// is.
    fn begin_copy(&self);

    /// It was copied; `made` is 0 in the child, where the gate runs again by then. Called by any thread
    /// in the parent, and by the only one in the child.
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

    /// Whether memory that is away may be mapped without access, so that a touch is a SIGSEGV
    /// (SEGV_ACCERR).
    fn hides(&self) -> bool {
        false
    }

    /// A fault (SIGBUS, BUS_ADRERR, or as [`Keeper::hides`] says). `true`: the page is there, and may
    /// be written to if it was a write.
    fn fault(&self, fault: Fault) -> bool;

    /// A call comes after which the keeper may not be able to begin any more: the process is about to
    /// share its memory with another task (but for a child of vfork), or to give up a right. One
    /// that has begun, or never will, has nothing to do.
    fn last_chance(&self) {}

    /// The calling thread may have given up users, groups or capabilities.
    fn give_up_rights(&self) {}

    /// The calling thread is about to set a filter of system calls, by which any thread may be killed: no
    /// call tells of its end.
    fn filtered(&self) {}

    /// Calls that the keeper makes in threads of the program, with their second arguments.
    fn calls(&self) -> &'static [(i64, usize)] {
        &[]
    }

    /// The process is about to have a child that shares its memory: [`crate::child`] tells its calls.
    fn has_child(&self) {}

    /// A child that shares the memory is gone, or executes another program: [`crate::child`] has told
    /// this number. Called by its parent.
    fn has_no_child(&self, _number: usize) {}

    /// What tells a thread of the keeper's to call [`crate::serve_errands`]; `None`: there is none.
    fn server(&self) -> Option<fn()> {
        None
    }

    /// Memory that must never be folded: stacks of threads, their TLS, robust lists, alternate
    /// stacks, as they become known.
    fn never_fold(&self, start: usize, len: usize);

    /// Whether a descriptor is the engine's own.
    fn owns_descriptor(&self, fd: i32) -> bool;

    /// A call that the kernel may refuse (EINVAL, EUSERS) to a process of several threads, by the
    /// only one of the program's. The keeper makes it by `make`, and once more without threads of its
    /// own.
    fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        make()
    }

    /// Asks for a limit of this process (soft, hard), and sets it. Returns what it was.
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

    /// Whether the thread with this number is one of them.
    fn owns_thread(&self, _number: u32) -> bool {
        false
    }

    /// Something was refused, and the program may not know why.
    fn tells(&self, _what: Refused) {}

    /// `execve` or `execveat`. The keeper makes it by `make`, with these arguments or others, and
    /// returns the result of the last try: it has failed.
    fn execute(
        &self,
        _nr: usize,
        args: &[usize; 6],
        make: &mut dyn FnMut(&[usize; 6]) -> isize,
    ) -> isize {
        make(args)
    }

    /// Nothing is evicted any more, of what is there and what is touched from now on: the process is
    /// about to end. `false`: it goes on after all.
    fn keep_all(&self, _keep: bool) {}

    /// Nothing may be away any more, so that no access raises a signal: the caller is about to be
    /// traced. `false`: that isn't possible, and nothing has changed. With `keep` false it may be
    /// again.
    fn keep_home(&self, _keep: bool) -> bool {
        true
    }

    /// Something is about to end.
    fn ends(&self, how: Ending);
}
