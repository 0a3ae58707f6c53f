//! Shrinks a failing run: leaves out steps as long as it still fails (delta debugging).
use crate::child::Outcome;
use crate::run::Plan;
use std::ops::Range;

/// Schedules that are tried for each list of steps, long ones and short ones. With fewer steps a
/// seed's schedule is another one.
const SCHEDULES: [u64; 2] = [3, 12];
/// Steps of a short list.
const SHORT: usize = 200;
/// Most runs.
const RUNS_MAX: usize = 1500;

/// What is being shrunk.
struct Shrinking {
    seed: u64,
    runs: usize,
    /// The last failing list of steps, its schedule, and how it ended.
    best: (Vec<usize>, u64, String),
}

impl Shrinking {
    /// Returns whether these steps alone fail in some schedule. Then they are the best.
    fn fails(&mut self, steps: &[usize]) -> bool {
        let first = self.best.1;
        let schedules = SCHEDULES[(steps.len() <= SHORT) as usize];
        for schedule in (0..schedules).map(|n| first.wrapping_add(n)) {
            if self.runs >= RUNS_MAX {
                return false;
            }
            self.runs += 1;
            let Outcome { steps: end, text } = plan(self.seed, schedule, steps).run_in_child();
            if end.is_none() {
                println!("{} steps fail, schedule {schedule}", steps.len());
                self.best = (steps.to_vec(), schedule, text);
                return true;
            }
        }
        false
    }

    /// Leaves out ever smaller parts.
    fn shrink(&mut self) {
        let mut part = self.best.0.len().div_ceil(2);
        while part > 0 && self.runs < RUNS_MAX {
            let (mut at, mut has_shrunk) = (0, false);
            while at < self.best.0.len() {
                let mut rest = self.best.0.clone();
                rest.drain(at..(at + part).min(rest.len()));
                match self.fails(&rest) {
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
}

fn plan(seed: u64, schedule: u64, steps: &[usize]) -> Plan {
    let one = |number: &usize| -> Range<usize> { *number..number + 1 };
    Plan { seed, schedule, only: Some(steps.iter().map(one).collect()) }
}

/// Removes steps from a failing plan while it still fails, and prints the remaining ones.
pub fn shrink(whole: Plan) {
    let scenario = whole.draw();
    let all = scenario.tasks.iter().flatten().map(|(number, _)| *number).collect();
    let best = (all, whole.schedule, String::new());
    let mut shrinking = Shrinking { seed: whole.seed, runs: 0, best };
    shrinking.shrink();
    let (steps, schedule, text) = &shrinking.best;
    let small = plan(whole.seed, *schedule, steps);
    println!("Shrunk to {} steps in {} runs:", steps.len(), shrinking.runs);
    let scenario = small.draw();
    println!("{:?}", scenario.world);
    for (task, steps) in scenario.tasks.iter().enumerate() {
        steps.iter().for_each(|(number, step)| println!("task {task}, step {number}: {step:?}"));
    }
    println!("{text}\nRepeat it: memfold-simulate {}", small.arguments().join(" "));
}
