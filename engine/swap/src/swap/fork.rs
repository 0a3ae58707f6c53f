//! The swap file across a fork, in gate delivery.
//!
//! A child **reads its parent's file**, whose descriptor it inherits, and writes to a file of its
//! own. To the child, the parent's slots are the first ones, and its own follow. So a fork costs no
//! I/O, and only a bit of memory for each slot.
//!
//! - The parent continues to write to its file. Slots in use at the fork get one more reference
//!   (`lent.rs`), so they are neither allocated again nor punched until the child has ended. Slots
//!   that the child frees meanwhile take disk space in the parent while the child runs.
//! - The child allocates no slot of its parent ([`Clusters::inherit`]), and seals with a key of its
//!   own (`seal.rs`).
//! - A child may be unable to make its own file: the directory is gone, or it may not write there.
//!   Then it writes nothing, and data that doesn't fit stays in memory.
//! - The thread that writes is paused at the fork, and no raw write is in progress. So a child has
//!   no work that is half done.
//!
//! The child also reads objects in the **remote store**. The service keeps a process's objects as
//! long as a child of it runs: the parent sends it the descendant watch that shows this (`lend`).
//! Slots in use at the fork stay where they are, in file or store, until the child has ended: none
//! of their groups moves.
//!
//! In two cases the caller must load all objects into memory before the fork, and the child begins
//! with an empty file. Files may already be stacked [`ANCESTORS_MAX`] deep. Or a child couldn't
//! reach the service, because the parent has changed its root directory or user.
//!
//! [`Clusters::inherit`]: crate::cluster::Clusters::inherit
use crate::lent::ANCESTORS_MAX;
use crate::swap::Swap;
use crate::tier::Tier;
use memfold_os::Errno;
use memfold_os::memory::descendant_watch::DescendantWatch;
use memfold_os::sync::atomic::Ordering::{Relaxed, SeqCst};
use memfold_os::units::PAGE_SIZE;

impl Swap {
    /// Returns whether a child could read the file: not too many ancestors' files are read already.
    pub fn can_lend(&self) -> bool {
        self.ancestors.load(Relaxed) < ANCESTORS_MAX
    }

    /// Closes the file to further writes, or opens it again.
    pub fn set_closed(&self, closed: bool) {
        self.is_closed.store(closed, SeqCst);
    }

    /// Prepares a fork, when the engine is quiesced, with the thread that writes. Returns `false`,
    /// and does nothing, if the objects in file and store must be loaded first. `reaches` returns
    /// whether a child would reach the remote store. It is called only if the child needs it.
    pub fn begin_copy(&self, reaches: impl Fn() -> bool) -> bool {
        self.tier.iter().for_each(Tier::freeze);
        if self.objects() > 0 && !self.lend(reaches) {
            // SAFETY: this thread has frozen the tier above, and unfreezes it once.
            self.tier.iter().for_each(|tier| unsafe { tier.unfreeze() });
            return false;
        }
        self.sealer.begin_copy();
        self.queue.freeze();
        true
    }

    /// Keeps all used slots as they are for a child. The tier must be frozen. Returns `false` if
    /// that is impossible.
    fn lend(&self, reaches: impl Fn() -> bool) -> bool {
        // SAFETY: the caller has frozen the tier, and unfreezes it only afterwards.
        let is_far = |tier: &&Tier| unsafe { tier.is_used_at_rest() };
        let tier = self.tier.as_ref().filter(is_far);
        if !self.can_lend() || tier.is_some() && !reaches() {
            return false;
        }
        let tell = tier.map(|tier| {
            move |copies: &DescendantWatch| tier.lend(copies).map_err(|_| Errno::REMOTEIO)
        });
        let lend = || self.lent.begin_copy(&self.clusters, tell);
        self.delegate_queue.as_ref().is_some_and(|queue| queue.run(lend).is_ok())
    }

    /// Runs the first part of the end of [`Swap::begin_copy`]: the write queue takes requests
    /// again.
    ///
    /// # Safety
    /// - `begin_copy` has returned true, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn allow_requests(&self) {
        // SAFETY: the caller promises that `begin_copy` has frozen the queue, and that this is the
        // one call for it.
        unsafe { self.queue.unfreeze() };
    }

    /// Connects to the service of the remote store, if the child reads there. Called in a child,
    /// between [`Swap::begin_in_child`] and [`Swap::end_copy`].
    ///
    /// # Safety
    /// - `end_copy` is not called meanwhile.
    pub unsafe fn connect_remote(&self) {
        // SAFETY: the tier is frozen until `end_copy`, which the caller promises not to call
        // meanwhile.
        self.tier.iter().for_each(|tier| unsafe { tier.connect() });
    }

    /// Lets the caller read objects before [`Swap::end_copy`], until [`Swap::forbid_reads`]. A read
    /// looks up in the tier where a slot is.
    ///
    /// # Safety
    /// - `begin_copy` has returned true, in this process or in the parent that it is a copy of, and
    ///   `end_copy` isn't called before `forbid_reads` has returned.
    /// - No other thread uses the file.
    pub unsafe fn allow_reads(&self) {
        // SAFETY: the caller promises that `begin_copy` has frozen the tier.
        self.tier.iter().for_each(|tier| unsafe { tier.unfreeze() });
    }

    /// Ends [`Swap::allow_reads`].
    pub fn forbid_reads(&self) {
        self.tier.iter().for_each(Tier::freeze_again);
    }

    /// Ends a fork, in the parent and in a child, after [`Swap::begin_in_child`] and
    /// [`Swap::allow_requests`].
    ///
    /// # Safety
    /// - `begin_copy` has returned true, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn end_copy(&self, in_child: bool) {
        // SAFETY: the caller promises that `begin_copy` has frozen these, and that this is the one
        // call for it.
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

    /// Returns whether a thread is in the middle of work on the queue or the remote store, or has
    /// ended while it was.
    pub fn is_held(&self) -> bool {
        self.queue.is_held() || self.tier.as_ref().is_some_and(Tier::is_held)
    }

    /// Returns the byte from which on a child's own file begins; 0 if it reads no slot of its
    /// parent.
    pub fn base(&self) -> u64 {
        if self.objects() == 0 { 0 } else { self.clusters.slots() * PAGE_SIZE as u64 }
    }

    /// Begins a file of its own in a child, after [`Swap::base`] was called.
    ///
    /// # Errors
    /// No random bytes for the key, or no page for it.
    ///
    /// # Safety
    /// - The caller is the only thread of the process, and `begin_copy` has returned true in its
    ///   parent.
    pub unsafe fn begin_in_child(&self) -> Result<(), Errno> {
        let reads = self.objects() > 0;
        // SAFETY: the caller promises that it is the only thread, so no other thread uses any of
        // these. In the parent `begin_copy` has frozen the tier.
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
            let own_start = self.clusters.inherited();
            self.tier.as_ref().map_or(Ok(()), |tier| tier.begin_in_child(own_start))
        }
    }
}
