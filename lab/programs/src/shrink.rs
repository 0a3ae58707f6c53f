//! Shrinks a failing program: leaves out actions, rounds and pages as long as it still fails (delta
//! debugging). What fails only at times is run several times.
use crate::execute::{Compiled, End, Hang};
use crate::hunt::{Failure, is_right};
use crate::program::{Argument, Program};
use crate::world::{Place, World, more_flags};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Runs of the whole program that tell how often it fails.
const FIRST_RUNS: usize = 20;
/// As many of one that hangs, each of which takes that long.
const HANGING_RUNS: usize = 3;
/// Most runs of a smaller one.
const RUNS_MAX: usize = 40;

/// Shrinks a program in one world.
pub struct Shrinking<'a> {
    /// Where it is run.
    pub place: &'a Place,
    /// The world in which it fails.
    pub world: &'static World,
    /// Programs at once.
    pub jobs: usize,
    /// After this a run hangs.
    pub hang: Hang,
    /// When to end.
    pub until: Instant,
}

impl Shrinking<'_> {
    /// Runs a program until it fails, at most so many times. Returns how it ended then, and how many
    /// of the runs failed.
    fn fails(&self, program: &Program, runs: usize, is_counted: bool) -> Option<(End, usize)> {
        let compiled = Compiled::new(program);
        let plain = compiled.run_plainly(self.place, self.hang);
        if plain.status.and_then(|status| status.code()) != Some(0) {
            return None;
        }
        let (next, failures, is_over) =
            (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
        let last = Mutex::new(None);
        let work = || {
            while next.fetch_add(1, Relaxed) < runs && !is_over.load(Relaxed) {
                if Instant::now() > self.until {
                    return;
                }
                let more = more_flags(program.seed, self.world);
                let (end, _) = compiled.run_in((self.place, self.world), more, self.hang);
                if !is_right(&plain, &end) {
                    failures.fetch_add(1, Relaxed);
                    is_over.store(!is_counted, Relaxed);
                    *last.lock().expect("no run panics") = Some(end);
                }
            }
        };
        std::thread::scope(|scope| (0..self.jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
        last.into_inner().expect("no run panics").map(|end| (end, failures.into_inner()))
    }

    /// Makes the program of a failure smaller, and returns whether it failed again at all.
    pub fn shrink(&self, failure: &mut Failure) -> bool {
        let hangs = failure.end.status.is_none();
        let first_runs = if hangs { HANGING_RUNS } else { FIRST_RUNS };
        let Some((_, count)) = self.fails(&failure.program, first_runs, true) else {
            println!("It did not fail again in {first_runs} runs, or in the time for shrinking.");
            return false;
        };
        // Three times as many as one failure takes in the mean; one, if each run fails.
        let runs = if count == first_runs { 1 } else { (3 * first_runs).div_ceil(count) };
        let runs = runs.min(RUNS_MAX);
        println!(
            "It failed {count} times in {first_runs} runs. Smaller ones are run {runs} times."
        );
        self.leave_out_actions(failure, runs);
        self.lessen(failure, runs);
        true
    }

    /// Takes a candidate if it fails. Returns whether it does.
    fn take(&self, failure: &mut Failure, mut candidate: Program, runs: usize) -> bool {
        candidate.prune();
        if Instant::now() > self.until {
            return false;
        }
        let Some((end, _)) = self.fails(&candidate, runs, false) else { return false };
        println!("{} actions fail: {}", candidate.len(), end.summary());
        failure.program = candidate;
        failure.end = end;
        true
    }

    /// Leaves out ever smaller parts.
    fn leave_out_actions(&self, failure: &mut Failure, runs: usize) {
        let mut part = failure.program.len().div_ceil(2);
        while part > 0 && Instant::now() < self.until {
            let (mut at, mut has_shrunk) = (0, false);
            while at < failure.program.len() {
                let candidate = without(&failure.program, at, part);
                match self.take(failure, candidate, runs) {
                    true => has_shrunk = true,
                    false => at += part,
                }
            }
            part = match part {
                1 if has_shrunk => 1,
                _ => part / 2,
            };
        }
    }

    /// Halves rounds and numbers of pages.
    fn lessen(&self, failure: &mut Failure, runs: usize) {
        for list in 0..failure.program.lists.len() {
            while failure.program.lists[list].rounds > 1 {
                let mut candidate = failure.program.clone();
                candidate.lists[list].rounds /= 2;
                if !self.take(failure, candidate, runs) {
                    break;
                }
            }
        }
        for list in 0..failure.program.lists.len() {
            for action in 0..failure.program.lists[list].actions.len() {
                while let Some(candidate) = halved(&failure.program, list, action) {
                    if !self.take(failure, candidate, runs) {
                        break;
                    }
                }
            }
        }
    }
}

/// Returns the program without `count` actions from the one with number `first` on.
fn without(program: &Program, first: usize, count: usize) -> Program {
    let (mut smaller, mut number) = (program.clone(), 0);
    for list in &mut smaller.lists {
        list.actions.retain(|_| {
            number += 1;
            !(first..first + count).contains(&(number - 1))
        });
    }
    smaller
}

/// Returns the program with half the pages of an action, if it has many.
fn halved(program: &Program, list: usize, action: usize) -> Option<Program> {
    let mut smaller = program.clone();
    let shared_pages = program.shared_pages;
    let arguments = &mut smaller.lists[list].actions.get_mut(action)?.arguments;
    let amount = arguments.iter_mut().find_map(|argument| match argument {
        Argument::Amount(n) if *n > 16 => Some(n),
        _ => None,
    })?;
    *amount = (*amount).min(shared_pages) / 2;
    Some(smaller)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::draw;

    #[test]
    fn smaller_programs_lack_only_what_is_left_out() {
        let program = draw(7);
        for at in 0..program.len() {
            assert_eq!(without(&program, at, 1).len(), program.len() - 1);
        }
        assert_eq!(without(&program, 0, program.len()).len(), 0);
        let mut smaller = without(&program, 1, program.len());
        smaller.prune();
        assert!(smaller.pages() < program.pages());
    }
}
