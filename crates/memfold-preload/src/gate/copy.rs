//! A copy of the process: the child has a copy of the engine at rest, and of the page table, and
//! opens a userfaultfd of its own before anything of the program runs in it.
//!
//! The thread that copies holds every lock that may be held by another, in the engine's order:
//! `state`, the gates, the areas, the queue, the list of zones, the arena. Faults of other threads
//! wait meanwhile, and calls that change mappings. Others go on; the child has none of them.
//!
//! The kernel registers nothing of the child's, so what is missing would read as zeros until the
//! child has registered it; it has one thread, which is here. What is shared with the parent can't
//! be moved until it is private again (`quiesce/unshare.rs`).
//!
//! With a swap file the child goes on to read its parent's, and writes to one of its own
//! (`memfold/swap/copied.rs`); with a remote store, what is in file and store comes home first.
use super::gated::Gated;
use crate::{engine, proc, say, slots};
use core::mem::forget;
use memfold::config::Size;
use memfold_sys::Errno;

impl Gated {
    /// Copies the process by `make`.
    pub fn copy(&self, make: &mut dyn FnMut() -> isize) -> isize {
        forget(self.state.lock());
        let (needed, available) = (self.pager.bytes_to_bring_home(), proc::available_bytes);
        if needed > 0 && needed > available() {
            say::die(format_args!(
                "fork() needs what is in swap file and remote store back in place: {}, the machine has {} left; stopping before data is lost",
                Size(needed),
                Size(available())
            ));
        }
        self.pager.begin_copy();
        self.forbid_allocation();
        let result = make();
        // SAFETY: forbidden above; the copy is the child's own.
        unsafe {
            self.allow_allocation();
            self.pager.allow_requests();
        }
        if result == 0 {
            self.begin_child();
        }
        // SAFETY: begun above, and this is called once in each of the two. `state` was locked by
        // this thread.
        unsafe {
            if result >= 0 {
                self.state.peek_mut().level.sharing = true;
            }
            self.pager.end_copy(result == 0);
            self.state.unlock();
        }
        result
    }

    /// In the child.
    fn begin_child(&self) {
        slots::begin_as_child();
        let opened =
            self.pagemap.reopen().and_then(|()| self.maps.reopen()).map_err(|e| (e, "/proc/self"));
        if let Err((e, what)) = opened {
            say::die(format_args!("in a child of fork: {what}: {e}"));
        }
        if let Err(e) = self.uffd.reopen() {
            say::die(format_args!("in a child of fork: {e}"));
        }
        self.begin_file();
        let mut done: Result<(), Errno> = Ok(());
        // SAFETY: this is the only thread.
        unsafe {
            self.pager.begin_in_child(|start, end| {
                done = done.and_then(|()| self.register(&(start..end)));
            });
        }
        if let Err(e) = done {
            say::die(format_args!("putting a child of fork under management failed: {e}"));
        }
        // SAFETY: the process has just been copied, and this is its only thread.
        unsafe { engine::start_in_child() };
    }

    /// The swap file's part, and the remote store's.
    fn begin_file(&self) {
        let Some(file) = &self.file else { return };
        let open = |base| {
            // SAFETY: this is the only thread, and what lies before `base` is left alone by the
            // parent.
            if let Err(why) = unsafe { file.begin_in_child(base) } {
                say::warn(format_args!(
                    "warning: in a child of fork: --swap: {why}; what doesn't shrink stays in memory"
                ));
            }
        };
        // SAFETY: likewise, for each.
        let begun = unsafe {
            let remote = self.remote.as_ref().map_or(Ok(()), |remote| remote.begin_in_child());
            remote.and_then(|()| self.pager.begin_file_in_child(open))
        };
        if let Err(e) = begun {
            say::die(format_args!("in a child of fork: a key for the swap file: {e}"));
        }
        self.keep_descriptors();
    }
}
