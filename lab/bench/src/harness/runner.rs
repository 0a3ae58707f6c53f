//! One run of the walk: starts the child, follows its messages, watches its memory.

use crate::harness::message::Message;
use crate::harness::workload::{Phase, PhaseResult};
use crate::host::guard;
use crate::host::machine::kib_field;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The results of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Name of the peer.
    pub peer: String,
    /// The completed phases, in order.
    pub phases: Vec<PhaseResult>,
    /// Wrong bytes in all phases and in the final comparison.
    pub bytes_wrong: u64,
    /// Peak anonymous memory of the process in bytes, sampled ten times a second. It includes
    /// memfold's frames, pool and index, but not zram's store.
    pub resident_bytes_max: u64,
    /// That memory over time: seconds since the first sample, and bytes.
    #[serde(default)]
    pub memory: Vec<(f64, u64)>,
    /// Further figures by name: memfold's counters, or those of zram, the cgroup and the kernel's
    /// folio sizes.
    pub counters: BTreeMap<String, u64>,
    /// Why the run failed before its end, if it did.
    pub broke_off: Option<String>,
}

/// Runs `command`, which is or starts a `walk-child`. `on_message` gets each message before the
/// child is answered. A child that sends nothing for `silence_max` is killed. The results up to the
/// end of the run count, however it ends.
pub fn run(
    peer: &str,
    command: &mut Command,
    silence_max: Duration,
    mut on_message: impl FnMut(&Message) -> anyhow::Result<()>,
) -> anyhow::Result<RunResult> {
    let child = guard::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
        .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
    let (walker, stop) = (AtomicI32::new(0), AtomicBool::new(false));
    let mut result = RunResult {
        peer: peer.into(),
        phases: Vec::new(),
        bytes_wrong: 0,
        resident_bytes_max: 0,
        memory: Vec::new(),
        counters: BTreeMap::new(),
        broke_off: None,
    };
    let mut soak = None;
    let samples = std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch_memory(&walker, &stop));
        let outcome = follow(child, silence_max, &mut result, |message| {
            match message {
                Message::Ready { pid } => walker.store(*pid, Ordering::Relaxed),
                Message::Phase(phase) if phase.phase == Phase::Soak => {
                    let end = Instant::now();
                    soak = Some((end - Duration::from_secs_f64(phase.seconds), end));
                }
                _ => {}
            }
            on_message(message)
        });
        stop.store(true, Ordering::Relaxed);
        result.broke_off = outcome.err().map(|error| format!("{error:#}"));
        watch.join().expect("the watching thread only reads")
    });
    result.resident_bytes_max = samples.iter().map(|sample| sample.1).max().unwrap_or(0);
    result.memory = thinned(&samples);
    if let Some((start, end)) = soak {
        // After a warm-up of a tenth, the first fifth is compared with the last.
        let span = end - start;
        for (name, from, to) in [("soak_bytes_early", 0.1, 0.3), ("soak_bytes_late", 0.8, 1.0)] {
            let window = start + span.mul_f64(from)..start + span.mul_f64(to);
            let most =
                samples.iter().filter(|(at, _)| window.contains(at)).map(|sample| sample.1).max();
            result.counters.insert(name.into(), most.unwrap_or(0));
        }
    }
    Ok(result)
}

/// Returns about 200 of the samples, with times relative to the first.
fn thinned(samples: &[(Instant, u64)]) -> Vec<(f64, u64)> {
    let every = samples.len().div_ceil(200).max(1);
    let since = |at: Instant| (at - samples[0].0).as_secs_f64();
    samples.iter().step_by(every).map(|&(at, bytes)| (since(at), bytes)).collect()
}

/// Follows the child to its end. Afterwards it has ended and was waited for in any case.
fn follow(
    mut child: Child,
    silence_max: Duration,
    result: &mut RunResult,
    on_message: impl FnMut(&Message) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let outcome = talk(&mut child, silence_max, result, on_message);
    // A child that has sent all messages, or closed the pipe, ends without help. Any other child is
    // killed.
    let patience = if outcome.is_ok() { silence_max } else { Duration::from_secs(1) };
    let start = Instant::now();
    let mut status = child.try_wait()?;
    while status.is_none() && start.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(2));
        status = child.try_wait()?;
    }
    guard::end_child(child)?;
    match (outcome, status) {
        (Ok(()), Some(status)) if status.success() => Ok(()),
        (Ok(()), Some(status)) => bail!("ended with {status}"),
        (Ok(()), None) => {
            bail!("did not end within {} s after its last message", silence_max.as_secs())
        }
        (Err(error), Some(status)) => bail!("{error:#} ({status})"),
        (Err(error), None) => bail!("{error:#} (killed)"),
    }
}

fn talk(
    child: &mut Child,
    silence_max: Duration,
    result: &mut RunResult,
    mut on_message: impl FnMut(&Message) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut input = child.stdin.take().context("no pipe to the child")?;
    let lines = lines_of(child.stdout.take().context("no pipe from the child")?);
    loop {
        let line = match lines.recv_timeout(silence_max) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Timeout) => {
                bail!("no sign of life for {} s", silence_max.as_secs())
            }
            Err(RecvTimeoutError::Disconnected) => bail!("{}", next_step(result)),
        };
        let message: Message =
            serde_json::from_str(&line).with_context(|| format!("unexpected output: {line}"))?;
        on_message(&message)?;
        match message {
            Message::Ready { .. } => input.write_all(b"\n")?,
            Message::Phase(phase) => {
                result.bytes_wrong += phase.bytes_wrong;
                result.phases.push(phase);
            }
            Message::Done { bytes_wrong, counters } => {
                result.bytes_wrong += bytes_wrong;
                result.counters = counters;
                return Ok(());
            }
        }
    }
}

fn next_step(result: &RunResult) -> String {
    match result.phases.last() {
        None => "ended in its first phase".into(),
        Some(last) => format!("ended after phase {}", last.phase.name()),
    }
}

/// Returns the lines of a pipe. A thread reads them, and ends with the pipe.
fn lines_of(pipe: std::process::ChildStdout) -> Receiver<std::io::Result<String>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines() {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Samples the anonymous resident bytes of the process, ten times a second.
fn watch_memory(pid: &AtomicI32, stop: &AtomicBool) -> Vec<(Instant, u64)> {
    let mut samples = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let pid = pid.load(Ordering::Relaxed);
        if pid != 0
            && let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status"))
            && let Some(bytes) = kib_field(&status, "RssAnon:")
        {
            samples.push((Instant::now(), bytes));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    samples
}
