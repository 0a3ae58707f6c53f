//! The swap file across a fork, in gate delivery.
//!
//! A child goes on to **read its parent's file**, whose descriptor it inherits, and writes to a
//! file of its own: slots of the parent are the first ones to it, and its own come behind them. So
//! a fork costs no I/O, and no memory but for a bit for each slot.
//!
//! - The parent goes on to write to its file. What was used at the copy has one holder more
//!   (`lent.rs`), so it is neither taken for other data nor punched until the child has ended. What
//!   the child lets go meanwhile stays used in the parent: disk space, for as long as the child
//!   runs.
//! - The child takes no slot of its parent's ([`Clusters::inherit`]), and seals with a key of its
//!   own (`seal.rs`).
//! - Whose file can't be made (no such directory any more, or no right to write there) can write
//!   nothing: what doesn't fit stays in memory.
//! - The thread that writes is at rest (`Gates::close_writing`), and no raw write is under way: a
//!   child has nothing half done.
//!
//! What lies in the **remote store** is read there by the child too. Its service keeps a process's
//! objects as long as a copy of it runs: the parent sends it the witness that tells (`lend`). What
//! was used at the copy stays where it is, in file or store, until the child has ended: nothing of
//! its groups moves.
//!
//! Where files are already stacked [`OLDER_MAX`] deep, or a child couldn't reach the service (the
//! parent is in another root directory by now, or another user), what is in file and store is
//! brought home before the copy (`address_space/fork.rs`); the child then begins with nothing in
//! its file.
use crate::lent::OLDER_MAX;
use crate::swap::Swap;
use crate::tier::Tier;
use memfold_sys::Errno;
use memfold_sys::memory::witness::DescendantWatch;
use memfold_sys::sync::atomic::Ordering::{Relaxed, SeqCst};
use memfold_sys::units::PAGE_SIZE;

impl Swap {
    /// Whether a child could read what is in the file: not too many are read already.
    pub fn can_lend(&self) -> bool {
        self.copies.load(Relaxed) < OLDER_MAX
    }

    /// Nothing more goes to the file, or it may again.
    pub fn shut(&self, shut: bool) {
        self.is_shut.store(shut, SeqCst);
    }

    /// For a fork, when the engine is at rest, the thread that writes too. `false`: what is in file
    /// and store must be brought home first; nothing was done then. `reaches`: whether a child
    /// would reach the remote store; asked if it needs it.
    pub fn begin_copy(&self, reaches: impl Fn() -> bool) -> bool {
        self.tier.iter().for_each(Tier::freeze);
        if self.objects() > 0 && !self.lend(reaches) {
            // SAFETY: frozen above, by this thread.
            self.tier.iter().for_each(|tier| unsafe { tier.unfreeze() });
            return false;
        }
        self.seal.begin_copy();
        self.outbox.freeze();
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
            move |copies: &DescendantWatch| tier.remote.lend(copies).map_err(|_| Errno::REMOTEIO)
        });
        let lend = || self.lent.begin_copy(&self.clusters, tell);
        self.errands.as_ref().is_some_and(|errands| errands.run(lend).is_ok())
    }

    /// In the parent and in a child, after [`Swap::begin_in_child`]. The outbox was opened before.
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
        self.seal.end_copy();
        if !in_child {
            self.lent.end_copy();
        }
        self.shut(false);
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
            self.seal.begin_in_child(reads)?;
            if reads {
                self.clusters.inherit();
                self.copies.fetch_add(1, Relaxed);
            } else {
                self.clusters.clear();
                self.copies.store(0, Relaxed);
            }
            let inherited = self.clusters.inherited();
            self.tier.as_ref().map_or(Ok(()), |tier| tier.begin_in_child(inherited))
        }
    }
}
