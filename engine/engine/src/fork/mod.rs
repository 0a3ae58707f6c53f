//! An engine across a fork: quiesced in the parent, used again in the child, and the pages that
//! both share afterwards.
//!
//! A child has a copy-on-write copy of the page table and of all data of the engine: pool, index
//! and frames are private memory. Its only thread is the forking one. The gate sees every system
//! call that copies the process, and calls the steps (`run/process/src/fork.rs`):
//!
//! 1. [`Fork::begin_copy`] pauses background work and the writer of the swap file (`requests/pause.rs`),
//!    and locks the areas and the requests. The forking thread then holds every lock of the engine.
//!    Faults of other threads wait, and so do calls that change mappings.
//! 2. The kernel copies the process.
//! 3. The child opens a userfaultfd of its own under the old number. It returns the parent's free frames,
//!    registers all managed memory, and starts engine threads of its own, each at the beginning of its
//!    `main`. All of that happens before the program continues in it.
//! 4. [`Fork::end_copy`] ends the pause, in each of the two.
//!
//! A child that may not open a userfaultfd loads all of its memory, or ends with status 125 where memory
//! is short. It runs unmanaged until it executes a program.
//!
//! vfork and posix_spawn share the parent's memory, and the parent's engine serves it. Regions of the
//! library are always `MADV_DONTFORK`.
//!
//! **Shared pages.** Pages that processes share after a fork count in each with its part (Pss), so
//! that the sum over a run is right. A process that writes to such a page gets its own from the
//! kernel, and no event reports that.
//! - A child for whose copies the run has room is charged with all that it shares.
//! - Another child pays for each copy before the kernel makes it (`fault/copies.rs`). So do the parent,
//!   and a child that was charged with all, from the moment on at which the run is short
//!   (`fork/shared.rs`).
//! - Before that, and where memory can't be write-protected, `run/process/src/size/share.rs` reads
//!   smaps_rollup from time to time. It takes at most a tenth of a CPU, and ends when no page is shared
//!   any more.
//!
//! To fold a shared page, a process must first make it private. That frees its part of the page, and
//! takes a compressed copy. The page is refused, block by block, where the copy is larger than the part
//! (three or more processes share), and from a fork of any process that shares until memory is measured
//! again (`memory/unshare.rs`, `residency/mod.rs` `refuse`). Pages that were written to since the fork are
//! evicted first. A page that no store would take is looked at before it is made private
//! (`reclaim/background.rs`).
mod copy;
mod shared;

use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::folio::table::FolioTable;
use crate::holds::Holds;
use crate::memory::budget::Budget;
use crate::memory::mapper::Mapper;
use crate::memory::unshare::ToUnshare;
use crate::parts::EngineParts;
use crate::requests::background::RequestQueue;
use crate::requests::pause::ForkPauses;
use crate::stats_place::StatsPlace;
use memfold_os::memory::zone::Zone;
use memfold_os::thread::delegate_queue::DelegateQueue;

/// Handles a fork of the process.
#[derive(Copy, Clone)]
pub struct Fork<'a> {
    stats: &'a StatsPlace,
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    budget: &'a Budget,
    areas: &'a AreaLock,
    requests: &'a RequestQueue,
    delegate_queue: Option<&'a DelegateQueue>,
    pauses: &'a ForkPauses,
    to_unshare: &'a ToUnshare,
    holds: &'static Holds,
    scratch: &'a Zone,
    engine: &'a EngineParts,
}

impl<'a> Fork<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Fork<'a> {
        Fork {
            stats: &engine.stats,
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            budget: &engine.budget,
            areas: &engine.areas,
            requests: &engine.requests,
            delegate_queue: engine.delegate_queue.as_deref(),
            pauses: &engine.pauses,
            to_unshare: &engine.to_unshare,
            holds: engine.holds,
            scratch: &engine.scratch,
            engine,
        }
    }
}
