//! What a fork asks of the handlers: who gets what is registered, and how a child begins.
use super::{Watcher, each_private, pages_of};
use crate::area::{Areas, page_of};
use crate::fault::Fault;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::maps::lookup::each_private_area;
use memfold_sys::maps::{Area, flag};
use memfold_sys::memory::zone::{overlaps_own, set_inherited, set_marked};
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::thread::{now_ns, sleep_ns, yield_now};
use memfold_sys::units::PAGE_SIZE;

/// So long a fork looks for a moment at which what was changed while it looked can be settled.
const CATCH_UP_NS: u64 = 10_000_000_000;
/// Time between looks for a moment at which no mapping is being changed.
const QUIET_PACE_NS: u64 = 20_000;

/// Why a child of fork could not be put under management.
pub enum NotCopied {
    /// The kernel refused.
    Refused(Errno),
    /// It can't be told what other threads of the parent were changing when the copy was made.
    Moving(&'static str),
}

impl From<Errno> for NotCopied {
    fn from(errno: Errno) -> NotCopied {
        NotCopied::Refused(errno)
    }
}

impl Watcher {
    /// In a child of fork, at rest, before any handler runs: registers with a userfaultfd of its
    /// own what the parent had under management. The frames are registered by the caller, who has
    /// reopened the page map.
    ///
    /// # Errors
    /// Registering failed; or the parent's other threads were changing something that nobody can
    /// tell.
    pub fn begin_as_child(&self) -> Result<(), NotCopied> {
        // SAFETY: no handler runs yet.
        unsafe { self.turn.reset() };
        // SAFETY: the engine's own page, which is there.
        unsafe { self.uffd.register(self.probe.start(), PAGE_SIZE, false)? };
        let mut lent = Vec::new();
        if self.begun.load(Relaxed) {
            each_private(|area, about| {
                if about.has(flag::RANDOM) {
                    lent.push(*area);
                }
            });
        }
        if let Err(why) = self.pager.catch_up(lent.iter().map(pages_of).collect()) {
            return Err(NotCopied::Moving(why));
        }
        for area in &lent {
            let (Area { start, end, .. }, (first, last)) = (*area, pages_of(area));
            set_marked(start, end, false);
            // As in the parent, all of a mapping or nothing of it.
            if self.pager.areas.read().touch(first, last) {
                // SAFETY: the handlers will serve the range, and no engine thread touches it.
                unsafe { self.uffd.register(start, end - start, false)? };
                set_inherited(start, end, false);
            }
        }
        Ok(())
    }

    /// At rest: lets children of fork get what is registered, and marks the mappings of which
    /// something is managed ([`flag::RANDOM`]), so that a child can tell them from what came in
    /// their place. Returns whether no other thread of the program has changed a mapping at rest.
    /// If one has, and this is not the `last` try, it is not done.
    ///
    /// Called by an engine thread.
    ///
    /// # Errors
    /// What the page-map scan says.
    pub fn lend_to_children(&self, last: bool) -> Result<bool, Errno> {
        self.pager.note_inherited(true);
        self.lend(true, true);
        if !last && self.pager.journal.has_changed() {
            return Ok(false);
        }
        if !self.catch_up(true, true) {
            self.pager.journal.note_unsure();
        }
        self.pager.note_strays(&self.pagemap, || self.is_quiet(), || sleep_ns(QUIET_PACE_NS))?;
        Ok(!self.pager.journal.has_changed())
    }

    /// At rest, when all is in place, so that a child needs no mark: lets it get what is
    /// registered. Called by an engine thread.
    pub fn leave_to_children(&self) {
        self.pager.note_inherited(true);
        self.lend(true, false);
        self.catch_up(true, false);
    }

    /// At rest: ends [`Watcher::lend_to_children`] and [`Watcher::leave_to_children`]. A child that
    /// comes to be past libc gets nothing that is registered. Called by an engine thread.
    pub fn keep_from_children(&self) {
        self.pager.note_inherited(false);
        self.lend(false, false);
        self.catch_up(false, false);
    }

    /// At rest: lets children get what is registered, or doesn't, and marks the mappings of which
    /// something is managed, or none. What others change meanwhile is still to be settled.
    ///
    /// All of a mapping or nothing: other parts with other properties would be mappings of their
    /// own, which mremap refuses to move at once.
    fn lend(&self, lent: bool, marked: bool) {
        if !self.begun.load(Relaxed) {
            return;
        }
        let wait = || sleep_ns(QUIET_PACE_NS);
        let managed = marked.then(|| self.pager.managed_at_rest(|| self.is_quiet(), wait).0);
        each_private(|area, about| {
            let registered = about.has(flag::UFFD_MISSING);
            if registered && about.has(flag::DONT_FORK) == lent {
                set_inherited(area.start, area.end, lent);
            }
            let (start, end) = pages_of(area);
            let wanted =
                registered && managed.as_ref().is_some_and(|managed| managed.touch(start, end));
            if wanted != about.has(flag::RANDOM) {
                set_marked(area.start, area.end, wanted);
            }
        });
    }

    /// At rest: after [`Watcher::lend`], the same for what other threads have changed since the
    /// rest began. That may not have been where one looked, or have given way to something else
    /// before one acted. All else was there all the time, so it was seen (proc(5), and
    /// `Documentation/filesystems/proc.rst` in the kernel). `false` if they never stopped for a
    /// moment.
    fn catch_up(&self, lent: bool, marked: bool) -> bool {
        let begin = now_ns();
        let mark = |managed: &Areas, changed: &[(usize, usize)]| {
            let done = each_private_area(changed, |start, end| {
                if !overlaps_own(start, end) {
                    let is_managed = managed.touch(page_of(start), page_of(end));
                    set_inherited(start, end, lent || !is_managed);
                    set_marked(start, end, marked && is_managed);
                }
            });
            done.expect("memfold: reading /proc/self/maps failed");
        };
        while !self.pager.catch_up_at_rest(|| self.is_quiet(), mark) {
            if now_ns() - begin > CATCH_UP_NS {
                return false;
            }
            sleep_ns(QUIET_PACE_NS);
        }
        true
    }

    /// Ends the rest, in the parent or the child of a fork: what has changed meanwhile is applied,
    /// the gates are opened, and what was served is put in order. Called by an engine thread.
    ///
    /// # Safety
    /// - `Pager::quiesce` has returned, in this process or in the parent that it is a copy of, and
    ///   this is called once for it.
    pub unsafe fn end_quiescence(&self) {
        let reading = self.pager.changes.reading();
        self.pager.journal.end(|note| self.pager.apply_note(note));
        // SAFETY: by the caller's promise.
        unsafe { self.pager.start_again() };
        drop(reading);
        // A page may be moved meanwhile; it is followed (`Journal::tell`).
        while let Some(addr) = self.pager.journal.noted_page() {
            if self.serve(Fault { addr, ..Fault::default() }) {
                self.pager.journal.end_page(addr);
            } else {
                yield_now();
            }
        }
    }

    /// As `Pager::find_stray`.
    ///
    /// # Errors
    /// What the page-map scan says.
    pub fn find_stray(&self) -> Result<Option<usize>, Errno> {
        self.pager.find_stray(&self.pagemap)
    }
}
