//! The engine across a fork: brought to rest in the parent, and put to use again in the child, which has a copy-on-write
//! copy of all that it keeps: pool, index and frames.
use crate::events::page_of;
use crate::folio::State;
use crate::pager::{Pager, StatsPlace};
use crate::stats::{self, Stats};
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::pagemap::Pagemap;
use memfold_sys::sync::atomic::Ordering::Relaxed;
use memfold_sys::units::{PAGE_SHIFT, PAGE_SIZE};

impl Pager {
    /// Waits until no engine thread works, and keeps all as it is until [`crate::watch::Watcher::end_rest`]. Called by a
    /// thread of the program.
    pub fn come_to_rest(&self) {
        self.gates.close();
        self.queue.freeze();
        self.rest.begin();
    }

    /// Ends [`Pager::come_to_rest`].
    ///
    /// # Safety
    /// - `come_to_rest` has returned, in this process or in the parent that it is a copy of, and this is called once for it.
    pub(crate) unsafe fn start_again(&self) {
        self.busy.note_fork();
        // SAFETY: by the caller's promise.
        unsafe {
            self.queue.unfreeze();
            self.gates.open();
        }
    }

    /// In a child of fork, at rest, before its userfaultfd has anything registered: what is the parent's and not the
    /// child's is let go. Counts in `stats` from now on.
    pub fn begin_as_child(&self, stats: &'static Stats) {
        if let StatsPlace::Shared(place) = &self.stats {
            place.store(stats as *const Stats as *mut Stats, Relaxed);
        }
        // SAFETY: this is the only engine thread.
        unsafe { self.rest.reset_in_child() };
        self.inherited.store(false, Relaxed);
        // The parent's pages; written to, each would be copied.
        self.frames.trim(&*self.space, u64::MAX);
    }

    /// All areas, as addresses.
    pub fn ranges(&self) -> Vec<(usize, usize)> {
        let areas = self.areas.read();
        areas.iter().map(|a| ((a.start as usize) << PAGE_SHIFT, (a.end as usize) << PAGE_SHIFT)).collect()
    }

    /// In a child of fork: the address of a page that somebody has touched before the child was under management, though
    /// its contents are folded. What they read was zeros.
    ///
    /// # Errors
    /// What the page-map scan says.
    pub fn find_stray(&self, pagemap: &Pagemap) -> Result<Option<usize>, Errno> {
        let areas = self.areas.read();
        let mut stray = None;
        for area in areas.iter() {
            let (start, end) = ((area.start as usize) << PAGE_SHIFT, (area.end as usize) << PAGE_SHIFT);
            pagemap.for_each_populated(start, end, |s, e| {
                let first = area.key_of(s);
                self.each_folio(first..first + page_of(e - s), |_, id| {
                    // SAFETY: the guard that `each_folio` holds is that of the folio's shard.
                    let folio = unsafe { self.folios.get(id) };
                    if folio.state == State::Resident {
                        return;
                    }
                    let (from, to) = (folio.key.max(first), folio.key + folio.order.pages() as u64);
                    let mut pages = (from..to.min(first + page_of(e - s))).map(|key| area.addr_of(key));
                    // SAFETY: the caller is the first engine thread of a child of fork.
                    stray = stray.or_else(|| pages.find(|&page| unsafe { !self.rest.holds(page) }));
                });
            })?;
        }
        Ok(stray)
    }

    /// The bytes of the page at `addr`, as the index says; they stay until the next call. At rest only, and by one thread
    /// at a time; no lock is held on return.
    pub(crate) fn page_at_rest(&self, addr: Option<usize>) -> *const u8 {
        let areas = self.areas.read();
        let Some((addr, area)) = addr.and_then(|addr| areas.find(addr).map(|area| (addr, area))) else {
            return self.zeros();
        };
        let key = area.key_of(addr);
        let guard = self.shards.lock(key);
        let Some(id) = self.index.find(&guard, key) else { return self.zeros() };
        // SAFETY: the guard is that of the folio's shard.
        let folio = unsafe { self.folios.get(id) };
        let page = (key - folio.key) as usize;
        match folio.state {
            State::Resident => self.zeros(),
            State::Cached => (self.frames.addr(folio.frame) + page * PAGE_SIZE) as *const u8,
            State::Stored => {
                let block = self.folios.block_order(folio.order);
                let (handle, page) = (self.folios.slots(folio)[page / block.pages()].handle, page % block.pages());
                let (mut context, to) = (self.contexts.borrow(), self.scratch.as_ptr());
                // Single pages are what is asked for at rest: the recent blocks save decompressing one for each (M7).
                // SAFETY: the scratch holds a page, and nobody else uses it at rest; nothing is freed there.
                match unsafe { self.store.load_pages(&mut context.worker, handle, block, page, 1, to) } {
                    Ok(recent) => stats::add(&self.stats.recent_hits, recent as u64),
                    Err(e) => panic!("memfold: stored data is damaged, stopping before a wrong byte is read: {e}"),
                }
                stats::add(&self.stats.partial_loads, 1);
                to
            }
            State::Loading | State::Saving => unreachable!("somebody works at rest"),
        }
    }
}
