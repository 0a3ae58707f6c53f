//! The list of memories, by number.
use crate::status::Failure;
use memfold::{Error, Heap, Memory};
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

/// Memories by number; numbers only grow. A child of fork reads them as they were, but a lock that
/// another thread held at the fork stays held.
struct Memories {
    by_number: BTreeMap<u64, Heap>,
    next: u64,
}

static MEMORIES: RwLock<Memories> = RwLock::new(Memories { by_number: BTreeMap::new(), next: 1 });

/// Adds a memory. Returns its number.
pub fn add(memory: &Memory) -> u64 {
    let mut memories = MEMORIES.write().unwrap_or_else(PoisonError::into_inner);
    let number = memories.next;
    memories.next += 1;
    memories.by_number.insert(number, Heap::new(memory));
    number
}

fn unknown() -> Failure {
    Failure::invalid("there is no such memory: it was destroyed, or never created")
}

fn find(number: u64) -> Result<Heap, Failure> {
    let memories = MEMORIES.read().unwrap_or_else(PoisonError::into_inner);
    memories.by_number.get(&number).cloned().ok_or_else(unknown)
}

/// Calls `what` with a memory, which stays alive meanwhile.
pub fn with<T>(number: u64, what: impl FnOnce(&Heap) -> Result<T, Error>) -> Result<T, Failure> {
    Ok(what(&find(number)?)?)
}

/// Ends a memory, as soon as no other call uses it.
pub fn remove(number: u64) -> Result<(), Failure> {
    find(number)?.at_home()?;
    let mut memories = MEMORIES.write().unwrap_or_else(PoisonError::into_inner);
    let heap = memories.by_number.remove(&number).ok_or_else(unknown)?;
    drop(memories);
    drop(heap);
    Ok(())
}
