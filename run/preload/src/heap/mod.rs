//! The allocator of this library: an arena of its own, so that the engine never calls the program's
//! `malloc`.
mod c_heap;

use memfold_os::memory::arena::ZoneAllocator;

#[global_allocator]
static HEAP: ZoneAllocator = ZoneAllocator::new();

/// The arena.
pub fn arena() -> &'static ZoneAllocator {
    &HEAP
}
