//! Who owns the program's memory, as the gate sees it.
use memfold_sys::Errno;
use memfold_sys::raw::system_call;
use memfold_sys::units::PAGE_SIZE;

/// Most ranges of one call that are told apart.
pub const SPANS_MAX: usize = 32;

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

/// The ranges that one call names.
#[derive(Clone, Debug)]
pub struct Spans {
    spans: [Span; SPANS_MAX],
    count: usize,
}

impl Spans {
    /// None.
    pub const fn new() -> Spans {
        Spans { spans: [Span { start: 0, len: 0, write: false }; SPANS_MAX], count: 0 }
    }

    /// Adds a range; an empty one, or one past the end of the address space, is passed over. When
    /// there is no place left, one reaches over two of them: the new one and one that is near, or
    /// those by which it grows least.
    pub fn push(&mut self, span: Span) {
        if span.len == 0 || span.start.checked_add(span.len).is_none() {
            return;
        }
        if self.count < SPANS_MAX {
            self.spans[self.count] = span;
            self.count += 1;
            return;
        }
        let over = |a: &Span, b: &Span| {
            let start = a.start.min(b.start);
            let end = (a.start + a.len).max(b.start + b.len);
            Span { start, len: end - start, write: a.write | b.write }
        };
        // The strings of a program's environment, mostly: no page lies between the two.
        let near = |other: &&mut Span| {
            let joined = over(other, &span);
            let both = other.len.saturating_add(span.len).saturating_add(PAGE_SIZE);
            joined.len < both && other.write == span.write
        };
        if let Some(other) = self.spans.iter_mut().find(near) {
            *other = over(other, &span);
            return;
        }
        let at = |n: usize| if n < SPANS_MAX { &self.spans[n] } else { &span };
        let grows = |a: usize, b: usize| {
            over(at(a), at(b)).len.saturating_sub(at(a).len.saturating_add(at(b).len))
        };
        let pairs = (1..=SPANS_MAX).flat_map(|b| (0..b).map(move |a| (a, b)));
        let Some((a, b)) = pairs.min_by_key(|(a, b)| grows(*a, *b)) else { return };
        let joined = over(at(a), at(b));
        // The second one's place is free, or it is the new one.
        self.spans[a] = joined;
        if b < SPANS_MAX {
            self.spans[b] = span;
        }
    }

    /// The ranges.
    pub fn as_slice(&self) -> &[Span] {
        &self.spans[..self.count]
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.count = 0;
    }
}

impl Default for Spans {
    fn default() -> Spans {
        Spans::new()
    }
}

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
    /// Syscall User Dispatch of its own: EINVAL.
    Dispatch,
    /// A task asks to be traced by its parent: it isn't managed from now on.
    Traced,
    /// A thread or a process whose dispatch the kernel, or a filter, refuses: it ends.
    Task(Errno),
}

/// The owner of the program's memory.
pub trait Keeper: Sync {
    /// Whether `[start, start + len)` may hold managed memory. Lock-free, a few loads: it is asked
    /// for each call that names memory. Never a false no.
    fn concerns(&self, start: usize, len: usize) -> bool;

    /// Keeps what of `spans` is managed present until [`Keeper::release`]; `None` if nothing of it
    /// is managed. Calls `touch` (address, to write) with no lock held for each page; an error of
    /// it is passed over, as the kernel will say EFAULT itself. `depth` is the caller's stack
    /// pointer: holds nest, and those of frames that a longjmp has left are ended.
    fn hold(
        &self,
        spans: &Spans,
        depth: usize,
        touch: fn(usize, bool) -> Result<(), BadAddress>,
    ) -> Option<Hold>;

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

    /// The process is copied: `make` does it, and returns 0 in the child, where the gate runs again
    /// by then.
    fn copy(&self, make: &mut dyn FnMut() -> isize) -> isize;

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

    /// Nothing leaves memory any more, of what is there and what is touched from now on: the process
    /// is about to end. `false`: it goes on after all.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// An environment on the stack, and then strings of the heap, must not name all between them.
    #[test]
    fn a_range_far_from_all_others_gets_a_place_of_its_own() {
        let mut spans = Spans::new();
        let (heap, stack) = (1 << 30, 1 << 46);
        (0..100).for_each(|i| spans.push(Span { start: stack + i * 50, len: 40, write: false }));
        spans.push(Span { start: heap, len: 40, write: true });
        (0..100).for_each(|i| spans.push(Span { start: stack + i * 50, len: 40, write: false }));
        let named: usize = spans.as_slice().iter().map(|s| s.len).sum();
        assert!(named <= 2 * (100 * 50 + 40), "{named}");
        assert!(spans.as_slice().contains(&Span { start: heap, len: 40, write: true }));
    }

    /// A message of a thousand parts on heap and stack must not name all between them.
    #[test]
    fn ranges_for_which_there_is_no_place_join_their_neighbours() {
        let mut spans = Spans::new();
        let (heap, stack) = (1 << 30, 1 << 46);
        for i in 0..1000 {
            let start = if i % 2 == 0 { heap } else { stack } + i * 4096;
            spans.push(Span { start, len: 100, write: i == 999 });
        }
        let named: usize = spans.as_slice().iter().map(|s| s.len).sum();
        assert_eq!(spans.as_slice().len(), SPANS_MAX);
        assert!(named < 2 * 1000 * 4096, "{named}");
        for i in 0..1000 {
            let start = if i % 2 == 0 { heap } else { stack } + i * 4096;
            let has = |s: &&Span| s.start <= start && start + 100 <= s.start + s.len;
            let holder = spans.as_slice().iter().find(has).expect("every range is in one");
            assert!(i != 999 || holder.write);
        }
    }
}
