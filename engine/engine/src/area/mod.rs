//! Areas: the managed parts of the address space, and the keys of their pages.
//!
//! # Keys and addresses
//! The index is keyed by a **key**, not by an address. A key stays with its page when mremap moves
//! the page: an area maps addresses to keys by one offset. So mremap can move gigabytes of managed
//! memory, folded parts too, and only the offset changes.
//!
//! A key is the page's number, unless an area that has moved away still owns that number. Then the
//! key comes from beyond the 47-bit address space, congruent modulo 2 MiB where alignment matters
//! for folios. The store gets a key only to choose a pool.
pub mod lock;

use crate::folio::index::KEYS;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::units::{MAX_PAGES, PAGE_SHIFT};

/// Returns the number of the page at an address.
pub fn page_of(addr: usize) -> u64 {
    (addr >> PAGE_SHIFT) as u64
}

/// A managed part of the address space. All three are page numbers.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Area {
    /// First page.
    pub start: u64,
    /// The page after its last one.
    pub end: u64,
    /// Key of the first page.
    pub key: u64,
}

impl Area {
    /// Returns the key of the page at `addr`.
    pub fn key_of(&self, addr: usize) -> u64 {
        (addr as u64 >> PAGE_SHIFT) - self.start + self.key
    }

    /// Returns the address of the page with this key.
    pub fn addr_of(&self, key: u64) -> usize {
        ((key - self.key + self.start) << PAGE_SHIFT) as usize
    }

    /// Returns the key after its last one.
    pub fn key_end(&self) -> u64 {
        self.key + (self.end - self.start)
    }
}

/// All areas, and the ranges in them that are pinned.
#[derive(Clone, Default)]
pub struct Areas {
    /// Areas by their first page.
    by_addr: BTreeMap<u64, Area>,
    /// First pages of areas by their keys.
    by_key: BTreeMap<u64, u64>,
    pins: Vec<(u64, u64)>,
}

/// Keys from this one on are for areas whose own page numbers are taken. They lie beyond the 47-bit
/// user address space.
const SPARE_KEYS: u64 = 1 << (47 - PAGE_SHIFT);

impl Areas {
    /// Returns the area that holds `addr`.
    pub fn find(&self, addr: usize) -> Option<&Area> {
        let page = page_of(addr);
        self.last_before(page + 1).filter(|a| page < a.end)
    }

    /// Returns whether any page of `[start, end)` (page numbers) is in an area.
    pub fn touch(&self, start: u64, end: u64) -> bool {
        self.last_before(end).is_some_and(|a| start < a.end)
    }

    /// Returns whether a page is in an area, and the end of the run for which that is so.
    pub fn run_at(&self, page: u64) -> (bool, u64) {
        match self.last_before(page + 1).filter(|area| page < area.end) {
            Some(area) => (true, area.end),
            None => {
                let next = self.by_addr.range(page + 1..).next();
                (false, next.map_or(u64::MAX >> PAGE_SHIFT, |(start, _)| *start))
            }
        }
    }

    /// Returns the last area that begins before a page.
    fn last_before(&self, page: u64) -> Option<&Area> {
        self.by_addr.range(..page).next_back().map(|(_, area)| area)
    }

    /// Returns the area that owns `key`.
    pub fn find_key(&self, key: u64) -> Option<&Area> {
        self.last_key_before(key + 1).filter(|a| key < a.key_end())
    }

    /// Returns the area with the last first key before `key`.
    fn last_key_before(&self, key: u64) -> Option<&Area> {
        self.by_key.range(..key).next_back().map(|(_, start)| &self.by_addr[start])
    }

    /// Returns all areas in ascending order of address.
    pub fn iter(&self) -> impl Iterator<Item = &Area> {
        self.by_addr.values()
    }

    /// Returns the parts of areas in a range of pages, in ascending order, with the keys of each.
    pub fn parts(&self, pages: &Range<u64>) -> Vec<(Area, Range<u64>)> {
        let part = |a: &Area| {
            let (s, e) = (pages.start.max(a.start), pages.end.min(a.end));
            (s < e).then(|| (*a, s - a.start + a.key..e - a.start + a.key))
        };
        let first = self.last_before(pages.start + 1).map_or(pages.start, |area| area.start);
        self.by_addr.range(first..pages.end.max(first)).filter_map(|(_, area)| part(area)).collect()
    }

    /// Adds `[start, end)` (page numbers), which touches no area, and joins it with neighbours
    /// whose keys continue.
    ///
    /// # Panics
    /// If it overlaps an area, or the key space is used up.
    pub fn add(&mut self, start: u64, end: u64) {
        assert!(start < end && end <= SPARE_KEYS);
        let is_taken = self.last_key_before(end).is_some_and(|a| start < a.key_end());
        let key = if is_taken { self.spare(start, end - start) } else { start };
        self.put(Area { start, end, key });
    }

    /// Returns the first gap between spare keys that holds `pages` pages, aligned as `start` is.
    fn spare(&self, start: u64, pages: u64) -> u64 {
        let align = MAX_PAGES as u64;
        let fit = |key: u64| key.next_multiple_of(align) + start % align;
        let mut from =
            fit(self.last_key_before(SPARE_KEYS).map_or(0, Area::key_end).max(SPARE_KEYS));
        for area in self.by_key.range(SPARE_KEYS..).map(|(_, start)| &self.by_addr[start]) {
            if from + pages <= area.key {
                break;
            }
            from = from.max(fit(area.key_end()));
        }
        assert!(from + pages < KEYS, "the key space is used up");
        from
    }

    /// Adds an area with keys of its own.
    fn put(&mut self, mut area: Area) {
        assert!(!self.touch(area.start, area.end), "areas overlap");
        let joins = |a: &Area, b: &Area| a.end == b.start && a.key_end() == b.key;
        if let Some(before) =
            self.last_before(area.start).copied().filter(|before| joins(before, &area))
        {
            self.take(before.start);
            area = Area { end: area.end, ..before };
        }
        if let Some(after) =
            self.by_addr.get(&area.end).copied().filter(|after| joins(&area, after))
        {
            self.take(after.start);
            area.end = after.end;
        }
        self.enter(area);
    }

    fn enter(&mut self, area: Area) {
        self.by_addr.insert(area.start, area);
        self.by_key.insert(area.key, area.start);
    }

    /// Removes the area that begins at page `start`, and returns it.
    fn take(&mut self, start: u64) -> Area {
        let area = self.by_addr.remove(&start).expect("an area begins there");
        self.by_key.remove(&area.key);
        area
    }

    /// Removes `[start, end)` (page numbers), and returns the parts of areas that it held, in
    /// ascending order of address.
    pub fn remove(&mut self, start: u64, end: u64) -> Vec<Area> {
        let mut out = Vec::new();
        if start >= end {
            return out;
        }
        while let Some(area) = self.last_before(end).copied().filter(|a| start < a.end) {
            self.take(area.start);
            let part = |s: u64, e: u64| Area { start: s, end: e, key: area.key + (s - area.start) };
            let (s, e) = (start.max(area.start), end.min(area.end));
            for (s, e) in [(area.start, s), (e, area.end)] {
                if s < e {
                    self.enter(part(s, e));
                }
            }
            out.push(part(s, e));
        }
        out.reverse();
        out
    }

    /// Moves `pages` pages of address space from `from` to `to` (page numbers). Keys stay. Areas at
    /// `to` must have been removed before.
    pub fn relocate(&mut self, from: u64, to: u64, pages: u64) {
        for part in self.remove(from, from + pages) {
            let start = part.start - from + to;
            self.put(Area { start, end: start + (part.end - part.start), key: part.key });
        }
    }

    /// Pins keys `[start, end)`: they are not evicted. Pins nest.
    pub fn pin(&mut self, start: u64, end: u64) {
        self.pins.push((start, end));
    }

    /// Ends one pin.
    pub fn unpin(&mut self, start: u64, end: u64) {
        if let Some(i) = self.pins.iter().position(|p| *p == (start, end)) {
            self.pins.swap_remove(i);
        }
    }

    /// Returns whether any of the keys `[start, end)` is pinned.
    pub fn is_pinned(&self, start: u64, end: u64) -> bool {
        self.pins.iter().any(|p| p.0 < end && start < p.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_testkit::random::{Random, seed};

    #[test]
    fn neighbours_join_and_splits_keep_keys() {
        let mut areas = Areas::default();
        areas.add(100, 200);
        areas.add(200, 300);
        assert_eq!(areas.iter().count(), 1);
        let out = areas.remove(150, 160);
        assert_eq!(out, [Area { start: 150, end: 160, key: 150 }]);
        assert_eq!(areas.find(160 << 12).unwrap().key_of(160 << 12), 160);
        assert!(areas.find(150 << 12).is_none());
    }

    #[test]
    fn keys_move_with_the_pages_and_are_not_given_twice() {
        let mut areas = Areas::default();
        areas.add(1000, 1100);
        areas.relocate(1000, 5000, 100);
        assert_eq!(areas.find(5010 << 12).unwrap().key_of(5010 << 12), 1010);
        areas.add(1000, 1100);
        let again = areas.find(1010 << 12).unwrap().key_of(1010 << 12);
        assert_ne!(again, 1010);
        assert_eq!(areas.find_key(again).unwrap().addr_of(again), 1010 << 12);
        assert_eq!(areas.find_key(1010).unwrap().addr_of(1010), 5010 << 12);
    }

    #[test]
    fn keys_of_ended_areas_are_given_again() {
        const GIB: u64 = 1 << 18;
        let mut areas = Areas::default();
        areas.add(0, GIB);
        areas.relocate(0, 10 * GIB, GIB);
        // An area that moved away keeps its keys, so an area in its place needs spare ones.
        for round in 0..100_000 {
            areas.add(0, GIB);
            let key =
                areas.find_key(SPARE_KEYS).expect("the first spare keys are free each time").key;
            assert_eq!(
                (areas.find(0).unwrap().key, areas.iter().count()),
                (key, 2),
                "round {round}"
            );
            areas.remove(0, GIB);
        }
    }

    #[test]
    fn spare_keys_overlap_no_others_and_are_aligned_as_their_pages() {
        let mut areas = Areas::default();
        areas.add(0, 10_000);
        areas.relocate(0, 1 << 20, 10_000);
        for (start, end) in [(3, 700), (700, 701), (1000, 1600), (2000, 2001), (5000, 9999)] {
            areas.add(start, end);
        }
        areas.remove(700, 701);
        areas.remove(1000, 1600);
        for (start, end) in [(9, 11), (700, 1400), (1500, 1501), (1501, 1502), (2001, 4100)] {
            if !areas.touch(start, end) {
                areas.add(start, end);
            }
        }
        let mut ends = 0;
        let by_key = areas.by_key.values().map(|start| &areas.by_addr[start]);
        assert!(by_key.clone().all(|a| a.key >= core::mem::replace(&mut ends, a.key_end())));
        let spare = by_key.filter(|a| a.key >= SPARE_KEYS);
        assert!(spare.clone().all(|a| a.key % MAX_PAGES as u64 == a.start % MAX_PAGES as u64));
        assert_eq!(
            spare.map(|a| a.end - a.start).sum::<u64>(),
            697 + 1 + 4999 + 700 + 1 + 1 + 2099
        );
    }

    /// Makes random changes, and compares with a map from page to key.
    #[test]
    fn agrees_with_a_map_from_page_to_key() {
        let mut random = Random::new(seed(11));
        let (mut areas, mut naive) = (Areas::default(), BTreeMap::new());
        for _ in 0..1000 {
            let mut below = |n| random.below(n) as u64;
            let (start, pages, to) = (below(4000), below(300), below(4000));
            let is_free =
                |at: u64, naive: &BTreeMap<u64, u64>| naive.range(at..at + pages).next().is_none();
            match below(3) {
                0 if pages > 0 && is_free(start, &naive) => {
                    areas.add(start, start + pages);
                    let key = areas
                        .find((start << PAGE_SHIFT) as usize)
                        .unwrap()
                        .key_of((start << PAGE_SHIFT) as usize);
                    assert!(
                        naive.values().all(|k| !(key..key + pages).contains(k)),
                        "a key is given once"
                    );
                    naive.extend((0..pages).map(|n| (start + n, key + n)));
                }
                1 if is_free(to, &naive) && (to + pages <= start || start + pages <= to) => {
                    areas.relocate(start, to, pages);
                    let moved_areas: Vec<_> =
                        naive.extract_if(start..start + pages, |_, _| true).collect();
                    naive.extend(
                        moved_areas.into_iter().map(|(page, key)| (page - start + to, key)),
                    );
                }
                2 => {
                    let removed_areas = areas.remove(start, start + pages);
                    assert!(removed_areas.is_sorted_by_key(|a| a.start));
                    for area in removed_areas {
                        let keys =
                            (area.start..area.end).map(|page| (page, area.key + page - area.start));
                        keys.for_each(|(page, key)| assert_eq!(naive.remove(&page), Some(key)));
                    }
                }
                _ => {}
            }
            let keys = areas
                .iter()
                .flat_map(|a| (a.start..a.end).map(|page| (page, a.key + page - a.start)));
            assert!(keys.eq(naive.iter().map(|(page, key)| (*page, *key))));
            let addr_of = |key: u64| areas.find_key(key).map(|a| a.addr_of(key));
            assert!(
                naive
                    .iter()
                    .all(|(page, key)| addr_of(*key) == Some((page << PAGE_SHIFT) as usize))
            );
        }
    }

    #[test]
    fn pins_nest() {
        let mut areas = Areas::default();
        areas.pin(5, 10);
        areas.pin(5, 10);
        areas.unpin(5, 10);
        assert!(areas.is_pinned(9, 20) && !areas.is_pinned(10, 20));
        areas.unpin(5, 10);
        assert!(!areas.is_pinned(0, 100));
    }
}
