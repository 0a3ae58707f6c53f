//! Settings with a few values.
use alloc::string::String;

/// How a touch of folded memory under `memfold run` is detected.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PagingKind {
    /// Missing pages are registered with a userfaultfd.
    Userfaultfd,
    /// Folded pages are guard pages (Linux 6.16).
    Guard,
    /// Folded memory is inaccessible. Each border between folded and resident memory uses a mapping.
    Protection,
}

impl PagingKind {
    /// Returns whether folded memory is hidden from the program, so that a touch raises SIGSEGV.
    pub fn hides(self) -> bool {
        self != PagingKind::Userfaultfd
    }
}

/// How faults reach the engine.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Handler threads, one pinned to each CPU, read the faults. Works for every access, system
    /// calls included.
    Thread,
    /// The faulting thread serves itself in a SIGBUS handler. This is fastest, but a system call
    /// that is passed a folded buffer fails with EFAULT. It is for memory that only user code
    /// touches, or that is pinned around calls.
    Signal,
    /// The faulting thread serves itself, and each system call of the program passes the gate,
    /// which keeps its buffers resident until it returns. Needs no privilege. `memfold run` always
    /// uses it. Regions of shared libraries can, if the library has armed the process
    /// ([`crate::delivery::gate::arm`]).
    Gate,
}

impl Delivery {
    /// Returns whether the faulting thread serves its fault itself.
    pub(crate) fn is_inline(self) -> bool {
        self != Delivery::Thread
    }
}

/// What happens when no more can be folded within the limit.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// Exceed the limit, with a warning.
    Grow,
    /// End the program with a message.
    Stop,
}

/// The source of dictionaries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DictionarySource {
    /// No dictionaries.
    Off,
    /// Trained from folded pages, in the background, and used where they win.
    On,
    /// Read from a file that `memfold dict train` made.
    File(String),
}
