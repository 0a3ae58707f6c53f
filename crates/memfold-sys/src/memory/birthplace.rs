//! The process in which something was made, told from the children that fork makes of it.
//!
//! A userfaultfd, a thread, a lock: what a child of fork inherits of them acts on its parent, isn't
//! there, or never comes free. A process number doesn't tell the two apart: a child in a namespace
//! of its own may have its parent's. So each of these objects has a page that the kernel wipes in
//! children. A child that shares all memory (vfork) is the same place, and rightly so.
use crate::Errno;
use crate::memory::zone::Zone;
use crate::units::PAGE_SIZE;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// See the module.
pub struct ProcessTag {
    page: Zone,
}

impl ProcessTag {
    /// This process.
    ///
    /// # Errors
    /// What reserving a page says; EINVAL before Linux 4.14.
    pub fn new() -> Result<ProcessTag, Errno> {
        let page = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        page.wipe_in_children()?;
        let place = ProcessTag { page };
        place.word().store(1, Relaxed);
        Ok(place)
    }

    /// Whether the caller is in the process where this was made. Costs one load.
    pub fn is_here(&self) -> bool {
        self.word().load(Relaxed) != 0
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the zone is this struct's own, larger than a word, aligned to a page, and used as
        // this word only. Any value is one.
        unsafe { &*self.page.as_ptr().cast::<AtomicU32>() }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_place_and_its_parent_is_not() {
        let _alone = crate::FORKS.lock();
        let place = ProcessTag::new().unwrap();
        assert!(place.is_here());
        // SAFETY: the child reads memory and ends.
        match unsafe { libc::fork() } {
            // SAFETY: as above.
            0 => unsafe { libc::_exit(place.is_here() as i32) },
            child => {
                let mut status = 0;
                // SAFETY: the child of above, which nobody else waits for.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "the child takes itself for its parent");
            }
        }
        assert!(place.is_here());
    }
}
