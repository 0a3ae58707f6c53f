//! Decides how much memory stays uncompressed where no limit says so: as little as a given slowdown
//! allows.
//!
//! The resident memory sinks by a small step at a time. Refaults show what was in use. It follows
//! senpai, which lowers the limit of a cgroup while its processes hardly stall ("TMO: Transparent
//! Memory Offloading in Datacenters", ASPLOS 2022). Here the measure is the CPU time that folding
//! takes, as a share of the program's own.
//!
//! - The program's work earns **credit**, the slowdown's share of its CPU time. Folding spends it.
//!   Memory sinks while there is credit. Without it, nothing more is folded until there is enough
//!   again.
//! - If folding suddenly costs many times what the work earns, the program needs what was folded.
//!   Then memory may grow at once, whatever the credit.
//! - If the program loads again more than half of the pages that were folded lately, it uses the
//!   memory that remains. So that memory stops sinking.
//! - If what a sinking has gained is back when the next one begins, the one after that is put off for
//!   twice the time.
//! - A process without work for a while is idle: all of its memory is folded. It must have been without
//!   work for so long that its last awakening is within the slowdown, as a share of the time.
//! - A process that has work, but gets no CPU for it, isn't idle: a quota, other processes, or a tool
//!   such as `cpulimit` may keep it waiting. Its threads have waited for a CPU.
//! - A process that works a little all the time may use all of its memory. So a small part is folded
//!   first. If the process loads that again at once, the rest stays.

/// Time between two decisions, nanoseconds.
const PERIOD_NS: u64 = 100_000_000;
/// The first seconds of a process are left alone, nanoseconds.
const START_NS: u64 = 3_000_000_000;
/// Credit is kept for at most so much work, nanoseconds.
const KEPT_WORK_NS: u64 = 60_000_000_000;
/// A sinking begins when there is credit for so much work, nanoseconds.
const ENOUGH_WORK_NS: u64 = 2_000_000_000;
/// Each period, memory sinks by one part in this many. So it sinks to a tenth in 15 seconds.
const STEP: u64 = 64;
/// Memory grows at once if folding takes so many times what the work earns.
const SUDDEN: u64 = 8;
/// Time until the first sinking after one that was in vain, nanoseconds, and the longest such time.
const PAUSE_NS: u64 = 2_000_000_000;
const PAUSE_MOST_NS: u64 = 128 * PAUSE_NS;
/// Of what was folded lately, a sinking ends if half was loaded again. It counts once one part in
/// this many of memory was folded.
const TRIED: u64 = 32;
/// A sinking was in vain if less than one part in this many stays folded.
const GAIN: u64 = 16;
/// An idle process works for less than one part in this many of the time. The timers of a Java
/// machine take one in 100 to one in 50.
const IDLE_SHARE: u64 = 20;
/// An idle process that loads so many pages in a period works again. That takes 2% of the time.
const WAKING_PAGES: u64 = 256;

/// A process whose threads ran, or waited for a CPU, for one part in this many of the time is not
/// idle. A starved process waits all the time.
const RUNNABLE_SHARE: u64 = 4;
/// Before all memory is folded, one part in this many is, and the process may use it for so long,
/// nanoseconds. The process isn't idle if it loads one part in `TRIAL_USED` of it. The part is small,
/// because a process that works for 4% of the time loads only some thousand pages a second.
const TRIAL: u64 = 64;
const TRIAL_NS: u64 = 800_000_000;
const TRIAL_USED: u64 = 4;
/// After a trial in vain, the process must be quiet for twice as long; so often.
const DOUBLED_MOST: u32 = 4;

/// What folding costs for so long after a process was woken is the cost of waking it, nanoseconds.
const WAKING_NS: u64 = 5_000_000_000;

/// What is asked for.
#[derive(Copy, Clone, Debug)]
pub struct SlowdownGoal {
    /// CPU time that folding may take, in ten-thousandths of the program's own.
    pub share: u32,
    /// A process without work for so long is idle, nanoseconds.
    pub idle_ns: u64,
}

/// A process at one moment. Times are CPU times since it began, except `now_ns`.
#[derive(Copy, Clone, Debug, Default)]
pub struct WorkDone {
    /// The time, nanoseconds.
    pub now_ns: u64,
    /// The program's own work, without faults and engine threads, nanoseconds.
    pub own_ns: u64,
    /// What folding has cost the program, nanoseconds.
    pub folding_ns: u64,
    /// The time for which threads of the program waited for a CPU, nanoseconds. It counts only if
    /// [`SlowdownController::asks_waited`].
    pub waited_ns: u64,
    /// Whether a thread of the program runs now, or waits for a CPU. It counts as the wait does.
    pub is_runnable: bool,
    /// Uncompressed memory that can be folded, pages.
    pub resident: u64,
    /// Pages that were loaded since the process began.
    pub loaded: u64,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Mode {
    /// Nothing more is folded.
    Resting,
    /// Memory sinks.
    Sinking,
    /// A small part of the memory of a quiet process is folded.
    Trying,
    /// Everything is folded.
    Idle,
}

/// The controller of one process.
#[derive(Debug)]
pub struct SlowdownController {
    goal: SlowdownGoal,
    mode: Mode,
    /// The memory that may stay, pages.
    aim: u64,
    began_ns: u64,
    last: WorkDone,
    /// Less than zero: a debt, which is paid before anything more is folded.
    credit_ns: i64,
    /// The memory when the last sinking began, pages.
    from: u64,
    /// Pages folded and loaded lately in a sinking.
    folded: u64,
    loaded: u64,
    /// No sinking begins before.
    until_ns: u64,
    pause_ns: u64,
    /// When the present stretch with hardly any work began, and what it had worked by then.
    quiet_ns: u64,
    quiet_own_ns: u64,
    /// The process in the middle of that stretch.
    half: Option<WorkDone>,
    /// When the present trial began, and the pages that it folds.
    trial: (WorkDone, u64),
    /// How often the time is doubled for which the process must be quiet.
    doubled: u32,
    /// When all memory was last folded, nanoseconds.
    folded_at_ns: u64,
    /// The process when it was last woken, and what folding cost in the seconds after that.
    woken: Option<WorkDone>,
    waking_cost_ns: u64,
}

impl SlowdownController {
    /// Makes the controller of a process that begins now.
    pub fn new(goal: SlowdownGoal, now: WorkDone) -> SlowdownController {
        SlowdownController {
            goal,
            mode: Mode::Resting,
            aim: u64::MAX,
            began_ns: now.now_ns,
            last: now,
            credit_ns: 0,
            from: 0,
            folded: 0,
            loaded: 0,
            until_ns: now.now_ns + START_NS,
            pause_ns: PAUSE_NS,
            quiet_ns: now.now_ns,
            quiet_own_ns: now.own_ns,
            half: None,
            trial: (now, 0),
            doubled: 0,
            folded_at_ns: 0,
            woken: None,
            waking_cost_ns: 0,
        }
    }

    /// Returns how much memory may stay uncompressed from now on, pages; `u64::MAX` for all.
    pub fn aim(&mut self, now: WorkDone) -> u64 {
        if !self.is_due(now.now_ns) {
            return self.aim;
        }
        let time = now.now_ns - self.last.now_ns;
        let last = core::mem::replace(&mut self.last, now);
        let earned = self.earned(now.own_ns.saturating_sub(last.own_ns));
        let spent = now.folding_ns.saturating_sub(last.folding_ns);
        let loads = now.loaded.saturating_sub(last.loaded);
        let is_woken = self.mode == Mode::Idle && loads >= WAKING_PAGES;
        if self.is_quiet(&now, is_woken) {
            return self.fold_quiet(&now, spent);
        }
        if self.mode == Mode::Idle {
            let is_soon = now.now_ns - self.folded_at_ns < WAKING_NS;
            self.doubled = if is_soon { (self.doubled + 1).min(DOUBLED_MOST) } else { 0 };
            self.woken = Some(last);
            self.rest(now.now_ns + self.pause_ns);
            return self.aim;
        }
        if self.mode == Mode::Trying {
            self.rest(now.now_ns + self.pause_ns);
        }
        if let Some(woken) = self.woken.filter(|woken| now.now_ns - woken.now_ns < WAKING_NS) {
            self.waking_cost_ns = now.folding_ns - woken.folding_ns;
        }
        let most = self.earned(KEPT_WORK_NS) as i64;
        self.credit_ns = (self.credit_ns + earned as i64).min(most) - spent as i64;
        let is_enough = self.credit_ns >= self.earned(ENOUGH_WORK_NS) as i64;
        let is_sudden = spent > earned.max(self.earned(time)) * SUDDEN;
        self.loaded = self.loaded - self.loaded / 8 + loads;
        self.folded =
            self.folded - self.folded / 8 + (last.resident + loads).saturating_sub(now.resident);
        let is_used = self.folded > now.resident / TRIED && self.loaded > self.folded / 2;
        match self.mode {
            Mode::Sinking if is_sudden || is_used || self.credit_ns <= 0 => {
                self.rest(now.now_ns + self.pause_ns);
            }
            Mode::Sinking => {
                let step = now.resident / STEP;
                self.aim = now.resident.min(self.aim).saturating_sub(step);
            }
            _ if is_sudden => self.until_ns = self.until_ns.max(now.now_ns + self.pause_ns),
            _ if now.now_ns >= self.until_ns && is_enough => {
                self.begin_sinking(now.resident);
            }
            _ => {}
        }
        self.aim
    }

    /// Returns whether everything is folded, because the process is idle.
    pub fn folds_all(&self) -> bool {
        self.mode == Mode::Idle
    }

    /// Returns the number of loaded pages ([`WorkDone::loaded`]) at which an idle process works
    /// again, and `u64::MAX` for a process that isn't idle. Whoever loads them needn't wait for the
    /// next decision.
    pub fn wakes_at(&self) -> u64 {
        if self.folds_all() { self.last.loaded + WAKING_PAGES } else { u64::MAX }
    }

    /// Returns whether the process was idle until some seconds ago.
    pub fn is_waking(&self) -> bool {
        self.woken.is_some_and(|woken| self.last.now_ns - woken.now_ns < WAKING_NS)
    }

    /// Returns whether a period has passed since the last decision.
    pub fn is_due(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.last.now_ns) >= PERIOD_NS
    }

    /// Returns when to decide on a process that goes on sleeping, nanoseconds; `None` if it is idle.
    pub fn idle_due_ns(&self) -> Option<u64> {
        let due_ns = match self.mode {
            Mode::Idle => return None,
            Mode::Trying => self.trial.0.now_ns + TRIAL_NS,
            _ if self.half.is_none() => self.quiet_ns + self.enough_ns() / 2,
            _ => self.quiet_ns + self.enough_ns(),
        };
        Some(due_ns.max(self.began_ns + START_NS).max(self.last.now_ns + PERIOD_NS))
    }

    /// Returns whether the next decision depends on [`WorkDone::waited_ns`].
    pub fn asks_waited(&self, now_ns: u64) -> bool {
        let quiet = now_ns.saturating_sub(self.quiet_ns);
        let enough = self.enough_ns();
        let is_decided = matches!(self.mode, Mode::Idle | Mode::Trying);
        !is_decided && quiet >= if self.half.is_none() { enough / 2 } else { enough }
    }

    /// Returns how long a process must be quiet to be idle, nanoseconds.
    fn enough_ns(&self) -> u64 {
        let worth = self.waking_cost_ns / self.goal.share as u64 * 10_000;
        (self.goal.idle_ns << self.doubled).max(worth)
    }

    /// Returns what so much work earns, nanoseconds.
    fn earned(&self, own_ns: u64) -> u64 {
        own_ns / 10_000 * self.goal.share as u64
    }

    fn rest(&mut self, until_ns: u64) {
        (self.mode, self.aim, self.until_ns) = (Mode::Resting, u64::MAX, until_ns);
    }

    /// Begins to sink from so many pages. If most of what the last sinking has gained is back, the
    /// next one is put off for longer.
    fn begin_sinking(&mut self, resident: u64) {
        let is_back = self.from > 0 && resident > self.from - self.from / GAIN;
        self.pause_ns = if is_back { (self.pause_ns * 2).min(PAUSE_MOST_NS) } else { PAUSE_NS };
        (self.mode, self.from) = (Mode::Sinking, resident);
        (self.folded, self.loaded) = (0, 0);
        self.aim = resident - resident / STEP;
    }

    /// Folds a small part of a quiet process, and then all of it unless the process has used that
    /// part. Returns the memory that may stay, pages.
    fn fold_quiet(&mut self, now: &WorkDone, spent: u64) -> u64 {
        let (began, pages) = self.trial;
        match self.mode {
            Mode::Idle => {}
            Mode::Trying => {
                self.credit_ns -= spent as i64;
                if now.loaded - began.loaded > pages / TRIAL_USED {
                    self.doubled = (self.doubled + 1).min(DOUBLED_MOST);
                    self.begin_stretch(now);
                    self.rest(now.now_ns + self.pause_ns);
                } else if now.now_ns >= began.now_ns + TRIAL_NS {
                    (self.mode, self.aim, self.folded_at_ns) = (Mode::Idle, 0, now.now_ns);
                }
            }
            _ => {
                let pages = now.resident / TRIAL;
                (self.mode, self.trial) = (Mode::Trying, (*now, pages));
                self.aim = now.resident.min(self.aim) - pages.min(self.aim);
            }
        }
        self.aim
    }

    fn begin_stretch(&mut self, now: &WorkDone) {
        (self.quiet_ns, self.quiet_own_ns, self.half) = (now.now_ns, now.own_ns, None);
    }

    /// Returns whether the process has hardly had work for as long as the goal says. A little work
    /// now and then, such as that of a timer, ends no such stretch. Waiting for a CPU does.
    fn is_quiet(&mut self, now: &WorkDone, is_woken: bool) -> bool {
        let quiet = now.now_ns.saturating_sub(self.quiet_ns);
        let own = now.own_ns.saturating_sub(self.quiet_own_ns);
        let allowed_ns = quiet.max(self.goal.idle_ns) / IDLE_SHARE;
        if is_woken || own > allowed_ns || now.now_ns < self.began_ns + START_NS {
            self.begin_stretch(now);
            return false;
        }
        if matches!(self.mode, Mode::Idle | Mode::Trying) {
            self.renew_stretch(now, quiet);
            return true;
        }
        let enough = self.enough_ns();
        let Some(half) = self.half else {
            if quiet >= enough / 2 {
                self.half = Some(*now);
            }
            return false;
        };
        if quiet < enough || now.now_ns - half.now_ns < PERIOD_NS {
            return false;
        }
        let waited_ns = now.waited_ns.saturating_sub(half.waited_ns);
        let runnable = waited_ns + now.own_ns.saturating_sub(half.own_ns);
        // A wait is counted when it ends. A thread that gets no CPU at all is still in one.
        if now.is_runnable || runnable > (now.now_ns - half.now_ns) / RUNNABLE_SHARE {
            self.begin_stretch(now);
            return false;
        }
        true
    }

    /// Forgets the beginning of a long stretch, so that work in it counts soon.
    fn renew_stretch(&mut self, now: &WorkDone, quiet: u64) {
        let enough = self.enough_ns();
        if quiet >= 2 * enough {
            (self.quiet_ns, self.quiet_own_ns) = (now.now_ns - enough, now.own_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::VecDeque;
    use memfold_testkit::random::Random;

    const SECOND: u64 = 1_000_000_000;
    const GOAL: SlowdownGoal = SlowdownGoal { share: 200, idle_ns: 30 * SECOND };
    /// What a load costs, and what it costs to store a page, nanoseconds.
    const LOAD_NS: u64 = 10_000;
    const STORE_NS: u64 = 3_000;

    /// A program whose pages leave memory in the order in which they came.
    struct Program {
        control: SlowdownController,
        work: WorkDone,
        order: VecDeque<usize>,
        is_here: Vec<bool>,
        random: Random,
    }

    impl Program {
        fn new(pages: usize) -> Program {
            let control = SlowdownController::new(GOAL, WorkDone::default());
            let order: VecDeque<_> = (0..pages).collect();
            let work = WorkDone { resident: pages as u64, ..WorkDone::default() };
            Program { control, work, order, is_here: vec![true; pages], random: Random::new(1) }
        }

        /// Touches one of the first `used` pages every 10 us of its CPU time for a period, of which
        /// it works for `percent`.
        fn period(&mut self, used: usize, percent: u64) {
            let end = self.work.own_ns + PERIOD_NS / 100 * percent;
            self.work.now_ns += PERIOD_NS;
            while self.work.own_ns < end {
                self.work.own_ns += 10_000;
                let page = self.random.below(used);
                if !self.is_here[page] {
                    self.work.folding_ns += LOAD_NS;
                    (self.is_here[page], self.work.resident) = (true, self.work.resident + 1);
                    self.work.loaded += 1;
                    self.order.push_back(page);
                }
            }
            let aim = self.control.aim(self.work);
            while self.work.resident > aim {
                let page = self.order.pop_front().unwrap();
                (self.is_here[page], self.work.resident) = (false, self.work.resident - 1);
                self.work.folding_ns += if self.control.mode == Mode::Idle { 0 } else { STORE_NS };
            }
        }

        fn run(&mut self, seconds: u64, used: usize, percent: u64) {
            (0..seconds * SECOND / PERIOD_NS).for_each(|_| self.period(used, percent));
        }

        /// Runs, and returns what folding has cost, in ten-thousandths of the program's work.
        fn cost_of(&mut self, seconds: u64, used: usize, percent: u64) -> u64 {
            let before = self.work;
            self.run(seconds, used, percent);
            (self.work.folding_ns - before.folding_ns) * 10_000 / (self.work.own_ns - before.own_ns)
        }
    }

    #[test]
    fn what_is_not_used_is_folded_within_the_slowdown() {
        let mut program = Program::new(50_000);
        program.run(20, 50_000, 100);
        assert!(program.cost_of(40, 5_000, 100) <= 200);
        assert!(program.work.resident < 10_000, "{}", program.work.resident);
        assert!(program.cost_of(100, 5_000, 100) <= 200);
    }

    #[test]
    fn memory_that_is_all_in_use_stays_and_trials_become_rare() {
        let mut program = Program::new(50_000);
        let first = program.cost_of(60, 50_000, 100);
        assert!(first <= 200, "{first}");
        assert!(program.work.resident > 45_000, "{}", program.work.resident);
        let later = program.cost_of(300, 50_000, 100);
        assert!(later <= 100, "{later}");
    }

    #[test]
    fn memory_may_grow_within_a_period_after_a_change() {
        let mut program = Program::new(50_000);
        program.run(60, 2_000, 100);
        assert!(program.work.resident < 5_000, "{}", program.work.resident);
        program.period(50_000, 100);
        assert_eq!(program.control.aim(program.work), u64::MAX);
        program.run(5, 50_000, 100);
        assert!(program.work.resident > 49_000, "{}", program.work.resident);
    }

    #[test]
    fn an_idle_process_keeps_nothing_until_it_works_again() {
        let mut program = Program::new(50_000);
        program.run(200, 50_000, 100);
        let awake = program.work.resident;
        program.run(29, 1, 0);
        assert_eq!(program.work.resident, awake, "not idle yet");
        program.run(2, 1, 0);
        assert_eq!((program.work.resident, program.control.mode), (0, Mode::Idle));
        assert_eq!(program.control.wakes_at(), program.work.loaded + WAKING_PAGES);
        // A timer wakes nothing, for however long.
        for _ in 0..1000 {
            program.run(1, 1, 0);
            program.work.own_ns += SECOND / 25;
        }
        assert_eq!(program.control.mode, Mode::Idle);
        program.run(1, 50_000, 100);
        assert!(!program.control.folds_all() && program.control.is_waking());
        assert_eq!(program.control.aim(program.work), u64::MAX);
        assert_eq!(program.control.wakes_at(), u64::MAX);
        program.run(10, 50_000, 100);
        assert!(!program.control.is_waking());
    }

    #[test]
    fn process_that_waits_for_a_cpu_is_not_idle() {
        for (waits, is_idle) in [(95, false), (30, false), (5, true)] {
            let (mut program, mut idle) = (Program::new(50_000), 0);
            program.run(20, 50_000, 100);
            for _ in 0..3000 {
                program.work.waited_ns += PERIOD_NS / 100 * waits;
                program.period(50_000, 0);
                idle += (program.control.mode == Mode::Idle) as u32;
            }
            assert_eq!(idle > 0, is_idle, "{waits}");
            assert_eq!(program.work.resident == 0, is_idle, "{waits}");
        }
    }

    /// Other processes take all CPUs for minutes.
    #[test]
    fn process_that_gets_no_cpu_at_all_is_not_idle() {
        for gets_none in [true, false] {
            let (mut program, mut idle) = (Program::new(50_000), 0);
            program.run(20, 50_000, 100);
            program.work.is_runnable = gets_none;
            for _ in 0..3000 {
                program.period(50_000, 0);
                idle += (program.control.mode == Mode::Idle) as u32;
            }
            assert_eq!(idle == 0, gets_none);
        }
    }

    /// It works for 4 ms of each 100, as under `cpulimit`, and waits for nothing.
    #[test]
    fn process_that_works_a_little_all_the_time_is_not_idle() {
        let (mut program, mut idle) = (Program::new(2_000), 0);
        program.run(10, 2_000, 100);
        let before = program.work;
        for _ in 0..6000 {
            program.period(2_000, 4);
            idle += (program.control.mode == Mode::Idle) as u32;
        }
        assert_eq!(idle, 0);
        let work = program.work;
        let cost = (work.folding_ns - before.folding_ns) * 10_000 / (work.own_ns - before.own_ns);
        assert!(cost <= GOAL.share as u64, "{cost}");
        // Once it rests it is idle, at the latest after the longest time.
        program.run(30 << DOUBLED_MOST, 1, 0);
        program.run(1, 1, 0);
        assert_eq!((program.control.mode, program.work.resident), (Mode::Idle, 0));
    }

    #[test]
    fn sleeping_process_is_due_when_it_becomes_idle() {
        let mut program = Program::new(50_000);
        program.run(10, 50_000, 100);
        let mut dues = Vec::new();
        while let Some(due_ns) = program.control.idle_due_ns() {
            assert!(due_ns > program.work.now_ns && dues.len() < 10, "{dues:?}");
            dues.push(due_ns);
            program.work.now_ns = due_ns;
            let aim = program.control.aim(program.work);
            program.work.resident = program.work.resident.min(aim);
        }
        let last = dues.last().unwrap();
        assert!(*last <= 10 * SECOND + GOAL.idle_ns + TRIAL_NS + PERIOD_NS, "{dues:?}");
        assert_eq!(program.work.resident, 0);
    }

    #[test]
    fn a_process_that_is_woken_often_is_not_folded_each_time() {
        let mut program = Program::new(50_000);
        program.run(40, 1, 0);
        let (before, mut folded) = (program.work, 0);
        for _ in 0..100 {
            program.period(50_000, 100);
            program.run(40, 1, 0);
            folded += (program.control.mode == Mode::Idle) as u32;
        }
        assert!(folded > 20, "{folded}");
        let cost = (program.work.folding_ns - before.folding_ns) * 10_000;
        let share = cost / (program.work.now_ns - before.now_ns);
        assert!(share <= 200, "{share}");
    }

    /// Whatever the program does, folding costs no more than its share of the time, and one load of
    /// each page where the program changes what it uses.
    #[test]
    fn programs_of_any_phases_keep_the_slowdown() {
        const PHASES: u64 = 6;
        for seed in 0..30 {
            let mut random = Random::new(seed);
            let pages = 2_000 + random.below(40_000);
            let mut program = Program::new(pages);
            program.random = random.fork();
            for _ in 0..PHASES {
                let (used, seconds) = (1 + random.below(pages), 1 + random.below(60) as u64);
                program.run(seconds, used, [0, 1, 30, 100][random.below(4)]);
            }
            let (work, all_ns) = (program.work, pages as u64 * LOAD_NS);
            let most = program.control.earned(work.now_ns + work.own_ns) + PHASES * all_ns;
            assert!(work.folding_ns <= most, "seed {seed}: {work:?}, at most {most}");
            assert!(work.resident <= pages as u64);
        }
    }

    #[test]
    fn memory_that_cannot_be_folded_is_aimed_below_and_no_more() {
        let mut control = SlowdownController::new(GOAL, WorkDone::default());
        let mut work = WorkDone { resident: 10_000, ..WorkDone::default() };
        let mut aims = Vec::new();
        for _ in 0..1000 {
            (work.now_ns, work.own_ns) = (work.now_ns + PERIOD_NS, work.own_ns + PERIOD_NS);
            aims.push(control.aim(work));
        }
        assert!(aims.is_sorted_by(|before, after| before >= after));
        assert_eq!(aims.last(), Some(&0));
    }

    #[test]
    fn start_of_a_process_is_left_alone() {
        let mut program = Program::new(1000);
        program.run(2, 1, 100);
        assert_eq!(program.work.resident, 1000);
    }
}
