//! The slots of a swap file, in clusters. Runs of every order stay whole however long the file is
//! used (S1 to S4).
//!
//! A cluster is 512 slots of 4 KiB, as long as the largest run. It serves one order at a time, so
//! that small runs don't fragment the room of large ones. Each CPU fills a cluster of its own for
//! each order, so that its writes lie together. This follows the clusters of Linux's
//! `mm/swapfile.c`.
//!
//! A search for a run looks at these, in this order: this CPU's cluster of the order, `NonFull`
//! clusters of the order, `Free` ones, and `Emptied` ones (their discard is saved). With
//! [`SearchScope::All`], every other cluster follows. So every free run can be found. For order 0
//! each free slot is a run, so each can be used (S2).
//!
//! A slot has a count of references, because several small objects may lie in it. It is free when
//! the last one is released.
//!
//! In a child of fork the clusters of its parent are **inherited**: they are read and released, and
//! none of their slots is ever allocated. In the parent, slots in use at the fork have one more
//! reference until the child has ended ([`Clusters::retain_used`]).
//!
//! Equations:
//! - `used` = slots with references = sum of `used` of all clusters that aren't inherited.
//! - An inherited cluster is on no list.
//! - A cluster with no used slot is `Free`, `Emptied`, or being discarded.
//! - A cluster with all slots used is `Full`.
//! - Any other cluster is `NonFull`, `Fragment` (no run of its own order is free), or reserved by a
//!   CPU.
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use memfold_os::sync::atomic::{AtomicU64, Ordering::Relaxed};
use memfold_os::sync::{Mutex, MutexGuard};
use memfold_os::units::{MAX_ORDER, MAX_PAGES, Order};

/// Slots in a cluster.
pub const CLUSTER_SLOTS: usize = MAX_PAGES;
const ORDERS: usize = MAX_ORDER as usize + 1;
/// CPUs that fill clusters of their own. Further CPUs share with one of these.
const CPUS: usize = 16;
/// Clusters of a list that are compared, at most.
const LOOKED_AT: usize = 32;
const NIL: u32 = u32::MAX;

/// How far to search for a run.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SearchScope {
    /// Clusters of the order and unused ones.
    Own,
    /// Also clusters of other orders, and those that other CPUs fill.
    All,
}

/// The list of a cluster.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum ClusterList {
    /// Unused, and without disk space that could be given back.
    Free,
    /// Unused; its disk space is to be given back.
    Emptied,
    /// Some slots are free; there may be a run of its order.
    NonFull(u8),
    /// Some slots are free, but none of its order in one run.
    Fragment(u8),
    /// No slot is free.
    Full(u8),
    /// On none: a CPU fills it (`owner`), or its space is being given back.
    Off,
}
const LISTS: usize = 2 + 3 * ORDERS;

impl ClusterList {
    fn index(self) -> Option<usize> {
        Some(match self {
            ClusterList::Free => 0,
            ClusterList::Emptied => 1,
            ClusterList::NonFull(order) => 2 + order as usize,
            ClusterList::Fragment(order) => 2 + ORDERS + order as usize,
            ClusterList::Full(order) => 2 + 2 * ORDERS + order as usize,
            ClusterList::Off => return None,
        })
    }
}

struct Cluster {
    /// A bit for each slot that has references.
    bits: [u64; CLUSTER_SLOTS / 64],
    references: [u8; CLUSTER_SLOTS],
    used: u16,
    order: u8,
    list: ClusterList,
    prev: u32,
    next: u32,
    /// The CPU that fills it.
    owner: Option<u8>,
}

/// All slots. Any number of threads may call every method at once.
pub struct Clusters {
    table: Mutex<ClusterTable>,
    used: AtomicU64,
    slots: AtomicU64,
    inherited: AtomicU64,
}

/// A set of slots: a bit for each, by cluster.
#[derive(Default)]
pub struct SlotSet(Vec<[u64; CLUSTER_SLOTS / 64]>);

impl SlotSet {
    /// Returns the bits of 16 slots from `16 * group` on. Slots are counted from the first one that
    /// isn't inherited.
    pub fn bits_of(&self, group: u64) -> u16 {
        let at = group as usize * 16;
        let word = self.0.get(at / CLUSTER_SLOTS).map_or(0, |bits| bits[at % CLUSTER_SLOTS / 64]);
        (word >> (at % 64)) as u16
    }
}

struct ClusterTable {
    clusters: Vec<Cluster>,
    ends: [(u32, u32); LISTS],
    /// The position at which each CPU continues, for each order: cluster and offset in it.
    next: [[(u32, u16); ORDERS]; CPUS],
    /// No run of this order or a larger one is free. Valid until a slot becomes free.
    unavailable: u8,
    /// Number of inherited clusters, which are the first ones.
    inherited: usize,
}

impl Default for Clusters {
    fn default() -> Self {
        Clusters::new()
    }
}

impl Clusters {
    /// Makes an allocator without slots.
    pub fn new() -> Clusters {
        let table = ClusterTable {
            clusters: Vec::new(),
            ends: [(NIL, NIL); LISTS],
            next: [[(NIL, 0); ORDERS]; CPUS],
            unavailable: ORDERS as u8,
            inherited: 0,
        };
        Clusters {
            table: Mutex::new(table),
            used: AtomicU64::new(0),
            slots: AtomicU64::new(0),
            inherited: AtomicU64::new(0),
        }
    }

    /// Adds a reference to every used slot that isn't inherited nor in `set`, and enters it there.
    /// Its bytes stay until [`Clusters::release_set`].
    pub fn retain_used(&self, set: &mut SlotSet) {
        let mut table = self.table.lock();
        let own_start = table.inherited;
        let clusters = &mut table.clusters[own_start..];
        set.0.resize(clusters.len(), [0; CLUSTER_SLOTS / 64]);
        for (cluster, in_set) in clusters.iter_mut().zip(&mut set.0) {
            for (word, in_set) in in_set.iter_mut().enumerate() {
                let mut new = cluster.bits[word] & !*in_set;
                *in_set |= new;
                while new != 0 {
                    let references =
                        &mut cluster.references[word * 64 + new.trailing_zeros() as usize];
                    assert!(*references < u8::MAX, "a slot has too many references");
                    *references += 1;
                    new &= new - 1;
                }
            }
        }
    }

    /// Releases the references of a set.
    pub fn release_set(&self, set: &SlotSet) {
        let first = self.inherited.load(Relaxed);
        for (cluster, bits) in set.0.iter().enumerate() {
            for slot in (0..CLUSTER_SLOTS).filter(|slot| bits[slot / 64] >> (slot % 64) & 1 != 0) {
                self.release(first + (cluster * CLUSTER_SLOTS + slot) as u64, 1);
            }
        }
    }

    /// Makes all clusters inherited, in a child of fork.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn inherit(&self) {
        // SAFETY: the caller promises that it is the only thread, so no other thread holds the lock
        // or uses the table.
        let table = unsafe {
            self.table.reset();
            self.table.peek_mut()
        };
        for cluster in &mut table.clusters {
            (cluster.list, cluster.owner) = (ClusterList::Off, None);
            (cluster.prev, cluster.next) = (NIL, NIL);
        }
        (table.ends, table.next) = ([(NIL, NIL); LISTS], [[(NIL, 0); ORDERS]; CPUS]);
        (table.inherited, table.unavailable) = (table.clusters.len(), ORDERS as u8);
        self.inherited.store(self.slots(), Relaxed);
        self.used.store(0, Relaxed);
    }

    /// Removes all slots, in a child of fork that uses none.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    pub unsafe fn clear(&self) {
        // SAFETY: the caller promises that it is the only thread, so no other thread holds the lock
        // or uses the table.
        unsafe {
            self.inherit();
            let table = self.table.peek_mut();
            table.clusters.clear();
            table.inherited = 0;
        }
        self.slots.store(0, Relaxed);
        self.inherited.store(0, Relaxed);
    }

    /// Adds `count` clusters of free slots at the end.
    pub fn grow(&self, count: usize) {
        let mut table = self.table.lock();
        for _ in 0..count {
            let id = table.clusters.len() as u32;
            table.clusters.push(Cluster {
                bits: [0; CLUSTER_SLOTS / 64],
                references: [0; CLUSTER_SLOTS],
                used: 0,
                order: 0,
                list: ClusterList::Off,
                prev: NIL,
                next: NIL,
                owner: None,
            });
            table.enter(id, ClusterList::Free);
        }
        table.unavailable = ORDERS as u8;
        self.slots.fetch_add((count * CLUSTER_SLOTS) as u64, Relaxed);
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u64 {
        self.slots.load(Relaxed)
    }

    /// Returns the number of inherited slots, which are the first ones.
    pub fn inherited(&self) -> u64 {
        self.inherited.load(Relaxed)
    }

    /// Returns the number of slots with references that aren't inherited.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Returns which of the 16 slots from `first`, a multiple of 16, have references.
    pub fn used_bits(&self, first: u64) -> u16 {
        let (id, offset) = (first as usize / CLUSTER_SLOTS, first as usize % CLUSTER_SLOTS);
        debug_assert!(offset.is_multiple_of(16));
        self.table
            .lock()
            .clusters
            .get(id)
            .map_or(0, |c| (c.bits[offset / 64] >> (offset % 64)) as u16)
    }

    /// Takes an aligned run of free slots in one cluster. Each has one reference then. `cpu` is the
    /// caller's CPU.
    ///
    /// `None` with [`SearchScope::All`] means that there is no such run, except in clusters that
    /// are being discarded.
    pub fn allocate(&self, order: Order, cpu: usize, reach: SearchScope) -> Option<u64> {
        let mut table = self.table.lock();
        if order.get() >= table.unavailable {
            return None;
        }
        let own = table.allocate_near(order, (cpu % CPUS) as u8);
        let slot = own.or_else(|| {
            if reach == SearchScope::All { table.allocate_anywhere(order) } else { None }
        });
        if slot.is_some() {
            // Under the lock, so that the count is never below the slots in use.
            self.used.fetch_add(order.pages() as u64, Relaxed);
        }
        slot
    }

    /// Adds a reference to each of `count` slots from `first`.
    ///
    /// # Panics
    /// If a slot has no reference, or too many.
    pub fn retain(&self, first: u64, count: usize) {
        let mut table = self.table.lock();
        each_cluster(first, count, |id, offsets| {
            let cluster = &mut table.clusters[id as usize];
            for offset in offsets {
                let references = &mut cluster.references[offset];
                assert!(
                    *references > 0 && *references < u8::MAX,
                    "slot {offset} of cluster {id} has {references} references"
                );
                *references += 1;
            }
        });
    }

    /// Releases a reference of each of `count` slots from `first`, as one operation (S4). Returns
    /// how many became free.
    ///
    /// # Panics
    /// If one of them has no reference.
    pub fn release(&self, first: u64, count: usize) -> usize {
        let mut table = self.table.lock();
        let mut freed_slots = 0;
        each_cluster(first, count, |id, offsets| freed_slots += table.release(id, offsets));
        self.used.fetch_sub(freed_slots as u64, Relaxed);
        freed_slots
    }

    /// Takes up to `out.len()` emptied clusters whose disk space is to be given back, and returns
    /// their slots as joined ranges. They are not allocated before [`Clusters::discarded`].
    pub fn begin_discard(&self, out: &mut [Range<u64>]) -> usize {
        let mut table = self.table.lock();
        let mut ids: Vec<u32> = Vec::new();
        while ids.len() < out.len() {
            let id = table.head(ClusterList::Emptied);
            if id == NIL {
                break;
            }
            table.leave(id);
            ids.push(id);
        }
        drop(table);
        ids.sort_unstable();
        let mut ranges = 0;
        for id in ids {
            let start = id as u64 * CLUSTER_SLOTS as u64;
            let end = start + CLUSTER_SLOTS as u64;
            if ranges > 0 && out[ranges - 1].end == start {
                out[ranges - 1].end = end;
            } else {
                out[ranges] = start..end;
                ranges += 1;
            }
        }
        ranges
    }

    /// Ends the discard of a range that [`Clusters::begin_discard`] returned: its slots may be
    /// allocated.
    pub fn discarded(&self, range: &Range<u64>) {
        let mut table = self.table.lock();
        for id in range.start / CLUSTER_SLOTS as u64..range.end / CLUSTER_SLOTS as u64 {
            debug_assert!(
                table.clusters[id as usize].list == ClusterList::Off
                    && table.clusters[id as usize].used == 0
            );
            table.enter(id as u32, ClusterList::Free);
        }
        table.unavailable = ORDERS as u8;
    }

    /// Verifies every cluster and list.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self) -> Result<(), String> {
        let table = self.table.lock();
        let mut used_slots = 0;
        for (id, cluster) in table.clusters.iter().enumerate() {
            cluster
                .check(&table.next, id as u32, id < table.inherited)
                .map_err(|e| alloc::format!("cluster {id}: {e}"))?;
            let is_inherited = id < table.inherited;
            if is_inherited && cluster.list != ClusterList::Off {
                return Err(alloc::format!("cluster {id} is inherited, and listed"));
            }
            used_slots += if is_inherited { 0 } else { cluster.used as u64 };
        }
        self.check_lists(&table)?;
        if used_slots != self.used() {
            return Err(alloc::format!(
                "{used_slots} slots are in use, {} are counted",
                self.used()
            ));
        }
        if table.clusters.len() * CLUSTER_SLOTS != self.slots() as usize {
            return Err(alloc::format!(
                "{} clusters, but {} slots",
                table.clusters.len(),
                self.slots()
            ));
        }
        Ok(())
    }

    fn check_lists(&self, table: &MutexGuard<'_, ClusterTable>) -> Result<(), String> {
        let mut count = 0;
        for index in 0..LISTS {
            let (mut at, mut before) = (table.ends[index].0, NIL);
            while at != NIL {
                let cluster = &table.clusters[at as usize];
                if cluster.prev != before || cluster.list.index() != Some(index) {
                    return Err(alloc::format!("cluster {at} is mislinked in list {index}"));
                }
                count += 1;
                (before, at) = (at, cluster.next);
            }
            if table.ends[index].1 != before {
                return Err(alloc::format!("list {index} ends elsewhere than it says"));
            }
        }
        let on = table.clusters.iter().filter(|c| c.list != ClusterList::Off).count();
        if on == count {
            Ok(())
        } else {
            Err(alloc::format!("{on} clusters say that they are listed, {count} are"))
        }
    }
}

/// Calls `each` for the part of a run of slots in each cluster.
fn each_cluster(first: u64, count: usize, mut each: impl FnMut(u32, Range<usize>)) {
    let (mut at, end) = (first, first + count as u64);
    while at < end {
        let id = at / CLUSTER_SLOTS as u64;
        let start = id * CLUSTER_SLOTS as u64;
        let stop = end.min(start + CLUSTER_SLOTS as u64);
        each(id as u32, (at - start) as usize..(stop - start) as usize);
        at = stop;
    }
}

impl ClusterTable {
    fn head(&self, list: ClusterList) -> u32 {
        list.index().map_or(NIL, |i| self.ends[i].0)
    }

    /// Puts a cluster that is on no list at the end of one.
    fn enter(&mut self, id: u32, list: ClusterList) {
        let index = list.index().expect("a list");
        let tail = self.ends[index].1;
        let cluster = &mut self.clusters[id as usize];
        (cluster.prev, cluster.next, cluster.list) = (tail, NIL, list);
        match tail {
            NIL => self.ends[index].0 = id,
            tail => self.clusters[tail as usize].next = id,
        }
        self.ends[index].1 = id;
    }

    /// Takes a cluster off its list, if it is on one.
    fn leave(&mut self, id: u32) {
        let Cluster { prev, next, list, .. } = self.clusters[id as usize];
        let Some(index) = list.index() else { return };
        match prev {
            NIL => self.ends[index].0 = next,
            prev => self.clusters[prev as usize].next = next,
        }
        match next {
            NIL => self.ends[index].1 = prev,
            next => self.clusters[next as usize].prev = prev,
        }
        self.clusters[id as usize].list = ClusterList::Off;
    }

    /// Puts a cluster on the list for its use. A cluster that a CPU fills stays with it while it
    /// has room.
    fn relist(&mut self, id: u32, has_run: bool) {
        if (id as usize) < self.inherited {
            return;
        }
        let cluster = &self.clusters[id as usize];
        let list = match cluster.used as usize {
            0 => ClusterList::Emptied,
            CLUSTER_SLOTS => ClusterList::Full(cluster.order),
            _ if cluster.owner.is_some() && has_run => return,
            _ if has_run => ClusterList::NonFull(cluster.order),
            _ => ClusterList::Fragment(cluster.order),
        };
        if let Some(cpu) = self.clusters[id as usize].owner.take() {
            let order = self.clusters[id as usize].order;
            self.next[cpu as usize][order as usize] = (NIL, 0);
        }
        if self.clusters[id as usize].list != list {
            self.leave(id);
            self.enter(id, list);
        }
    }

    /// Returns the fullest of the first clusters of the order that have room, so that the emptier
    /// ones may become unused.
    fn fullest(&self, order: Order) -> u32 {
        let (mut at, mut best) = (self.head(ClusterList::NonFull(order.get())), NIL);
        for _ in 0..LOOKED_AT {
            if at == NIL {
                break;
            }
            let cluster = &self.clusters[at as usize];
            if best == NIL || cluster.used > self.clusters[best as usize].used {
                best = at;
            }
            at = cluster.next;
        }
        best
    }

    /// Allocates from this CPU's cluster, from one of the order that has room, or from an unused
    /// one.
    fn allocate_near(&mut self, order: Order, cpu: u8) -> Option<u64> {
        let slot = order.get() as usize;
        loop {
            let (mut id, from) = self.next[cpu as usize][slot];
            let mut from = from as usize;
            if id == NIL {
                let idle_clusters =
                    [ClusterList::Free, ClusterList::Emptied].map(|list| self.head(list));
                id = [self.fullest(order), idle_clusters[0], idle_clusters[1]]
                    .into_iter()
                    .find(|id| *id != NIL)?;
                self.leave(id);
                let cluster = &mut self.clusters[id as usize];
                (cluster.order, cluster.owner) = (order.get(), Some(cpu));
                self.next[cpu as usize][slot] = (id, 0);
                from = 0;
            }
            let Some(offset) = self.clusters[id as usize].find(order, from) else {
                self.relist(id, false);
                continue;
            };
            self.clusters[id as usize].mark_taken(order, offset);
            self.next[cpu as usize][slot] = (id, ((offset + order.pages()) % CLUSTER_SLOTS) as u16);
            self.relist(id, true);
            return Some(id as u64 * CLUSTER_SLOTS as u64 + offset as u64);
        }
    }

    /// Allocates from any cluster that has such a run. It takes the fullest one, so that the others
    /// stay whole.
    fn allocate_anywhere(&mut self, order: Order) -> Option<u64> {
        let room = |c: &Cluster| c.used > 0 && c.used as usize + order.pages() <= CLUSTER_SLOTS;
        let with_run = (self.inherited..self.clusters.len())
            .filter(|id| room(&self.clusters[*id]))
            .filter_map(|id| {
                let offset = self.clusters[id].find(order, 0)?;
                Some((self.clusters[id].used, id, offset))
            });
        let Some((_, id, offset)) = with_run.max() else {
            self.unavailable = self.unavailable.min(order.get());
            return None;
        };
        self.clusters[id].mark_taken(order, offset);
        let has_run = self.clusters[id].list != ClusterList::Fragment(self.clusters[id].order);
        self.relist(id as u32, has_run);
        Some((id * CLUSTER_SLOTS + offset) as u64)
    }

    fn release(&mut self, id: u32, offsets: Range<usize>) -> usize {
        let cluster = &mut self.clusters[id as usize];
        let mut freed_slots = 0;
        for offset in offsets {
            assert!(
                cluster.references[offset] > 0,
                "slot {offset} of cluster {id} is free already"
            );
            cluster.references[offset] -= 1;
            if cluster.references[offset] == 0 {
                cluster.bits[offset / 64] &= !(1 << (offset % 64));
                freed_slots += 1;
            }
        }
        cluster.used -= freed_slots as u16;
        if (id as usize) < self.inherited {
            return 0;
        }
        if freed_slots > 0 {
            self.unavailable = ORDERS as u8;
            self.relist(id, true);
        }
        freed_slots
    }
}

impl Cluster {
    /// Returns the first free run at or after `from`, or else before it.
    fn find(&self, order: Order, from: usize) -> Option<usize> {
        let step = order.pages();
        let first = from.next_multiple_of(step);
        let runs =
            (first..CLUSTER_SLOTS).step_by(step).chain((0..first.min(CLUSTER_SLOTS)).step_by(step));
        runs.into_iter().find(|&offset| self.is_free(order, offset))
    }

    fn is_free(&self, order: Order, offset: usize) -> bool {
        match order.pages() {
            pages @ ..64 => self.bits[offset / 64] >> (offset % 64) & ((1 << pages) - 1) == 0,
            pages => self.bits[offset / 64..][..pages / 64].iter().all(|word| *word == 0),
        }
    }

    fn mark_taken(&mut self, order: Order, offset: usize) {
        let pages = order.pages();
        match pages {
            ..64 => self.bits[offset / 64] |= ((1 << pages) - 1) << (offset % 64),
            _ => self.bits[offset / 64..][..pages / 64].fill(u64::MAX),
        }
        self.references[offset..offset + pages].fill(1);
        self.used += pages as u16;
    }

    fn check(
        &self,
        next: &[[(u32, u16); ORDERS]; CPUS],
        id: u32,
        is_inherited: bool,
    ) -> Result<(), &'static str> {
        let set: u32 = self.bits.iter().map(|w| w.count_ones()).sum();
        let count = self.references.iter().filter(|h| **h > 0).count();
        if set != self.used as u32 || count != self.used as usize {
            return Err("the count of used slots is off");
        }
        let fits = match self.list {
            ClusterList::Free | ClusterList::Emptied => self.used == 0,
            ClusterList::NonFull(order) => {
                self.used > 0 && (self.used as usize) < CLUSTER_SLOTS && order == self.order
            }
            ClusterList::Fragment(order) => {
                let order_of = Order::new(order).ok_or("an order that isn't one")?;
                self.used > 0 && order == self.order && self.find(order_of, 0).is_none()
            }
            ClusterList::Full(order) => self.used as usize == CLUSTER_SLOTS && order == self.order,
            ClusterList::Off => is_inherited || self.owner.is_some() || self.used == 0,
        };
        if !fits {
            return Err("it is on a list that its use doesn't ask for");
        }
        match self.owner {
            Some(cpu) if next[cpu as usize][self.order as usize].0 != id => {
                Err("its CPU fills another")
            }
            Some(_) if self.list != ClusterList::Off => Err("a CPU fills it, and it is listed"),
            _ => Ok(()),
        }
    }
}
