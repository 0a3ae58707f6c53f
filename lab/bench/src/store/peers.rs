//! `memfold bench peers`: other kinds of compressed memory with the same data: nbdkit's memory disk
//! and python-blosc2.

use crate::common::row::StoreRow;
use crate::common::summary::Spread;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::harness::brief::{BriefArgs, BriefFindings, brief};
use crate::host::guard;
use crate::host::machine::kib_field;
use anyhow::{Context, bail, ensure};
use memfold_engine::Memory;
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Measures, prints and returns the exit status.
pub fn peers(args: BriefArgs) -> anyhow::Result<i32> {
    brief("peers", &args, |corpus, _, quick| measure(corpus, if quick { (2, 2) } else { (8, 3) }))
}

/// One pass of one peer.
struct Pass {
    out_mb_s: f64,
    in_mb_s: f64,
    held_bytes: u64,
}

type Run = dyn Fn(&Data) -> anyhow::Result<Pass>;

/// A peer: its name, and the function that writes and reads the data.
struct Other {
    name: String,
    run: Box<Run>,
}

/// The corpus, repeated a few times, as a file in memory. Dropping it removes it.
struct Data<'c> {
    dir: PathBuf,
    bytes: usize,
    corpus: &'c CorpusFile,
}

impl Data<'_> {
    fn new(corpus: &CorpusFile, times: usize) -> anyhow::Result<Data<'_>> {
        let dir = Path::new("/dev/shm").join(format!("memfold-peers-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        let data = Data { dir, bytes: corpus.pages() * PAGE * times, corpus };
        let mut file = File::create(data.file())?;
        for page in 0..(corpus.pages() * times) as u64 {
            // SAFETY: a whole page of the corpus, which is mapped and never written.
            file.write_all(unsafe { std::slice::from_raw_parts(corpus.page(page), PAGE) })?;
        }
        Ok(data)
    }

    fn file(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn mb_s(&self, since: Instant) -> f64 {
        self.bytes as f64 / 1e6 / since.elapsed().as_secs_f64()
    }
}

impl Drop for Data<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn measure(corpus: &CorpusFile, (times, rounds): (usize, usize)) -> anyhow::Result<BriefFindings> {
    let data = Data::new(corpus, times)?;
    let mut findings = BriefFindings { rows: Vec::new(), name: "peers", raw: Vec::new() };
    let mut others = Vec::new();
    for codec in ["lz4", "zstd"] {
        let name = format!("memfold {codec}, blocks of 16K");
        others.push(Other { name, run: Box::new(move |data| memfold(data, codec)) });
    }
    match version("nbdkit", &["--version"])
        .and_then(|nbdkit| Ok((nbdkit, version("nbdcopy", &["--version"])?)))
    {
        Ok((nbdkit, _)) => {
            for allocator in ["sparse", "malloc", "zstd"] {
                let name = format!("{nbdkit} memory, {allocator}");
                others.push(Other {
                    name,
                    run: Box::new(move |data| nbdkit_memory(data, allocator)),
                });
            }
        }
        Err(why) => findings.rows.push(StoreRow::not_run("nbdkit memory", "", &format!("{why:#}"))),
    }
    match version("python3", &["-c", "import numpy, blosc2; print('blosc2', blosc2.__version__)"]) {
        Ok(blosc) => {
            for codec in ["LZ4", "ZSTD"] {
                let name = format!("{blosc} array, {}", codec.to_lowercase());
                others.push(Other { name, run: Box::new(move |data| blosc2(data, codec)) });
            }
        }
        Err(why) => findings.rows.push(StoreRow::not_run("blosc2 array", "", &format!("{why:#}"))),
    }
    let mut passes: Vec<Vec<Pass>> = others.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (other, passes) in others.iter().zip(&mut passes) {
            passes.push((other.run)(&data).with_context(|| other.name.clone())?);
        }
    }
    for (other, passes) in others.iter().zip(&passes) {
        let spread = |of: &dyn Fn(&Pass) -> f64| Spread::of(passes.iter().map(of).collect());
        let ratio = spread(&|pass| data.bytes as f64 / pass.held_bytes as f64);
        let (out, back) = (spread(&|pass| pass.out_mb_s), spread(&|pass| pass.in_mb_s));
        let (Some(ratio), Some(out), Some(back)) = (ratio, out, back) else { continue };
        let held_mib = passes.last().map_or(0, |pass| pass.held_bytes) as f64 / 1048576.0;
        let note = format!(
            "held {held_mib:.1} of {} MiB; {} MB/s out, {} in",
            data.bytes >> 20,
            out.show(),
            back.show()
        );
        findings.rows.push(StoreRow::plain(
            &format!("{}: data for each byte held", other.name),
            ratio.median,
            note,
        ));
        findings
            .raw
            .push(json!({ "peer": other.name, "ratio": ratio, "out_mb_s": out, "in_mb_s": back }));
    }
    Ok(findings)
}

/// Returns the first line that a program prints with these arguments.
fn version(program: &str, args: &[&str]) -> anyhow::Result<String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .with_context(|| format!("{program} is not installed"))?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or("it failed")
    );
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .next()
        .unwrap_or_default()
        .trim()
        .to_string())
}

/// Writes a region, folds all of it, and reads it again.
fn memfold(data: &Data, codec: &str) -> anyhow::Result<Pass> {
    let problem = |error: memfold_engine::Error| anyhow::anyhow!("memfold: {error}");
    let resident_bytes = 2 * data.bytes as u64 + (64 << 20);
    let memory =
        Memory::builder().resident_bytes(resident_bytes).codec(codec).set("clean", "0").build();
    let memory = memory.map_err(problem)?;
    let region = memory.region(data.bytes).map_err(problem)?;
    let page = |number: usize| region.as_ptr().wrapping_add(number * PAGE);
    let start = Instant::now();
    for number in 0..data.bytes / PAGE {
        // SAFETY: the page lies in the region, which only this thread uses; a corpus page lies
        // elsewhere.
        unsafe {
            std::ptr::copy_nonoverlapping(data.corpus.page(number as u64), page(number), PAGE)
        };
        // Folds memory as it is written, 2 MiB at a time, as a disk would receive it.
        if (number + 1).is_multiple_of(512) {
            region.pageout((number - 511) * PAGE..(number + 1) * PAGE);
        }
    }
    while memory.stats().folded_bytes.load(Relaxed) < data.bytes as u64 {
        region.pageout(0..data.bytes);
    }
    let out_mb_s = data.mb_s(start);
    let held_bytes =
        memory.stats().pool_bytes.load(Relaxed) + memory.stats().index_bytes.load(Relaxed);
    let start = Instant::now();
    // SAFETY: both are readable for a page; every byte is read and compared.
    let is_same = |number| unsafe {
        libc::memcmp(page(number).cast(), data.corpus.page(number as u64).cast(), PAGE) == 0
    };
    let right = (0..data.bytes / PAGE).all(is_same);
    let in_mb_s = data.mb_s(start);
    ensure!(right, "a page came back wrong");
    Ok(Pass { out_mb_s, in_mb_s, held_bytes })
}

/// Runs nbdkit as a disk in memory, over a socket: copies to it, copies from it, and compares.
fn nbdkit_memory(data: &Data, allocator: &str) -> anyhow::Result<Pass> {
    let socket = data.dir.join("socket");
    let _ = fs::remove_file(&socket);
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(&socket).args(["memory", &data.bytes.to_string()]);
    command.arg(format!("allocator={allocator}")).stdin(Stdio::null()).stdout(Stdio::null());
    let child = guard::spawn(&mut command).context("starting nbdkit")?;
    let pass = copy_and_compare(data, &socket, child.id());
    guard::end_child(child)?;
    pass
}

fn copy_and_compare(data: &Data, socket: &Path, pid: u32) -> anyhow::Result<Pass> {
    let start = Instant::now();
    while !socket.exists() {
        ensure!(start.elapsed() < Duration::from_secs(10), "nbdkit did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    let held_kib = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        kib_field(&status, "RssAnon:").context("nbdkit has ended")
    };
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let (file, copy) = (data.file().display().to_string(), data.dir.join("copy"));
    let start = Instant::now();
    nbdcopy(&[&file, &uri])?;
    let out_mb_s = data.mb_s(start);
    // All of its memory, because one allocator allocates before it is written to.
    let held_bytes = held_kib()?;
    let start = Instant::now();
    nbdcopy(&[&uri, "null:"])?;
    let in_mb_s = data.mb_s(start);
    nbdcopy(&[&uri, &copy.display().to_string()])?;
    let is_same =
        Command::new("cmp").arg(&file).arg(&copy).stdout(Stdio::null()).status()?.success();
    fs::remove_file(&copy)?;
    ensure!(is_same, "the disk gave other bytes back");
    Ok(Pass { out_mb_s, in_mb_s, held_bytes })
}

fn nbdcopy(args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("nbdcopy").args(args).output().context("starting nbdcopy")?;
    match output.status.success() {
        true => Ok(()),
        false => bail!(
            "nbdcopy: {}",
            String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or("it failed")
        ),
    }
}

/// Makes an array with chunks of 2 MiB and blocks of 16 KiB, compressed and read on all cores.
fn blosc2(data: &Data, codec: &str) -> anyhow::Result<Pass> {
    let output = Command::new("python3")
        .args(["-c", BLOSC, &data.file().display().to_string(), codec])
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", errors.lines().last().unwrap_or("it failed"));
    let text = String::from_utf8(output.stdout)?;
    let figures: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [out_s, in_s, held_bytes] = figures[..] else { bail!("it said '{}'", text.trim()) };
    let mb = data.bytes as f64 / 1e6;
    Ok(Pass { out_mb_s: mb / out_s, in_mb_s: mb / in_s, held_bytes: held_bytes as u64 })
}

const BLOSC: &str = "
import os, sys, time, numpy, blosc2
data = numpy.fromfile(sys.argv[1], dtype=numpy.uint8)
cores = len(os.sched_getaffinity(0))
cparams = {'codec': getattr(blosc2.Codec, sys.argv[2]), 'clevel': 1, 'nthreads': cores, 'typesize': 1,
           'filters': [blosc2.Filter.NOFILTER] * 6}
start = time.perf_counter()
array = blosc2.asarray(data, chunks=(2 << 20,), blocks=(16 << 10,), cparams=cparams, dparams={'nthreads': cores})
out = time.perf_counter() - start
start = time.perf_counter()
back = array[:]
inn = time.perf_counter() - start
assert (back == data).all(), 'the array gave other bytes back'
print(out, inn, array.schunk.cbytes)
";
