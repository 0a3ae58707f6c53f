//! The heap of this library, which whoever links it allocates from.
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_os::memory::arena::ZoneAllocator;

static ARENA: AtomicPtr<ZoneAllocator> = AtomicPtr::new(core::ptr::null_mut());

/// From now on this is known as the arena behind the global allocator. Called by the constructor.
pub fn note(arena: &'static ZoneAllocator) {
    ARENA.store((&raw const *arena).cast_mut(), SeqCst);
}

/// The arena.
pub fn arena() -> &'static ZoneAllocator {
    // SAFETY: the pointer is null or comes from a `&'static`.
    unsafe { ARENA.load(SeqCst).as_ref() }.expect("noted by the constructor")
}
