//! One run of the walk: starts the child, follows its messages, watches its memory.

use crate::guard;
use crate::machine::kib_field;
use crate::message::Message;
use crate::workload::PhaseResult;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What one run measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Name of the peer.
    pub peer: String,
    /// Its phases, in order.
    pub phases: Vec<PhaseResult>,
    /// Wrong bytes in all phases and in the last comparison of everything.
    pub bytes_wrong: u64,
    /// The most anonymous memory that the process had mapped, in bytes, sampled ten times a second. memfold's frames,
    /// pool and index are in it; zram's store is not.
    pub resident_bytes_max: u64,
    /// Further figures by name: memfold's counters, or zram's, the cgroup's and the folio sizes the kernel used.
    pub counters: BTreeMap<String, u64>,
}

/// Runs `command`, which is or leads to a `walk-child`. `on_message` sees each message before the child is answered.
/// A child that says nothing for `silence_max` is killed, and that is an error.
pub fn run(
    peer: &str,
    command: &mut Command,
    silence_max: Duration,
    mut on_message: impl FnMut(&Message) -> anyhow::Result<()>,
) -> anyhow::Result<RunResult> {
    let child = guard::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
        .with_context(|| format!("starting {}", command.get_program().to_string_lossy()))?;
    let (walker, stop, resident_max) = (AtomicI32::new(0), AtomicBool::new(false), AtomicU64::new(0));
    let mut result = RunResult {
        peer: peer.into(),
        phases: Vec::new(),
        bytes_wrong: 0,
        resident_bytes_max: 0,
        counters: BTreeMap::new(),
    };
    std::thread::scope(|scope| {
        scope.spawn(|| watch_memory(&walker, &stop, &resident_max));
        let outcome = follow(child, silence_max, &mut result, |message| {
            if let Message::Ready { pid } = message {
                walker.store(*pid, Ordering::Relaxed);
            }
            on_message(message)
        });
        stop.store(true, Ordering::Relaxed);
        outcome
    })
    .with_context(|| format!("peer {peer}"))?;
    result.resident_bytes_max = resident_max.into_inner();
    Ok(result)
}

/// Follows the child to its end; it is dead and waited for afterwards, whatever happened.
fn follow(
    mut child: Child,
    silence_max: Duration,
    result: &mut RunResult,
    on_message: impl FnMut(&Message) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let talked = talk(&mut child, silence_max, result, on_message);
    let mut status = None;
    if talked.is_ok() {
        let start = Instant::now();
        while status.is_none() && start.elapsed() < silence_max {
            status = child.try_wait()?;
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let killed = guard::end_child(child)?;
    match (talked, status) {
        (Ok(()), Some(status)) if status.success() => Ok(()),
        (Ok(()), Some(status)) => bail!("ended with {status}"),
        (Ok(()), None) => bail!("did not end within {} s after its last message", silence_max.as_secs()),
        (Err(error), _) => Err(error.context(format!("the walk broke off ({killed})"))),
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
            Err(RecvTimeoutError::Timeout) => bail!("no sign of life for {} s", silence_max.as_secs()),
            Err(RecvTimeoutError::Disconnected) => bail!("ended before its last message"),
        };
        let message: Message = serde_json::from_str(&line).with_context(|| format!("unexpected output: {line}"))?;
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

/// The lines of a pipe, read by a thread that ends with the pipe.
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

fn watch_memory(pid: &AtomicI32, stop: &AtomicBool, resident_max: &AtomicU64) {
    while !stop.load(Ordering::Relaxed) {
        let pid = pid.load(Ordering::Relaxed);
        if pid != 0
            && let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status"))
        {
            resident_max.fetch_max(kib_field(&status, "RssAnon:").unwrap_or(0), Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
