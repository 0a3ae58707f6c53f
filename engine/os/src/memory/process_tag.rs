//! A tag for the process in which an object was made. It distinguishes the process from its
//! children by fork.
//!
//! A child of fork inherits userfaultfds, threads and locks that act on its parent, don't exist, or
//! never become free. A process number doesn't distinguish the two: a child in a namespace of its
//! own may have its parent's. So each of these objects has a page that the kernel wipes in
//! children. A child that shares all memory (vfork) has the same tag, as it must.
use crate::Errno;
use crate::memory::zone::Zone;
use crate::units::PAGE_SIZE;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// The tag; see the module.
pub struct ProcessTag {
    page: Zone,
}

impl ProcessTag {
    /// Makes a tag of this process.
    ///
    /// # Errors
    /// The errors of reserving a page; EINVAL before Linux 4.14.
    pub fn new() -> Result<ProcessTag, Errno> {
        let page = Zone::reserve(PAGE_SIZE, PAGE_SIZE)?;
        page.wipe_in_children()?;
        let tag = ProcessTag { page };
        tag.word().store(1, Relaxed);
        Ok(tag)
    }

    /// Returns whether the caller is in the process where this was made. Costs one load.
    pub fn is_here(&self) -> bool {
        self.word().load(Relaxed) != 0
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the zone belongs to this struct, is larger than a word, is aligned to a page, and
        // is used only as this word. Any value is valid.
        unsafe { &*self.page.as_ptr().cast::<AtomicU32>() }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn child_of_fork_has_another_tag_than_its_parent() {
        let _alone = crate::FORKS.lock();
        let tag = ProcessTag::new().unwrap();
        assert!(tag.is_here());
        // SAFETY: the child reads memory and ends.
        match unsafe { libc::fork() } {
            // SAFETY: the child ends here.
            0 => unsafe { libc::_exit(tag.is_here() as i32) },
            child => {
                let mut status = 0;
                // SAFETY: no other thread waits for the child.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!(status, 0, "the child takes itself for its parent");
            }
        }
        assert!(tag.is_here());
    }
}
