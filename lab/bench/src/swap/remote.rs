//! The remote tier with a real redis-server on loopback: throughput to it and back, latency of one
//! fault, and memory of the service. There are no targets, because the server, the network and the
//! program's speed decide.

use crate::common::latency::Latency;
use crate::common::row::StoreRow;
use crate::common::size::show_size;
use crate::common::summary::show;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::{Pages, corpus_sums};
use crate::harness::region::counters_of;
use crate::host::guard::{self, GuardedDirectory};
use crate::host::machine::kib_field;
use crate::host::program::find;
use crate::swap::load::Load;
use anyhow::{Context, ensure};
use memfold_engine::{Delivery, Memory, Region};
use memfold_remote::{Service, StoreSettings};
use memfold_testkit::random::Sequence as Random;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::time::{Duration, Instant};

const FOLIO: usize = 64 << 10;
/// The time for which a read is retried.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The mover is idle when it has moved nothing for this long.
const REST: Duration = Duration::from_secs(2);
const LABELS: [&str; 6] = [
    "out to the remote store: MB/s",
    "in from the remote store, in order: MB/s",
    "a fault on a folio of 64K in the remote store: p50, us",
    "a fault on a folio of 64K in the remote store: p99, us",
    "a fault on a folio of 64K in the remote store: p99.9, us",
    "memory of memfold run with its service, at most: MiB",
];

/// A server on loopback. Dropping it ends the server.
struct Redis {
    child: Option<Child>,
    url: String,
}

impl Redis {
    fn start(program: &str, dir: &Path) -> anyhow::Result<Redis> {
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let mut command = Command::new(program);
        command
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
            .arg(dir);
        let child =
            guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()))?;
        let redis = Redis { child: Some(child), url: format!("redis://127.0.0.1:{port}") };
        let start = Instant::now();
        while !answers(port) {
            ensure!(start.elapsed() < TIMEOUT, "redis-server does not start");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(redis)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.child.take().map(guard::end_child);
    }
}

fn answers(port: u16) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).map(|()| answer)
    };
    ask().is_ok_and(|answer| &answer == b"+PONG")
}

/// A region whose data is in the remote store, except for a few percent.
struct Far {
    // The region first, because it must be dropped before its `Memory`.
    region: Region,
    memory: Memory,
    out_mb_s: f64,
    out_bytes: u64,
}

impl Far {
    /// Fills `len` bytes with incompressible folios and waits until the mover is idle.
    fn filled(
        load: &Load<'_>,
        pages: &mut Filler<'_>,
        redis: &Redis,
        socket: &str,
        more: &[&str],
    ) -> anyhow::Result<Far> {
        let len = load.size as usize;
        let builder = Memory::builder()
            .delivery(Delivery::Thread)
            .limit_bytes(load.limit)
            .remote_socket(socket);
        let builder = builder
            .set("codec", "none")
            .set("swap", load.dir.to_str().context("a path that is not text")?);
        let builder =
            builder.set("swap-size", &(load.size * 2).to_string()).set("remote", &redis.url);
        let builder = more
            .iter()
            .filter_map(|s| s.split_once('='))
            .fold(builder, |b, (name, value)| b.set(name, value));
        let fail = |error| anyhow::anyhow!("memfold: {error}");
        let memory = builder.set("remote-at", "1").build().map_err(fail)?;
        let region = memory.region(len).map_err(fail)?;
        let start = Instant::now();
        pages(&region, &mut |pages, i| pages.fill(i))?;
        region.pageout(0..len);
        let (mut bytes, mut at) = (0, Instant::now());
        while at.elapsed() < REST {
            // The mover updates the counter only when it becomes idle.
            let now = count(&memory, "remote_bytes");
            (bytes, at) = if now > bytes { (now, Instant::now()) } else { (bytes, at) };
            std::thread::sleep(Duration::from_millis(5));
        }
        let out_mb_s = bytes as f64 / 1e6 / (at - start).as_secs_f64();
        let (file, failures) = (count(&memory, "swap_bytes"), count(&memory, "remote_failed"));
        ensure!(
            bytes > load.size / 2 && failures == 0,
            "only {} went to the store, {} is in the file, {failures} requests failed",
            show_size(bytes),
            show_size(file)
        );
        Ok(Far { region, memory, out_mb_s, out_bytes: bytes })
    }
}

/// A function that is called for each page of a region.
type Filler<'a> =
    dyn FnMut(&Region, &mut dyn FnMut(&mut Pages<'_>, usize)) -> anyhow::Result<()> + 'a;

fn count(memory: &Memory, name: &str) -> u64 {
    counters_of(memory).get(name).copied().unwrap_or(0)
}

/// Returns the rows, or why there are none.
pub fn rows(load: &Load<'_>, corpus: &CorpusFile) -> anyhow::Result<Vec<StoreRow>> {
    let program = match find("redis-server", "redis-server") {
        Ok(program) => program,
        Err(why) => {
            return Ok(LABELS
                .iter()
                .map(|label| StoreRow::not_run(label, "", &why.to_string()))
                .collect());
        }
    };
    let scratch = GuardedDirectory::new("remote")?;
    let redis = Redis::start(&program, scratch.path())?;
    let socket = scratch.path().join("socket");
    let settings = StoreSettings::parse(&redis.url, TIMEOUT).map_err(anyhow::Error::msg)?;
    let service = Service::start(settings, &socket).map_err(anyhow::Error::msg)?;
    let socket = socket.to_str().context("a path that is not text")?;
    let sums = corpus_sums(corpus);
    let mut each = |region: &Region, work: &mut dyn FnMut(&mut Pages<'_>, usize)| {
        // SAFETY: the pages lie in the region, page-aligned, and nothing else uses them.
        let mut pages =
            unsafe { Pages::new(region.as_ptr(), region.len() / PAGE, 0, corpus, &sums) };
        (0..pages.len()).for_each(|i| work(&mut pages, i));
        ensure!(pages.bytes_wrong == 0, "{} WRONG BYTES", pages.bytes_wrong);
        Ok(())
    };
    let mut rows = in_order(load, &mut each, &redis, socket)?;
    rows.extend(single_faults(load, &mut each, &redis, socket)?);
    drop(service);
    rows.push(service_memory(load, &redis)?);
    Ok(rows)
}

fn in_order(
    load: &Load<'_>,
    each: &mut Filler<'_>,
    redis: &Redis,
    socket: &str,
) -> anyhow::Result<Vec<StoreRow>> {
    let far = Far::filled(load, each, redis, socket, &[])?;
    let before = count(&far.memory, "remote_in");
    let start = Instant::now();
    each(&far.region, &mut |pages, i| pages.check_samples(i))?;
    let seconds = start.elapsed().as_secs_f64();
    let back = (count(&far.memory, "remote_in") - before) << 12;
    each(&far.region, &mut |pages, i| pages.check_whole(i))?;
    let out = format!(
        "{} of {} filled in {} of memory",
        show_size(far.out_bytes),
        show_size(load.size),
        show_size(load.limit)
    );
    let note = format!(
        "{:.0}% of {} from the store, the rest from the file",
        back as f64 * 100.0 / load.size as f64,
        show_size(load.size)
    );
    Ok(vec![
        StoreRow::plain(LABELS[0], far.out_mb_s, out),
        StoreRow::plain(LABELS[1], load.size as f64 / 1e6 / seconds, note),
    ])
}

fn single_faults(
    load: &Load<'_>,
    each: &mut Filler<'_>,
    redis: &Redis,
    socket: &str,
) -> anyhow::Result<Vec<StoreRow>> {
    let load = Load { size: load.size / 2, ..load.clone() };
    let far =
        Far::filled(&load, each, redis, socket, &["folio=64K", "block=64K", "readahead=off"])?;
    let count_of = load.size as usize / FOLIO;
    let mut folios: Vec<usize> = (0..count_of).collect();
    Random::new(1).shuffle(&mut folios);
    let before = count(&far.memory, "remote_in");
    let mut latency = Latency::default();
    for folio in folios {
        let start = Instant::now();
        // SAFETY: the byte lies in the region.
        unsafe { far.region.as_ptr().add(folio * FOLIO).read_volatile() };
        latency.add(start.elapsed());
    }
    let back = (count(&far.memory, "remote_in") - before) << 12;
    each(&far.region, &mut |pages, i| pages.check_whole(i))?;
    let share = back as f64 * 100.0 / load.size as f64;
    let note = format!(
        "{count_of} folios at random, {share:.0}% from the store; worst {}",
        show(latency.max_us())
    );
    let quantiles = [0.5, 0.99, 0.999].iter().zip(&LABELS[2..5]);
    let rows =
        quantiles.map(|(q, label)| StoreRow::plain(label, latency.quantile_us(*q), note.clone()));
    Ok(rows.collect())
}

/// Runs a program under `memfold run --remote`, and returns the peak of anonymous memory of the
/// command and its service.
fn service_memory(load: &Load<'_>, redis: &Redis) -> anyhow::Result<StoreRow> {
    let (runner, stop) = (AtomicI32::new(0), AtomicBool::new(false));
    let status =
        |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let (result, most) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !stop.load(Relaxed) {
                let runner = runner.load(Relaxed);
                let held_kib = |pid: i32| kib_field(&status(pid), "RssAnon:").unwrap_or(0);
                most = most.max(held_kib(runner) + service_of(runner).map_or(0, held_kib));
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        let size = (load.size / 8).to_string();
        let flags = ["--swap-size", &size, "--remote-at", "50", "--remote", &redis.url];
        let result = load.under_run(&flags, |pid| {
            let parent = status(pid)
                .lines()
                .find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok());
            runner.store(parent.unwrap_or(0), Relaxed);
        });
        stop.store(true, Relaxed);
        (result, watch.join().expect("it only reads"))
    });
    let result = result?;
    let pages_of = |name: &str| show_size(result.counters.get(name).copied().unwrap_or(0) << 12);
    let note = format!(
        "{} out and {} back for {} threads",
        pages_of("remote_out"),
        pages_of("remote_in"),
        load.threads
    );
    Ok(StoreRow::plain(LABELS[5], most as f64 / (1 << 20) as f64, note))
}

/// Returns the PID of a run's service: the child with that name.
fn service_of(runner: i32) -> Option<i32> {
    let processes = std::fs::read_dir("/proc").ok()?.flatten();
    let start = format!(" (memfold-remote) S {runner} ");
    let is_it = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(&start))
    };
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it)
}
