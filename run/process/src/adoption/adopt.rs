//! Adoption: which memory comes under management, and when. It begins when the program's size nears
//! its bounds.
use crate::marks::state::{FLAGS, MemoryMark, ProgramState};
use crate::program::ManagedProgram;
use crate::size::pace::LookPause;
use crate::size::process_size;
use crate::size::share::SizeLook;
use crate::threads::START_SHARE;
use crate::{diagnostics, engine};
use alloc::vec;
use alloc::vec::Vec;
use core::mem::forget;
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use memfold_engine::known::TOP;
use memfold_gate::{all_are_gone, child, first_has_exited};
use memfold_os::Errno;
use memfold_os::maps::flag;
use memfold_os::memory::zone::{overlaps_own, unless_own};
use memfold_os::raw::{populates, system_call};
use memfold_os::thread::identity::ThreadRights;
use memfold_os::thread::{bare, now_ns, process_cpu_ns, yield_now};
use memfold_os::units::PAGE_SIZE;
use memfold_run::member;
use memfold_run::table::News;
use memfold_stats::{self as stats, Stats};

/// Time between looks at the program's size, nanoseconds.
const LOOK_NS: u64 = 5_000_000;
/// Time between looks while the program grows and is near its bounds, nanoseconds.
const LOOK_SOON_NS: u64 = 1_000_000;
/// Time between looks while the program is past its bounds, nanoseconds.
const LOOK_PAST_NS: u64 = 250_000;
/// Time between looks at an idle process, whose memory grows only by faults of the engine,
/// nanoseconds.
const LOOK_IDLE_NS: u64 = 50_000_000;
/// Time between looks without a limit, nanoseconds.
const LOOK_UNBOUNDED_NS: u64 = 100_000_000;
/// Smaller areas are left unmanaged unless they continue a managed one.
const SMALL_BYTES: usize = 64 << 10;
/// A mapping of this size or more is reported to the other processes of the run at once.
const LARGE_BYTES: usize = 1 << 20;
/// Small ranges that wait for adoption are taken once they have this many bytes.
const LATE_BYTES: usize = 1 << 20;

impl ManagedProgram {
    /// Looks at the program's size if the program has run since the last look, or after news, or if
    /// something is due. Near the limit, takes the program's memory under management. Returns the
    /// time until the next look. `is_rung` is whether a thread of this process has asked for a look.
    pub fn look(&self, is_rung: bool) -> LookPause {
        self.end_with_program();
        let Some(mut state) = self.memory().state().try_lock() else {
            return LookPause { ns: LOOK_SOON_NS, ends_with_work: false };
        };
        member::free_requests();
        let state = &mut *state;
        let now = (now_ns(), process_cpu_ns().saturating_sub(bare::cpu_ns()));
        let news = member::take_news();
        if news.has(News::SHARING) {
            state.level.sharing.note_news(now.0);
        }
        let has_news = is_rung || news != News::default();
        if !has_news && !state.level.pace.is_due(now.0, now.1) {
            return self.while_it_may(state.level.pace.rest(now.0));
        }
        stats::add(&self.pager().stats().looks, 1);
        let wanted_ns = self.look_at(state, now.1);
        let weighed = self
            .account()
            .is_weighed(&state.level, self.memory().is_managing())
            .then(|| self.pager().gauges().idle_due_ns())
            .flatten();
        let due_ns = [state.level.sharing.due_ns(), weighed].into_iter().flatten().min();
        self.while_it_may(state.level.pace.note(now, wanted_ns, due_ns, has_news))
    }

    /// Cuts a rest short while a filter may kill the program's last thread, which is no event. The
    /// filter may also kill a thread that sets a timer.
    fn while_it_may(&self, pause: LookPause) -> LookPause {
        match self.threads().is_filtered() {
            true => LookPause { ns: pause.ns.min(LOOK_IDLE_NS), ends_with_work: false },
            false => pause,
        }
    }

    /// Makes one look, at which the program's threads have run for `worked_ns`. Returns the time
    /// until the next one while the program works, nanoseconds.
    fn look_at(&self, state: &mut ProgramState, worked_ns: u64) -> u64 {
        let is_managing = self.memory().is_managing();
        let seen = self.account().look(&mut state.level, worked_ns, is_managing);
        let Some(seen) = seen else { return LOOK_NS };
        state.mapped_since = 0;
        if state.traced > 0 {
            return LOOK_NS;
        }
        let SizeLook { before, unmanaged, slower } = seen;
        let anonymous = state.level.anonymous;
        let max = self.pager().limits().bound_bytes();
        let is_past = self.pager().gauges().excess_bytes() > 0;
        let next = next_look_ns((before, anonymous), max, is_past, slower);
        self.pager().gauges().note_cost();
        self.account().weigh_slowdown(state, unmanaged, is_managing);
        let begin = if state.is_due { 0 } else { self.account().managed_from_bytes() };
        if !state.has_threads() && anonymous >= begin / START_SHARE {
            self.threads().start(state, self.memory().paging(), anonymous > max);
        }
        let begins = state.is_due
            || !self.memory().is_managing() && (anonymous >= begin || self.may_pass(state, 0));
        if begins && state.has_threads() {
            state.is_due = false;
            self.adopt_all(state);
        } else if self.memory().is_managing() {
            self.pager().gauges().judge_cost();
            if unmanaged > max {
                self.pager().gauges().past_the_limit();
            }
            self.account().judge_limit(state);
        }
        self.adopt_stacks(state);
        self.adopt_late(state);
        match self.account().is_unbounded() {
            true => LOOK_UNBOUNDED_NS,
            false if self.pager().gauges().is_idle() && !is_past => LOOK_IDLE_NS.max(next),
            false => next,
        }
    }

    /// Ends the process if the program's last thread has ended without a call that the gate saw.
    fn end_with_program(&self) {
        if !self.threads().is_filtered() {
            return;
        }
        if all_are_gone() {
            process_size::end_by(libc::SIGSYS as usize);
        }
        process_size::end_with_program(first_has_exited());
    }

    /// Prepares for a call that maps `bytes` more. If the program could exceed the limit before the
    /// next look at its size, takes its present memory under management now. The new memory is
    /// taken with the call.
    pub fn expect(&self, state: &mut ProgramState, bytes: usize) {
        engine::end_rest();
        state.mapped_since = state.mapped_since.saturating_add(bytes);
        let most = state.level.anonymous.saturating_add(state.mapped_since as u64);
        if self.memory().is_managing() {
            return;
        }
        let is_large = bytes >= LARGE_BYTES;
        let has_room = most <= self.pager().limits().bound_bytes();
        if has_room && (!is_large || self.account().has_room(&mut state.level, most)) {
            return;
        }
        self.begin_managing(state);
    }

    /// Prepares for a call that makes `bytes` more writable, as [`ManagedProgram::expect`] does.
    /// None of them may be writable already.
    pub fn expect_new(&self, state: &mut ProgramState, bytes: usize) {
        self.expect(state, bytes);
        if self.may_pass(state, bytes as u64) {
            self.begin_managing(state);
        }
    }

    /// Takes all memory under management now.
    pub fn begin_managing(&self, state: &mut ProgramState) {
        state.mapped_since = 0;
        engine::have_done(|| {
            self.threads().start(state, self.memory().paging(), true);
            if state.has_threads() {
                self.adopt_all(state);
            }
        });
    }

    /// Takes all suitable memory under management, in one step. No mapping changes meanwhile.
    fn adopt_all(&self, state: &mut ProgramState) {
        let (mut all, mut mergeable): (Vec<Range<usize>>, Vec<Range<usize>>) = Default::default();
        let dump = if self.account().folds_dont_dump() { Some(MemoryMark::DontDump) } else { None };
        let done = self.account().each_mapping(|area, about| {
            let range = area.start..area.end;
            if !area.is_private_anonymous() || area.end > TOP || overlaps_own(area.start, area.end)
            {
                return Continue(());
            }
            self.memory().known().set(&range);
            for (flags, mark) in FLAGS {
                if about.has(flags) && Some(mark) != dump && !state.is_undone(flags, &range) {
                    state.marked(mark).add(range.clone());
                }
            }
            let suits = self.memory().suits(area.access()) && !area.is_stack();
            if suits && about.has(flag::MERGEABLE) && !state.merges {
                mergeable.push(range.clone());
            }
            match all.last_mut() {
                _ if !suits => {}
                Some(last) if last.end == range.start => last.end = range.end,
                _ => all.push(range),
            }
            Continue(())
        });
        if done.is_err() && !self.account().is_blind() {
            return;
        }
        if done.is_err() {
            diagnostics::warn(format_args!(
                "warning: A child of fork has no /proc, so memory that it inherited stays uncompressed"
            ));
        }
        mergeable.iter().for_each(end_merging);
        // Set before the first range is registered. A thread that makes a call from now on touches
        // the buffers of the call. Buffers of earlier calls are found by their holds.
        self.memory().set_managing(true);
        self.take_parts(state, all);
    }

    /// Takes a range as [`ManagedProgram::adopt`] does. A small range waits until enough have come
    /// together, or until the next look. libc's heap and arenas grow in small ranges. If each were
    /// taken at once, it would be filled by faults of its own, and would end the folios before and
    /// after it.
    pub fn adopt_later(&self, state: &mut ProgramState, range: &Range<usize>) {
        if self.memory().is_managing() {
            state.late.add(range.clone());
            if state.late.bytes() >= LATE_BYTES {
                self.adopt_late(state);
            }
        }
    }

    fn adopt_late(&self, state: &mut ProgramState) {
        for range in state.late.take() {
            self.adopt(state, &range);
        }
    }

    /// Takes the memory that was mapped as a stack and that no thread uses as one: no mapping of it
    /// holds what the gate has reported for a thread. A thread's stack stays unmanaged, so that its
    /// mapping isn't split.
    fn adopt_stacks(&self, state: &mut ProgramState) {
        if !self.memory().is_managing() {
            return;
        }
        for range in state.marked(MemoryMark::Stack).take() {
            let mut parts = Vec::new();
            let _ = self.memory().maps().each(range.start, range.end, |found| {
                parts.push(found.start.max(range.start)..found.end.min(range.end));
            });
            for part in parts {
                let own = state.marked(MemoryMark::Own);
                match own.within(&part).is_empty() {
                    true => self.adopt(state, &part),
                    false => own.add(part),
                }
            }
        }
    }

    /// Takes the suitable mappings in a range that are not managed yet, each as a whole. Small ranges that continue no managed one are taken once they have
    /// [`LATE_BYTES`] together.
    pub fn adopt(&self, state: &mut ProgramState, range: &Range<usize>) {
        if !self.memory().is_managing() || !state.takes() {
            return;
        }
        let all = self.memory().suitable(range);
        self.take_parts(state, all);
    }

    /// Makes a call that the kernel refuses to a process of several threads (EINVAL, EUSERS). The
    /// caller must be the program's only thread. The engine's threads end meanwhile. They don't if
    /// the engine has a connection to a remote store, which would end with them.
    pub fn alone(&self, make: &mut dyn FnMut() -> isize) -> isize {
        let refused = make();
        let wants_one = [libc::EINVAL, libc::EUSERS].map(|e| -(e as isize)).contains(&refused);
        if !wants_one || self.relations().has_remote() || child().is_some() {
            return refused;
        }
        // Once its children are to be in another namespace than itself, the process can't start
        // threads again.
        if !bare::may_be_started() {
            return refused;
        }
        // The guard is forgotten, because the restarted thread assumes that the thread that starts
        // it holds the lock.
        forget(self.memory().state().lock());
        self.threads().stop(self.memory().paging());
        engine::stop();
        // SAFETY: only engine threads use the rings, and they have ended.
        unsafe { self.relations().leave_rings() };
        self.threads().resume();
        let made = make();
        // SAFETY: `engine::stop` has returned, so all engine threads have ended.
        if let Err(e) = unsafe { engine::start_again() } {
            diagnostics::die(format_args!("Starting the engine again failed: {e}"));
        }
        // SAFETY: this function has locked it and forgotten the guard, and unlocks it once.
        unsafe { self.memory().state().unlock() };
        made
    }

    /// Ends the engine for good. All memory is in memory for good, by
    /// [`ManagedProgram::keep_home`]. The run counts the process as one without an engine from now
    /// on.
    pub fn retire(&self) {
        // While this thread holds the lock, the first engine thread starts no others.
        let _state = self.memory().state().lock();
        self.pager().gauges().publish();
        self.account().publish_totals();
        self.threads().stop(self.memory().paging());
        engine::end();
        // SAFETY: only engine threads use the rings, and they have ended.
        unsafe { self.relations().leave_rings() };
    }

    /// Makes the engine's threads give up rights that the calling thread has given up for good: all
    /// except the first are started again. If the user has changed, the process changes to the
    /// table of its new user.
    ///
    /// # Errors
    /// - EAGAIN: no more threads can be started.
    /// - The errors of [`member::change_user`].
    pub fn give_up_rights(&self, rights: &ThreadRights) -> Result<(), Errno> {
        let _state = self.memory().state().lock();
        // Another thread may have done this already.
        if !member::has_given_up() {
            return Ok(());
        }
        self.threads().stop(self.memory().paging());
        let mut done = Ok(());
        engine::have_done(|| {
            bare::await_others_end(
                |_| true,
                || {
                    self.pager().serve_waiting();
                    yield_now();
                },
            );
            self.threads().resume();
            // SAFETY: the first engine thread runs this, and the others have ended.
            done = unsafe { bare::restart_others_with(rights) }
                .and_then(|()| member::change_user())
                .map(|changed| {
                    if changed {
                        self.pager().fork().count_in(member::claim());
                    }
                });
        });
        done
    }

    /// Runs the part of the first engine thread after [`ManagedProgram::alone`].
    pub fn go_on(&self, stats: &'static Stats) {
        self.account().reopen();
        self.pager().fork().count_in(stats);
        self.relations().make_rings();
        // SAFETY: the caller is the first engine thread, which was started again, and the others
        // have ended.
        if let Err(e) = unsafe { bare::restart_others() } {
            diagnostics::die(format_args!("Starting engine threads again failed: {e}"));
        }
    }

    /// Loads everything into memory and keeps it there, for a task that is about to be traced; or
    /// ends that. Returns `false` if the machine has too little free memory.
    pub fn keep_home(&self, keep: bool) -> bool {
        let mut state = self.memory().state().lock();
        if keep {
            let available = process_size::available_bytes();
            if available > 0 && self.pager().gauges().away_bytes() > available {
                return false;
            }
            state.traced += 1;
            self.memory().leave_with_guards(&mut state, &(0..TOP));
        } else {
            state.traced -= 1;
            self.adopt(&mut state, &(0..TOP));
        }
        true
    }

    /// Ends the apart call of a child of vfork that is gone, if one was in progress: the child may
    /// have been killed in it. `child` is its number.
    pub fn end_child(&self, child: usize) {
        if !self.memory().had_apart() {
            return;
        }
        let state = &mut *self.memory().state().lock();
        if let Some(apart) = state.apart_of(child) {
            // It is unknown whether the call was made, so the present mappings are adopted.
            let parts = state.end_apart(apart).parts;
            parts.iter().for_each(|part| self.adopt(state, part));
        }
    }

    fn take_parts(&self, state: &mut ProgramState, all: Vec<Range<usize>>) {
        if state.traced > 0 {
            return;
        }
        for range in self.unmanaged_of(state, all) {
            match self.is_worth(&range) {
                true => self.take_range(range),
                false => state.small.add(range),
            }
        }
        if state.small.bytes() >= LATE_BYTES {
            for range in state.small.take() {
                let all = self.memory().suitable(&range);
                self.unmanaged_of(state, all).into_iter().for_each(|part| self.take_range(part));
            }
        }
    }

    /// Returns the parts of `all` that may be managed and aren't yet.
    fn unmanaged_of(&self, state: &ProgramState, all: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let unmanaged =
            |range: &Range<usize>| self.pager().mappings().unmanaged_parts(range.start, range.end);
        let parts = state.unmarked(all);
        parts.iter().flat_map(unmanaged).map(|(start, end)| start..end).collect()
    }

    /// Takes a range under management. Memory that the kernel refuses to register stays unmanaged.
    fn take_range(&self, range: Range<usize>) {
        self.memory().known().set(&range);
        let mut is_registered = false;
        let register = |is_held: bool| {
            let done =
                unless_own(range.start, range.end, || self.memory().register(&range, is_held));
            is_registered = done.is_ok();
            done
        };
        let taken =
            self.pager().mappings().take(range.clone(), self.memory().pagemap(), bring, register);
        if taken.is_err() && is_registered {
            self.memory().note_registered();
        }
    }

    /// Returns whether a range is large enough to be managed, or continues a managed range.
    pub fn is_worth(&self, range: &Range<usize>) -> bool {
        range.len() >= SMALL_BYTES
            || self.pager().mappings().manages(range.start - 1)
            || self.pager().mappings().manages(range.end)
    }

    /// Takes memory that the program has just mapped, readable and writable. Without a limit it is
    /// taken only when memory begins to sink, because memory that is soon unmapped is then never
    /// filled by faults of the engine.
    pub fn take_new(&self, state: &mut ProgramState, range: &Range<usize>) {
        if self.memory().is_managing()
            && state.takes()
            && range.end <= TOP
            && !self.account().is_unbounded()
        {
            self.take_parts(state, vec![range.clone()]);
        }
    }

    /// Runs the part of the first engine thread in a child of fork.
    pub fn begin_as_child(&self, stats: &'static Stats) {
        // SAFETY: the thread that forked holds the lock and waits for this thread, so no other
        // thread uses the state.
        let state = unsafe { self.memory().state().peek_mut() };
        self.account().begin_as_child(&mut state.level);
        self.pager().fork().begin_as_child(stats);
        // SAFETY: the thread that forked calls `end_copy` only after it has waited for this thread.
        unsafe { self.pager().fork().connect_remote() };
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
        if self.account().is_blind() && !self.memory().is_managing() {
            self.threads().start(state, self.memory().paging(), false);
            self.adopt_all(state);
        }
    }
}

/// Returns the time until the next look at the program's size, nanoseconds. The size was `before`
/// bytes and is `now`; the program may have `max`. `slower` is the factor by which looks become
/// rarer.
fn next_look_ns((before, now): (u64, u64), max: u64, is_past: bool, slower: u64) -> u64 {
    match now > max / 2 && now > before {
        _ if is_past => LOOK_PAST_NS * slower,
        true => LOOK_SOON_NS,
        false => LOOK_NS * slower,
    }
}

/// Makes the kernel merge no page of a range, and separate those that it has merged: merged pages
/// can't be moved. The advice before was given when there was no engine.
fn end_merging(range: &Range<usize>) {
    let args = [range.start, range.len(), libc::MADV_UNMERGEABLE as usize, 0, 0, 0];
    // SAFETY: the advice changes no byte.
    let _ = unsafe { system_call(libc::SYS_madvise, args) };
}

/// Makes the pages of a range present that a call in progress is about to use. Unmapped pages are
/// left as they are. Pages that aren't writable are made present for reading.
fn bring(range: Range<usize>) {
    for page in range.step_by(PAGE_SIZE) {
        let _ = populates(page, true) || populates(page, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{Calls, Room, each_paging, each_paging_alone, numbers};
    use crate::program::PLAIN;

    const RESERVED: i32 = libc::MAP_NORESERVE;

    #[test]
    fn program_that_grows_towards_its_bound_is_looked_at_sooner() {
        let next = |before, now| next_look_ns((before, now), 1000, false, 3);
        assert_eq!(next(100, 200), 3 * LOOK_NS, "far from it");
        assert_eq!(next(600, 700), LOOK_SOON_NS);
        assert_eq!(next(700, 700), 3 * LOOK_NS, "it does not grow");
        assert_eq!(next_look_ns((700, 700), 1000, true, 2), 2 * LOOK_PAST_NS);
    }

    /// Maps memory that is not managed, as if the call had bypassed the gate.
    fn unmanaged(calls: Calls, range: &Range<usize>) {
        calls.map(range);
        calls.0.memory().leave(range);
    }

    #[test]
    fn memory_is_taken_as_it_is() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            let all = room.pages(0..64);
            unmanaged(calls, &all);
            calls.with_state(|state| program.adopt(state, &all));
            assert_eq!(calls.managed(&all), [all.clone()]);
            calls.fold(&all);
            assert_eq!(calls.read(&all), numbers(0..64));
        });
    }

    #[test]
    fn small_memory_is_taken_where_it_continues_what_is_managed() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(96));
            let (all, small) = (room.pages(0..64), room.pages(64..66));
            assert_eq!(calls.map_with(&small, PLAIN, RESERVED), small.start as isize);
            calls.with_state(|state| program.adopt(state, &small));
            assert!(calls.managed(&small).is_empty());
            calls.map_with(&all, PLAIN, RESERVED);
            calls.with_state(|state| program.adopt(state, &room.pages(0..66)));
            assert_eq!(calls.managed(&room.pages(0..96)), [room.pages(0..66)]);
        });
    }

    #[test]
    fn marked_memory_is_passed_over() {
        each_paging(|program| {
            let (calls, room) = (Calls(program), Room::new(96));
            let all = room.pages(0..96);
            unmanaged(calls, &all);
            calls.with_state(|state| {
                state.marked(MemoryMark::Own).add(room.pages(32..40));
                state.marked(MemoryMark::DontFork).add(room.pages(40..48));
                program.adopt(state, &all);
            });
            assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(40..96)]);
        });
    }

    #[test]
    fn memory_of_other_access_is_not_taken() {
        each_paging(|program| {
            let rwx = program.memory().suits(PLAIN | libc::PROT_EXEC);
            assert_eq!(rwx, !program.memory().paging().hides());
            assert!(program.memory().suits(PLAIN) && !program.memory().suits(libc::PROT_READ));
            let (calls, room) = (Calls(program), Room::new(96));
            let all = room.pages(0..96);
            unmanaged(calls, &all);
            calls.map_with(&room.pages(32..64), libc::PROT_READ, 0);
            calls.with_state(|state| program.adopt(state, &all));
            assert_eq!(calls.managed(&all), [room.pages(0..32), room.pages(64..96)]);
        });
    }

    #[test]
    fn small_growth_is_taken_together() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(512));
            unmanaged(calls, &room.pages(0..512));
            let managed = || calls.managed(&room.pages(0..512));
            let later = |pages| {
                calls.with_state(|state| program.adopt_later(state, &room.pages(pages)));
            };
            later(0..100);
            later(100..255);
            assert_eq!(managed(), []);
            later(255..256);
            assert_eq!(managed(), [room.pages(0..512)], "1 MiB, as far as the mapping reaches");
            assert_eq!(calls.with_state(|state| state.late.bytes()), 0);
        });
    }

    #[test]
    fn many_small_areas_are_taken_together() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(9 * 32));
            let area = |n: usize| room.pages(n * 9..n * 9 + 8);
            for n in 0..32 {
                assert!(calls.managed(&room.pages(0..9 * 32)).is_empty(), "{n} areas");
                calls.map_with(&area(n), PLAIN, 0);
            }
            for n in 0..32 {
                assert_eq!(calls.managed(&area(n)), [area(n)], "1 MiB in all");
            }
            assert_eq!(calls.with_state(|state| state.small.bytes()), 0);
        });
    }

    #[test]
    fn small_areas_that_ended_do_not_count() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            calls.map_with(&room.pages(0..8), PLAIN, 0);
            assert_eq!(calls.with_state(|state| state.small.bytes()), 8 * PAGE_SIZE);
            calls.unmap(&room.pages(0..8));
            assert_eq!(calls.with_state(|state| state.small.bytes()), 0);
        });
    }

    #[test]
    fn memory_mapped_as_a_stack_is_taken_if_no_thread_uses_it() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(160));
            let (used, unused) = (room.pages(0..64), room.pages(80..144));
            for stack in [&used, &unused] {
                assert_eq!(calls.map_with(stack, PLAIN, libc::MAP_STACK), stack.start as isize);
            }
            calls.with_state(|state| {
                state.marked(MemoryMark::Own).add(room.pages(60..61));
                program.adopt_stacks(state);
                program.adopt(state, &room.pages(0..160));
                assert_eq!(state.marked(MemoryMark::Own).within(&used), [used.clone()]);
            });
            assert_eq!(calls.managed(&room.pages(0..160)), [unused]);
        });
    }

    #[test]
    fn nothing_is_taken_while_a_task_is_traced() {
        each_paging_alone(|program| {
            let (calls, room) = (Calls(program), Room::new(64));
            let all = room.pages(0..64);
            calls.map(&all);
            calls.fold(&all);
            assert!(program.keep_home(true));
            assert!(calls.managed(&all).is_empty());
            let is_home = |page| program.memory().pagemap().is_populated(page);
            assert!(all.clone().step_by(PAGE_SIZE).all(is_home));
            calls.with_state(|state| program.adopt(state, &all));
            assert!(calls.managed(&all).is_empty());
        });
    }
}
