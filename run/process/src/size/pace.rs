//! When a process looks at its size: often while its program works, and hardly ever while it
//! sleeps.
//!
//! A program that hasn't run has not grown. So the time to the next look doubles with each look at
//! which the program has hardly run. It may rest that long, because a timer of the process's CPU
//! time ends the rest once the program runs ([`memfold_os::thread::alarm`]).

/// A look is due at the latest when the program has run for so long since the last one,
/// nanoseconds.
const WORK_NS: u64 = 50_000;
/// A program works if it has run for one part in this many of the time since the last look.
const WORK_SHARE: u64 = 50;
/// The shortest pause, whatever is due, and the longest rest, nanoseconds.
const PAUSE_LEAST_NS: u64 = 250_000;
const REST_MOST_NS: u64 = 10_000_000_000;

/// The time from one look to the next.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LookPause {
    /// The time at most, nanoseconds.
    pub ns: u64,
    /// Whether the pause ends as soon as the program works.
    pub ends_with_work: bool,
}

/// The last look, and when the next one is due. Times are nanoseconds.
#[derive(Default)]
pub struct LookPace {
    looked_ns: u64,
    /// CPU time of the program's threads at the last look.
    worked_ns: u64,
    pause_ns: u64,
    next_ns: u64,
}

impl LookPace {
    /// Returns whether a look is due. `worked_ns` is the CPU time of the program's threads.
    pub fn is_due(&self, now_ns: u64, worked_ns: u64) -> bool {
        now_ns >= self.next_ns || worked_ns.saturating_sub(self.worked_ns) >= WORK_NS
    }

    /// Returns the rest until the next look, if none is due.
    pub fn rest(&self, now_ns: u64) -> LookPause {
        LookPause { ns: self.next_ns.saturating_sub(now_ns), ends_with_work: true }
    }

    /// Notes a look. Returns the time until the next one: `wanted_ns` while the program works, and
    /// longer while it doesn't, but not beyond `due_ns`. After news of other processes the rests
    /// begin anew.
    pub fn note(
        &mut self,
        (now_ns, worked_ns): (u64, u64),
        wanted_ns: u64,
        due_ns: Option<u64>,
        has_news: bool,
    ) -> LookPause {
        let elapsed_ns = now_ns.saturating_sub(self.looked_ns);
        let ran_ns = worked_ns.saturating_sub(self.worked_ns);
        let works = ran_ns >= WORK_NS && ran_ns >= elapsed_ns / WORK_SHARE;
        self.pause_ns = match works || has_news {
            true => wanted_ns,
            false => (self.pause_ns * 2).clamp(wanted_ns, REST_MOST_NS.max(wanted_ns)),
        };
        (self.looked_ns, self.worked_ns) = (now_ns, worked_ns);
        let next_ns = (now_ns + self.pause_ns).min(due_ns.unwrap_or(u64::MAX));
        self.next_ns = next_ns.max(now_ns + PAUSE_LEAST_NS);
        LookPause { ns: self.next_ns - now_ns, ends_with_work: !works }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    /// Runs a program that works for `percent` of the time. Returns its looks in `seconds`.
    fn looks(pace: &mut LookPace, clock: &mut (u64, u64), percent: u64, seconds: u64) -> u64 {
        let (end, mut count, mut rests) = (clock.0 + seconds * SECOND, 0, true);
        while clock.0 < end {
            *clock = (clock.0 + MS / 10, clock.1 + MS / 1000 * percent);
            // The timer of CPU time is set only for a rest.
            let is_woken = rests || clock.0 >= pace.next_ns;
            if is_woken && pace.is_due(clock.0, clock.1) {
                rests = pace.note(*clock, 5 * MS, None, false).ends_with_work;
                count += 1;
            }
        }
        count
    }

    #[test]
    fn sleeping_program_is_looked_at_once_in_ten_seconds() {
        let (mut pace, mut clock) = (LookPace::default(), (SECOND, SECOND));
        let pauses = looks(&mut pace, &mut clock, 100, 1);
        assert!((150..=210).contains(&pauses), "{pauses}");
        let ending = looks(&mut pace, &mut clock, 0, 11);
        assert!(ending <= 13, "{ending}");
        let sleeping = looks(&mut pace, &mut clock, 0, 100);
        assert!((9..=11).contains(&sleeping), "{sleeping}");
    }

    #[test]
    fn program_that_wakes_is_looked_at_at_once() {
        let (mut pace, mut clock) = (LookPace::default(), (SECOND, SECOND));
        looks(&mut pace, &mut clock, 0, 60);
        clock = (clock.0 + SECOND, clock.1 + WORK_NS);
        assert!(pace.is_due(clock.0, clock.1));
        assert!(pace.note(clock, 5 * MS, None, false).ends_with_work);
        let wakes = looks(&mut pace, &mut clock, 100, 1);
        assert!(wakes >= 150, "{wakes}");
    }

    #[test]
    fn rest_ends_when_something_is_due() {
        let mut pace = LookPace::default();
        let pause = |pace: &mut LookPace, now, due| pace.note((now, 0), 5 * MS, due, false).ns;
        for n in 1..20 {
            pause(&mut pace, n * 20 * SECOND, None);
        }
        assert_eq!(pause(&mut pace, 500 * SECOND, None), REST_MOST_NS);
        assert_eq!(pause(&mut pace, 501 * SECOND, Some(503 * SECOND)), 2 * SECOND);
        assert_eq!(pause(&mut pace, 504 * SECOND, Some(503 * SECOND)), PAUSE_LEAST_NS);
        assert_eq!(pace.note((505 * SECOND, 0), 5 * MS, None, true).ns, 5 * MS);
    }
}
