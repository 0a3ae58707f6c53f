//! Generated programs: small C programs of several threads and processes, which know each byte of
//! their memory. Each is run plainly and under `memfold run` in several worlds, and must end alike.
//!
//! A seed decides the program. docs/testing.md tells how to hunt, repeat and shrink.
mod program;
mod draw;
mod world;
mod execute;
mod hunt;
mod shrink;

use clap::{Args, Parser, Subcommand};
use execute::{Compiled, Hang};
use hunt::{Failure, Hunt};
use shrink::Shrinking;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use world::{Place, more_flags};

/// Runs generated programs with and without memfold.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Draws programs until one fails, and shrinks that
    Hunt(Options),
    /// Prints the program of a seed
    Show {
        /// The seed
        seed: u64,
    },
}

/// What a hunt does.
#[derive(Args)]
pub struct Options {
    /// The first seed; a new one each time if it isn't given
    #[arg(long)]
    from: Option<u64>,
    /// How many programs
    #[arg(long)]
    seeds: Option<u64>,
    /// How many minutes, if there is no number of programs
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Programs at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Busy threads beside
    #[arg(long, default_value_t = 0)]
    load: usize,
    /// Only these worlds
    #[arg(long)]
    world: Vec<String>,
    /// Run each program in one world, by turns, instead of in all
    #[arg(long)]
    by_turns: bool,
    /// Continue after a failure, and shrink nothing
    #[arg(long)]
    all: bool,
    /// Seconds after which a run hangs
    #[arg(long, default_value_t = 300)]
    hang: u64,
    /// Most minutes for shrinking
    #[arg(long, default_value_t = 10.0)]
    shrink: f64,
    /// Directory for programs that fail
    #[arg(long, default_value = "target/programs")]
    out: String,
    /// Directory of the built memfold
    #[arg(long, default_value = "target/release")]
    bin: PathBuf,
}

impl Options {
    fn hang(&self, shows_stacks: bool) -> Hang {
        Hang { after: Duration::from_secs(self.hang), shows_stacks }
    }

    /// Returns the first seed, the same for the whole hunt.
    fn first_seed(&self) -> u64 {
        static DRAWN: OnceLock<u64> = OnceLock::new();
        let since_epoch = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let drawn = || since_epoch().as_micros() as u64 % 1_000_000_000;
        self.from.unwrap_or_else(|| *DRAWN.get_or_init(drawn))
    }
}

/// Writes a failing program, how to run it, and how it ended to a directory of its own.
fn keep(options: &Options, place: &Place, failure: &Failure, name: &str) {
    let world = failure.world.map_or("plainly", |world| world.name);
    let directory = format!("{}/{}-{world}-{name}", options.out, failure.program.seed);
    let compiled = Compiled::new(&failure.program);
    compiled.keep(&directory);
    let command = match failure.world {
        Some(world) => {
            let more = more_flags(failure.program.seed, world);
            compiled.command_text((place, world), more)
        }
        None => "./program".to_string(),
    };
    let end = if failure.world.is_some() { &failure.end } else { &failure.plain };
    let text = format!(
        "{}\n\nCompile: gcc -O1 -pthread -o program program.c\nRun: {command}\n\n== stdout, plainly\n{}\n== stdout\n{}\n== stderr\n{}\n",
        failure.summary(),
        failure.plain.stdout,
        end.stdout,
        end.stderr
    );
    std::fs::write(format!("{directory}/failure.txt"), text).expect("a file");
    println!("Kept in {directory}: {} actions. Run: {command}", failure.program.len());
}

fn hunt(options: &Options) -> ExitCode {
    let place = Place::new(&options.bin);
    let (failures, has_folded) = Hunt::new(options, &place).run();
    if failures.is_empty() && !has_folded {
        println!("Nothing was folded, so nothing was tested.");
        return ExitCode::FAILURE;
    }
    let has_failed = !failures.is_empty();
    for mut failure in failures {
        let Some(world) = failure.world.filter(|_| !options.all) else { continue };
        let shrinking = Shrinking {
            place: &place,
            world,
            jobs: options.jobs,
            hang: options.hang(false),
            until: Instant::now() + Duration::from_secs_f64(options.shrink * 60.0),
        };
        if shrinking.shrink(&mut failure) {
            keep(options, &place, &failure, "small");
        }
        println!("Draw it again: memfold-programs hunt --from {} --seeds 1", failure.program.seed);
    }
    if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Hunt(options) => hunt(&options),
        Command::Show { seed } => {
            print!("{}", draw::draw(seed).source());
            ExitCode::SUCCESS
        }
    }
}
