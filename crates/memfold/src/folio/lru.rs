//! The lists that order folios by age. Intrusive, doubly linked, newest at the head, counted in
//! pages.
//!
//! User space can't read accessed bits, so the swap cache is the inactive end: a folio that is
//! mapped out rests on `Cooling`, where a touch takes it back cheaply, before it is saved.
use crate::folio::index::FolioId;
use memfold_sys::Errno;
use memfold_sys::memory::zone::{NoPromise, Zone, ZoneEdge};
use memfold_sys::sync::Mutex;
use memfold_sys::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_sys::units::PAGE_SIZE;

/// A list, or why a folio is on none.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LruList {
    /// On no list.
    None,
    /// Mapped; the tail is mapped out next.
    Inactive,
    /// Mapped, and touched again soon after it was once evicted: ages into `Inactive`.
    Active,
    /// Mapped, and when it was last to leave, nothing took it, as it doesn't shrink: tried again
    /// later. The next three are kept likewise.
    Dense,
    /// As nothing had room for it.
    Full,
    /// As the kernel doesn't let go of it: a device has pinned it.
    Pinned,
    /// As a fork shares it.
    Shared,
    /// In the swap cache; whether it changed since it was stored isn't known yet.
    Cooling,
    /// In the swap cache, loaded ahead of its use: equal to its stored copy.
    Ahead,
    /// In the swap cache, and known to need compression.
    Dirty,
    /// In the store only; kept where there is a swap file, to which the tail goes next.
    Folded,
    /// Taken off by somebody who is about to work on it.
    Isolated,
}
const LISTS: usize = LruList::Isolated as usize;

impl LruList {
    /// Those of folios that could not leave.
    pub const REFUSED: [LruList; 4] =
        [LruList::Dense, LruList::Full, LruList::Pinned, LruList::Shared];
}

#[repr(C)]
#[derive(Copy, Clone)]
struct FolioLink {
    prev: u32,
    next: u32,
    /// Key in the low 36 bits, order in the next 8, list in the top 8.
    what: u64,
}

impl FolioLink {
    fn key(&self) -> u64 {
        self.what & ((1 << 36) - 1)
    }
    fn pages(&self) -> u64 {
        1 << (self.what >> 36 & 0xff)
    }
    fn list(&self) -> u8 {
        (self.what >> 56) as u8
    }
    fn set_list(&mut self, list: LruList) {
        self.what = self.what & !(0xff << 56) | (list as u64) << 56;
    }
}

/// All lists.
pub struct Lru {
    links: Zone,
    edge: ZoneEdge,
    ends: Mutex<[ListEnds; LISTS]>,
    pages: [AtomicU64; LISTS],
}

#[derive(Copy, Clone, Default)]
struct ListEnds {
    head: FolioId,
    tail: FolioId,
}

const LIMIT: usize = 1 << 26;

impl Lru {
    /// Empty lists.
    ///
    /// # Errors
    /// What reserving address space says.
    pub fn new() -> Result<Lru, Errno> {
        let len = (size_of::<FolioLink>() * (LIMIT + 1)).next_multiple_of(PAGE_SIZE);
        Ok(Lru {
            links: Zone::reserve_growing(len, PAGE_SIZE)?,
            edge: ZoneEdge::default(),
            ends: Mutex::new([ListEnds::default(); LISTS]),
            pages: [const { AtomicU64::new(0) }; LISTS],
        })
    }

    fn link(&self, id: FolioId) -> *mut FolioLink {
        debug_assert!(id != 0 && id as usize <= LIMIT);
        let done = self.links.need(
            &self.edge,
            0,
            self.links.len(),
            size_of::<FolioLink>() * (id as usize + 1),
        );
        if done.is_err() {
            NoPromise::end("the list of folios");
        }
        // SAFETY: ids are at most LIMIT, and the zone has a link for each.
        unsafe { self.links.as_ptr().cast::<FolioLink>().add(id as usize) }
    }

    /// Pages on a list.
    pub fn pages(&self, list: LruList) -> u64 {
        self.pages[list as usize].load(Relaxed)
    }

    /// Puts a folio at the head of `list`, taking it off the list it was on. Under its shard lock.
    pub fn push(&self, id: FolioId, key: u64, order: u8, list: LruList) {
        debug_assert!(!matches!(list, LruList::None | LruList::Isolated));
        let mut ends = self.ends.lock();
        // SAFETY: links are read and written under the lock of the ends only; `unlink` and `enter`
        // keep them whole.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).what = key | (order as u64) << 36;
            self.enter(&mut ends, id, list);
        }
    }

    /// Takes the folio at the tail of `list`; the caller now has it isolated, and must end that by
    /// `push` or `settle`. Its key tells which shard to lock. Until then others may settle it, list
    /// it again or end it: under the lock, the index tells whether the folio at that key still is
    /// this one.
    pub fn isolate(&self, list: LruList) -> Option<(FolioId, u64)> {
        let mut ends = self.ends.lock();
        let id = ends[list as usize].tail;
        if id == 0 {
            return None;
        }
        // SAFETY: as in `push`.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).set_list(LruList::Isolated);
            Some((id, (*self.link(id)).key()))
        }
    }

    /// Isolates this folio if it is on a list. Under its shard lock.
    pub fn isolate_this(&self, id: FolioId) -> bool {
        let mut ends = self.ends.lock();
        // SAFETY: as in `push`.
        unsafe {
            let list = (*self.link(id)).list() as usize;
            if list == LruList::None as usize || list >= LISTS {
                return false;
            }
            self.unlink(&mut ends, id);
            (*self.link(id)).set_list(LruList::Isolated);
        }
        true
    }

    /// Ends an isolation, or takes a folio off its list: it is on none now. Under its shard lock.
    pub fn detach(&self, id: FolioId) {
        let mut ends = self.ends.lock();
        // SAFETY: as in `push`.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).set_list(LruList::None);
        }
    }

    /// Whether a folio is on `list`. Under its shard lock, which keeps everybody but
    /// [`Lru::isolate`] from changing that.
    pub fn is_on(&self, id: FolioId, list: LruList) -> bool {
        let _ends = self.ends.lock();
        // SAFETY: as in `push`.
        unsafe { (*self.link(id)).list() == list as u8 }
    }

    /// Notes that a folio has become smaller. Under its shard lock.
    pub fn resize(&self, id: FolioId, order: u8) {
        let mut ends = self.ends.lock();
        // SAFETY: as in `push`.
        let link = unsafe { &mut *self.link(id) };
        let (list, before) = (link.list() as usize, link.pages());
        link.what = link.what & !(0xff << 36) | (order as u64) << 36;
        if list != LruList::None as usize && list < LISTS {
            self.pages[list].fetch_sub(before - link.pages(), Relaxed);
        }
        let _ = &mut ends;
    }

    /// Puts a folio at the tail of `list`: next in line. Under its shard lock.
    pub fn push_tail(&self, id: FolioId, key: u64, order: u8, list: LruList) {
        self.push(id, key, order, list);
        let mut ends = self.ends.lock();
        // SAFETY: as in `push`.
        unsafe {
            if (*self.link(id)).list() != list as u8 || ends[list as usize].tail == id {
                return;
            }
            self.unlink(&mut ends, id);
            let tail = ends[list as usize].tail;
            let link = &mut *self.link(id);
            (link.prev, link.next) = (tail, 0);
            match tail {
                0 => ends[list as usize].head = id,
                tail => (*self.link(tail)).next = id,
            }
            ends[list as usize].tail = id;
            self.pages[list as usize].fetch_add((*self.link(id)).pages(), Relaxed);
        }
    }

    /// Moves the tail of `Active` to the head of `Inactive` while `Active` is the larger one.
    pub fn rebalance(&self) {
        while self.pages(LruList::Active) > self.pages(LruList::Inactive) {
            let mut ends = self.ends.lock();
            let id = ends[LruList::Active as usize].tail;
            if id == 0 {
                return;
            }
            // SAFETY: as in `push`.
            unsafe {
                self.unlink(&mut ends, id);
                self.enter(&mut ends, id, LruList::Inactive);
            }
        }
    }

    /// # Safety
    /// - Under the lock of the ends.
    unsafe fn unlink(&self, ends: &mut [ListEnds; LISTS], id: FolioId) {
        // SAFETY: neighbours of a listed folio are listed ones, so their links exist; the lock
        // excludes others.
        unsafe {
            let link = *self.link(id);
            let list = link.list() as usize;
            if list == LruList::None as usize || list >= LISTS {
                return;
            }
            match link.prev {
                0 => ends[list].head = link.next,
                prev => (*self.link(prev)).next = link.next,
            }
            match link.next {
                0 => ends[list].tail = link.prev,
                next => (*self.link(next)).prev = link.prev,
            }
            self.pages[list].fetch_sub(link.pages(), Relaxed);
        }
    }

    /// # Safety
    /// - Under the lock of the ends, and the folio is on no list.
    unsafe fn enter(&self, ends: &mut [ListEnds; LISTS], id: FolioId, list: LruList) {
        // SAFETY: as in `unlink`.
        unsafe {
            let head = ends[list as usize].head;
            let link = &mut *self.link(id);
            (link.prev, link.next) = (0, head);
            link.set_list(list);
            let pages = link.pages();
            match head {
                0 => ends[list as usize].tail = id,
                head => (*self.link(head)).prev = id,
            }
            ends[list as usize].head = id;
            self.pages[list as usize].fetch_add(pages, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_first_in_first_out_and_counted_in_pages() {
        let lru = Lru::new().unwrap();
        for id in 1..=3 {
            lru.push(id, id as u64 * 16, 2, LruList::Inactive);
        }
        assert_eq!(lru.pages(LruList::Inactive), 12);
        assert_eq!(lru.isolate(LruList::Inactive), Some((1, 16)));
        lru.detach(2);
        assert_eq!(lru.pages(LruList::Inactive), 4);
        assert!(!lru.isolate_this(1), "it is isolated already");
        assert!(lru.isolate_this(3));
        assert_eq!(lru.isolate(LruList::Inactive), None);
    }

    #[test]
    fn active_ages_into_inactive() {
        let lru = Lru::new().unwrap();
        (1..=4).for_each(|id| lru.push(id, id as u64 * 4, 0, LruList::Active));
        lru.rebalance();
        assert_eq!((lru.pages(LruList::Active), lru.pages(LruList::Inactive)), (2, 2));
        assert_eq!(lru.isolate(LruList::Inactive).unwrap().0, 1, "the oldest comes out first");
    }
}
