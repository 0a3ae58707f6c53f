//! A witness: tells whether any process that was copied from this one still runs, or one that was
//! copied from such a one.
//!
//! A page of a nameless file (memfd), which nobody reads or writes, is mapped while the copy is
//! made; this process then ends its own mapping. The kernel counts writable mappings of a file, and
//! refuses to seal one against writing while there are any. A copy has the mapping from its first
//! moment, hands it on to its own copies, and loses it when it ends, by whatever, or executes
//! another program. So nobody has to say anything.
use crate::Errno;
use crate::units::PAGE_SIZE;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};

/// See the module.
pub struct DescendantWatch {
    file: OwnedFd,
    /// This process's own mapping; 0 if there is none.
    at: AtomicUsize,
}

impl DescendantWatch {
    /// Nobody is seen yet. It has a descriptor in the caller's table.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new() -> Result<DescendantWatch, Errno> {
        let file =
            memfd_create(c"memfold-witness", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, PAGE_SIZE as u64)?;
        Ok(DescendantWatch { file, at: AtomicUsize::new(0) })
    }

    /// One that another process has made, by the descriptor that it has sent.
    pub fn of(file: OwnedFd) -> DescendantWatch {
        DescendantWatch { file, at: AtomicUsize::new(0) }
    }

    /// The descriptor, to be sent.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whoever is copied from now on, until [`DescendantWatch::end_copy`], is seen. Called by a thread that
    /// has the descriptor.
    ///
    /// # Errors
    /// What mmap says; EPERM also where [`DescendantWatch::is_over`] was true.
    pub fn begin_copy(&self) -> Result<(), Errno> {
        // One that isn't writable is allowed of a sealed file too, and isn't counted there.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let at = unsafe { mmap(null_mut(), PAGE_SIZE, access, MapFlags::SHARED, &self.file, 0)? };
        self.at.store(at as usize, SeqCst);
        // Nobody may touch it; it counts as long as it could be made writable again.
        // SAFETY: the mapping just made.
        unsafe { mprotect(at, PAGE_SIZE, MprotectFlags::empty()) }
    }

    /// After the copy was made, or was not. Any thread may call it. A copy doesn't: it keeps what
    /// it has.
    pub fn end_copy(&self) {
        let at = self.at.swap(0, SeqCst);
        if at != 0 {
            // SAFETY: the mapping of `begin_copy`, which nobody touches.
            let _ = unsafe { munmap(at as *mut _, PAGE_SIZE) };
        }
    }

    /// Whether all are gone. It then stays so: this is no witness of further copies. Called by a
    /// thread that has the descriptor.
    pub fn is_over(&self) -> bool {
        self.at.load(SeqCst) == 0 && fcntl_add_seals(&self.file, SealFlags::WRITE).is_ok()
    }
}

#[cfg(all(test, not(shuttle)))]
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

    /// A child of fork, which does `work` and ends.
    fn child(work: impl FnOnce()) -> i32 {
        // SAFETY: the child makes system calls only.
        match unsafe { libc::fork() } {
            0 => {
                work();
                // SAFETY: ends the process.
                unsafe { libc::_exit(0) }
            }
            pid => pid,
        }
    }

    fn wait(pid: i32) {
        let mut status = 0;
        // SAFETY: waits for a child of this test.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    }

    #[test]
    fn a_copy_is_seen_until_it_and_its_own_copies_have_ended() {
        let _forks = crate::FORKS.lock();
        let witness = DescendantWatch::new().unwrap();
        witness.begin_copy().unwrap();
        let pair = || UnixStream::pair().unwrap();
        let ((go, stop), (told, tell)) = (pair(), pair());
        let parent = child(|| {
            child(|| {
                say(&tell);
                hear(&go);
            });
        });
        assert!(!witness.is_over(), "this process has it itself");
        witness.end_copy();
        hear(&told);
        wait(parent);
        assert!(!witness.is_over(), "the child's child runs");
        let later = child(|| {
            hear(&go);
        });
        say(&stop);
        say(&stop);
        wait(later);
        let begin = std::time::Instant::now();
        while !witness.is_over() {
            assert!(begin.elapsed().as_secs() < 60, "it has ended");
            std::thread::yield_now();
        }
        assert!(witness.begin_copy().is_err());
    }

    #[test]
    fn what_a_copy_executes_is_another_program() {
        let _forks = crate::FORKS.lock();
        let witness = DescendantWatch::new().unwrap();
        witness.begin_copy().unwrap();
        let sleeper = child(|| {
            // SAFETY: the strings end with zeros, and the list with a null pointer.
            unsafe {
                libc::execl(c"/bin/sleep".as_ptr(), c"sleep".as_ptr(), c"60".as_ptr(), 0usize)
            };
        });
        witness.end_copy();
        let begin = std::time::Instant::now();
        while !witness.is_over() {
            assert!(begin.elapsed().as_secs() < 60, "it executes another program");
            std::thread::yield_now();
        }
        // SAFETY: a child of this test.
        unsafe { libc::kill(sleeper, libc::SIGKILL) };
        wait(sleeper);
    }
}
