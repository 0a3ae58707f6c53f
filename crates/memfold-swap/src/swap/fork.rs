//! The swap file across a fork, in gate delivery.
//!
//! A child **reads its parent's file**, whose descriptor it inherits, and writes to a file of its
//! own. The parent's slots are the first ones to the child, and the child's own lie behind them. So
//! a fork costs no I/O, and no memory but a bit for each slot.
//!
//! - The parent goes on to write to its file. Slots in use at the fork get one reference more
//!   (`lent.rs`), so they are neither allocated again nor punched until the child has ended. Slots
//!   that the child frees meanwhile stay in use in the parent: disk space, while the child runs.
//! - The child allocates no slot of its parent's ([`Clusters::inherit`]), and seals with a key of
//!   its own (`seal.rs`).
//! - A child that can't make its own file (no such directory any more, or no right to write there)
//!   writes nothing: what doesn't fit stays in memory.
//! - The thread that writes is paused at the fork, and no raw write is under way: a child has
//!   nothing half done.
//!
//! The child also reads what lies in the **remote store**. The service keeps a process's objects as
//! long as a child of it runs: the parent sends it the witness that tells (`lend`). Slots in use at
//! the fork stay where they are, in file or store, until the child has ended: no group of theirs
//! moves.
//!
//! The caller must load all objects into memory before the fork, and the child begins with an empty
//! file, in two cases: files are already stacked [`ANCESTORS_MAX`] deep, or a child couldn't reach
//! the service (the parent is in another root directory by now, or another user).
//!
//! [`Clusters::inherit`]: crate::cluster::Clusters::inherit
use crate::lent::ANCESTORS_MAX;
use crate::swap::Swap;
use crate::tier::Tier;
use memfold_sys::Errno;
use memfold_sys::memory::witness::DescendantWatch;
use memfold_sys::sync::atomic::Ordering::{Relaxed, SeqCst};
use memfold_sys::units::PAGE_SIZE;

impl Swap {
    /// Whether a child could read what is in the file: not too many are read already.
    pub fn can_lend(&self) -> bool {
        self.ancestors.load(Relaxed) < ANCESTORS_MAX
    }

    /// Nothing more goes to the file, or it may again.
    pub fn set_closed(&self, closed: bool) {
        self.is_closed.store(closed, SeqCst);
    }

    /// For a fork, when the engine is at rest, the thread that writes too. `false`: what is in file
    /// and store must be loaded first; nothing was done then. `reaches`: whether a child
    /// would reach the remote store; asked if it needs it.
    pub fn begin_copy(&self, reaches: impl Fn() -> bool) -> bool {
        self.tier.iter().for_each(Tier::freeze);
        if self.objects() > 0 && !self.lend(reaches) {
            // SAFETY: frozen above, by this thread.
            self.tier.iter().for_each(|tier| unsafe { tier.unfreeze() });
            return false;
        }
        self.sealer.begin_copy();
        self.queue.freeze();
        true
    }

    /// Has all that is used kept as it is for a child, where the tier is frozen. `false`: it can't
    /// be.
    fn lend(&self, reaches: impl Fn() -> bool) -> bool {
        // SAFETY: frozen by the caller.
        let is_far = |tier: &&Tier| unsafe { tier.is_used_at_rest() };
        let tier = self.tier.as_ref().filter(is_far);
        if !self.can_lend() || tier.is_some() && !reaches() {
            return false;
        }
        let tell = tier.map(|tier| {
            move |copies: &DescendantWatch| tier.lend(copies).map_err(|_| Errno::REMOTEIO)
        });
        let lend = || self.lent.begin_copy(&self.clusters, tell);
        self.errands.as_ref().is_some_and(|errands| errands.run(lend).is_ok())
    }

    /// The first part of the end of [`Swap::begin_copy`]: the write queue takes requests again.
    ///
    /// # Safety
    /// - `begin_copy` has returned true, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn allow_requests(&self) {
        // SAFETY: frozen by `begin_copy`.
        unsafe { self.queue.unfreeze() };
    }

    /// In a child, between [`Swap::begin_in_child`] and [`Swap::end_copy`]: connects to the service
    /// of the remote store, if the child reads there.
    ///
    /// # Safety
    /// - `end_copy` is not called meanwhile.
    pub unsafe fn connect_remote(&self) {
        // SAFETY: the tier is frozen until `end_copy`.
        self.tier.iter().for_each(|tier| unsafe { tier.connect() });
    }

    /// In the parent and in a child, after [`Swap::begin_in_child`] and [`Swap::allow_requests`].
    ///
    /// # Safety
    /// - `begin_copy` has returned true, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn end_copy(&self, in_child: bool) {
        // SAFETY: by the caller's promise.
        unsafe {
            if let Some(tier) = &self.tier {
                tier.unfreeze();
            }
        }
        self.sealer.end_copy();
        if !in_child {
            self.lent.end_copy();
        }
        self.set_closed(false);
    }

    /// In a child: from which byte on its own file begins; 0 if it needs nothing of its parent's.
    pub fn base(&self) -> u64 {
        if self.objects() == 0 { 0 } else { self.clusters.slots() * PAGE_SIZE as u64 }
    }

    /// In a child, after [`Swap::base`] was asked.
    ///
    /// # Errors
    /// No random bytes for the key, or no page for it.
    ///
    /// # Safety
    /// - The caller is the only thread of the process, and `begin_copy` has returned true in its
    ///   parent.
    pub unsafe fn begin_in_child(&self) -> Result<(), Errno> {
        let reads = self.objects() > 0;
        // SAFETY: by the caller's promise.
        unsafe {
            self.lent.begin_in_child(&self.clusters);
            self.sealer.begin_in_child(reads)?;
            if reads {
                self.clusters.inherit();
                self.ancestors.fetch_add(1, Relaxed);
            } else {
                self.clusters.clear();
                self.ancestors.store(0, Relaxed);
            }
            let inherited = self.clusters.inherited();
            self.tier.as_ref().map_or(Ok(()), |tier| tier.begin_in_child(inherited))
        }
    }
}
