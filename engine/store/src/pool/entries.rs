//! The entries of a pool: which are free, and how many were ever used.
use crate::handle::{GENERATION_BITS, INDEX_BITS};
use crate::pool::area::AreaTable;
use crate::pool::budget::PoolBudget;
use crate::pool::entry::ObjectEntry;
use crate::pool::mark::ObjectMark;
use alloc::sync::Arc;
use memfold_os::sync::atomic::{AtomicU32, Ordering::Relaxed};
use memfold_os::sync::{Mutex, MutexGuard};

const NIL: u32 = u32::MAX;

/// All entries of a pool. Free ones form a list through their second words.
pub(crate) struct EntryTable {
    table: AreaTable<ObjectEntry>,
    list: Mutex<FreeList>,
    budget: Arc<PoolBudget>,
    /// A copy of `FreeList::fresh` that is read without the lock.
    used_ever: AtomicU32,
}

/// `fresh` = live + `free`, where live entries are those of allocated objects.
pub(crate) struct FreeList {
    head: u32,
    /// Entries in the list.
    pub free: u32,
    /// Entries that were ever used; the memory of the others is untouched.
    pub fresh: u32,
}

impl EntryTable {
    pub fn new(table: AreaTable<ObjectEntry>, budget: Arc<PoolBudget>) -> EntryTable {
        EntryTable {
            table,
            list: Mutex::new(FreeList { head: NIL, free: 0, fresh: 0 }),
            budget,
            used_ever: AtomicU32::new(0),
        }
    }

    /// Takes a free entry and the generation of its next use; `None` when all are used.
    pub fn allocate(&self) -> Option<(u32, u16, &ObjectEntry)> {
        let mut list = self.list.lock();
        if list.head != NIL {
            let index = list.head;
            let entry = self.table.get(index)?;
            list.head = entry.next_free();
            list.free -= 1;
            return Some((index, entry.generation_unchecked(), entry));
        }
        let index = list.fresh;
        let entry = self
            .table
            .get(index)
            .filter(|_| index < 1 << INDEX_BITS && self.table.need(index + 1))?;
        self.budget.charge(Self::bytes_of(index + 1) - Self::bytes_of(index));
        list.fresh += 1;
        self.used_ever.store(list.fresh, Relaxed);
        Some((index, 0, entry))
    }

    /// Frees an entry. Handles of its last use are dead from then on.
    pub fn free(&self, index: u32) {
        let Some(entry) = self.table.get(index) else { return };
        let mut list = self.list.lock();
        let generation = (entry.generation_unchecked() + 1) % (1 << GENERATION_BITS);
        entry.set_free(index, generation, list.head);
        list.head = index;
        list.free += 1;
    }

    /// Returns entry `index`, used or not, or `None` past the table.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&ObjectEntry> {
        self.table.get(index)
    }

    pub fn lock(&self) -> MutexGuard<'_, FreeList> {
        self.list.lock()
    }

    /// Returns at least the entries that were ever used.
    pub fn used_ever(&self) -> u32 {
        self.used_ever.load(Relaxed)
    }

    /// Returns the bytes of memory of the entries and their marks.
    pub fn bytes(&self, list: &FreeList) -> u64 {
        Self::bytes_of(list.fresh)
    }

    fn bytes_of(count: u32) -> u64 {
        AreaTable::<ObjectEntry>::bytes(count) + AreaTable::<ObjectMark>::bytes(count)
    }

    /// Walks the list of free entries.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn check(&self, list: &FreeList) -> Result<(), &'static str> {
        let (mut at, mut count) = (list.head, 0);
        while at != NIL {
            let entry = self.table.get(at).ok_or("free list leaves the table")?;
            if entry.snapshot(at).map_or(true, |p| p.is_live()) {
                return Err("a live or damaged entry is in the free list");
            }
            count += 1;
            if at >= list.fresh || count > list.free {
                return Err("free list is longer than its count, or holds an entry never used");
            }
            at = entry.next_free();
        }
        if count == list.free { Ok(()) } else { Err("free list is shorter than its count") }
    }
}
