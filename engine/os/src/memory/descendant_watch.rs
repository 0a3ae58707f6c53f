//! A descendant watch: shows whether a process that was copied from this one, or from such a copy,
//! still runs.
//!
//! A page of a nameless file (memfd), which no process reads or writes, is mapped while the copy is
//! made. This process then unmaps it. The kernel counts writable mappings of a file, and refuses to
//! seal the file against writing while there are any. A copy has the mapping from its first moment,
//! and its own copies inherit it. It loses the mapping when it ends, for any reason, or executes
//! another program. So no process has to report anything.
use crate::Errno;
use crate::units::PAGE_SIZE;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

/// A watch of the copies of this process; see the module.
pub struct DescendantWatch {
    file: OwnedFd,
    /// This process's own mapping; 0 if there is none.
    at: AtomicUsize,
}

impl DescendantWatch {
    /// Makes a watch that sees no process yet. It has a descriptor in the caller's table.
    ///
    /// # Errors
    /// The kernel's.
    pub fn new() -> Result<DescendantWatch, Errno> {
        let file =
            memfd_create(c"memfold-descendants", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, PAGE_SIZE as u64)?;
        Ok(DescendantWatch { file, at: AtomicUsize::new(0) })
    }

    /// Makes the watch of another process, from the descriptor that it has sent.
    pub fn of(file: OwnedFd) -> DescendantWatch {
        DescendantWatch { file, at: AtomicUsize::new(0) }
    }

    /// Returns the descriptor, to be sent.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Begins to see processes that are copied from now on, until [`DescendantWatch::end_copy`].
    /// The calling thread has the descriptor.
    ///
    /// # Errors
    /// The errors of mmap; EPERM also where [`DescendantWatch::is_over`] was true.
    pub fn begin_copy(&self) -> Result<(), Errno> {
        // A read-only mapping is allowed of a sealed file too, and isn't counted.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe { mmap(null_mut(), PAGE_SIZE, access, MapFlags::SHARED, &self.file, 0)? };
        self.at.store(at as usize, SeqCst);
        // No thread may touch it. It counts as long as it could be made writable again.
        // SAFETY: this is the mapping just made.
        unsafe { mprotect(at, PAGE_SIZE, MprotectFlags::empty()) }
    }

    /// Ends a copy, whether it was made or not. Any thread may call it. The copy itself doesn't: it
    /// keeps its mapping.
    pub fn end_copy(&self) {
        let at = self.at.swap(0, SeqCst);
        if at != 0 {
            // SAFETY: this is the mapping of `begin_copy`, which no thread touches.
            let _ = unsafe { munmap(at as *mut _, PAGE_SIZE) };
        }
    }

    /// Returns whether all copies are gone. It then stays so, and sees no further copies. The
    /// calling thread has the descriptor.
    pub fn is_over(&self) -> bool {
        self.at.load(SeqCst) == 0 && fcntl_add_seals(&self.file, SealFlags::WRITE).is_ok()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn say(mut to: &UnixStream) {
        to.write_all(b"x").unwrap();
    }

    fn hear(mut from: &UnixStream) {
        from.read_exact(&mut [0]).unwrap();
    }

    /// Makes a child of fork, which runs `work` and ends.
    fn child(work: impl FnOnce()) -> i32 {
        // SAFETY: the child makes only system calls.
        match unsafe { libc::fork() } {
            0 => {
                work();
                // SAFETY: the call ends the process.
                unsafe { libc::_exit(0) }
            }
            pid => pid,
        }
    }

    fn wait(pid: i32) {
        let mut status = 0;
        // SAFETY: the process is a child of this test.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    }

    #[test]
    fn a_copy_is_seen_until_it_and_its_own_copies_have_ended() {
        let _forks = crate::FORKS.lock();
        let watch = DescendantWatch::new().unwrap();
        watch.begin_copy().unwrap();
        let pair = || UnixStream::pair().unwrap();
        let ((go, stop), (answer, tell)) = (pair(), pair());
        let parent = child(|| {
            child(|| {
                say(&tell);
                hear(&go);
            });
        });
        assert!(!watch.is_over(), "this process has it itself");
        watch.end_copy();
        hear(&answer);
        wait(parent);
        assert!(!watch.is_over(), "the child's child runs");
        let later = child(|| {
            hear(&go);
        });
        say(&stop);
        say(&stop);
        wait(later);
        let begin = std::time::Instant::now();
        while !watch.is_over() {
            assert!(begin.elapsed().as_secs() < 60, "it has ended");
            std::thread::yield_now();
        }
        assert!(watch.begin_copy().is_err());
    }

    #[test]
    fn program_that_a_copy_executes_is_another_one() {
        let _forks = crate::FORKS.lock();
        let watch = DescendantWatch::new().unwrap();
        watch.begin_copy().unwrap();
        let sleeper = child(|| {
            // SAFETY: the strings end with zeros, and the list with a null pointer.
            unsafe {
                libc::execl(c"/bin/sleep".as_ptr(), c"sleep".as_ptr(), c"60".as_ptr(), 0usize)
            };
        });
        watch.end_copy();
        let begin = std::time::Instant::now();
        while !watch.is_over() {
            assert!(begin.elapsed().as_secs() < 60, "it executes another program");
            std::thread::yield_now();
        }
        // SAFETY: the process is a child of this test.
        unsafe { libc::kill(sleeper, libc::SIGKILL) };
        wait(sleeper);
    }
}
