//! Pages of a block brought home by copy: decompressed into a buffer, and mapped by UFFDIO_COPY.
use crate::area::{Area, Areas};
use crate::folio::index::{FolioId, ShardGuard};
use crate::folio::loading::LoadingFolio;
use crate::folio::{Folio, FolioState, TouchKind};
use crate::memory::mapper::StepSize;
use crate::parts::bytes;
use crate::policy::stream_readahead::is_protected;
use crate::residency::Residency;
use crate::residency::huge_pages::HugePages;
use core::ops::Range;
use memfold_os::Errno;
use memfold_os::sync::atomic::Ordering::Relaxed;
use memfold_os::uffd::Partial;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_stats as stats;

/// What a load knows of the fault that it is for.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct FaultAccess {
    /// How it was asked for.
    pub touch: TouchKind,
    /// It was a write.
    pub write: bool,
}

/// How far a copy got.
struct CopyProgress {
    /// Pages that are there now and were not before.
    pages: u64,
    /// Which (`Folio::here`).
    bits: u16,
    /// They are known to equal their stored copy from now on.
    clean: bool,
    /// All that was to be copied is there.
    all: bool,
}

impl<'a> Residency<'a> {
    /// Brings home what is missing of a `Partial` folio, past the target if need be, so that it can
    /// be moved out; it has changed, or may have. Returns with its shard locked, which was not
    /// meanwhile.
    pub(crate) fn load_rest(
        &self,
        areas: &Areas,
        area: &Area,
        guard: ShardGuard<'_>,
        id: FolioId,
    ) -> ShardGuard<'a> {
        let load = self.table.begin_load(&guard, id);
        drop(guard);
        let keys = load.keys();
        let access = FaultAccess { touch: TouchKind::UNKNOWN, write: true };
        let progress = self.copy_in(areas, area, load, keys.clone(), access);
        assert!(progress.is_ok(), "what is partial stays so, or becomes whole");
        self.table.lock(keys.start)
    }

    /// Loads the pages with `keys` of a one-block `Loading` folio by copy, for which there is room, and
    /// ends the load. Returns whether all of them are there.
    ///
    /// # Errors
    /// The load: it can't be done now, and goes on.
    pub(crate) fn copy_in(
        &self,
        areas: &Areas,
        area: &Area,
        load: LoadingFolio,
        keys: Range<u64>,
        access: FaultAccess,
    ) -> Result<bool, LoadingFolio> {
        let (start, order, slot) = (load.key(), load.order(), load.first_slot());
        let mut context = self.backing.context();
        let buffer = context.buffer.pages_mut();
        let pages = (keys.start - start) as usize..(keys.end - start) as usize;
        // SAFETY: the buffer holds a block of the largest order that blocks have here, and is this
        // context's, which is lent to this thread; the folio is `Loading` by it, so that nobody
        // else frees its copy.
        let from_file =
            unsafe { self.backing.fetch_pages(&mut context, slot, order, pages, buffer) };
        let guard = self.table.lock(start);
        let folio = self.table.get(&guard, load.id());
        let before = folio.here.get();
        let progress = self.copy_home(areas, area, folio, keys, buffer.cast(), access);
        let resident_bits = before | progress.bits;
        if !(progress.all || self.mapper.drops_clean() && resident_bits != 0) {
            // What was mapped is right, and the other path finds it there.
            return Err(load);
        }
        let id = load.end();
        if before == 0 {
            self.note_refault(&guard, id, access.touch, from_file);
            self.note_load_time(folio);
        } else {
            folio.touch.set(folio.touch.get().then(access.touch));
        }
        let clean = progress.clean && (before == 0 || self.table.is_clean(folio));
        folio.clean_in.set(if clean { self.table.generation() } else { 0 });
        self.table.tally().map(progress.pages);
        self.table.tally().load(progress.pages);
        let is_whole = resident_bits == folio.bits(start..folio.end());
        folio.here.set(if is_whole { 0 } else { resident_bits });
        folio.state.set(if is_whole { FolioState::Resident } else { FolioState::Partial });
        folio.wanted.store(false, Relaxed);
        self.table.list_by_state(&guard, id);
        if is_whole {
            self.keep_clean_budget(&guard, id);
            HugePages::new(self.engine).note_load(&guard, id);
        }
        self.table.notify(&guard);
        let in_part = before != 0 || !is_whole;
        stats::add(&self.stats.page_loads, in_part as u64);
        let is_fallback = order > Order::PAGE && !clean && !in_part;
        stats::add(&self.stats.load_fallback, is_fallback as u64);
        if in_part {
            (0..progress.pages).for_each(|_| self.count_load(Order::PAGE, from_file));
        } else {
            self.count_load(order, from_file);
        }
        Ok(progress.all)
    }

    /// Copies those pages with these keys home that are not there, under their shard's lock; `from`
    /// is where the folio's first page is.
    fn copy_home(
        &self,
        areas: &Areas,
        area: &Area,
        folio: &Folio,
        keys: Range<u64>,
        from: *const u8,
        access: FaultAccess,
    ) -> CopyProgress {
        let protect = self.mapper.drops_clean()
            && is_protected(access.touch, access.write)
            && !areas.is_pinned(keys.start, keys.end);
        let mut progress = CopyProgress { pages: 0, bits: 0, clean: protect, all: false };
        let mut at = keys.start;
        let mut span = StepSize::new(bytes((keys.end - at) as usize));
        while at < keys.end {
            let is_away = |key: &u64| folio.here.get() & folio.bits(*key..key + 1) == 0;
            let Some(first) = (at..keys.end).find(is_away) else { break };
            let end = (first..keys.end).find(|key| !is_away(key)).unwrap_or(keys.end);
            let (home, len) = (area.addr_of(first), span.limit(bytes((end - first) as usize)));
            // SAFETY: the shard is locked, the buffer holds the folio's bytes as far as they are
            // asked for, and `home` is of its own range, and not `here`.
            let result = unsafe {
                let from = from.add(bytes((first - folio.key()) as usize));
                if protect {
                    self.mapper.space().copy_protected(home, from, len)
                } else {
                    self.mapper.space().copy(home, from, len, true)
                }
            };
            let mut mapped_pages = result.map_or_else(|partial| partial.done, |()| len) / PAGE_SIZE;
            match result {
                Err(partial) if partial.errno == Errno::EXIST => {
                    // A page that is there is newer than ours, as in `carry_in`, and the folio must
                    // not be `Loading` any more when the lock is gone: the program may drop it.
                    stats::add(&self.stats.move_exists, 1);
                    self.mapper.space().wake(home, len);
                    (mapped_pages, progress.clean) = (mapped_pages + 1, false);
                }
                Err(Partial { errno: Errno::NOENT | Errno::INVAL, .. }) if span.narrow(len) => {}
                Err(partial) if partial.errno != Errno::AGAIN || mapped_pages == 0 => {
                    self.mapper.space().wake(home, len);
                    progress.bits |= folio.bits(first..first + mapped_pages as u64);
                    progress.pages += mapped_pages as u64;
                    return progress;
                }
                _ => span.widen(),
            }
            at = first + mapped_pages as u64;
            progress.bits |= folio.bits(first..at);
            progress.pages += mapped_pages as u64;
        }
        progress.all = true;
        progress
    }
}
