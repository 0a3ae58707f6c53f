//! Reading the swap file in order, against fio on the same disk.

use crate::common::row::StoreRow;
use crate::common::size::show_size;
use crate::common::summary::{Spread, show};
use crate::corpus::file::{CorpusFile, PAGE};
use crate::corpus::page::{Pages, corpus_sums};
use crate::harness::region::{counters_of, folded};
use crate::host::guard;
use anyhow::{Context, bail};
use memfold_engine::Delivery;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The least share of fio's throughput.
const FIO_MIN: f64 = 0.8;
/// fio's requests.
const REQUEST: &str = "256k";

/// Reads `len` bytes of an unnamed file in `dir` with fio, O_DIRECT, one request at a time. Returns
/// MB/s.
fn fio(corpus: &CorpusFile, dir: &Path, len: usize) -> anyhow::Result<f64> {
    let flags = libc::O_TMPFILE | libc::O_CLOEXEC;
    let mut file =
        File::options().read(true).write(true).custom_flags(flags).mode(0o600).open(dir)?;
    for page in 0..len / PAGE {
        // SAFETY: a whole page of the corpus, which is mapped and never written.
        file.write_all(unsafe { std::slice::from_raw_parts(corpus.page(page as u64), PAGE) })?;
    }
    file.sync_all()?;
    // SAFETY: posix_fadvise takes only numbers; it drops pages that were just written back.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let mut command = Command::new("fio");
    command.args([
        "--name=read",
        "--rw=read",
        "--direct=1",
        "--ioengine=psync",
        "--readonly",
        "--output-format=json",
    ]);
    command.args([
        format!("--filename={name}"),
        format!("--bs={REQUEST}"),
        format!("--size={len}"),
    ]);
    let mut child =
        guard::spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()))?;
    let mut text = String::new();
    let outcome = child.stdout.take().context("no pipe")?.read_to_string(&mut text);
    guard::end_child(child)?;
    outcome?;
    let report: serde_json::Value = serde_json::from_str(&text).context("fio printed no JSON")?;
    match report["jobs"][0]["read"]["bw_bytes"].as_f64() {
        Some(rate) if report["jobs"][0]["error"] == 0 => Ok(rate / 1e6),
        _ => bail!("fio failed"),
    }
}

/// The results of reading a region in the swap file in order.
struct Reading {
    mb_s: f64,
    /// The share of bytes that came from the file.
    from_file: f64,
    /// Data bytes per byte in the file.
    ratio: f64,
    counters: BTreeMap<String, u64>,
}

fn reading(
    corpus: &CorpusFile,
    dir: &Path,
    len: usize,
    settings: &[&str],
) -> anyhow::Result<Reading> {
    let mut all: Vec<String> = settings.iter().map(|setting| setting.to_string()).collect();
    all.push(format!("swap={}", dir.display()));
    let (memory, region) = folded(len, Delivery::Thread, &all)?;
    let sums = corpus_sums(corpus);
    // SAFETY: the region is `len` bytes, page-aligned, and nothing else uses it.
    let mut pages = unsafe { Pages::new(region.as_ptr(), len / PAGE, 0, corpus, &sums) };
    (0..pages.len()).for_each(|i| pages.fill(i));
    let start = Instant::now();
    let get = |name: &str| counters_of(&memory).get(name).copied().unwrap_or(0);
    // Waits until no more data is evicted, and the pool has moved to the file as far as it does.
    let mut last = (0, 0);
    while start.elapsed().as_secs() < 20 {
        region.pageout(0..len);
        let now = (get("folded_bytes"), get("pool_bytes"));
        if now == last && now.0 == len as u64 {
            break;
        }
        last = now;
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let (before, in_file) = (get("pswpin"), get("swap_bytes"));
    let ratio = (get("pswpout") << 12) as f64 / in_file as f64;
    let start = Instant::now();
    (0..pages.len()).for_each(|i| pages.check_samples(i));
    let seconds = start.elapsed().as_secs_f64();
    let from_file = ((get("pswpin") - before) << 12) as f64 / len as f64;
    (0..pages.len()).for_each(|i| pages.check_whole(i));
    if pages.bytes_wrong > 0 {
        bail!("{} WRONG BYTES", pages.bytes_wrong);
    }
    Ok(Reading {
        mb_s: len as f64 / 1e6 / seconds,
        from_file,
        ratio,
        counters: counters_of(&memory),
    })
}

/// Measures reads of raw folios and of packed blocks against fio.
pub fn rows(corpus: &CorpusFile, dir: &Path, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let (len, rounds) = if quick { (256 << 20, 2) } else { (512 << 20, 5) };
    let label = "raw folios read in order, of fio's rate";
    let is_there = Command::new("fio")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|s| s.success());
    if !is_there {
        return Ok(vec![StoreRow::not_run(
            label,
            &format!(">= {FIO_MIN}"),
            "no fio here (apt-get install fio)",
        )]);
    }
    let kinds: [(&str, &[&str]); 3] = [
        ("raw folios", &["limit=128M", "codec=none"]),
        ("raw folios, no encryption", &["limit=128M", "codec=none", "swap-encrypt=off"]),
        ("lz4 blocks", &["limit=128M", "max-pool=16M"]),
    ];
    let (mut disk, mut ours) = (Vec::new(), [const { Vec::new() }; 3]);
    for _ in 0..rounds {
        disk.push(fio(corpus, dir, len)?);
        for ((name, settings), readings) in kinds.iter().zip(&mut ours) {
            readings.push(reading(corpus, dir, len, settings).with_context(|| name.to_string())?);
        }
    }
    let disk = Spread::of(disk).expect("a round");
    let mut rows = vec![StoreRow::plain(
        "fio, 256 KiB requests in order: MB/s",
        disk.median,
        format!("{} of {}, O_DIRECT, one at a time", disk.show(), show_size(len as u64)),
    )];
    for (i, ((name, _), readings)) in kinds.iter().zip(&ours).enumerate() {
        let speed =
            Spread::of(readings.iter().map(|r: &Reading| r.mb_s).collect()).expect("a round");
        let last = readings.last().expect("a round");
        let count = |name: &str| last.counters.get(name).copied().unwrap_or(0);
        let note = format!(
            "{} MB/s; {:.0}% from the file, {:.2} data bytes for each byte there; {} windows ahead, {} used",
            speed.show(),
            last.from_file * 100.0,
            last.ratio,
            count("readahead_windows"),
            count("readahead_hits"),
        );
        let label = format!("{name} read in order, of fio's rate");
        let figure = speed.median / disk.median;
        rows.push(match i {
            0 => StoreRow::at_least(&label, figure, FIO_MIN, note),
            2 => StoreRow::plain(
                &format!("{name} read in order, of fio's rate times their ratio"),
                figure / last.ratio,
                note,
            ),
            _ => StoreRow::plain(&label, figure, format!("{note}; {}", show(figure))),
        });
    }
    Ok(rows)
}
