//! Batches of blocks on several cores against one core.

use crate::common::row::StoreRow;
use crate::common::summary::{Spread, show};
use crate::corpus::file::{CorpusFile, PAGE};
use crate::store::pool::Buffer;
use anyhow::ensure;
use memfold_store::{
    BareCodec, BatchJob, BatchResult, CodecSpec, Compressor, SoftwarePool, huge_threshold,
};
use std::time::Instant;

const BLOCK: usize = 16 << 10;
const BATCH: usize = 16;
/// The least throughput of two cores, relative to one.
const SPEEDUP_MIN: f64 = 1.7;

/// Compresses the corpus in batches on one core and on two, in turn.
pub fn rows(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let label = |codec: &str| format!("{codec}: batches of {BATCH} blocks on 2 cores, of one core");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    ["lz4", "zstd"]
        .into_iter()
        .map(|codec| match cores {
            1 => Ok(StoreRow::not_run(
                &label(codec),
                &format!(">= {SPEEDUP_MIN}"),
                "there is one core",
            )),
            _ => measure(corpus, codec, rounds)
                .map(|(ratio, note)| StoreRow::at_least(&label(codec), ratio, SPEEDUP_MIN, note)),
        })
        .collect()
}

fn measure(corpus: &CorpusFile, codec: &str, rounds: usize) -> anyhow::Result<(f64, String)> {
    let spec = CodecSpec::parse(codec).map_err(|e| anyhow::anyhow!("{e}"))?;
    let pool = SoftwarePool::start(spec, BLOCK, 1)
        .map_err(|e| anyhow::anyhow!("starting a thread: {e}"))?;
    let (mut codec, mut queue) = (BareCodec::new(spec, BLOCK), pool.queue());
    let mut to = Buffer::new(BATCH * BLOCK);
    let batches = corpus.pages() * PAGE / (BATCH * BLOCK);
    let mut ratios = Vec::new();
    let (mut one_s, mut two_s) = (f64::MAX, f64::MAX);
    for _ in 0..rounds {
        let start = Instant::now();
        let one: usize = (0..batches).map(|batch| on_one(&mut codec, corpus, batch, &mut to)).sum();
        let one_time = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let two: usize = (0..batches).map(|batch| on_two(&mut queue, corpus, batch, &mut to)).sum();
        let two_time = start.elapsed().as_secs_f64();
        ensure!(one == two, "one core made {one} bytes, two made {two}");
        ratios.push(one_time / two_time);
        (one_s, two_s) = (one_s.min(one_time), two_s.min(two_time));
    }
    let mb = (batches * BATCH * BLOCK) as f64 / 1e6;
    let note = format!("{} of {} MB/s at best", show(mb / two_s), show(mb / one_s));
    Ok((Spread::of(ratios).map_or(f64::NAN, |spread| spread.median), note))
}

fn jobs(corpus: &CorpusFile, batch: usize, to: &mut Buffer) -> [BatchJob; BATCH] {
    let to = to.bytes().as_mut_ptr();
    std::array::from_fn(|at| BatchJob {
        tag: at as u64,
        src: corpus.page(((batch * BATCH + at) * BLOCK / PAGE) as u64),
        len: BLOCK,
        dst: to.wrapping_add(at * BLOCK),
        room: huge_threshold(BLOCK),
    })
}

fn on_one(codec: &mut BareCodec, corpus: &CorpusFile, batch: usize, to: &mut Buffer) -> usize {
    let compress = |job: BatchJob| {
        // SAFETY: the block lies in the corpus, which is never written; `to` has room for a block
        // at each place.
        let size = unsafe { codec.compress(job.src, job.len, job.dst, job.room) };
        size.expect("the codec works").unwrap_or(BLOCK)
    };
    jobs(corpus, batch, to).into_iter().map(compress).sum()
}

fn on_two(queue: &mut dyn Compressor, corpus: &CorpusFile, batch: usize, to: &mut Buffer) -> usize {
    let jobs = jobs(corpus, batch, to);
    // SAFETY: each job's block lies in the corpus, and its place has room; nothing else uses the
    // places until all results are there.
    let count = unsafe { queue.submit(&jobs) };
    assert_eq!(count, BATCH, "an idle queue takes a batch");
    let (mut rest, mut bytes) = (BATCH, 0);
    while rest > 0 {
        let mut results = [BatchResult::NONE; BATCH];
        let count = queue.complete(&mut results, u64::MAX);
        bytes += results[..count]
            .iter()
            .map(|d| d.result.expect("the codec works").unwrap_or(BLOCK))
            .sum::<usize>();
        rest -= count;
    }
    bytes
}
