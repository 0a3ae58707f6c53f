//! The multi-index: from a page's key to its folio, one entry for a folio of any order (C3).
//!
//! A chunk is 2 MiB of key space. Its word in the chunk table names an order-9 folio or a node. A
//! node has 8 words of 256 KiB each. A word of a node names a folio of order 6 to 8, or a leaf of
//! 64 words, one for each page. A folio that spans several words is entered in each, as in the
//! kernel's XArray. The lock of a chunk's shard guards the chunk's words.
use crate::folio::slab::Slab;
use core::marker::PhantomData;
use memfold_os::Errno;
use memfold_os::memory::zone::{NoPromise, Zone, ZoneEdge};
use memfold_os::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use memfold_os::sync::{Condvar, Mutex, MutexGuard};
use memfold_os::units::{MAX_ORDER, MAX_PAGES, Order, PAGE_SIZE};

/// A folio's id in the slab of folios; 0 is none.
pub type FolioId = u32;

/// Keys are page numbers below this limit: 256 TiB of key space.
pub const KEYS: u64 = 1 << 36;
const CHUNKS: usize = (KEYS >> MAX_ORDER) as usize;
/// Words in a node, and the order that each word covers.
const NODE_WORDS: usize = 8;
const NODE_ORDER: u8 = 6;
const LEAF_WORDS: usize = 1 << NODE_ORDER;
/// Marks a word that names a folio. Other words name a node or a leaf, or are empty (0).
const FOLIO: u32 = 1 << 31;
const SHARDS: usize = 256;

/// Locks over spans of key space; each guards the index words and folios of its keys.
pub struct Shards {
    locks: [Shard; SHARDS],
    shift: u32,
    /// Counts how often a shard was locked.
    #[cfg(test)]
    pub(crate) locked: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    lock: Mutex<()>,
    changed: Condvar,
}

/// The lock of one shard. References borrowed from it stay in this thread. No other thread may use
/// the folios of the shard meanwhile.
pub struct ShardGuard<'a> {
    guard: MutexGuard<'a, ()>,
    shards: &'a Shards,
    shard: usize,
    _thread: PhantomData<*const ()>,
}

impl ShardGuard<'_> {
    /// Returns whether this is the lock of the shard of `key`. Keys from [`KEYS`] on have no shard.
    pub fn covers(&self, key: u64) -> bool {
        key < KEYS && self.shards.number(key) == self.shard
    }
}

impl Shards {
    /// Makes locks that each cover `span_bytes` (a power of two, at least 2 MiB).
    pub fn new(span_bytes: u64) -> Shards {
        let shift = span_bytes.trailing_zeros() - PAGE_SIZE.trailing_zeros();
        Shards {
            locks: [const { Shard { lock: Mutex::new(()), changed: Condvar::new() } }; SHARDS],
            shift,
            #[cfg(test)]
            locked: AtomicUsize::new(0),
        }
    }

    fn number(&self, key: u64) -> usize {
        (key >> self.shift) as usize % SHARDS
    }

    /// Locks the shard of `key`.
    pub fn lock(&self, key: u64) -> ShardGuard<'_> {
        let shard = self.number(key);
        #[cfg(test)]
        self.locked.fetch_add(1, Relaxed);
        self.held(self.locks[shard].lock.lock(), shard)
    }

    /// Returns whether a thread has the shard of `key` locked, or has ended while it had.
    pub fn is_held(&self, key: u64) -> bool {
        self.locks[self.number(key)].lock.is_held()
    }

    /// Sleeps until a folio of the shard changes its state. The lock is released meanwhile.
    pub fn wait<'a>(&'a self, guard: ShardGuard<'a>) -> ShardGuard<'a> {
        let shard = guard.shard;
        self.held(self.locks[shard].changed.wait(guard.guard), shard)
    }

    fn held<'a>(&'a self, guard: MutexGuard<'a, ()>, shard: usize) -> ShardGuard<'a> {
        ShardGuard { guard, shards: self, shard, _thread: PhantomData }
    }

    /// Wakes the threads that wait for a folio of the shard.
    pub fn notify(&self, guard: &ShardGuard<'_>) {
        self.locks[guard.shard].changed.notify_all();
    }
}

/// Finds a folio by key. Callers pass the guard of the key's shard to each method.
pub struct FolioIndex {
    chunks: Zone,
    edge: ZoneEdge,
    nodes: Slab<[u32; NODE_WORDS]>,
    leaves: Slab<[u32; LEAF_WORDS]>,
    chunks_used: AtomicUsize,
    /// Look-ups by one key, and the part of them that found no folio (C5).
    #[cfg(test)]
    pub(crate) looked: [AtomicUsize; 2],
}

impl FolioIndex {
    /// Makes an empty index.
    ///
    /// # Errors
    /// The errors of reserving address space.
    pub fn new() -> Result<FolioIndex, Errno> {
        Ok(FolioIndex {
            chunks: Zone::reserve_growing(CHUNKS * 4, PAGE_SIZE)?,
            edge: ZoneEdge::default(),
            nodes: Slab::new(1 << 24, 1)?,
            leaves: Slab::new(1 << 26, 1)?,
            chunks_used: AtomicUsize::new(0),
            #[cfg(test)]
            looked: Default::default(),
        })
    }

    fn chunk(&self, key: u64) -> *mut u32 {
        assert!(key < KEYS, "key {key:#x} is outside the index");
        // SAFETY: the chunk number is below CHUNKS, and the zone has a word for each.
        unsafe { self.chunks.as_ptr().cast::<u32>().add((key >> MAX_ORDER) as usize) }
    }

    /// Gets memory for the word of `key`, which is about to be written.
    fn need_chunk(&self, key: u64) {
        let end = ((key >> MAX_ORDER) as usize + 1) * size_of::<u32>();
        let outcome = self.chunks.need(&self.edge, 0, self.chunks.len(), end);
        if outcome.is_err() {
            NoPromise::end("The index");
        }
    }

    /// Returns the folio that covers `key`.
    pub fn find(&self, guard: &ShardGuard<'_>, key: u64) -> Option<FolioId> {
        let word = self.word(guard, key);
        #[cfg(test)]
        {
            self.looked[0].fetch_add(1, Relaxed);
            self.looked[1].fetch_add(word.is_none() as usize, Relaxed);
        }
        word
    }

    fn word(&self, guard: &ShardGuard<'_>, key: u64) -> Option<FolioId> {
        assert!(guard.covers(key), "the lock of another shard");
        // SAFETY: the guard, of the key's shard, excludes every writer of this chunk's words, nodes
        // and leaves.
        unsafe { self.peek(key) }
    }

    /// Returns the folio that covers `key`, without the lock.
    ///
    /// # Safety
    /// - No thread writes to the index meanwhile.
    pub unsafe fn peek(&self, key: u64) -> Option<FolioId> {
        // SAFETY: by the caller's promise no thread writes to the words, nodes and leaves
        // meanwhile.
        unsafe {
            let chunk = *self.chunk(key);
            if chunk == 0 || chunk & FOLIO != 0 {
                return (chunk != 0).then_some(chunk & !FOLIO);
            }
            let word = self.nodes.place(chunk).as_ref()[node_slot(key)];
            if word == 0 || word & FOLIO != 0 {
                return (word != 0).then_some(word & !FOLIO);
            }
            let id = self.leaves.place(word).as_ref()[leaf_slot(key)];
            (id != 0).then_some(id)
        }
    }

    /// Enters a folio for `2^order` pages from `key`. No folio may cover them yet.
    pub fn insert(&self, guard: &ShardGuard<'_>, key: u64, order: Order, id: FolioId) {
        debug_assert!(key.is_multiple_of(order.pages() as u64));
        self.write(guard, key, order, id);
    }

    /// Erases the entry of `2^order` pages from `key`, which one folio of that order covered.
    pub fn erase(&self, guard: &ShardGuard<'_>, key: u64, order: Order) {
        self.write(guard, key, order, 0);
    }

    fn write(&self, guard: &ShardGuard<'_>, key: u64, order: Order, id: FolioId) {
        assert!(guard.covers(key), "the lock of another shard");
        let mark = if id == 0 { 0 } else { id | FOLIO };
        let count = order.pages();
        // SAFETY: the guard, of the key's shard, excludes every other reader and writer of this
        // chunk's words, nodes and leaves. A node or leaf is freed only when its last word has
        // become 0, and the word that names it is erased at the same time.
        unsafe {
            self.need_chunk(key);
            let chunk = &mut *self.chunk(key);
            if order == Order::MAX {
                debug_assert!((*chunk == 0) != (id == 0));
                self.count_chunk(*chunk == 0, id == 0);
                *chunk = mark;
                return;
            }
            debug_assert!(*chunk & FOLIO == 0);
            if *chunk == 0 {
                self.count_chunk(true, false);
                *chunk = self.nodes.take();
                self.nodes.place(*chunk).write([0; NODE_WORDS]);
            }
            let node = self.nodes.place(*chunk).as_mut();
            if order.get() >= NODE_ORDER {
                node[node_slot(key)..][..count >> NODE_ORDER].fill(mark);
            } else {
                let word = &mut node[node_slot(key)];
                debug_assert!(*word & FOLIO == 0);
                if *word == 0 {
                    *word = self.leaves.take();
                    self.leaves.place(*word).write([0; LEAF_WORDS]);
                }
                let leaf = self.leaves.place(*word).as_mut();
                leaf[leaf_slot(key)..][..count].fill(id);
                if id == 0 && leaf.iter().all(|w| *w == 0) {
                    self.leaves.give(*word);
                    *word = 0;
                }
            }
            if id == 0 && node.iter().all(|w| *w == 0) {
                self.nodes.give(*chunk);
                *chunk = 0;
                self.count_chunk(false, true);
            }
        }
    }

    fn count_chunk(&self, was_empty: bool, is_empty: bool) {
        match (was_empty, is_empty) {
            (true, false) => self.chunks_used.fetch_add(1, Relaxed),
            (false, true) => self.chunks_used.fetch_sub(1, Relaxed),
            _ => 0,
        };
    }

    /// Returns whether `2^order` pages from `key` hold no folio.
    pub fn is_empty(&self, guard: &ShardGuard<'_>, key: u64, order: Order) -> bool {
        self.first(guard, key, key + order.pages() as u64).is_none()
    }

    /// Returns the first key in `[key, end)`, all in one chunk, that a folio covers, and that
    /// folio.
    pub fn first(&self, guard: &ShardGuard<'_>, key: u64, end: u64) -> Option<(u64, FolioId)> {
        assert!(guard.covers(key), "the lock of another shard");
        debug_assert!(end > key && (end - 1) >> MAX_ORDER == key >> MAX_ORDER);
        // SAFETY: the guard, of the key's shard, excludes every writer of this chunk's words, nodes
        // and leaves.
        unsafe {
            let chunk = *self.chunk(key);
            if chunk == 0 || chunk & FOLIO != 0 {
                return (chunk != 0).then_some((key, chunk & !FOLIO));
            }
            let node = self.nodes.place(chunk).as_ref();
            let mut at = key;
            while at < end {
                let word = node[node_slot(at)];
                if word & FOLIO != 0 {
                    return Some((at, word & !FOLIO));
                }
                let next = ((at >> NODE_ORDER) + 1) << NODE_ORDER;
                if word != 0 {
                    let leaf = self.leaves.place(word).as_ref();
                    let stop = next.min(end);
                    if let Some(k) = (at..stop).find(|k| leaf[leaf_slot(*k)] != 0) {
                        return Some((k, leaf[leaf_slot(k)]));
                    }
                }
                at = next;
            }
        }
        None
    }

    /// Returns whether nearly all of its records are in use.
    pub fn is_crowded(&self) -> bool {
        self.nodes.is_crowded() || self.leaves.is_crowded()
    }

    /// Returns the bytes of the index: nodes, leaves and the used words of the chunk table.
    pub fn used_bytes(&self) -> usize {
        self.nodes.used_bytes() + self.leaves.used_bytes() + self.chunks_used.load(Relaxed) * 4
    }
}

fn node_slot(key: u64) -> usize {
    (key as usize & (MAX_PAGES - 1)) >> NODE_ORDER
}
fn leaf_slot(key: u64) -> usize {
    key as usize & (LEAF_WORDS - 1)
}

const _: () =
    assert!(NODE_WORDS * LEAF_WORDS == MAX_PAGES, "a node's leaves must cover one chunk exactly");

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Applies random inserts and erases of all orders, and compares with a map from page to
        /// folio.
        #[test]
        fn agrees_with_a_map(ops in prop::collection::vec((0u8..=9, 0u64..1536, any::<bool>()), 1..200)) {
            let (index, shards) = (FolioIndex::new().unwrap(), Shards::new(2 << 20));
            let mut naive: BTreeMap<u64, (u64, u8, u32)> = BTreeMap::new();
            for (n, (order, at, insert)) in ops.into_iter().enumerate() {
                let (order, id) = (Order::new(order).unwrap(), n as u32 + 1);
                let key = at / order.pages() as u64 * order.pages() as u64;
                let guard = shards.lock(key);
                let span = key..key + order.pages() as u64;
                if insert && span.clone().all(|k| !naive.contains_key(&k)) {
                    index.insert(&guard, key, order, id);
                    span.for_each(|k| { naive.insert(k, (key, order.get(), id)); });
                } else if let Some(&(first, o, _)) = naive.get(&at) {
                    let o = Order::new(o).unwrap();
                    index.erase(&guard, first, o);
                    (first..first + o.pages() as u64).for_each(|k| { naive.remove(&k); });
                }
                drop(guard);
                for k in (0..1536).step_by(7) {
                    let guard = shards.lock(k);
                    prop_assert_eq!(index.find(&guard, k), naive.get(&k).map(|f| f.2));
                    let end = (k / 512 + 1) * 512;
                    let first = naive.range(k..end).next().map(|(k, f)| (*k, f.2));
                    prop_assert_eq!(index.first(&guard, k, end), first);
                }
            }
            if naive.is_empty() {
                prop_assert_eq!(index.used_bytes(), 0);
            }
        }
    }

    #[test]
    fn one_entry_serves_a_large_folio() {
        let (index, shards) = (FolioIndex::new().unwrap(), Shards::new(2 << 20));
        for chunk in 0..64u64 {
            let guard = shards.lock(chunk << 9);
            index.insert(&guard, chunk << 9, Order::MAX, chunk as u32 + 1);
            assert_eq!(index.find(&guard, (chunk << 9) + 511), Some(chunk as u32 + 1));
        }
        assert_eq!(index.used_bytes(), 64 * 4);
    }
}
