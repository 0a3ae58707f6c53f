//! The engine's equations (see [`Pager`]). Tests and fuzzers check them after each round.
use crate::area::Area;
use crate::area::lock::AreaLock;
use crate::backing::Backing;
use crate::folio::index::FolioId;
use crate::folio::lru::LruList;
use crate::folio::table::FolioTable;
use crate::folio::{Folio, FolioState};
use crate::memory::mapper::Mapper;
use crate::parts::EngineParts;
use crate::reclaim::writeback::Writeback;
use crate::requests::pause::ForkPauses;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use memfold_os::units::PAGE_SIZE;
use memfold_swap::Swap;

/// Sums over the folios of all areas.
#[derive(Default)]
struct FolioSums {
    mapped: u64,
    /// Pages of folios that have mapped pages.
    listed: u64,
    cached: u64,
    clean: u64,
    folded: u64,
    unproven: u64,
    folios: u64,
    objects: u64,
    in_file: u64,
}

/// Verifies the engine.
#[derive(Copy, Clone)]
pub(crate) struct Invariants<'a> {
    table: &'a FolioTable,
    mapper: &'a Mapper,
    backing: &'a Backing,
    areas: &'a AreaLock,
    pauses: &'a ForkPauses,
    engine: &'a EngineParts,
}

impl<'a> Invariants<'a> {
    /// Returns the walk over the parts of an engine.
    #[inline]
    pub(crate) fn new(engine: &'a EngineParts) -> Invariants<'a> {
        Invariants {
            table: &engine.table,
            mapper: &engine.mapper,
            backing: &engine.backing,
            areas: &engine.areas,
            pauses: &engine.pauses,
            engine,
        }
    }

    /// Verifies the conditions that hold while no thread works: store, frames, and every folio of
    /// every area. The caller is no engine thread.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self) -> Result<(), String> {
        // Background threads would evict and trim between two figures.
        let _paused = self.pauses.paused_background();
        let areas = self.areas.write();
        Writeback::new(self.engine).drain_writes();
        self.backing.store().check()?;
        self.mapper.frames().check(self.mapper.space()).map_err(|e| e.to_string())?;
        self.backing.swap().map_or(Ok(()), Swap::check)?;
        let mut sums = FolioSums::default();
        for area in areas.iter() {
            self.check_area(area, &mut sums)?;
        }
        self.check_sums(&sums)
    }

    fn check_area(&self, area: &Area, found: &mut FolioSums) -> Result<(), String> {
        let mut key = area.key;
        while let Some((guard, at, id)) = self.table.lock_next(key..area.key_end()) {
            let folio = self.table.get(&guard, id);
            if folio.key() != at || at + folio.pages() > area.key_end() {
                let key = folio.key();
                return Err(format!(
                    "folio {id} at {key:#x} is entered at {at:#x} or leaves its area"
                ));
            }
            self.check_folio(id, folio, found)?;
            self.check_clean(area, id, folio)?;
            key = at + folio.pages();
        }
        Ok(())
    }

    fn check_folio(&self, id: FolioId, folio: &Folio, found: &mut FolioSums) -> Result<(), String> {
        let (pages, stored) = (folio.pages(), folio.state.get() == FolioState::Stored);
        found.folios += 1;
        found.unproven += if folio.is_probed.get() { pages } else { 0 };
        match folio.state.get() {
            FolioState::Resident => {
                found.mapped += pages;
                found.listed += pages;
            }
            FolioState::Partial => {
                let resident_pages = folio.pages_here();
                if resident_pages == 0
                    || resident_pages == pages
                    || self.table.slots(folio).len() != 1
                {
                    return Err(format!(
                        "folio {id} is partial with {resident_pages} pages of {pages}"
                    ));
                }
                found.mapped += resident_pages;
                found.listed += pages;
                found.folded += pages - resident_pages;
            }
            FolioState::Cached => found.cached += pages,
            FolioState::Stored => found.folded += pages,
            state @ (FolioState::Loading | FolioState::Saving | FolioState::Leaving) => {
                return Err(format!("folio {id} is {state:?} at rest"));
            }
        }
        if folio.state.get() != FolioState::Partial && folio.here.get() != 0 {
            return Err(format!("folio {id} is not partial, and some of its pages are here"));
        }
        if !folio.has_copy.get() {
            return if stored || folio.state.get() == FolioState::Partial {
                Err(format!("folio {id} is stored without a copy"))
            } else {
                Ok(())
            };
        }
        found.clean += match folio.state.get() {
            FolioState::Stored => 0,
            FolioState::Partial => folio.pages_here(),
            _ => pages,
        };
        let handles = || self.table.handles(folio);
        if handles().any(|h| h.is_none()) {
            return Err(format!("folio {id} lacks a block of its copy"));
        }
        let foreign = handles().filter(|h| h.as_foreign().is_some()).count();
        let zeros = handles().filter(|h| h.is_zero()).count();
        found.objects += (self.table.slots(folio).len() - zeros - foreign) as u64;
        found.in_file += foreign as u64;
        // Objects of folios that are on no list never leave the pool.
        let in_pool = stored && handles().any(|h| self.backing.store().payload(h).is_some());
        if in_pool
            && self.backing.swap().is_some()
            && !self.table.lists().is_on(id, LruList::Folded)
        {
            return Err(format!("folio {id} is in the pool, and writeback doesn't know it"));
        }
        Ok(())
    }

    /// Verifies that the pages of a clean folio are in memory, and equal its stored copy.
    fn check_clean(&self, area: &Area, id: FolioId, folio: &Folio) -> Result<(), String> {
        if !self.table.is_clean(folio) {
            return Ok(());
        }
        let (order, slots) = (folio.order(), self.table.slots(folio));
        let in_memory = matches!(folio.state.get(), FolioState::Resident | FolioState::Partial);
        if !in_memory || !folio.has_copy.get() || slots.len() != 1 {
            return Err(format!("folio {id} is clean, and not one block in memory with a copy"));
        }
        let address = area.addr_of(folio.key());
        let resident_keys: Vec<u64> =
            (folio.key()..folio.end()).filter(|key| folio.is_here(*key)).collect();
        if !resident_keys.iter().all(|key| self.mapper.space().is_populated(area.addr_of(*key))) {
            return Err(format!("folio {id} is clean, and lacks a page"));
        }
        let mut context = self.backing.context();
        let buffer = context.buffer.pages_mut();
        // SAFETY: the buffer holds a block, and belongs to this context, which is lent to this
        // thread. No other thread works, so the copy is not freed.
        unsafe {
            self.backing.fetch_pages(&mut context, slots[0].get(), order, 0..order.pages(), buffer)
        };
        let bytes = |from: *const u8| {
            // SAFETY: both have the folio's size. The pages that are read at home are present, so
            // no fault is taken. They may be written to meanwhile, hence there is no reference.
            move |n| unsafe { from.add(n).read_volatile() }
        };
        let (own, stored) = (bytes(address as *const u8), bytes(buffer.cast()));
        let mut within = resident_keys.iter().flat_map(|key| {
            let at = (key - folio.key()) as usize * PAGE_SIZE;
            at..at + PAGE_SIZE
        });
        match within.all(|n| own(n) == stored(n)) {
            true => Ok(()),
            false => Err(format!("folio {id} is clean, and differs from its copy")),
        }
    }

    fn check_sums(&self, found: &FolioSums) -> Result<(), String> {
        let listed = |lists: &[LruList]| {
            lists.iter().map(|list| self.table.lists().pages(*list)).sum::<u64>()
        };
        let mapped_pages = listed(&[LruList::Active, LruList::Inactive, LruList::Held])
            + listed(&LruList::REFUSED);
        let cached = listed(&[LruList::Cooling, LruList::Ahead, LruList::Dirty]);
        let in_file = self.backing.swap().map_or(0, Swap::objects);
        let sums = [
            ("mapped pages", found.mapped, self.table.tally().mapped()),
            ("pages of mapped folios on lists", found.listed, mapped_pages),
            ("cached pages on lists", found.cached, cached),
            (
                "full frames",
                found.cached + self.mapper.frames().full_free(),
                self.mapper.frames().populated(),
            ),
            ("clean pages", found.clean, self.table.tally().clean()),
            ("folded pages", found.folded, self.table.tally().folded()),
            ("unproven pages", found.unproven, self.table.unproven()),
            ("folios", found.folios, self.table.count() as u64),
            ("stored objects", found.objects, self.backing.store().stats().objects),
            ("objects in the swap file", found.in_file, in_file),
        ];
        match sums.iter().find(|sum| sum.1 != sum.2) {
            Some((name, found, counted)) => {
                Err(format!("{name}: found {found}, counted {counted}"))
            }
            None => Ok(()),
        }
    }
}
