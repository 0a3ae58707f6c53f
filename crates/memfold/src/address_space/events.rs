//! Changes of the address space that are not the engine's: adopted memory, and what the program
//! does to it.
use crate::address_space::ranges::largest_aligned;
use crate::area::{Areas, page_of};
use crate::folio::State;
use crate::pager::Pager;
use crate::stats;
use alloc::vec::Vec;
use memfold_sys::Errno;
use memfold_sys::maps::pagemap::Pagemap;
use memfold_sys::sync::atomic::Ordering::SeqCst;
use memfold_sys::thread::yield_now;
use memfold_sys::uffd::Event;
use memfold_sys::units::{PAGE_SHIFT, PAGE_SIZE};

impl Pager {
    /// Applies one event (not a fault) that was read and is still held back by
    /// `area/event_order.rs`.
    ///
    /// A discard that is reported here happens, or has happened, in the kernel; no engine move can
    /// come between.
    pub fn apply(&self, event: Event) {
        stats::add(&self.stats.events, 1);
        let mut areas = self.areas.write();
        match event {
            Event::Remove { start, end } => {
                let pages = (start >> PAGE_SHIFT) as u64..end.div_ceil(PAGE_SIZE) as u64;
                for (area, keys) in areas.parts(&pages) {
                    self.discard_keys(&area, keys, false);
                }
            }
            Event::Unmap { start, end } => self.unmap(&mut areas, start, end),
            Event::Remap { from, to, len } => {
                self.remap(&mut areas, page_of(from), page_of(to), page_of(len))
            }
            Event::Fork { .. } | Event::Fault { .. } => {}
        }
    }

    /// The program has unmapped `[start, end)`, or mremap its source. See
    /// [`crate::area::early_events`].
    fn unmap(&self, areas: &mut Areas, start: usize, end: usize) {
        for (s, e) in areas.ended(page_of(start), page_of(end)) {
            self.forget(areas, (s << PAGE_SHIFT) as usize, (e << PAGE_SHIFT) as usize, false);
        }
    }

    /// The program has moved `pages` pages from `from` to `to` (page numbers).
    fn remap(&self, areas: &mut Areas, from: u64, to: u64, pages: u64) {
        let moved = areas.begin_move(from, to, pages);
        moved.ranges().for_each(|(start, end)| self.cut(areas, start, end));
        areas.end_move(moved);
    }

    /// No folio reaches across either end of `[start, end)` (page numbers).
    pub(crate) fn cut(&self, areas: &Areas, start: u64, end: u64) {
        for page in [start, end] {
            if let Some(area) = areas.iter().find(|a| a.start < page && page < a.end) {
                self.unfold_across(page - area.start + area.key);
            }
        }
    }

    /// Whether something waits for an event that may never come.
    pub fn has_parked(&self) -> bool {
        !self.areas.read().parked.is_empty()
    }

    /// Every event there was has been applied: what still waits for one has ended.
    pub fn end_parked(&self) {
        let mut areas = self.areas.write();
        for (start, end) in areas.take_parked() {
            self.forget(
                &mut areas,
                (start << PAGE_SHIFT) as usize,
                (end << PAGE_SHIFT) as usize,
                false,
            );
        }
    }

    /// Takes `[start, end)` under management: it must be registered already. Blocks of which a page
    /// is there become `Resident` folios, lowest address oldest: whole blocks, as first touches
    /// make them, so that a page that was never touched does not cut large folios in pieces.
    ///
    /// # Errors
    /// What the page-map scan says; EAGAIN: whoever works on folios takes long. Nothing is managed
    /// then.
    pub fn manage(&self, start: usize, end: usize, pagemap: &Pagemap) -> Result<(), Errno> {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let block = self.config.block_order.bytes();
        pagemap.for_each_populated(start, end, |s, e| {
            let (s, e) = ((s & !(block - 1)).max(start), e.next_multiple_of(block).min(end));
            match runs.last_mut() {
                Some(last) if last.1 >= s => last.1 = e,
                _ => runs.push((s, e)),
            }
        })?;
        let mut areas = self.areas.grow().ok_or(Errno::AGAIN)?;
        areas.add((start >> PAGE_SHIFT) as u64, (end >> PAGE_SHIFT) as u64);
        let area = *areas.find(start).expect("just added");
        for (s, e) in runs {
            self.note_resident(area.key_of(s), area.key_of(s) + ((e - s) >> PAGE_SHIFT) as u64);
        }
        stats::add(&self.stats.adopted_bytes, (end - start) as u64);
        Ok(())
    }

    pub(crate) fn note_resident(&self, mut key: u64, end: u64) {
        while key < end {
            let order = largest_aligned(key, end, self.config.folio_order);
            let guard = self.shards.lock(key);
            let id = self.folios.create(&guard, key, order, State::Resident);
            self.index.insert(&guard, key, order, id);
            self.tally.map(order.pages() as u64);
            // It was counted as unmanaged until now.
            self.quota.sub_outside(order.bytes() as u64);
            self.list_by_state(&guard, id);
            drop(guard);
            key += order.pages() as u64;
        }
    }

    /// Whether an address is under management.
    pub fn manages(&self, addr: usize) -> bool {
        self.areas.read().find(addr).is_some()
    }

    /// The parts of `[start, end)` that are not under management.
    pub fn unmanaged_parts(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let areas = self.areas.read();
        let mut parts = Vec::new();
        let mut at = start;
        for area in areas.iter() {
            let (s, e) = ((area.start as usize) << PAGE_SHIFT, (area.end as usize) << PAGE_SHIFT);
            if e <= at || s >= end {
                continue;
            }
            if s > at {
                parts.push((at, s));
            }
            at = e;
        }
        if at < end {
            parts.push((at, end));
        }
        parts
    }

    /// Says whether children of fork get what comes under management from now on.
    pub(crate) fn note_inherited(&self, inherited: bool) {
        self.inherited.store(inherited, SeqCst);
    }

    /// Whether they get it now.
    pub(crate) fn is_inherited(&self) -> bool {
        self.inherited.load(SeqCst)
    }

    /// Brings every folded page back and keeps all in place until [`Pager::thaw`]: for a fork,
    /// whose child gets copies of the page table and no engine. Goes past the limit if it must.
    ///
    /// Called by a thread of the program, whose handlers still run; for a fork, no area may be
    /// added until `thaw`. No lock is held on return, so other threads of the program go on
    /// faulting: what they can get is first touches only.
    pub fn freeze(&self) {
        self.frozen.store(true, SeqCst);
        loop {
            self.need_at(0..usize::MAX);
            // Written: whoever was evicting or saving when the freeze began has ended.
            let areas = self.areas.write();
            if areas.iter().all(|a| self.is_home(a.key, a.key_end())) {
                return;
            }
            drop(areas);
            yield_now();
        }
    }

    /// Whether every folio of a range of keys is in the page table.
    pub(crate) fn is_home(&self, start: u64, end: u64) -> bool {
        let mut home = true;
        self.each_folio(start..end, |guard, id| {
            home &= self.folios.get(guard, id).state.get() == State::Resident;
        });
        home
    }

    /// Ends [`Pager::freeze`].
    pub fn thaw(&self) {
        self.to_unshare.note_fork();
        self.frozen.store(false, SeqCst);
        self.queue.reclaim();
    }
}
