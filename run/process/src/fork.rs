//! Copying the process. The child has a copy of the quiesced engine and of the page table. It opens
//! a userfaultfd of its own before any code of the program runs in it.
//!
//! The thread that forks, or one that does it on its behalf, takes every lock that another thread
//! may hold, or the child frees it. docs/locks.md lists all of them. Faults and mapping changes of
//! other threads wait meanwhile. Other work of theirs goes on; the child has none of these threads.
//!
//! The kernel reports the copy to the program's own userfaultfd (UFFD_FEATURE_EVENT_FORK) before
//! the child begins, and waits until a thread of the program has read the event. So the locks are
//! released as soon as all memory is copied, which [`MARK`] shows.
//!
//! The kernel registers none of the child's memory, so missing pages would read as zeros until the
//! child has registered it. The child has one thread, which runs this code. Pages that are shared
//! with the parent can't be moved until they are private again (`memory/unshare.rs`).
//!
//! A child may see no /proc of its own (it is not dumpable, or has an empty root). It continues
//! without it (`Pagemap`, `Maps`, `Scale`). If a child gets no userfaultfd, because a sandbox
//! forbids it by now, all its memory is loaded and it has no engine.
//!
//! With a swap file the child continues to read its parent's file and its objects in a remote
//! store. It writes to a file of its own (`engine/swap/src/swap/fork.rs`).
use crate::adoption::Adoption;
use crate::diagnostics::unserved::unserved_later;
use crate::heap::{allow_allocation, forbid_allocation};
use crate::limits;
use crate::marks::state::{MemoryMark, ProgramState};
use crate::program::{
    MARK, ManagedProgram, ProgramMemory, ProgramRelations, abandon, keep_descriptors,
};
use crate::size::process_size;
use crate::{diagnostics, engine};
use core::mem::forget;
use memfold_engine::config::Size;
use memfold_engine::known::TOP;
use memfold_engine::pager::Pager;
use memfold_gate::{touch, write_bytes};
use memfold_os::memory::huge;
use memfold_os::raw::{is_resident, system_call};
use memfold_os::thread::now_ns;
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;

/// Returns whether the kernel may have swapped pages out.
fn may_be_swapped() -> bool {
    // SAFETY: the struct has only integers, for which zeros are valid.
    let mut about: libc::sysinfo = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel writes one `sysinfo` to `about`, which has that type.
    let result =
        unsafe { system_call(libc::SYS_sysinfo, [&raw mut about as usize, 0, 0, 0, 0, 0]) };
    result.is_err() || about.totalswap > 0
}

/// A copy of the process by fork, with the engine in it.
#[derive(Copy, Clone)]
pub struct ForkCopy<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    relations: &'a ProgramRelations,
    adoption: Adoption<'a>,
}

impl ForkCopy<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> ForkCopy<'_> {
        ForkCopy {
            pager: program.pager(),
            memory: program.memory(),
            relations: program.relations(),
            adoption: Adoption::of(program),
        }
    }

    /// Prepares for a copy of the process.
    pub fn begin_copy(&self) {
        forget(self.memory.state().lock());
        member::note_fork();
        let may_bring = |bytes| {
            let available = process_size::available_bytes();
            if bytes > available && available > 0 {
                diagnostics::die(format_args!(
                    "This fork must load {} from the swap file and the remote store, but only {} of memory are free. The process is ended before data is lost",
                    Size(bytes),
                    Size(available)
                ));
            }
        };
        self.pager.fork().begin_copy(|| self.relations.child_reaches_store(), may_bring);
        // A thread that has this lock allocates.
        self.memory.lock_faults();
        forbid_allocation();
        MARK.renew();
    }

    /// Returns whether all memory has been copied since [`ForkCopy::begin_copy`]. The kernel
    /// shows no page while it copies.
    pub fn is_copied(&self) -> bool {
        self.relations.tells_of_copies() && MARK.is_copied(self.memory.pagemap())
    }

    /// Ends a copy. `result` is that of the call: 0 in the child. In the parent any thread may call
    /// it.
    pub fn end_copy(&self, result: isize) {
        // SAFETY: `begin_copy` forbade both, and this is the one call that allows them in this
        // process. The child has its own copy of the locks.
        unsafe {
            allow_allocation();
            self.pager.fork().allow_requests();
        }
        if result == 0 {
            limits::with_descriptors(|| self.begin_child());
        }
        // SAFETY: `begin_copy` took the two locks and began the copy, and this is called once for it
        // in each of the two processes.
        unsafe {
            if result > 0 {
                self.memory.state().peek_mut().level.sharing.note_fork(now_ns(), None);
            }
            self.pager.fork().end_copy(result == 0);
            if result == 0 {
                self.charge_copies(self.memory.state().peek_mut());
            }
            self.memory.unlock_faults();
            self.memory.state().unlock();
        }
        if result > 0 {
            engine::end_rest();
        }
    }

    /// Prepares a child of fork for writes to what it shares. If the run has room for copies of all
    /// of it, the child is charged with them already. Otherwise all of its memory is managed from
    /// now on, and each copy is charged when it is made. The caller is the program's only thread.
    fn charge_copies(&self, state: &mut ProgramState) {
        let is_bounded = self.pager.limits().is_bounded();
        let pays = is_bounded && !state.level.is_prepaid() && !self.memory.paging().hides();
        if pays && !self.memory.is_managing() {
            self.adoption.begin_managing(state);
        }
        match self.pager.fork().charge_copies(pays) {
            Ok(()) if pays => drop(state.level.sharing.begin_paying()),
            Ok(()) => {}
            Err(e) => diagnostics::warn(format_args!(
                "warning: Memory of a child of fork can't be protected ({e}). Its copies of shared memory are noticed late"
            )),
        }
    }

    fn begin_child(&self) {
        member::begin_as_child();
        if self.relations.has_file() {
            // SAFETY: this is the only thread, and nothing was transferred yet.
            unsafe { self.relations.leave_rings() };
            self.pager.fork().set_alone(true);
        }
        // SAFETY: this is the only thread, and it holds the lock.
        let state = unsafe { self.memory.state().peek_mut() };
        state.forget_apart();
        let ranges = state.marked(MemoryMark::DontFork).within(&(0..TOP));
        ranges.iter().for_each(|range| state.forget(range));
        if state.traced > 0 {
            // The traced task is not in this process.
            state.traced = 0;
            state.late.add(0..TOP);
        }
        // SAFETY: this is the only thread, and it holds the locks of the copy.
        unsafe { self.pager.fork().end_in_child(&ranges) };
        // The child's file must be open before anything is read from it. SAFETY: this is the only
        // thread of the child, and `leave_rings` was called above.
        unsafe { self.relations.begin_in_child(self.pager) };
        let knows_pages = self.memory.pagemap().reopen().is_ok();
        // SAFETY: this is the only thread.
        let _ = unsafe { self.memory.maps().reopen() };
        if let Err(e) = self.memory.paging().reopen() {
            self.bring_home(knows_pages);
            self.relations.close_remote();
            abandon();
            return unserved_later(format_args!("in a child of fork: {e}"));
        }
        keep_descriptors(self.memory, self.relations);
        let (start, len) = self.pager.frames_zone();
        let mut outcome = self.memory.paging().register_frames(start, len);
        // SAFETY: this is the only thread, and it holds the locks of the copy.
        unsafe {
            self.pager.fork().begin_in_child(self.memory.pagemap(), |start, end| {
                outcome = outcome.and_then(|()| {
                    self.memory.paging().register_in_child(&(start..end), self.pager.protects())
                });
            });
        }
        if let Err(e) = outcome {
            diagnostics::die(format_args!("Managing a child of fork failed: {e}"));
        }
        self.pager.fork().set_alone(false);
        // SAFETY: the process has just been copied, and this is its only thread.
        unsafe { engine::start_in_child() };
    }

    /// Loads all folded memory in a child in which nothing is registered.
    fn bring_home(&self, knows_pages: bool) {
        let (away_bytes, available) =
            (self.pager.gauges().away_bytes(), process_size::available_bytes());
        if away_bytes > available && available > 0 {
            diagnostics::die(format_args!(
                "A child of fork must load all of its memory: {} are folded, but only {} of memory are free. The process is ended before data is lost",
                Size(away_bytes),
                Size(available)
            ));
        }
        if away_bytes > 0 && !knows_pages && may_be_swapped() {
            diagnostics::die(format_args!(
                "A child of fork has neither a userfaultfd nor its page map, so it can't know which pages the kernel has swapped out. It is ended before data is lost"
            ));
        }
        // SAFETY: this is the only thread, and the caller abandons the engine.
        unsafe {
            self.pager.fork().each_area_in_child(|start, end| {
                if self.memory.paging().hides() {
                    let _ = self.memory.paging().unregister(&(start..end));
                }
                if away_bytes > 0 {
                    // Otherwise the kernel may map zeros around a page that is put, in pages that
                    // are still to be put.
                    huge::forbid(start..end);
                }
            });
            self.pager.fork().each_away(|page, bytes| {
                // A resident page is newer than its stored copy. For a page that the kernel has
                // swapped out, this can't be known.
                let is_there = if knows_pages {
                    self.memory.pagemap().is_populated(page)
                } else {
                    is_resident(page)
                };
                if !is_there {
                    self.put(page, core::slice::from_raw_parts(bytes, PAGE_SIZE));
                }
            });
        }
    }

    fn put(&self, page: usize, bytes: &[u8]) {
        // SAFETY: these are the bytes that the program expects there, and no other thread runs.
        if unsafe { write_bytes(page, bytes) }.is_ok() {
            return;
        }
        let mut access = if touch(page, false).is_ok() { libc::PROT_READ } else { libc::PROT_NONE };
        let _ = self.memory.maps().each(page, page + 1, |mapping| access = mapping.access);
        let protect = |access: i32| {
            // SAFETY: no other thread runs, and the page's access is restored before the program
            // continues.
            unsafe { system_call(libc::SYS_mprotect, [page, PAGE_SIZE, access as usize, 0, 0, 0]) }
        };
        let outcome = protect(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: these are the bytes that the program expects there, and no other thread runs.
        let is_written = outcome.is_ok() && unsafe { write_bytes(page, bytes) }.is_ok();
        if !is_written || protect(access).is_err() {
            diagnostics::die(format_args!(
                "A child of fork can't load its folded memory. It is ended before data is lost"
            ));
        }
    }
}
