//! The engine at rest around a fork: its threads are stopped, and what happens meanwhile is written
//! down.
//!
//! # Fork
//! `fork.rs`, `address_space/fork.rs`, `quiesce/journal.rs`, `quiesce/copy_moment.rs`. A child has
//! a copy of the page table and of everything that the engine keeps (pool, index, frames: private
//! memory), and no thread but its own. The steps:
//!
//! 1. The prepare handler (registered first, so it runs last; `clone.rs` takes the same steps for
//!    `_Fork`, `clone` and `syscall`) blocks all signals, stops adoption, and calls
//!    `Pager::quiesce`: both gates (`quiesce/gate.rs`) are closed, background work first, since it
//!    may wait for faults to be served. Then nobody holds a lock of the engine but the forking
//!    thread.
//! 2. **At rest** libc still takes its own locks, whose memory may be folded, and other threads may
//!    hold these and wait for memory. `Watcher::receive_at_rest` serves such a fault without
//!    changing the engine: it decompresses into a scratch, takes no lock of the engine's, and
//!    *copies* the page home; the index goes on to say that it is folded. Pages are noted before
//!    they are there, address-space events are noted and not applied. Pages that are there already
//!    though the index says otherwise (a load that was given up because of a change leaves such)
//!    are noted, too.
//! 3. `Watcher::lend_to_children` lifts the mark that keeps registered memory from children, and
//!    sets one (`rr` in smaps: MADV_RANDOM, which means nothing without a file) on mappings of
//!    which something is managed. What other threads change while it looks it may miss, or take for
//!    what was there before; but that is noted. So `settle` does all that was changed since the
//!    rest began once more, while the notes are locked: nobody reads events then, so if no change
//!    is under way before and after, there was none in between (`Journal::settle_changed`). Where
//!    there is no such moment in 10 s the child is told, and ends with a message.
//! 4. Between the handlers and the copy, and again in the child before any handler, libc and
//!    libraries that were there before us touch memory of their own: the blocks of other threads,
//!    the locks of open files and heaps. So the system call itself is taken out of libc's hands, by
//!    Syscall User Dispatch (`dispatch.rs` in memfold-sys): from the prepare handler on, each
//!    system call of the forking thread is made by a handler of SIGSYS, and after the one that
//!    copies the process both go through the following steps in that handler, and then back to
//!    libc. The program's own SIGSYS is put back before. (Tried before: touching what libc was
//!    known to touch; it was never all of it: redis's allocator starts threads past us.)
//! 5. In the child, the first engine thread is started again (`bare.rs`), opens a userfaultfd of
//!    its own under the old number, gives the parent's free frames back, catches up with the
//!    changes (below), registers every mapping that holds managed memory, and asks the page map for
//!    a page that is there though it is folded and was not noted: whoever touched it read zeros, so
//!    the child ends with a message. Then the others are started, each from the beginning of its
//!    `main`.
//! 6. In the parent `Watcher::keep_from_children` takes the marks back, still at rest and settled
//!    likewise; `Watcher::end_quiescence` applies the noted events; in both it opens the gates and
//!    serves the noted pages in the usual way (they are there: EEXIST). One that is moved meanwhile
//!    is followed (`Journal::tell`).
//!
//! **Other threads** may change mappings between rest and copy, and the parent alone is told, after
//! it has happened. If they did while the engine came to rest, the rest is given up and begun
//! again, up to three times (`RESTS` in `fork.rs`): most programs have a moment without. Where
//! there is none, the child must tell. So the notes lie in memory that parent and child share. How
//! many there were at the copy the child sees in its own copy of their count; those it applies as
//! the parent does. What was noted later may have happened before the copy all the same:
//! `quiesce/copy_moment.rs` tells by the marks in the child's own map, which go where the memory
//! goes, and which nothing has that was mapped anew. The argument is there; `tests/moment.rs` forks
//! a simulated kernel at 20,000 moments. If the marks can't be explained within 5 s, the child ends
//! with a message rather than guesses. From when the forking thread has gone on until there is a
//! child, messages are read only while that thread sleeps (`may_miss`): so that no discard is read
//! whose caller may or may not have gone on when the copy was made. If that happens all the same,
//! the child knows that it may have, and ends.
//!
//! With a swap file, whose slots two can't own, without Syscall User Dispatch, or if a userfaultfd
//! can't be opened any more, `Pager::freeze` brings every folio home, or the program ends with
//! status 125; the parent's handler thaws, and the child forgets the engine and runs unmanaged
//! until it executes something.
//!
//! **A mapping's marks are whole.** The mark that keeps managed memory from children covers all
//! that is registered of a mapping, also where a part has grown and isn't managed yet. With parts
//! that differ it would be several mappings to the kernel, and mremap of it fails with EFAULT.
//!
//! vfork and posix_spawn share the parent's memory and are served by the parent. Managed areas are
//! `MADV_DONTFORK` at all other times, as regions of the library are always: a copy made behind the
//! engine's back is killed rather than reads zeros.
//!
//! **What processes share** after a fork counts in each with its part of the whole (Pss), so that
//! the sum over a run is right. Whoever writes to such a page gets its own from the kernel, and no
//! event tells of it. So `Program::measure_shared` asks smaps_rollup from time to time, for at most
//! a tenth of a CPU, until nothing is shared any more; bounds and need follow (`take_share`). To
//! fold a shared page, a process must first make it private: that brings its part of the page, and
//! takes a compressed copy. Where the copy is more (three or more share), the page is refused
//! (`quiesce/unshare.rs` `is_shared_by_many`, `pager/map.rs` `refuse`), block by block, and what
//! was written to since the fork leaves first. So is what no store would take, by a look at it
//! before it is made private (`reclaim/mod.rs` `is_private_in_vain`).
//!
//! **The table of a run** (`memfold/table.rs`). A sealed memfd with the bounds, a seat for each
//! process that the system can have, and lines to be said; sparse, and mapped as far as seats were
//! used. All look at what the others need every 40 ms, so needs lie together, four to a cache line.
//! A seat is held by the first engine thread as a robust futex (`address_space/advice.rs`): the
//! kernel marks it when the thread ends, by whatever, or the process executes another program,
//! which then finds its seat by its number and goes on with its counters. So nobody asks for a
//! process by number (`kill(pid, 0)` is wrong across PID namespaces and users). The list that the
//! kernel reads for that lies in the table too. A process opens the table by `/proc/PID/fd/N` of
//! `memfold run`; where that leads nowhere, it asks at a socket without a file (`door.rs`), with
//! half of a key, and gets the other half, its number outside, and the descriptor. `memfold run`
//! holds a word of its own: when it is marked, nobody reads lines any more.
//!
//! **What a process says** goes to the table (`mailbox.rs`, `memfold-preload/src/say/mod.rs`);
//! `memfold run` says each thing once (`log.rs`), where numbers don't make another thing of it; why
//! a process ends, of each.
//!
//! **Only the first engine thread** runs at first; it looks at the program's size. It starts the
//! others when something is to be adopted (`Program::start_threads`), and the first context is made
//! then: most processes of a run never come near their share.
//!
//! **Bare threads** (`bare.rs`). The engine's threads in a program are unknown to libc: made by
//! `clone`, with own stacks and thread blocks, all signals blocked. They need nothing of the
//! program's heap, so they can start where it is folded, and to libc a program of one thread stays
//! one. They share a table of descriptors that isn't the program's; what needs it is done by them
//! (`engine.rs` `have_done`).
pub mod unshare;
pub mod gate;
pub mod copy_moment;
pub mod journal;
#[cfg(test)]
mod tests;
