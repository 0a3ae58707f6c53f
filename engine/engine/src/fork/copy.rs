//! The engine across a fork: brought to rest in the parent, and put to use again in the child,
//! which has a copy-on-write copy of all that it keeps: pool, index and frames.
use crate::area::{Area, Areas, page_of};
use crate::backing::BlockSlot;
use crate::fault::load::BlockSource;
use crate::fault::{Faults, PageFault};
use crate::folio::FolioState;
use crate::folio::lru::LruList;
use crate::fork::Fork;
use crate::known::TOP;
use crate::limits::Limits;
use crate::mappings::Mappings;
use crate::mappings::ranges::KeyRanges;
use crate::parts::bytes;
use crate::reclaim::writeback::Writeback;
use crate::stats_place::StatsPlace;
use alloc::vec::Vec;
use core::cell::Cell;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::maps::pagemap::Pagemap;
use memfold_os::page::Page;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::thread::yield_now;
use memfold_os::units::{Order, PAGE_SHIFT, PAGE_SIZE};
use memfold_stats::Stats;
use memfold_store::Handle;
use memfold_swap::{ObjectLocation, Swap};

impl Fork<'_> {
    /// In gate delivery: waits until nobody works, and keeps all as it is until
    /// [`Fork::end_copy`]: no fault is served, nothing is asked of background threads, and nothing
    /// is written. Called by the thread that makes the copy, which meets no fault until then; no
    /// mapping is being changed. `reaches`: whether a child would reach the remote store; asked if
    /// it needs it. `may_bring` is told what must be brought home first, bytes, if anything must,
    /// and returns if there is room for it.
    pub fn begin_copy(&self, reaches: impl Fn() -> bool, may_bring: impl Fn(u64)) {
        let bring = |swap: &Swap| {
            may_bring(self.bytes_in_file());
            self.empty_file(swap);
        };
        if let Some(swap) = self.backing.swap().filter(|swap| !swap.can_lend()) {
            bring(swap);
        }
        loop {
            self.pauses.pause_background();
            self.areas.close();
            let Some(swap) = self.backing.swap() else { break };
            // Nobody waits for the thread that writes any more, and it gets nothing new.
            Writeback::new(self.engine).drain_writes();
            self.pauses.pause_writing();
            if swap.begin_copy(&reaches) {
                break;
            }
            // SAFETY: closed above.
            unsafe {
                self.pauses.resume_writing();
                self.areas.open();
                self.pauses.resume_background();
            }
            bring(swap);
        }
        // After that: who serves a fault asks.
        self.requests.freeze();
        if let Some(queue) = self.delegate_queue {
            queue.freeze();
        }
    }

    /// What lies in swap file and remote store alone, bytes.
    fn bytes_in_file(&self) -> u64 {
        let mut sum = 0;
        for area in self.areas.read().iter() {
            self.table.each(area.key..area.key_end(), |guard, id| {
                let folio = self.table.get(guard, id);
                let slots = self.table.slots(folio).iter();
                let lens = slots.filter_map(|slot| {
                    Some(ObjectLocation::from_handle(slot.get().handle)?.len as u64)
                });
                let is_away = matches!(folio.state.get(), FolioState::Stored | FolioState::Partial);
                sum += if is_away { lens.sum() } else { 0 };
            });
        }
        sum
    }

    /// Brings home what is in the swap file, where nothing more goes until the copy was made.
    fn empty_file(&self, swap: &Swap) {
        swap.set_closed(true);
        while swap.objects() > 0 {
            Writeback::new(self.engine).drain_writes();
            let areas = self.areas.read();
            areas.iter().for_each(|area| self.bring_from_file(&areas, area));
            drop(areas);
            yield_now();
        }
    }

    fn bring_from_file(&self, areas: &Areas, area: &Area) {
        let mut key = area.key;
        while let Some((guard, at, id)) = self.table.lock_next(key..area.key_end()) {
            let folio = self.table.get(&guard, id);
            let slots = self.table.slots(folio);
            let in_file = |slot: &Cell<BlockSlot>| slot.get().handle.as_foreign().is_some();
            let Some(first) = slots.iter().position(in_file) else {
                key = folio.end().max(at + 1);
                continue;
            };
            if matches!(folio.state.get(), FolioState::Resident | FolioState::Cached) {
                self.table.drop_copy(&guard, id, self.backing);
                self.table.list_by_state(&guard, id);
                continue;
            }
            let block = self.table.block_order(folio.order());
            let at = (folio.key() + (first * block.pages()) as u64).max(area.key);
            // A touch of a page that is here would load nothing.
            let at = (at..folio.end()).find(|key| !folio.is_here(*key)).unwrap_or(at);
            drop(guard);
            // It is there then, or somebody else works on it: it is looked at again.
            let fault = PageFault { addr: area.addr_of(at), ..PageFault::default() };
            Faults::new(self.engine).serve(areas, area, fault, BlockSource::Any);
        }
    }

    /// In a child, after [`Fork::begin_copy`] in its parent, and before [`Fork::end_copy`]: no
    /// hold of other threads came along, and requests may be made. Calls `register`
    /// for each managed range, because the kernel has registered none in the child. Pages that the
    /// kernel has mapped there since are dropped (`Mappings::drop_strays`). The caller has registered
    /// the frames.
    ///
    /// # Safety
    /// - The caller is the only thread.
    pub unsafe fn begin_in_child(&self, pagemap: &Pagemap, register: impl FnMut(usize, usize)) {
        // SAFETY: by the caller's promise.
        unsafe { self.holds.reset_in_child() };
        self.table.begin_generation();
        // SAFETY: by the caller's promise.
        unsafe { self.each_area_in_child(register) };
        // SAFETY: nobody changes areas.
        let areas = unsafe { self.areas.peek() };
        Mappings::new(self.engine).drop_strays(areas, &(0..page_of(TOP)), pagemap);
    }

    /// In a child, between [`Fork::begin_copy`] in its parent and [`Fork::end_copy`]: calls `each`
    /// with the first address and the end of all that is managed.
    ///
    /// # Safety
    /// - The caller is the only thread.
    pub unsafe fn each_area_in_child(&self, mut each: impl FnMut(usize, usize)) {
        // SAFETY: nobody changes areas.
        for area in unsafe { self.areas.peek() }.iter() {
            each((area.start as usize) << PAGE_SHIFT, (area.end as usize) << PAGE_SHIFT);
        }
    }

    /// In a child, after [`Fork::begin_copy`] in its parent, before anything else: these ranges of
    /// addresses are not for children, so nothing is mapped there.
    ///
    /// # Safety
    /// - The caller is the only thread.
    pub unsafe fn end_in_child(&self, ranges: &[Range<usize>]) {
        // SAFETY: closed by the parent, and nobody waits for it.
        unsafe { self.areas.open() };
        for range in ranges {
            Mappings::new(self.engine).end(range.clone());
        }
        self.areas.close();
    }

    /// In a child that can have no engine, after [`Fork::begin_copy`] in its parent: calls `put`
    /// with the address and the bytes of every page that the program has and the engine keeps.
    ///
    /// # Safety
    /// - The caller is the only thread, and nothing of the engine is used afterwards.
    pub unsafe fn each_away(&self, mut put: impl FnMut(usize, *const u8)) {
        // SAFETY: the parent has begun the copy, which ends later, and the caller is alone.
        self.backing.swap().into_iter().for_each(|swap| unsafe { swap.allow_reads() });
        // SAFETY: nobody changes areas.
        for area in unsafe { self.areas.peek() }.iter() {
            let keys = area.key..area.key + (area.end - area.start);
            let mut stored_pages: Vec<(u64, Option<BlockSlot>, Order)> = Vec::new();
            self.table.each(keys.clone(), |guard, id| {
                let folio = self.table.get(guard, id);
                if folio.state.get() != FolioState::Resident {
                    // What is in a frame may be newer than its stored copy.
                    let is_stored = folio.state.get() != FolioState::Cached;
                    let (block, slots) =
                        (self.table.block_order(folio.order()), self.table.slots(folio));
                    let slot = |key| {
                        is_stored.then(|| slots[(key - folio.key()) as usize / block.pages()].get())
                    };
                    let own = folio.key().max(keys.start)..folio.end().min(keys.end);
                    let missing_keys = own.filter(|key| !folio.is_here(*key));
                    stored_pages.extend(missing_keys.map(|key| (key, slot(key), block)));
                }
            });
            let mut last_handle = Handle::NONE;
            for (key, slot, block) in stored_pages {
                let (addr, page) = (area.addr_of(key), key as usize % block.pages());
                // SAFETY: the engine is at rest, and the caller is alone. The scratch holds a block.
                unsafe {
                    let Some(slot) = slot.filter(|slot| slot.handle.as_foreign().is_some()) else {
                        last_handle = Handle::NONE;
                        put(addr, self.page_at_rest(Some(addr)));
                        continue;
                    };
                    if last_handle != slot.handle {
                        let context = self.backing.context_at_rest();
                        let to = Page::at(self.scratch.as_ptr());
                        self.backing.fetch_pages(context, slot, block, 0..block.pages(), to);
                        last_handle = slot.handle;
                    }
                    put(addr, self.scratch.as_ptr().add(page * PAGE_SIZE));
                }
            }
        }
        self.backing.swap().into_iter().for_each(Swap::forbid_reads);
    }

    /// In a child: whether its only thread does by itself what engine threads do for it later. It
    /// has the descriptors of the swap file.
    pub fn set_alone(&self, alone: bool) {
        self.delegate_queue.iter().for_each(|queue| queue.set_alone(alone));
    }

    /// In a child, after [`Fork::begin_copy`] in its parent: the swap file's part of
    /// [`Fork::begin_in_child`]. `open` opens an own file, for what lies from this byte on: see
    /// `FileDisk::begin_in_child`.
    ///
    /// # Errors
    /// No key for it.
    ///
    /// # Safety
    /// - The caller is the only thread.
    pub unsafe fn begin_file_in_child(&self, open: impl FnOnce(u64)) -> Result<(), Errno> {
        let Some(swap) = self.backing.swap() else { return Ok(()) };
        open(swap.base());
        // SAFETY: by the caller's promise.
        unsafe { swap.begin_in_child() }
    }

    /// In a child, between [`Fork::begin_file_in_child`] and [`Fork::end_copy`], by an engine
    /// thread: connects to the remote store, if it reads there. It may be in a root directory later
    /// where it couldn't.
    ///
    /// # Safety
    /// - `end_copy` is not called meanwhile.
    pub unsafe fn connect_remote(&self) {
        // SAFETY: by the caller's promise the tier is frozen.
        self.backing.swap().into_iter().for_each(|swap| unsafe { swap.connect_remote() });
    }

    /// In a child, after [`Fork::end_copy`]: with `charges`, protects all managed memory from writes.
    /// So each copy of a page is charged before the kernel makes it (`fault/copies.rs`). Without,
    /// ends what the parent had of that. The caller is the program's only thread, so no system call
    /// is in progress that writes to this memory.
    ///
    /// # Errors
    /// The errors of `UFFDIO_WRITEPROTECT`. ENOSYS: the space can't protect resident memory.
    pub fn charge_copies(&self, charges: bool) -> Result<(), Errno> {
        self.to_unshare.set_charges_copies(false);
        if !charges {
            return Ok(());
        }
        if !self.mapper.drops_clean() {
            return Err(Errno::NOSYS);
        }
        for area in self.areas.read().iter() {
            let start = (area.start as usize) << PAGE_SHIFT;
            self.mapper.space().protect(start, bytes((area.end - area.start) as usize), true)?;
        }
        self.to_unshare.set_charges_copies(true);
        Ok(())
    }

    /// Ends [`Fork::begin_copy`], in each of the two processes, after [`Fork::allow_requests`]. The
    /// child mostly ends or executes a program soon, so what both share stays until
    /// [`Fork::note_shared`].
    ///
    /// # Safety
    /// - `begin_copy` has returned, in this process or in the parent that it is a copy of, and this
    ///   is called once for it.
    pub unsafe fn end_copy(&self, in_child: bool) {
        self.note_uncounted();
        // SAFETY: by the caller's promise.
        unsafe {
            if let Some(swap) = self.backing.swap() {
                swap.end_copy(in_child);
                self.pauses.resume_writing();
            }
            self.areas.open();
            self.pauses.resume_background();
        }
    }

    /// It isn't known how many processes share the memory of this one. What is shared stays until
    /// [`Fork::note_shared`].
    pub fn note_uncounted(&self) {
        self.to_unshare.note_shared(true);
    }

    /// This process shares `bytes` of memory by forks, and `own` bytes of these count here. It is one of
    /// `processes` that are known to share memory; new ones may not be among them yet. A page that is
    /// folded is made private first, in each of the processes. Among three or more that takes more
    /// memory than it frees, so shared pages stay. Between two they are folded if a compressed copy
    /// takes less than a process's part of them. Without a limit they stay, because each process that
    /// touched them again would have a page of its own.
    pub fn note_shared(&self, bytes: u64, own: u64, processes: usize) {
        let data = (self.table.tally().folded() + self.table.tally().clean()) << PAGE_SHIFT;
        let pool = self.backing.store().pool_bytes().min(data / 2);
        let takes_more = u128::from(own) * u128::from(data) < u128::from(bytes) * u128::from(pool);
        // Of a page that `n` processes have, one part in `n` counts in each.
        let has_many = processes > 2 || u128::from(own) * 5 < u128::from(bytes) * 2;
        let stays = takes_more || has_many || !Limits::new(self.engine).is_bounded();
        self.to_unshare.note_shared(stays);
    }

    /// Returns whether each copy of a shared page is charged before the kernel makes it.
    pub fn charges_copies(&self) -> bool {
        self.to_unshare.charges_copies()
    }

    /// This process shares no memory any more.
    pub fn note_private(&self) {
        self.to_unshare.note_private();
    }

    /// Pages that could not be folded are tried again, because it is known anew what is shared.
    pub fn retry_shared(&self) {
        if self.table.lists().pages(LruList::Shared) > 0 {
            self.requests.reclaim();
        }
    }

    /// The first part of the end of [`Fork::begin_copy`]: there may be requests to background threads
    /// again, which wait for the pauses.
    ///
    /// # Safety
    /// - `begin_copy` has returned, in this process or in the parent that it is a copy of, and this is
    ///   called once for it.
    pub unsafe fn allow_requests(&self) {
        // SAFETY: by the caller's promise.
        unsafe {
            if let Some(queue) = self.delegate_queue {
                queue.unfreeze();
                self.backing.swap().into_iter().for_each(|swap| swap.allow_requests());
            }
            self.requests.unfreeze();
        }
    }

    /// Returns whether no thread is in the middle of work on the engine. If all threads that could
    /// be have ended, the engine is whole then: each of them has ended before or after such work.
    pub fn is_at_rest(&self) -> bool {
        let queue = self.delegate_queue;
        !(self.pauses.are_used()
            || self.areas.is_held()
            || self.requests.is_held()
            || queue.is_some_and(|queue| queue.is_held())
            || self.backing.swap().is_some_and(Swap::is_held))
    }

    /// Returns whether a managed page was never touched, or is discarded, so that it is zeros. All
    /// threads of the engine have ended, perhaps in the middle of work. Returns `false` if that is
    /// unknown.
    ///
    /// # Safety
    /// - No living thread changes the areas or the table.
    pub unsafe fn is_untouched(&self, addr: usize) -> bool {
        if self.areas.are_changing() {
            return false;
        }
        // SAFETY: by the caller's promise no living thread changes the areas, and none has ended in
        // a change.
        let areas = unsafe { self.areas.peek() };
        // A folio comes and goes with its shard locked.
        areas.find(addr).is_some_and(|area| {
            let key = area.key_of(addr);
            // SAFETY: by the caller's promise no living thread changes the table. None has ended
            // with this shard locked.
            !self.table.is_held(key) && unsafe { self.table.at_rest(key) }.is_none()
        })
    }

    /// Takes over an engine that [`Fork::is_at_rest`], whose threads and process have ended.
    ///
    /// # Safety
    /// - No living thread uses the engine.
    pub unsafe fn inherit(&self) {
        // SAFETY: by the caller's promise no living thread uses any of these.
        unsafe {
            self.pauses.forget_waiters();
            self.areas.forget_waiters();
            self.holds.forget_waiters();
        }
    }

    /// Counts in `stats` from now on.
    pub fn count_in(&self, stats: &'static Stats) {
        if let StatsPlace::Shared(place) = self.stats {
            place.store(stats as *const Stats as *mut Stats, Relaxed);
        }
    }

    /// In a child of fork, at rest, before its userfaultfd has anything registered: what is the
    /// parent's and not the child's is let go. Counts in `stats` from now on.
    pub fn begin_as_child(&self, stats: &'static Stats) {
        self.count_in(stats);
        self.budget.forget_cost();
        // SAFETY: this is the only engine thread, and the parent was at rest.
        unsafe { self.backing.store().reset_in_child() };
        // The parent's pages; written to, each would be copied.
        self.mapper.trim(u64::MAX);
    }

    /// The bytes of the page at `addr`, as the index says; they stay until the next call.
    ///
    /// Nothing of the engine is changed, and no lock is taken.
    ///
    /// # Safety
    /// - The engine is at rest, and one thread at a time calls this.
    pub(crate) unsafe fn page_at_rest(&self, addr: Option<usize>) -> *const u8 {
        // SAFETY: at rest no area changes.
        let areas = unsafe { self.areas.peek() };
        let Some((addr, area)) = addr.and_then(|addr| areas.find(addr).map(|area| (addr, area)))
        else {
            return self.mapper.frames().zeros();
        };
        let key = area.key_of(addr);
        // SAFETY: nor does the table.
        let Some(folio) = (unsafe { self.table.at_rest(key) }) else {
            return self.mapper.frames().zeros();
        };
        let page = (key - folio.key()) as usize;
        match folio.state.get() {
            FolioState::Resident => self.mapper.frames().zeros(),
            FolioState::Partial if folio.is_here(key) => self.mapper.frames().zeros(),
            FolioState::Cached => {
                (self.mapper.frames().addr(folio.frame.get()) + page * PAGE_SIZE) as *const u8
            }
            FolioState::Stored | FolioState::Partial => {
                let block = self.table.block_order(folio.order());
                let (handle, page) = (
                    self.table.slots(folio)[page / block.pages()].get().handle,
                    page % block.pages(),
                );
                let to = self.scratch.as_ptr();
                // SAFETY: nobody borrows a context at rest, and the caller is alone. The scratch holds
                // a page, and nobody else uses it at rest.
                unsafe { self.backing.fetch_at_rest(handle, block, page, to) };
                to
            }
            FolioState::Loading | FolioState::Saving | FolioState::Leaving => {
                unreachable!("somebody works at rest")
            }
        }
    }

    /// Brings every folded page back and keeps all in place until [`Fork::thaw`]: for a fork,
    /// whose child gets copies of the page table and no engine. Goes past the limit if it must.
    ///
    /// Called by a thread of the program, whose handlers still run; for a fork, no area may be
    /// added until `thaw`. No lock is held on return, so other threads of the program go on
    /// faulting: what they can get is first touches only.
    pub fn freeze(&self) {
        self.budget.set_frozen(true);
        loop {
            Mappings::new(self.engine).need_at(0..usize::MAX);
            // Written: whoever was evicting or saving when the freeze began has ended.
            let areas = self.areas.write();
            if areas.iter().all(|a| KeyRanges::new(self.engine).is_home(a.key, a.key_end())) {
                return;
            }
            drop(areas);
            yield_now();
        }
    }

    /// Ends [`Fork::freeze`].
    pub fn thaw(&self) {
        self.to_unshare.note_fork();
        self.budget.set_frozen(false);
        self.requests.reclaim();
    }
}
