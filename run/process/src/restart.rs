//! Ends and restarts of the engine's threads.
use crate::adoption::Adoption;
use crate::program::{
    ManagedProgram, ProgramAccount, ProgramMemory, ProgramRelations, ProgramThreads,
};
use crate::{diagnostics, engine};
use core::mem::forget;
use memfold_engine::pager::Pager;
use memfold_gate::child;
use memfold_os::Errno;
use memfold_os::thread::identity::ThreadRights;
use memfold_os::thread::{bare, yield_now};
use memfold_run::member;
use memfold_stats::Stats;

/// Ends the engine's threads and starts them again: for calls that the kernel refuses to a process of
/// several threads, after the program has given up rights, and in a child of fork.
#[derive(Copy, Clone)]
pub struct EngineRestart<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    account: &'a ProgramAccount,
    threads: &'a ProgramThreads,
    relations: &'a ProgramRelations,
    adoption: Adoption<'a>,
}

impl EngineRestart<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> EngineRestart<'_> {
        EngineRestart {
            pager: program.pager(),
            memory: program.memory(),
            account: program.account(),
            threads: program.threads(),
            relations: program.relations(),
            adoption: Adoption::of(program),
        }
    }

    /// Makes a call that the kernel refuses to a process of several threads (EINVAL, EUSERS). The
    /// caller must be the program's only thread. The engine's threads end meanwhile. They don't if
    /// the engine has a connection to a remote store, which would end with them.
    pub fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        let result = make();
        let wants_one = [libc::EINVAL, libc::EUSERS].map(|e| -(e as isize)).contains(&result);
        if !wants_one || self.relations.has_remote() || child().is_some() {
            return result;
        }
        // Once its children are to be in another namespace than itself, the process can't start
        // threads again.
        if !bare::may_be_started() {
            return result;
        }
        // The guard is forgotten, because the restarted thread assumes that the thread that starts
        // it holds the lock.
        forget(self.memory.state().lock());
        self.threads.stop(self.memory.paging());
        engine::stop();
        // SAFETY: only engine threads use the rings, and they have ended.
        unsafe { self.relations.leave_rings() };
        self.threads.resume();
        let result = make();
        // SAFETY: `engine::stop` has returned, so all engine threads have ended.
        if let Err(e) = unsafe { engine::start_again() } {
            diagnostics::die(format_args!("Starting the engine again failed: {e}"));
        }
        // SAFETY: this function has locked it and forgotten the guard, and unlocks it once.
        unsafe { self.memory.state().unlock() };
        result
    }

    /// Ends the engine for good. All memory is in memory for good, by
    /// [`Adoption::keep_home`]. The run counts the process as one without an engine from now
    /// on.
    pub fn retire(&self) {
        // While this thread holds the lock, the first engine thread starts no others.
        let _state = self.memory.state().lock();
        self.pager.gauges().publish();
        self.account.publish_totals();
        self.threads.stop(self.memory.paging());
        engine::end();
        // SAFETY: only engine threads use the rings, and they have ended.
        unsafe { self.relations.leave_rings() };
    }

    /// Makes the engine's threads give up rights that the calling thread has given up for good: all
    /// except the first are started again. If the user has changed, the process changes to the
    /// table of its new user.
    ///
    /// # Errors
    /// - EAGAIN: no more threads can be started.
    /// - The errors of [`member::change_user`].
    pub fn give_up_rights(&self, rights: &ThreadRights) -> Result<(), Errno> {
        let _state = self.memory.state().lock();
        // Another thread may have done this already.
        if !member::has_given_up() {
            return Ok(());
        }
        self.threads.stop(self.memory.paging());
        let mut outcome = Ok(());
        engine::have_done(|| {
            bare::await_others_end(
                |_| true,
                || {
                    self.pager.serve_waiting();
                    yield_now();
                },
            );
            self.threads.resume();
            // SAFETY: the first engine thread runs this, and the others have ended.
            outcome = unsafe { bare::restart_others_with(rights) }
                .and_then(|()| member::change_user())
                .map(|is_changed| {
                    if is_changed {
                        self.pager.fork().count_in(member::claim());
                    }
                });
        });
        outcome
    }

    /// Runs the part of the first engine thread after [`EngineRestart::alone`].
    pub fn go_on(&self, stats: &'static Stats) {
        self.account.reopen();
        self.pager.fork().count_in(stats);
        self.relations.make_rings();
        // SAFETY: the caller is the first engine thread, which was started again, and the others
        // have ended.
        if let Err(e) = unsafe { bare::restart_others() } {
            diagnostics::die(format_args!("Starting engine threads again failed: {e}"));
        }
    }

    /// Runs the part of the first engine thread in a child of fork.
    pub fn begin_as_child(&self, stats: &'static Stats) {
        // SAFETY: the thread that forked holds the lock and waits for this thread, so no other
        // thread uses the state.
        let state = unsafe { self.memory.state().peek_mut() };
        self.account.begin_as_child(&mut state.level);
        self.pager.fork().begin_as_child(stats);
        // SAFETY: the thread that forked calls `end_copy` only after it has waited for this thread.
        unsafe { self.pager.fork().connect_remote() };
        member::set_need(state.level.anonymous - state.level.counted_in_others());
        // SAFETY: the caller is the first engine thread of a child of fork, where no other engine
        // thread runs. Only this thread calls this.
        if let Err(e) = unsafe { bare::restart_others() } {
            diagnostics::die(format_args!(
                "Starting engine threads in a child of fork failed: {e}"
            ));
        }
        // A process that can't see its size would not notice later how much has been mapped, so
        // adoption begins now.
        if self.account.is_blind() && !self.memory.is_managing() {
            self.threads.start(state, self.memory.paging(), false);
            self.adoption.adopt_all(state);
        }
    }
}
