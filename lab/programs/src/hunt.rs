//! Draws programs and runs each plainly and in every world, until one ends otherwise.
use crate::Options;
use crate::draw::draw;
use crate::execute::{Compiled, End};
use crate::program::Program;
use crate::world::{Place, WORLDS, World, more_flags};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

/// A program that ended otherwise in a world.
pub struct Failure {
    /// The program.
    pub program: Program,
    /// The world; none if it already fails plainly, by a defect of this generator.
    pub world: Option<&'static World>,
    /// How it ended plainly.
    pub plain: End,
    /// How it ended in the world.
    pub end: End,
}

impl Failure {
    /// Says what failed, in a line.
    pub fn summary(&self) -> String {
        let world = self.world.map_or("plainly", |world| world.name);
        let end = if self.world.is_some() { &self.end } else { &self.plain };
        format!("seed {} in {world}: {}", self.program.seed, end.summary())
    }
}

/// Returns whether a run ended as the plain one did.
pub fn is_right(plain: &End, end: &End) -> bool {
    end.status == plain.status && end.stdout == plain.stdout
}

/// Programs, seconds and folded bytes of a world.
#[derive(Default)]
struct Figures {
    runs: u64,
    seconds: f64,
    folded_bytes: u64,
    loads: u64,
}

/// Runs programs until one fails, or all are run.
pub struct Hunt<'a> {
    options: &'a Options,
    place: &'a Place,
    worlds: Vec<&'static World>,
    next: AtomicU64,
    programs: AtomicU64,
    is_over: AtomicBool,
    figures: Mutex<BTreeMap<&'static str, Figures>>,
    found: Mutex<Vec<Failure>>,
}

impl<'a> Hunt<'a> {
    /// Prepares a hunt in those worlds of the options which this machine has.
    pub fn new(options: &'a Options, place: &'a Place) -> Hunt<'a> {
        let is_asked = |world: &&World| {
            options.world.is_empty() || options.world.iter().any(|name| name == world.name)
        };
        let is_there = |world: &&World| match place.refuses(world) {
            None => true,
            Some(why) => {
                println!("World {} is left out: {why}", world.name);
                false
            }
        };
        let worlds: Vec<_> = WORLDS.iter().filter(is_asked).filter(is_there).collect();
        assert!(!worlds.is_empty(), "no world is left of {:?}", options.world);
        Hunt {
            options,
            place,
            worlds,
            next: AtomicU64::new(options.first_seed()),
            programs: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            figures: Mutex::default(),
            found: Mutex::default(),
        }
    }

    /// Runs it. Returns what failed, and whether anything was folded.
    pub fn run(self) -> (Vec<Failure>, bool) {
        let start = Instant::now();
        println!("Seeds from {}", self.options.first_seed());
        std::thread::scope(|scope| {
            let loads: Vec<_> =
                (0..self.options.load).map(|_| scope.spawn(|| self.burn())).collect();
            let jobs: Vec<_> =
                (0..self.options.jobs.max(1)).map(|_| scope.spawn(|| self.work(start))).collect();
            jobs.into_iter().for_each(|job| job.join().expect("no job panics"));
            self.is_over.store(true, Relaxed);
            loads.into_iter().for_each(|load| load.join().expect("no load panics"));
        });
        let seconds = start.elapsed().as_secs();
        println!("{} programs in {seconds} s", self.programs.into_inner());
        let figures = self.figures.into_inner().expect("no job panics");
        for (world, figures) in &figures {
            let Figures { runs, seconds, folded_bytes, loads } = figures;
            let mib = folded_bytes >> 20;
            println!("{world}: {runs} runs, {seconds:.0} s, {mib} MiB folded, {loads} loads");
        }
        let has_folded = figures.values().any(|figures| figures.folded_bytes > 0);
        (self.found.into_inner().expect("no job panics"), has_folded)
    }

    /// Takes a CPU until the hunt is over.
    fn burn(&self) {
        while !self.is_over.load(Relaxed) {
            std::hint::spin_loop();
        }
    }

    fn is_due(&self, seed: u64, start: Instant) -> bool {
        let elapsed = start.elapsed().as_secs_f64();
        match self.options.seeds {
            Some(count) => seed - self.options.first_seed() < count,
            None => elapsed < self.options.minutes * 60.0,
        }
    }

    fn work(&self, start: Instant) {
        while !self.is_over.load(Relaxed) {
            let seed = self.next.fetch_add(1, Relaxed);
            if !self.is_due(seed, start) {
                return;
            }
            let failure = self.try_seed(seed);
            self.programs.fetch_add(1, Relaxed);
            if let Some(failure) = failure {
                println!("FAILED: {}", failure.summary());
                crate::keep(self.options, self.place, &failure, "whole");
                self.is_over.store(!self.options.all, Relaxed);
                self.found.lock().expect("no job panics").push(failure);
            }
        }
    }

    /// Runs a program in each world, or in the one whose turn it is.
    fn try_seed(&self, seed: u64) -> Option<Failure> {
        let (program, hang) = (draw(seed), self.options.hang(true));
        let compiled = Compiled::new(&program);
        let plain = compiled.run_plainly(self.place, hang);
        if plain.status.and_then(|status| status.code()) != Some(0) {
            let end = End { status: None, stdout: String::new(), stderr: String::new() };
            return Some(Failure { program, world: None, plain, end });
        }
        let turn = seed as usize % self.worlds.len();
        let is_due = |n: usize| !self.options.by_turns || n == turn;
        let worlds = self.worlds.iter().enumerate().filter(|(n, _)| is_due(*n));
        for (_, world) in worlds {
            let (start, more) = (Instant::now(), more_flags(seed, world));
            let (end, stats) = compiled.run_in((self.place, world), more, hang);
            let mut all = self.figures.lock().expect("no job panics");
            let figures = all.entry(world.name).or_default();
            figures.runs += 1;
            figures.seconds += start.elapsed().as_secs_f64();
            figures.folded_bytes += stats["peak_folded_bytes"].as_u64().unwrap_or(0);
            figures.loads += stats["page_loads"].as_u64().unwrap_or(0);
            drop(all);
            if !is_right(&plain, &end) {
                return Some(Failure { program, world: Some(world), plain, end });
            }
            if self.is_over.load(Relaxed) {
                break;
            }
        }
        None
    }
}
