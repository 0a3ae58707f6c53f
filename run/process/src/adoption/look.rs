//! Looks at the program's size. When it nears its bounds, adoption begins.
use crate::adoption::Adoption;
use crate::marks::state::ProgramState;
use crate::program::{ManagedProgram, ProgramAccount, ProgramMemory, ProgramThreads};
use crate::size::pace::LookPause;
use crate::size::process_size;
use crate::size::share::SizeLook;
use crate::threads::START_SHARE;
use memfold_engine::pager::Pager;
use memfold_gate::{all_are_gone, first_has_exited};
use memfold_os::thread::{bare, now_ns, process_cpu_ns};
use memfold_run::member;
use memfold_run::table::News;
use memfold_stats as stats;

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

/// The looks of the first engine thread at the program's size.
#[derive(Copy, Clone)]
pub struct SizeLooks<'a> {
    pager: &'a Pager,
    memory: &'a ProgramMemory,
    account: &'a ProgramAccount,
    threads: &'a ProgramThreads,
    adoption: Adoption<'a>,
}

impl SizeLooks<'_> {
    /// Returns the walk over the parts of `program`.
    pub fn of(program: &ManagedProgram) -> SizeLooks<'_> {
        SizeLooks {
            pager: program.pager(),
            memory: program.memory(),
            account: program.account(),
            threads: program.threads(),
            adoption: Adoption::of(program),
        }
    }

    /// Looks at the program's size if the program has run since the last look, or after news, or if
    /// something is due. Near the limit, takes the program's memory under management. Returns the
    /// time until the next look. `is_rung` is whether a thread of this process has asked for a look.
    pub fn look(&self, is_rung: bool) -> LookPause {
        self.end_with_program();
        let Some(mut state) = self.memory.state().try_lock() else {
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
        stats::add(&self.pager.stats().looks, 1);
        let wanted_ns = self.look_at(state, now.1);
        let weigh_time = self
            .account
            .is_weighed(&state.level, self.memory.is_managing())
            .then(|| self.pager.gauges().idle_due_ns())
            .flatten();
        // A look that found it too early to judge leaves it to a later one.
        let report_time = state.limit_report.due_ns().filter(|at_ns| *at_ns > now.0);
        let due_ns =
            [state.level.sharing.due_ns(), weigh_time, report_time].into_iter().flatten().min();
        self.while_it_may(state.level.pace.note(now, wanted_ns, due_ns, has_news))
    }

    /// Cuts a rest short while a filter may kill the program's last thread, which is no event. The
    /// filter may also kill a thread that sets a timer.
    fn while_it_may(&self, pause: LookPause) -> LookPause {
        match self.threads.is_filtered() {
            true => LookPause { ns: pause.ns.min(LOOK_IDLE_NS), ends_with_work: false },
            false => pause,
        }
    }

    /// Makes one look, at which the program's threads have run for `worked_ns`. Returns the time
    /// until the next one while the program works, nanoseconds.
    fn look_at(&self, state: &mut ProgramState, worked_ns: u64) -> u64 {
        let is_managing = self.memory.is_managing();
        let look = self.account.look(&mut state.level, worked_ns, is_managing);
        let Some(look) = look else { return LOOK_NS };
        state.mapped_since = 0;
        if state.traced > 0 {
            return LOOK_NS;
        }
        let SizeLook { before, unmanaged: unmanaged_bytes, slower } = look;
        let anonymous = state.level.anonymous;
        let max = self.pager.limits().bound_bytes();
        let is_past = self.pager.gauges().excess_bytes() > 0;
        let next = next_look_ns((before, anonymous), max, is_past, slower);
        self.pager.gauges().note_cost();
        self.account.weigh_slowdown(state, unmanaged_bytes, is_managing);
        let begin = if state.is_due { 0 } else { self.account.managed_from_bytes() };
        if !state.threads.is_complete() && anonymous >= begin / START_SHARE {
            self.threads.start(state, self.memory.paging(), anonymous > max);
        }
        let begins = state.is_due
            || !self.memory.is_managing()
                && (anonymous >= begin || self.adoption.may_pass(state, 0));
        if begins && state.threads.is_complete() {
            state.is_due = false;
            self.adoption.adopt_all(state);
        } else if self.memory.is_managing() {
            self.pager.gauges().judge_cost();
            if unmanaged_bytes > max {
                self.pager.gauges().past_the_limit();
            }
            self.account.judge_limit(state);
        }
        self.adoption.adopt_stacks(state);
        self.adoption.adopt_late(state);
        match self.account.is_unbounded() {
            true => LOOK_UNBOUNDED_NS,
            false if self.pager.gauges().is_idle() && !is_past => LOOK_IDLE_NS.max(next),
            false => next,
        }
    }

    /// Ends the process if the program's last thread has ended without a call that the gate saw.
    fn end_with_program(&self) {
        if !self.threads.is_filtered() {
            return;
        }
        if all_are_gone() {
            process_size::end_by(libc::SIGSYS as usize);
        }
        process_size::end_with_program(first_has_exited());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_grows_towards_its_bound_is_looked_at_sooner() {
        let next = |before, now| next_look_ns((before, now), 1000, false, 3);
        assert_eq!(next(100, 200), 3 * LOOK_NS, "far from it");
        assert_eq!(next(600, 700), LOOK_SOON_NS);
        assert_eq!(next(700, 700), 3 * LOOK_NS, "it does not grow");
        assert_eq!(next_look_ns((700, 700), 1000, true, 2), 2 * LOOK_PAST_NS);
    }
}
