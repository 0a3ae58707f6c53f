//! One run: a world, the steps of its tasks, and a schedule, all from seeds.
use crate::oracle::Oracle;
use crate::schedule::{SeededScheduler, Trace};
use crate::step::{Step, StepSource};
use crate::task::ProgramTask;
use crate::world::{Machine, World, become_engine_task};
use memfold_testkit::random::{Random, mix};
use std::ops::Range;
use std::process::abort;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Points of a schedule after which tasks count as stuck, for each step.
const POINTS_PER_STEP: usize = 40_000;

/// What a run does, and in which schedule.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides the world and the steps.
    pub seed: u64,
    /// Decides the schedule.
    pub schedule: u64,
    /// The steps to take, by their numbers; all others are left out.
    pub only: Option<Vec<Range<usize>>>,
}

/// The drawn parts of a plan.
pub struct Scenario {
    /// The settings.
    pub world: World,
    /// The steps of each task, with their numbers.
    pub tasks: Vec<Vec<(usize, Step)>>,
}

impl Plan {
    /// Makes the plan of a seed.
    pub fn of(seed: u64) -> Plan {
        Plan { seed, schedule: seed, only: None }
    }

    /// Draws world and steps.
    pub fn draw(&self) -> Scenario {
        let mut random = Random::new(mix(self.seed));
        let world = World::random(&mut random);
        let count = random.pick(&[60, 300, 300, 1200]);
        let is_taken = |number: &usize| {
            self.only.as_ref().is_none_or(|only| only.iter().any(|part| part.contains(number)))
        };
        let task = |task: usize| {
            let mut source = StepSource::new(&world.habits, random.fork());
            let steps = (0..count).map(|n| (task * count + n, source.next()));
            steps.filter(|(number, _)| is_taken(number)).collect()
        };
        let tasks = (0..world.tasks).map(task).collect();
        Scenario { world, tasks }
    }

    /// Runs it in this process, which ends where the engine fails. Returns the number of steps, and
    /// the trace.
    pub fn run(&self) -> (usize, Arc<Trace>) {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |why| {
            hook(why);
            abort();
        }));
        let (trace, scenario) = (Arc::new(Trace::default()), Arc::new(self.draw()));
        let steps = scenario.tasks.iter().map(Vec::len).sum();
        let mut config = shuttle::Config::new();
        config.stack_size = 2 << 20;
        config.failure_persistence = shuttle::FailurePersistence::None;
        config.silence_warnings = true;
        config.max_steps =
            shuttle::MaxSteps::FailAfter((steps + scenario.world.pages) * POINTS_PER_STEP);
        let scheduler = SeededScheduler::new(self.schedule, &trace);
        shuttle::Runner::new(scheduler, config).run(move || play(&scenario));
        (steps, trace)
    }
}

fn play(scenario: &Arc<Scenario>) {
    become_engine_task();
    let machine = Arc::new(Machine::new(&scenario.world));
    let oracle = Arc::new(Oracle::new(scenario.world.pages));
    let engine = machine.start();
    let begin = |number: usize| {
        let (scenario, machine, oracle) = (scenario.clone(), machine.clone(), oracle.clone());
        shuttle::thread::spawn(move || {
            let task = ProgramTask { number, machine: &machine, oracle: &oracle };
            scenario.tasks[number].iter().for_each(|(_, step)| task.take(step));
        })
    };
    let tasks: Vec<_> = (0..scenario.tasks.len()).map(begin).collect();
    tasks.into_iter().for_each(|task| task.join().expect("a task ends"));
    machine.troubles.clear();
    let all = 0..scenario.world.pages;
    let reader = ProgramTask { number: 63, machine: &machine, oracle: &oracle };
    reader.take(&Step::ReadAll(all, true));
    machine.stop(engine);
    assert_sound(&machine);
}

/// Checks the engine while no task works.
fn assert_sound(machine: &Machine) {
    if let Err(why) = machine.pager.check() {
        panic!("{why}");
    }
    assert_eq!(machine.pager.stats().check_sums(), Ok(()));
}

/// Returns one line about a run that has ended well.
pub fn report(steps: usize, trace: &Trace) -> String {
    let (points, digest) = (trace.points.load(Relaxed), trace.digest.load(Relaxed));
    format!("{steps} steps, {points} points, digest {digest:016x}")
}
