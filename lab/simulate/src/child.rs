//! Runs in processes of their own. A failure ends only its process, and all runs begin with the same
//! memory.
use crate::ranges_text;
use crate::run::Plan;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Asks for the persona of this process, and changes nothing.
const ASK: libc::c_ulong = 0xffff_ffff;

/// Makes the kernel place memory at the same addresses in every run, because keys of pages are
/// addresses: executes this program anew with fixed ones, where the kernel allows it.
pub fn fix_addresses() {
    const FIXED: i32 = libc::ADDR_NO_RANDOMIZE;
    // SAFETY: it reads a number.
    let persona = unsafe { libc::personality(ASK) };
    if persona & FIXED != 0 {
        return;
    }
    // SAFETY: it changes where programs that this process executes have their memory, and nothing of
    // the process itself.
    let is_refused = unsafe { libc::personality((persona | FIXED) as libc::c_ulong) } == -1;
    // SAFETY: it reads a number.
    if is_refused || unsafe { libc::personality(ASK) } & FIXED == 0 {
        eprintln!(
            "The kernel doesn't allow fixed addresses: a seed may not repeat its run exactly."
        );
        return;
    }
    let program = std::env::current_exe().expect("the path of this program");
    let why = Command::new(program).args(std::env::args_os().skip(1)).exec();
    panic!("Starting this program anew failed: {why}");
}

/// The end of a run.
pub struct Outcome {
    /// Steps that were taken, if it ended well.
    pub steps: Option<u64>,
    /// Its output.
    pub text: String,
}

impl Plan {
    /// Returns the arguments that run it.
    pub fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["run".to_string(), self.seed.to_string()];
        if self.schedule != self.seed {
            arguments.push(format!("--schedule={}", self.schedule));
        }
        if let Some(only) = &self.only {
            let numbers: Vec<usize> = only.iter().cloned().flatten().collect();
            arguments.push(format!("--only={}", ranges_text(&numbers)));
        }
        arguments
    }

    /// Runs it in a child.
    pub fn run_in_child(&self) -> Outcome {
        let program = std::env::current_exe().expect("the path of this program");
        let mut command = Command::new(program);
        command.args(self.arguments()).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
        let output = command.output().expect("a child");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let steps = text.split(' ').next().and_then(|word| word.parse().ok());
        let steps = steps.filter(|_| output.status.success());
        let text = text + &String::from_utf8_lossy(&output.stderr);
        Outcome { steps, text }
    }
}

/// Runs seeds until one fails, and returns its plan.
pub fn hunt(from: Option<u64>, seeds: Option<u64>, hours: f64, jobs: usize) -> Option<Plan> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970");
    let first = from.unwrap_or(since_epoch.as_nanos() as u64 % 1_000_000_000_000);
    let (next, steps, is_over) = (AtomicU64::new(first), AtomicU64::new(0), AtomicBool::new(false));
    let found: Mutex<Option<(Plan, String)>> = Mutex::new(None);
    let start = Instant::now();
    let is_due = |seed: u64| match seeds {
        Some(count) => seed - first < count,
        None => start.elapsed().as_secs_f64() < hours * 3600.0,
    };
    let work = || {
        while !is_over.load(Relaxed) {
            let plan = Plan::of(next.fetch_add(1, Relaxed));
            if !is_due(plan.seed) {
                return;
            }
            if (plan.seed - first) % 1000 == 999 {
                let (seconds, steps) = (start.elapsed().as_secs(), steps.load(Relaxed));
                println!("{} runs, {steps} steps, {seconds} s", plan.seed - first);
            }
            let outcome = plan.run_in_child();
            steps.fetch_add(outcome.steps.unwrap_or(0), Relaxed);
            if outcome.steps.is_none() && !is_over.swap(true, Relaxed) {
                *found.lock().expect("no thread panics") = Some((plan, outcome.text));
            }
        }
    };
    std::thread::scope(|scope| (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work)));
    let (seconds, steps) = (start.elapsed().as_secs_f64(), steps.load(Relaxed));
    let runs = next.load(Relaxed).saturating_sub(first);
    println!(
        "Runs: {runs} from seed {first}; steps: {steps} in {seconds:.1} s, {:.0} a minute",
        steps as f64 / seconds * 60.0
    );
    let (plan, text) = found.into_inner().expect("no thread panics")?;
    println!("Seed {} fails:\n{text}", plan.seed);
    println!("Repeat it: memfold-simulate {}", plan.arguments().join(" "));
    Some(plan)
}
