//! The scheduler: which task runs until the next point at which another could.
//!
//! A seed decides. Races differ in what they need, so there are three kinds of schedules: those that
//! switch at random at each point, those that rarely switch, and those that run the task with the
//! highest priority until it waits (PCT), whose priorities change at random points.
use memfold_testkit::random::{Random, mix};
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a schedule has been so far. Two runs with equal traces were the same run.
#[derive(Default)]
pub struct Trace {
    /// Points at which the scheduler was asked.
    pub points: AtomicU64,
    /// A hash of all answers.
    pub digest: AtomicU64,
}

/// What makes the scheduler switch, besides a task that waits or yields. All are drawn anew after so
/// many points on average.
enum Kind {
    /// Another task is drawn.
    Switches(usize),
    /// The task with the largest priority runs. The present one gets another priority.
    Priorities(usize),
}

/// The scheduler of one run.
pub struct SeededScheduler {
    random: Random,
    kind: Kind,
    /// Points until the next draw.
    left: usize,
    /// Priorities of tasks, by their number. The largest runs.
    priorities: Vec<u64>,
    trace: Arc<Trace>,
    has_begun: bool,
}

impl SeededScheduler {
    /// Makes the schedule of a seed, which notes itself in `trace`.
    pub fn new(seed: u64, trace: &Arc<Trace>) -> SeededScheduler {
        let mut random = Random::new(mix(seed ^ 0x5c4e_d01e));
        let kind = match random.below(6) {
            0 => Kind::Switches(1),
            1 => Kind::Switches(3),
            2 => Kind::Switches(16),
            3 => Kind::Switches(100),
            4 => Kind::Priorities(100),
            _ => Kind::Priorities(1000),
        };
        let (priorities, trace) = (Vec::new(), trace.clone());
        SeededScheduler { random, kind, left: 0, priorities, trace, has_begun: false }
    }

    fn priority(&mut self, task: usize) -> u64 {
        while self.priorities.len() <= task {
            let new = self.random.word();
            self.priorities.push(new);
        }
        self.priorities[task]
    }

    /// Returns whether the present task goes on: it is runnable, no draw is due, and none that is
    /// runnable has a larger priority.
    fn goes_on(&self, runnable: &[&Task], current: TaskId) -> bool {
        let priority = |task: TaskId| self.priorities.get(usize::from(task)).copied();
        let own = priority(current);
        let is_before = |task: &&Task| match self.kind {
            Kind::Switches(_) => false,
            Kind::Priorities(_) => priority(task.id()).is_none() || priority(task.id()) > own,
        };
        self.left > 0
            && runnable.iter().any(|task| task.id() == current)
            && !runnable.iter().any(is_before)
    }

    /// Chooses the next task.
    fn next(&mut self, runnable: &[usize], current: Option<usize>, yields: bool) -> usize {
        let is_due = self.left == 0;
        let (Kind::Switches(mean) | Kind::Priorities(mean)) = self.kind;
        self.left = if is_due { self.random.below(2 * mean) } else { self.left };
        if let Kind::Switches(_) = self.kind {
            return self.random.pick(runnable);
        }
        if let Some(task) = current {
            self.priority(task);
            // A thread that yields waits for another one, so all others come first.
            let least = self.priorities.iter().min().copied().unwrap_or(0);
            match (yields, is_due) {
                (true, _) => self.priorities[task] = least.saturating_sub(1),
                (false, true) => self.priorities[task] = self.random.word(),
                (false, false) => {}
            }
        }
        let best = runnable.iter().copied().max_by_key(|task| self.priority(*task));
        best.expect("a task is runnable")
    }
}

impl Scheduler for SeededScheduler {
    fn new_execution(&mut self) -> Option<Schedule> {
        let is_first = !self.has_begun;
        self.has_begun = true;
        is_first.then(|| Schedule::new(0))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        self.trace.points.fetch_add(1, Relaxed);
        if let Some(current) = current.filter(|task| !is_yielding && self.goes_on(runnable, *task))
        {
            self.left -= 1;
            return Some(current);
        }
        let numbers: Vec<usize> = runnable.iter().map(|task| task.id().into()).collect();
        let next = self.next(&numbers, current.map(usize::from), is_yielding);
        let (points, digest) = (self.trace.points.load(Relaxed), self.trace.digest.load(Relaxed));
        self.trace.digest.store(mix(digest ^ points << 8 ^ next as u64), Relaxed);
        runnable.iter().map(|task| task.id()).find(|task| usize::from(*task) == next)
    }

    fn next_u64(&mut self) -> u64 {
        self.random.word()
    }
}
