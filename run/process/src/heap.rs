//! The arena behind the global allocator of the library.
use core::sync::atomic::{AtomicPtr, Ordering::SeqCst};
use memfold_os::memory::arena::ZoneAllocator;
use memfold_os::memory::zone::{freeze_list, unfreeze_list};

static ARENA: AtomicPtr<ZoneAllocator> = AtomicPtr::new(core::ptr::null_mut());

/// Records the arena behind the global allocator. The constructor calls it.
pub fn note(arena: &'static ZoneAllocator) {
    ARENA.store((&raw const *arena).cast_mut(), SeqCst);
}

pub fn arena() -> &'static ZoneAllocator {
    // SAFETY: the pointer is null or comes from a `&'static`.
    unsafe { ARENA.load(SeqCst).as_ref() }.expect("noted by the constructor")
}

/// Blocks allocation, and changes of the list of zones, until [`allow_allocation`].
pub fn forbid_allocation() {
    freeze_list();
    arena().freeze();
}

/// Ends [`forbid_allocation`].
///
/// # Safety
/// - [`forbid_allocation`] was called, in this process or in the parent that it is a copy of.
/// - This is called once for it.
pub unsafe fn allow_allocation() {
    // SAFETY: the caller promises that `forbid_allocation` has frozen both, and that this is the one
    // call for it.
    unsafe {
        arena().unfreeze();
        unfreeze_list();
    }
}
