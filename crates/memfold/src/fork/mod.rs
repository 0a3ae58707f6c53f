//! The engine at rest around a fork, and what processes share after it.
//!
//! # Fork
//! `address_space/fork.rs`, `quiesce/gate.rs`, and `gate/copy.rs` of memfold-preload. A child has a
//! copy of the page table and of everything that the engine keeps (pool, index, frames: private
//! memory), and no thread but its own. The gate sees the system call that copies the process, by
//! whomever it is made:
//!
//! 1. `Pager::begin_copy` closes the gates of background work and of the swap file, the areas and
//!    the queue. The forking thread then holds every lock of the engine's. Faults of other threads
//!    wait, and so do calls that change mappings.
//! 2. The call is made.
//! 3. The child opens a userfaultfd of its own under the old number, gives the parent's free frames
//!    back, registers all that is managed, and starts engine threads of its own, each from the
//!    beginning of its `main`. All of that happens before anything of the program's runs in it.
//! 4. `Pager::end_copy` opens all again, in each of the two.
//!
//! A child that may not open a userfaultfd any more brings everything home, or ends with status 125
//! where the memory for it is lacking. It runs unmanaged until it executes something.
//!
//! vfork and posix_spawn share the parent's memory and are served by the parent. Regions of the
//! library are always `MADV_DONTFORK`.
//!
//! **What processes share** after a fork counts in each with its part of the whole (Pss), so that
//! the sum over a run is right. Whoever writes to such a page gets its own from the kernel, and no
//! event tells of it. So `measure_shared` (`share.rs` of
//! memfold-preload) asks smaps_rollup from time to time, for at most
//! a tenth of a CPU, until nothing is shared any more; bounds and need follow (`take_share`). To
//! fold a shared page, a process must first make it private: that brings its part of the page, and
//! takes a compressed copy. Where the copy is more (three or more share), the page is refused
//! (`quiesce/unshare.rs` `is_shared_by_many`, `pager/map.rs` `refuse`), block by block, and what
//! was written to since the fork leaves first. So is what no store would take, by a look at it
//! before it is made private (`reclaim/mod.rs` `is_private_in_vain`).
//!
//! **The table of a run** (`memfold-run/src/table/`). A sealed memfd with the bounds, a slot for each
//! process that the system can have, and lines to be said; sparse, and mapped as far as slots were
//! used. All look at what the others need every 40 ms, so needs lie together, four to a cache line.
//! A slot is held by the first engine thread as a robust futex (`address_space/advice.rs`): the
//! kernel marks it when the thread ends, by whatever, or the process executes another program,
//! which then finds its slot by its number and goes on with its counters. So nobody asks for a
//! process by number (`kill(pid, 0)` is wrong across PID namespaces and users). The list that the
//! kernel reads for that lies in the table too. A process opens the table by `/proc/PID/fd/N` of
//! `memfold run`; where that leads nowhere, it asks at a socket without a file (`door.rs`), with
//! half of a key, and gets the other half, its number outside, and the descriptor. `memfold run`
//! holds a word of its own: when it is marked, nobody reads lines any more.
//!
//! **What a process says** goes to the table (`mailbox.rs`, `memfold-process/src/diagnostics/mod.rs`);
//! `memfold run` says each thing once (`log.rs`), where numbers don't make another thing of it; why
//! a process ends, of each.
//!
//! **Only the first engine thread** runs at first; it looks at the program's size. It starts the
//! others when something is to be adopted (`ManagedProgram::start_threads`), and the first context is made
//! then: most processes of a run never come near their share.
//!
//! **Bare threads** (`bare.rs`). The engine's threads in a program are unknown to libc: made by
//! `clone`, with own stacks and thread blocks, all signals blocked. They need nothing of the
//! program's heap, so they can start where it is folded, and to libc a program of one thread stays
//! one. They share a table of descriptors that isn't the program's; what needs it is done by them
//! (`engine.rs` `have_done` of memfold-preload).
mod copy;

use crate::parts::walk;

walk! {
    /// The engine across a fork.
    pub struct Fork
}
