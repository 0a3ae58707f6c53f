//! The lists that order folios by age. They are intrusive, doubly linked, newest at the head,
//! counted in pages.
//!
//! User space cannot read accessed bits, so the swap cache is the inactive end. A folio that is
//! mapped out is first on `Cooling`. There a touch maps it back cheaply, before it is saved.
use crate::folio::index::FolioId;
use memfold_os::Errno;
use memfold_os::memory::zone::{NoPromise, Zone, ZoneEdge};
use memfold_os::sync::Mutex;
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::units::PAGE_SIZE;

/// A list, or the reason why a folio is on none.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LruList {
    /// On no list.
    None,
    /// Mapped. The tail is mapped out next.
    Inactive,
    /// Mapped, and was refaulted. Ages into `Inactive`.
    Active,
    /// Mapped, and refused at its last eviction, because its bytes do not compress. It is tried
    /// again later, like the folios of the next three lists.
    Dense,
    /// Refused, because neither pool nor swap file had room for it.
    Full,
    /// Refused, because a device has pinned it, or a fork shares it and it is read-only, so the
    /// kernel cannot move it.
    Pinned,
    /// Refused, because a fork shares it.
    Shared,
    /// Mapped, and a system call held a part of it at its last eviction. It is tried again when a
    /// hold has ended.
    Held,
    /// In the swap cache. It may be dirty: its fingerprint was not compared yet.
    Cooling,
    /// In the swap cache, loaded ahead of its use: equal to its stored copy.
    Ahead,
    /// In the swap cache, and known to be dirty: it must be compressed.
    Dirty,
    /// In the store only. The list is kept where there is a swap file, to which the tail goes next.
    Folded,
    /// Taken off its list by a thread that is about to work on it.
    Isolated,
}
const LISTS: usize = LruList::Isolated as usize;

impl LruList {
    /// The lists of folios that could not be evicted.
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
    fn order(&self) -> u8 {
        (self.what >> 36) as u8
    }
    fn pages(&self) -> u64 {
        1 << self.order()
    }
    fn list(&self) -> u8 {
        (self.what >> 56) as u8
    }
    fn set_list(&mut self, list: LruList) {
        self.what = self.what & !(0xff << 56) | (list as u64) << 56;
    }
}

/// All lists of an engine.
pub struct Lru {
    links: Zone,
    edge: ZoneEdge,
    ends: Mutex<[ListEnds; LISTS]>,
    pages: [AtomicU64; LISTS],
    /// The argument of the last [`Lru::relist_held`].
    endings: AtomicU64,
}

#[derive(Copy, Clone, Default)]
struct ListEnds {
    head: FolioId,
    tail: FolioId,
}

const LIMIT: usize = 1 << 26;

impl Lru {
    /// Makes empty lists.
    ///
    /// # Errors
    /// The errors of reserving address space.
    pub fn new() -> Result<Lru, Errno> {
        let len = (size_of::<FolioLink>() * (LIMIT + 1)).next_multiple_of(PAGE_SIZE);
        Ok(Lru {
            links: Zone::reserve_growing(len, PAGE_SIZE)?,
            edge: ZoneEdge::default(),
            ends: Mutex::new([ListEnds::default(); LISTS]),
            pages: [const { AtomicU64::new(0) }; LISTS],
            endings: AtomicU64::new(0),
        })
    }

    fn link(&self, id: FolioId) -> *mut FolioLink {
        debug_assert!(id != 0 && id as usize <= LIMIT);
        let outcome = self.links.need(
            &self.edge,
            0,
            self.links.len(),
            size_of::<FolioLink>() * (id as usize + 1),
        );
        if outcome.is_err() {
            NoPromise::end("The list of folios");
        }
        // SAFETY: ids are at most LIMIT, and the zone has a link for each.
        unsafe { self.links.as_ptr().cast::<FolioLink>().add(id as usize) }
    }

    /// Returns the number of pages on a list.
    pub fn pages(&self, list: LruList) -> u64 {
        self.pages[list as usize].load(Relaxed)
    }

    /// Returns the order of the folio at the tail of `list`.
    pub fn oldest_order(&self, list: LruList) -> Option<u8> {
        let ends = self.ends.lock();
        match ends[list as usize].tail {
            0 => None,
            // SAFETY: the lock of the ends is held, and listed ids have links.
            id => Some(unsafe { (*self.link(id)).order() }),
        }
    }

    /// Puts a folio at the head of `list`, taking it off its former list. The caller has locked its
    /// shard.
    pub fn push(&self, id: FolioId, key: u64, order: u8, list: LruList) {
        debug_assert!(!matches!(list, LruList::None | LruList::Isolated));
        let mut ends = self.ends.lock();
        // SAFETY: links are read and written only under the lock of the ends, which is held. The id
        // is at most LIMIT, so the link exists. `unlink` and `enter` keep neighbours linked both
        // ways.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).what = key | (order as u64) << 36;
            self.enter(&mut ends, id, list);
        }
    }

    /// Isolates the folio at the tail of `list`, and returns its id and its key. The caller locks
    /// the key's shard next, and ends the isolation by `push` or `detach`. Until then other threads
    /// may detach it, list it again or end it. Under the lock, the index shows whether the folio at
    /// that key still is this one.
    pub fn isolate(&self, list: LruList) -> Option<(FolioId, u64)> {
        let mut ends = self.ends.lock();
        let id = ends[list as usize].tail;
        if id == 0 {
            return None;
        }
        // SAFETY: the lock of the ends is held, and listed ids have links.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).set_list(LruList::Isolated);
            Some((id, (*self.link(id)).key()))
        }
    }

    /// Isolates this folio if it is on a list. The caller has locked its shard.
    pub fn isolate_this(&self, id: FolioId) -> bool {
        let mut ends = self.ends.lock();
        // SAFETY: the lock of the ends is held, and the folio's id has a link.
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

    /// Ends an isolation, or takes a folio off its list: it is on none now. The caller has locked
    /// its shard.
    pub fn detach(&self, id: FolioId) {
        let mut ends = self.ends.lock();
        // SAFETY: the lock of the ends is held, and the folio's id has a link.
        unsafe {
            self.unlink(&mut ends, id);
            (*self.link(id)).set_list(LruList::None);
        }
    }

    /// Returns whether a folio is on `list`. The caller has locked its shard, so only
    /// [`Lru::isolate`] can change that.
    pub fn is_on(&self, id: FolioId, list: LruList) -> bool {
        let _ends = self.ends.lock();
        // SAFETY: the lock of the ends is held, and the folio's id has a link.
        unsafe { (*self.link(id)).list() == list as u8 }
    }

    /// Notes that a folio has become smaller. The caller has locked its shard.
    pub fn resize(&self, id: FolioId, order: u8) {
        let mut ends = self.ends.lock();
        // SAFETY: the lock of the ends is held as long as the reference lives, and the folio's id
        // has a link.
        let link = unsafe { &mut *self.link(id) };
        let (list, before) = (link.list() as usize, link.pages());
        link.what = link.what & !(0xff << 36) | (order as u64) << 36;
        if list != LruList::None as usize && list < LISTS {
            self.pages[list].fetch_sub(before - link.pages(), Relaxed);
        }
        let _ = &mut ends;
    }

    /// Puts a folio at the tail of `list`, so that it is taken next. The caller has locked its
    /// shard.
    pub fn push_tail(&self, id: FolioId, key: u64, order: u8, list: LruList) {
        self.push(id, key, order, list);
        let mut ends = self.ends.lock();
        // SAFETY: the lock of the ends is held, and the folio's id has a link.
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

    /// Moves the tail of `Active` to the head of `Inactive` until `Active` is the smaller one.
    pub fn rebalance(&self) {
        while self.pages(LruList::Active) > self.pages(LruList::Inactive) {
            let mut ends = self.ends.lock();
            // SAFETY: the lock of the ends is held.
            if !unsafe { self.move_tail(&mut ends, LruList::Active, LruList::Inactive) } {
                return;
            }
        }
    }

    /// Moves all of `Held` to the head of `Active` if holds have ended since the last call.
    /// `endings` is [`Holds::endings`](crate::holds::Holds::endings).
    pub fn relist_held(&self, endings: u64) {
        if self.pages(LruList::Held) == 0 || self.endings.swap(endings, Relaxed) == endings {
            return;
        }
        let mut ends = self.ends.lock();
        // SAFETY: the lock of the ends is held.
        while unsafe { self.move_tail(&mut ends, LruList::Held, LruList::Active) } {}
    }

    /// Moves the tail of `from` to the head of `to`. Returns `false` if `from` is empty.
    ///
    /// # Safety
    /// - The caller holds the lock of the ends.
    unsafe fn move_tail(&self, ends: &mut [ListEnds; LISTS], from: LruList, to: LruList) -> bool {
        let id = ends[from as usize].tail;
        if id != 0 {
            // SAFETY: the caller holds the lock of the ends, and listed ids have links. The folio is
            // on no list between the two calls.
            unsafe {
                self.unlink(ends, id);
                self.enter(ends, id, to);
            }
        }
        id != 0
    }

    /// # Safety
    /// - The caller holds the lock of the ends.
    unsafe fn unlink(&self, ends: &mut [ListEnds; LISTS], id: FolioId) {
        // SAFETY: neighbours of a listed folio are listed too, so their links exist; the lock
        // excludes other threads.
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
    /// - The caller holds the lock of the ends, and the folio is on no list.
    unsafe fn enter(&self, ends: &mut [ListEnds; LISTS], id: FolioId, list: LruList) {
        // SAFETY: the head of the list, if any, is a listed folio, so its link exists; the lock
        // excludes other threads.
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

    #[test]
    fn held_folios_wait_until_a_hold_has_ended() {
        let lru = Lru::new().unwrap();
        (1..=2).for_each(|id| lru.push(id, id as u64, 0, LruList::Held));
        lru.relist_held(0);
        assert_eq!((lru.pages(LruList::Held), lru.pages(LruList::Active)), (2, 0));
        lru.relist_held(1);
        assert_eq!((lru.pages(LruList::Held), lru.pages(LruList::Active)), (0, 2));
        assert_eq!(lru.isolate(LruList::Active).unwrap().0, 1, "the oldest comes out first");
    }
}
