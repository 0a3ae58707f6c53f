//! What the process shares with its children and other processes: the swap file and the remote
//! store, which a child continues to read, and the notice of copies.
use crate::diagnostics;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use core::time::Duration;
use memfold_engine::pager::Pager;
use memfold_os::thread::bare;
use memfold_swap::disk::file_disk::FileDisk;
use memfold_swap::remote::Remote;
use memfold_swap::remote::socket::SocketRemote;

/// How long to wait for the remote store's service, which may be stopped.
const PATIENCE: Duration = Duration::from_secs(5);

/// The process's relations to its children.
pub struct ProgramRelations {
    /// The swap file, if there is one. `remote` is the service of the remote store.
    file: Option<Arc<FileDisk>>,
    remote: Option<Arc<SocketRemote>>,
    /// Whether a userfaultfd of the program gets an event for each copy of the process
    /// (UFFD_FEATURE_EVENT_FORK).
    tells_of_copies: AtomicBool,
}

impl ProgramRelations {
    /// Returns the relations of a process whose copies nothing reports yet.
    pub fn new(file: Option<Arc<FileDisk>>, remote: Option<Arc<SocketRemote>>) -> ProgramRelations {
        ProgramRelations { file, remote, tells_of_copies: AtomicBool::new(false) }
    }

    /// Records that a userfaultfd of the program gets an event for each copy from now on.
    pub fn tell_of_copies(&self) {
        self.tells_of_copies.store(true, SeqCst);
    }

    /// Returns whether a userfaultfd of the program gets an event for each copy.
    pub fn tells_of_copies(&self) -> bool {
        self.tells_of_copies.load(SeqCst)
    }

    /// Returns whether there is a swap file.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Returns whether there is a remote store.
    pub fn has_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Calls `each` with the numbers of the swap file's descriptors in the program's table.
    pub fn each_descriptor(&self, each: impl FnMut(i32)) {
        if let Some(file) = &self.file {
            file.each_number(each);
        }
    }

    /// Makes the rings of the swap file, for the calling engine thread and those that it starts.
    pub fn make_rings(&self) {
        if let Some(file) = &self.file {
            file.make_rings();
        }
    }

    /// Drops the rings of the swap file ([`FileDisk::leave_rings`]).
    ///
    /// # Safety
    /// - No other thread uses the file.
    pub unsafe fn leave_rings(&self) {
        if let Some(file) = &self.file {
            // SAFETY: the caller promises that no other thread uses the file.
            unsafe { file.leave_rings() };
        }
    }

    /// Returns whether a child of the calling thread would reach the remote store's service. A
    /// thread with the rights of the child tries it.
    pub fn child_reaches_store(&self) -> bool {
        let trial = self.remote.as_ref().map(|remote| {
            bare::once(
                c"memfold-try",
                || !matches!(remote.keep(PATIENCE), Err(failure) if failure.is_cut),
            )
        });
        trial.is_some_and(|outcome| outcome == Ok(true))
    }

    /// Closes the connection to the remote store.
    pub fn close_remote(&self) {
        self.remote.iter().for_each(|remote| remote.close());
    }

    /// Begins with a swap file and a remote store in a child of fork.
    ///
    /// # Safety
    /// - The caller is the only thread of the process.
    /// - [`ProgramRelations::leave_rings`] was called in this process.
    pub unsafe fn begin_in_child(&self, pager: &Pager) {
        let Some(file) = &self.file else { return };
        let open = |base| {
            // SAFETY: by the caller's promise this is the only thread, and `leave_rings` was called.
            // So no transfer is in progress. The parent leaves the bytes before `base` unchanged.
            if let Err(why) = unsafe { file.begin_in_child(base) } {
                diagnostics::warn(format_args!(
                    "warning: --swap: a child of fork can't make its swap file: {why}. Data that does not compress stays in memory"
                ));
            }
        };
        // SAFETY: by the caller's promise this is the only thread, so no other thread uses the
        // remote store or the swap file.
        let outcome = unsafe {
            let remote = self.remote.as_ref().map_or(Ok(()), |remote| remote.begin_in_child());
            remote.and_then(|()| pager.fork().begin_file_in_child(open))
        };
        if let Err(e) = outcome {
            diagnostics::die(format_args!(
                "A child of fork can't make a key for its swap file: {e}"
            ));
        }
    }
}
