//! The arena behind the global allocator of the library.
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_os::memory::arena::ZoneAllocator;

static ARENA: AtomicPtr<ZoneAllocator> = AtomicPtr::new(core::ptr::null_mut());

/// Records the arena behind the global allocator. The constructor calls it.
pub fn note(arena: &'static ZoneAllocator) {
    ARENA.store((&raw const *arena).cast_mut(), SeqCst);
}

pub fn arena() -> &'static ZoneAllocator {
    // SAFETY: the pointer is null or comes from a `&'static`.
    unsafe { ARENA.load(SeqCst).as_ref() }.expect("noted by the constructor")
}
