//! Where a process keeps the state of a Python interpreter: the address of its runtime, and the
//! offsets that a walk of a thread's Python functions needs. `memfold record` finds them in the
//! program's files. Each process walks its own functions, because no other process can read its folded
//! memory.
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The offsets of a Python interpreter, bytes, with the address of its runtime. A member that the
/// version doesn't have is [`Interpreter::NONE`].
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Interpreter {
    /// The address of `_PyRuntime`.
    pub runtime: u64,
    /// `_PyRuntimeState.interpreters.head`.
    pub first_interpreter: u64,
    /// `PyInterpreterState.next`.
    pub next_interpreter: u64,
    /// `PyInterpreterState.threads.head`.
    pub first_thread: u64,
    /// `PyThreadState.next`.
    pub next_thread: u64,
    /// `PyThreadState.thread_id`: what `pthread_self` returns.
    pub thread_id: u64,
    /// `PyThreadState.cframe`, a pointer to a struct with the frame (3.11, 3.12).
    pub c_frame: u64,
    /// The innermost frame: in that struct, or in `PyThreadState`.
    pub frame: u64,
    /// The caller's frame, in a frame.
    pub previous: u64,
    /// The code object of a frame.
    pub code: u64,
    /// A byte of a frame that isn't 0 if compiled code has called it (3.11), or
    /// [`Interpreter::ALWAYS`] (before).
    pub is_entry: u64,
    /// A byte of a frame that is at least `entry_owner` if the frame only stands for a call by
    /// compiled code (3.12 on).
    pub owner: u64,
    /// The least `owner` of such a frame.
    pub entry_owner: u64,
    /// The names of a code object.
    pub names: CodeNames,
    /// The layout of a string.
    pub unicode: UnicodeLayout,
}

/// Offsets in a code object, bytes.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CodeNames {
    /// `co_qualname`, or `co_name` before 3.11.
    pub name: u64,
    /// `co_filename`.
    pub file: u64,
    /// `co_firstlineno`, 32 bits.
    pub line: u64,
}

/// The layout of a string object, bytes.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct UnicodeLayout {
    /// `PyASCIIObject.length`.
    pub len: u64,
    /// The characters of an ASCII string.
    pub ascii: u64,
}

/// Words of an [`Interpreter`].
const WORDS: usize = size_of::<Interpreter>() / size_of::<u64>();

impl Interpreter {
    /// The offset of a member that the version doesn't have.
    pub const NONE: u64 = u64::MAX;
    /// Stands for a byte that is never 0.
    pub const ALWAYS: u64 = u64::MAX - 1;

    fn words(&self) -> &[u64; WORDS] {
        // SAFETY: the struct has the C layout and consists of `WORDS` words, without padding.
        unsafe { &*(&raw const *self).cast() }
    }

    pub(super) fn of_words(words: [u64; WORDS]) -> Interpreter {
        // SAFETY: the struct has the C layout and consists of `WORDS` words. Any bits are valid.
        unsafe { core::mem::transmute(words) }
    }
}

/// A place for the interpreter of one program and its copies. All zeros are a free one.
#[repr(C)]
pub(super) struct InterpreterPlace {
    /// The image of its processes, once all else is written; 0 while the place is free.
    image: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl InterpreterPlace {
    pub fn is_free(&self) -> bool {
        self.image.load(Acquire) == 0
    }

    /// Fills the place. Only `memfold record` does that, in one thread.
    pub fn set(&self, image: u64, interpreter: &Interpreter) {
        self.words.iter().zip(interpreter.words()).for_each(|(to, from)| to.store(*from, Relaxed));
        self.image.store(image, Release);
    }

    pub fn of(&self, image: u64) -> Option<Interpreter> {
        let words = || core::array::from_fn(|n| self.words[n].load(Relaxed));
        (self.image.load(Acquire) == image).then(|| Interpreter::of_words(words()))
    }
}
