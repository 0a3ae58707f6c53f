//! How several threads that fault at once are best served: found out by trying.
//!
//! There are two ways. *Apart*: each handler serves on its own CPU, so several faults are served at
//! the same time. But each eviction interrupts the other CPUs (10 us on a virtual machine), and so
//! does each wake of a thread on another CPU. *Together*: all threads and one handler share a CPU.
//! Nothing is interrupted, and only one of them runs.
//!
//! Which is faster depends on the program. Threads that wait for each other's locks anyway
//! (memcached) are 1.5 times as fast together; threads that don't (MariaDB) are half as fast. So a
//! contest tries both ways for a moment and keeps the faster one until the next contest.
//!
//! A contest that *together* loses costs 640 faults served in the slower way, so each such contest
//! makes the pause before the next one longer. Where *together* has won, contests go on at the
//! shortest pause: a program changes, and with many CPUs a wrong *together* loses more than a right
//! one gains.

/// Rounds of faults in a try, of which the first are not timed: threads are on their way then.
const TRY_ROUNDS: u32 = 10;
const UNTIMED_ROUNDS: u32 = 2;
/// Rounds to the first contest, and from one to the next: twice as many each time that apart is
/// best again, up to the most.
const FIRST_PAUSE: u32 = 16;
const PAUSE_MIN: u32 = 1 << 8;
const PAUSE_MAX: u32 = 1 << 12;

/// How several threads are served.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// By all handlers, each on its CPU.
    Apart,
    /// By one, on whose CPU the threads are kept.
    Together,
}

/// The ways of the tries, in turn: each pair must have the same outcome.
const TRIES: [Way; 4] = [Way::Apart, Way::Together, Way::Apart, Way::Together];

/// See the module.
pub(crate) struct Contest {
    /// What the last one has shown.
    best: Way,
    /// The try that is under way, or as many as there are if none is.
    attempt: usize,
    /// Rounds of this try, or until the next contest.
    rounds: u32,
    pause: u32,
    begin_ns: u64,
    times_ns: [u64; TRIES.len()],
}

impl Contest {
    /// None yet; until then, apart.
    pub const fn new() -> Contest {
        Contest {
            best: Way::Apart,
            attempt: TRIES.len(),
            rounds: FIRST_PAUSE,
            pause: PAUSE_MIN,
            begin_ns: 0,
            times_ns: [0; TRIES.len()],
        }
    }

    /// A round of faults of several threads has ended. The way in which the next is to be served.
    pub fn end_round(&mut self, now_ns: u64) -> Way {
        if self.attempt == TRIES.len() {
            self.rounds -= 1;
            if self.rounds > 0 {
                return self.best;
            }
            self.attempt = 0;
            return TRIES[0];
        }
        self.rounds += 1;
        if self.rounds == UNTIMED_ROUNDS {
            self.begin_ns = now_ns;
        }
        if self.rounds == TRY_ROUNDS {
            self.times_ns[self.attempt] = now_ns - self.begin_ns;
            return self.end_try();
        }
        TRIES[self.attempt]
    }

    fn end_try(&mut self) -> Way {
        if TRIES[self.attempt] == Way::Together {
            let (apart, together) = (self.times_ns[self.attempt - 1], self.times_ns[self.attempt]);
            // To change over it must be faster by a tenth.
            let wanted = if self.best == Way::Together { apart } else { apart / 10 * 9 };
            if together > wanted {
                if together > apart / 2 * 3 {
                    self.pause = PAUSE_MAX;
                }
                return self.choose(Way::Apart);
            }
        }
        self.attempt += 1;
        self.rounds = 0;
        if self.attempt == TRIES.len() { self.choose(Way::Together) } else { TRIES[self.attempt] }
    }

    fn choose(&mut self, best: Way) -> Way {
        let is_new = best != self.best || best == Way::Together;
        self.pause = if is_new { PAUSE_MIN } else { (self.pause * 2).min(PAUSE_MAX) };
        (self.best, self.attempt, self.rounds) = (best, TRIES.len(), self.pause);
        best
    }

    /// It is no more than one thread, or none may be kept: a contest that is under way has no
    /// outcome.
    pub fn break_off(&mut self) {
        if self.attempt < TRIES.len() {
            (self.attempt, self.rounds) = (TRIES.len(), self.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds that were served in each way, of `rounds`, each of which takes what `cost` says.
    fn served(contest: &mut Contest, rounds: u32, mut cost: impl FnMut(Way) -> u64) -> [u32; 2] {
        let (mut now, mut way, mut served) = (0, contest.best, [0; 2]);
        for _ in 0..rounds {
            now += cost(way);
            served[(way == Way::Together) as usize] += 1;
            way = contest.end_round(now);
        }
        served
    }

    fn costs(apart: u64, together: u64) -> impl FnMut(Way) -> u64 {
        move |way| if way == Way::Apart { apart } else { together }
    }

    #[test]
    fn what_is_faster_is_taken() {
        let mut contest = Contest::new();
        let [apart, together] = served(&mut contest, 10_000, costs(1000, 700));
        assert!(together > 9_000 && apart > 500, "{apart} rounds apart, {together} together");
        // And no longer when it isn't.
        let [_, together] = served(&mut contest, PAUSE_MIN + 100, costs(1000, 1400));
        assert!(together <= PAUSE_MIN + TRY_ROUNDS, "{together} rounds together");
        let [_, together] = served(&mut contest, 10_000, costs(1000, 1400));
        assert!(together <= 6 * TRY_ROUNDS, "{together} rounds together");
    }

    #[test]
    fn a_contest_that_together_loses_costs_little() {
        let [apart, together] = served(&mut Contest::new(), 20_000, costs(1000, 2000));
        assert!(together <= 6 * TRY_ROUNDS, "{together} rounds together, {apart} apart");
        let [_, close] = served(&mut Contest::new(), 20_000, costs(1000, 1000));
        assert!(close <= 10 * TRY_ROUNDS, "{close} rounds together where it makes no difference");
    }

    #[test]
    fn one_lucky_try_is_not_enough() {
        let mut tries = 0;
        let lucky = move |way| {
            tries += (way == Way::Together) as u64;
            if way == Way::Apart || tries > TRY_ROUNDS as u64 { 1000 } else { 100 }
        };
        let [_, together] = served(&mut Contest::new(), 200, lucky);
        assert!(together <= 2 * TRY_ROUNDS, "{together} rounds together");
    }

    #[test]
    fn what_is_broken_off_has_no_outcome() {
        let mut contest = Contest::new();
        for _ in 0..100 {
            served(&mut contest, FIRST_PAUSE + 2 * TRY_ROUNDS + 1, costs(1000, 100));
            contest.break_off();
            assert_eq!(contest.best, Way::Apart);
            contest.rounds = FIRST_PAUSE;
        }
    }
}
