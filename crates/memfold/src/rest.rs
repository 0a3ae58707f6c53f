//! What is served while the engine is at rest for a fork.
//!
//! The thread that forks, and others that hold locks which it waits for, may still need a folded page. At rest nothing of
//! the engine may change, as the child gets a copy of it at some moment. So a page is decompressed and *copied* home,
//! and the index goes on to say that it is folded; each such page is noted before it is there, and put in order after the
//! rest. Changes of the address space are noted too, so that whoever makes them goes on, and applied after the rest.
use alloc::vec::Vec;
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicBool, Ordering::SeqCst};
use memfold_sys::uffd::Event;

const PAGES: usize = 1024;
const CHANGES: usize = 256;

/// The notes of a rest, and whether there is one.
#[derive(Default)]
pub struct Rest {
    on: AtomicBool,
    notes: Mutex<Notes>,
}

/// See the module.
pub struct Notes {
    pages: [usize; PAGES],
    page_count: usize,
    changes: [Option<Event>; CHANGES],
    change_count: usize,
}

impl Default for Notes {
    fn default() -> Notes {
        Notes { pages: [0; PAGES], page_count: 0, changes: [None; CHANGES], change_count: 0 }
    }
}

impl Rest {
    /// It begins: the gates are closed.
    pub fn begin(&self) {
        self.on.store(true, SeqCst);
    }

    /// At rest, lets `one` serve messages until it returns false. Does nothing otherwise.
    pub fn receive(&self, mut one: impl FnMut(&mut Notes) -> bool) {
        let mut notes = self.notes.lock();
        loop {
            if !self.on.load(SeqCst) || !one(&mut notes) {
                return;
            }
        }
    }

    /// It ends: gives the changes to `apply` and returns the pages.
    pub fn end(&self, mut apply: impl FnMut(Event)) -> Vec<usize> {
        let mut notes = self.notes.lock();
        self.on.store(false, SeqCst);
        let count = core::mem::take(&mut notes.change_count);
        notes.changes[..count].iter().flatten().for_each(|change| apply(*change));
        let count = core::mem::take(&mut notes.page_count);
        notes.pages[..count].to_vec()
    }

    /// Whether a page was copied home at rest, as far as a child of the fork can tell.
    ///
    /// # Safety
    /// - The caller is the only thread, or the only engine thread, of a child of fork.
    pub unsafe fn holds(&self, page: usize) -> bool {
        // SAFETY: in the child nobody else uses the notes. Whoever held their lock in the parent is not there.
        let notes = unsafe { self.notes.peek() };
        notes.pages[..notes.page_count].contains(&page)
    }

    /// In a child of fork: ends what the parent's threads had begun.
    ///
    /// # Safety
    /// - As [`Rest::holds`].
    pub unsafe fn reset_in_child(&self) {
        // SAFETY: nobody else uses the lock.
        unsafe { self.notes.reset() };
    }
}

impl Notes {
    /// Notes a page before it is copied home.
    pub fn note_page(&mut self, page: usize) {
        assert!(self.page_count < PAGES, "memfold: too much memory is touched while the program forks");
        self.pages[self.page_count] = page;
        self.page_count += 1;
    }

    /// Notes a change that was read.
    pub fn note_change(&mut self, change: Event) {
        assert!(self.change_count < CHANGES, "memfold: too many mappings change while the program forks");
        self.changes[self.change_count] = Some(change);
        self.change_count += 1;
    }

    /// Where the index, which doesn't know of the noted changes, has what is at `page` now; `None` for fresh memory.
    pub fn origin(&self, page: usize) -> Option<usize> {
        let mut at = page;
        for change in self.changes[..self.change_count].iter().rev().flatten() {
            match *change {
                Event::Remap { from, to, len } if at.wrapping_sub(to) < len => at = at - to + from,
                Event::Remap { from, len, .. } if at.wrapping_sub(from) < len => return None,
                Event::Unmap { start, end } | Event::Remove { start, end } if start <= at && at < end => return None,
                _ => {}
            }
        }
        Some(at)
    }
}
