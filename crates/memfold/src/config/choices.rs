//! Settings that are one of a few things.
use alloc::string::String;

/// How faults reach the engine.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Handler threads, one pinned to each CPU, read the faults. Right for every access, system
    /// calls included.
    Thread,
    /// The faulting thread serves itself in a SIGBUS handler. Fastest, but a system call that is
    /// given a folded buffer fails with EFAULT: for memory that only user code touches, or that is
    /// pinned around calls.
    Signal,
    /// As `Signal`, and each system call of the program passes the gate, which keeps what it names in
    /// memory until it is over. Needs no privilege. All of `memfold run`; and regions of shared
    /// libraries that have armed the process ([`crate::delivery::gate::arm`]).
    Gate,
}

/// What to do when nothing more can be folded within the limit.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum OnFull {
    /// Go past the limit, with a warning.
    Grow,
    /// End the program with a message.
    Stop,
}

/// Where dictionaries come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DictionarySource {
    /// Nothing is compressed against a dictionary.
    Off,
    /// From the pages that are folded, in the background, where they win.
    On,
    /// From a file that `memfold dict train` made.
    File(String),
}
