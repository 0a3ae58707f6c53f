//! Simulation: the engine over a fake kernel, disk, remote store and clock, driven by a seeded
//! scheduler, with faults on purpose. An oracle holds every byte.
//!
//! A seed decides the settings, the steps of the program's tasks, the faults and the schedule. So a
//! failure is repeated by its seed. docs/testing.md tells how to hunt, replay and shrink.
mod schedule;
mod oracle;
mod step;
mod world;
mod task;
mod run;
mod child;
mod shrink;

use clap::{Parser, Subcommand};
use run::{Plan, report};
use std::ops::Range;
use std::process::ExitCode;

/// Simulates the engine of memfold.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs one seed in this process, which ends where the engine fails
    Run {
        /// The seed of settings and steps
        seed: u64,
        /// The seed of the schedule, if it is another one
        #[arg(long)]
        schedule: Option<u64>,
        /// The steps to take: numbers and ranges, as in 3,10-20
        #[arg(long, value_parser = parse_ranges)]
        only: Option<std::sync::Arc<Vec<Range<usize>>>>,
        /// Print the settings and the steps first
        #[arg(long)]
        show: bool,
    },
    /// Runs seeds, each in a process of its own, until one fails, and shrinks its steps
    Hunt {
        /// The first seed; a new one each time if it isn't given
        #[arg(long)]
        from: Option<u64>,
        /// How many seeds
        #[arg(long)]
        seeds: Option<u64>,
        /// How many hours, if there is no number of seeds
        #[arg(long, default_value_t = 1.0)]
        hours: f64,
        /// Processes at once
        #[arg(long, default_value_t = 2)]
        jobs: usize,
        /// Don't shrink
        #[arg(long)]
        whole: bool,
    },
    /// Shrinks the steps of a failing seed
    Shrink {
        /// The seed
        seed: u64,
    },
}

/// Reads ranges as [`ranges_text`] writes them.
fn parse_ranges(text: &str) -> Result<std::sync::Arc<Vec<Range<usize>>>, String> {
    let number = |text: &str| text.parse::<usize>().map_err(|why| format!("{text}: {why}"));
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => Ok(number(first)?..number(last)? + 1),
        None => number(part).map(|one| one..one + 1),
    };
    let parts = text.split(',').filter(|part| !part.is_empty());
    parts.map(range).collect::<Result<Vec<_>, _>>().map(std::sync::Arc::new)
}

/// Writes step numbers in ascending order as ranges.
fn ranges_text(numbers: &[usize]) -> String {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some(last) if last.end == *number => last.end += 1,
            _ => ranges.push(*number..number + 1),
        }
    }
    let text = |range: &Range<usize>| match range.len() {
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    };
    ranges.iter().map(text).collect::<Vec<_>>().join(",")
}

fn main() -> ExitCode {
    child::fix_addresses();
    match Arguments::parse().command {
        Command::Run { seed, schedule, only, show } => {
            let only = only.map(|only| only.to_vec());
            let plan = Plan { seed, schedule: schedule.unwrap_or(seed), only };
            if show {
                let scenario = plan.draw();
                println!("{:?}", scenario.world);
                for (task, steps) in scenario.tasks.iter().enumerate() {
                    steps.iter().for_each(|(number, step)| println!("{task} {number} {step:?}"));
                }
            }
            let (steps, trace) = plan.run();
            println!("{}", report(steps, &trace));
            ExitCode::SUCCESS
        }
        Command::Hunt { from, seeds, hours, jobs, whole } => {
            let found = child::hunt(from, seeds, hours, jobs);
            match (found, whole) {
                (None, _) => ExitCode::SUCCESS,
                (Some(_), true) => ExitCode::FAILURE,
                (Some(plan), false) => {
                    shrink::shrink(plan);
                    ExitCode::FAILURE
                }
            }
        }
        Command::Shrink { seed } => {
            shrink::shrink(Plan::of(seed));
            ExitCode::SUCCESS
        }
    }
}
