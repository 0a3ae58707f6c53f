//! A child of fork that only shares pages.

/// A child of fork that shares all pages of this process. It does nothing until it is dropped or
/// this process ends.
pub struct Sharer(libc::pid_t);

impl Sharer {
    /// Forks.
    ///
    /// # Panics
    /// If there can't be another process.
    pub fn fork() -> Sharer {
        // SAFETY: the child makes only system calls.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: it ends with its parent, and waits for the signal.
                unsafe { (libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL), libc::pause()) };
            },
            child => {
                assert!(child > 0, "no child");
                Sharer(child)
            }
        }
    }
}

impl Drop for Sharer {
    fn drop(&mut self) {
        // SAFETY: the child of `fork`, which nothing else waits for.
        unsafe {
            (libc::kill(self.0, libc::SIGKILL), libc::waitpid(self.0, std::ptr::null_mut(), 0))
        };
    }
}
