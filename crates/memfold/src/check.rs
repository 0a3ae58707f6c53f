//! The engine against its equations (see [`Pager`]): what tests and fuzzers ask after each round.
use crate::folio::State;
use crate::folio::lru::List;
use crate::pager::Pager;
use crate::swap::Swap;
use alloc::string::{String, ToString};
use memfold_sys::units::MAX_PAGES;

impl Pager {
    /// Verifies what must hold while nobody works: store, frames, and every folio of every area.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.drain_writes();
        let areas = self.areas.write();
        self.store.check()?;
        self.frames.check(&*self.space).map_err(|e| e.to_string())?;
        self.swap.as_ref().map_or(Ok(()), Swap::check)?;
        let (mut mapped, mut cached, mut clean, mut folded) = (0u64, 0u64, 0u64, 0u64);
        let (mut count, mut objects, mut in_file) = (0u64, 0u64, 0u64);
        for area in areas.iter() {
            let mut key = area.key;
            while key < area.key_end() {
                let end = ((key / MAX_PAGES as u64 + 1) * MAX_PAGES as u64).min(area.key_end());
                let guard = self.shards.lock(key);
                let Some((at, id)) = self.index.first(&guard, key, end) else {
                    key = end;
                    continue;
                };
                let folio = self.folios.get(&guard, id);
                let pages = folio.pages();
                if folio.key() != at || at + pages > area.key_end() {
                    return Err(alloc::format!(
                        "folio {id} at {:#x} is entered at {at:#x} or leaves its area",
                        folio.key()
                    ));
                }
                count += 1;
                match folio.state.get() {
                    State::Resident => mapped += pages,
                    State::Cached => cached += pages,
                    State::Stored => {
                        folded += pages;
                        if !folio.has_copy.get() {
                            return Err(alloc::format!("folio {id} is stored without a copy"));
                        }
                    }
                    State::Loading | State::Saving => {
                        return Err(alloc::format!(
                            "folio {id} is {:?} at rest",
                            folio.state.get()
                        ));
                    }
                }
                if folio.has_copy.get() {
                    clean += if folio.state.get() == State::Stored { 0 } else { pages };
                    if self.folios.handles(folio).any(|h| h.is_none()) {
                        return Err(alloc::format!("folio {id} lacks a block of its copy"));
                    }
                    let foreign =
                        self.folios.handles(folio).filter(|h| h.as_foreign().is_some()).count();
                    let zeros = self.folios.handles(folio).filter(|h| h.is_zero()).count();
                    objects += (self.folios.slots(folio).len() - zeros - foreign) as u64;
                    in_file += foreign as u64;
                }
                // What is on no list never leaves the pool.
                if folio.state.get() == State::Stored
                    && self.swap.is_some()
                    && self.folios.handles(folio).any(|h| self.store.payload(h).is_some())
                    && !self.lru.is_on(id, List::Folded)
                {
                    return Err(alloc::format!(
                        "folio {id} is in the pool, and writeback doesn't know it"
                    ));
                }
                key = at + pages;
            }
        }
        let listed = |lists: &[List]| lists.iter().map(|list| self.lru.pages(*list)).sum::<u64>();
        let sums = [
            ("mapped pages", mapped, self.tally.mapped()),
            (
                "mapped pages on lists",
                mapped,
                listed(&[List::Active, List::Inactive, List::Refused]),
            ),
            ("cached pages on lists", cached, listed(&[List::Cooling, List::Ahead, List::Dirty])),
            ("full frames", cached + self.frames.full_free(), self.frames.populated()),
            ("clean pages", clean, self.tally.clean()),
            ("folded pages", folded, self.tally.folded()),
            ("folios", count, self.folios.count() as u64),
            ("stored objects", objects, self.store.stats().objects),
            ("objects in the swap file", in_file, self.swap.as_ref().map_or(0, Swap::objects)),
        ];
        match sums.iter().find(|s| s.1 != s.2) {
            Some((name, found, counted)) => {
                Err(alloc::format!("{name}: found {found}, counted {counted}"))
            }
            None => Ok(()),
        }
    }
}
