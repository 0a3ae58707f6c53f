//! The kernel's zram as the store's peer: the whole corpus written to a device and read back.

use crate::corpus_file::{CorpusFile, PAGE};
use crate::guard;
use crate::journal::JOURNAL_PATH;
use crate::store_pool::{Buffer, Whole, whole};
use crate::store_row::StoreRow;
use crate::summary::show;
use crate::zram::Zram;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const CHUNK: usize = 1 << 20;
/// What memfold may hold of what zram lz4 holds.
const LZ4_MAX: f64 = 0.85;
const ZSTD_MAX: f64 = 0.65;

/// Writes the corpus to zram lz4 and reads it back, with direct transfers of 1 MiB. The device is gone afterwards.
fn zram(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Whole> {
    guard::open_journal(Path::new(JOURNAL_PATH))?;
    let measured = on_device(corpus, rounds);
    guard::close_journal();
    measured
}

fn on_device(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Whole> {
    let chunks = corpus.pages() * PAGE / CHUNK;
    let zram = guard::change(|journal| Zram::disk(journal, "lz4", (chunks * CHUNK) as u64))?;
    let file = zram.open_direct()?;
    let mut to = Buffer::new(CHUNK);
    let (mut out_s, mut in_s) = (f64::MAX, f64::MAX);
    for _ in 0..rounds {
        let start = Instant::now();
        for chunk in 0..chunks {
            let page = (chunk * CHUNK / PAGE) as u64;
            // SAFETY: the chunk lies in the corpus, which is mapped and never written.
            let bytes = unsafe { std::slice::from_raw_parts(corpus.page(page), CHUNK) };
            file.write_all_at(bytes, (chunk * CHUNK) as u64)?;
        }
        out_s = start.elapsed().as_secs_f64().min(out_s);
        let start = Instant::now();
        for chunk in 0..chunks {
            file.read_exact_at(to.bytes(), (chunk * CHUNK) as u64)?;
        }
        in_s = start.elapsed().as_secs_f64().min(in_s);
    }
    let mb = (chunks * CHUNK) as f64 / 1e6;
    let bytes = zram.bytes()?;
    Ok(Whole { stored: bytes.compressed, held: bytes.held, out_mb_s: mb / out_s, in_mb_s: mb / in_s })
}

/// The whole corpus in the store and in zram lz4: memory held, and speed.
pub fn rows(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let lz4 = whole(corpus, "lz4", 2, rounds)?;
    let zstd = whole(corpus, "zstd", 2, rounds)?;
    let labels = ["lz4 16K of zram lz4: bytes held", "zstd 16K of zram lz4: bytes held"];
    if let Err(why) = Zram::check("lz4") {
        let rows = labels.into_iter().zip([LZ4_MAX, ZSTD_MAX]);
        return Ok(rows
            .map(|(label, most)| StoreRow::not_run(label, &format!("<= {most}"), &why.to_string()))
            .collect());
    }
    let kernel = zram(corpus, rounds)?;
    let held = |ours: &Whole| {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        (ours.held as f64 / kernel.held as f64, format!("{:.1} of {:.1} MiB", mib(ours.held), mib(kernel.held)))
    };
    let speed = |ours: f64, kernel: f64| (ours / kernel, format!("{} of {} MB/s", show(ours), show(kernel)));
    let ((lz4_held, lz4_note), (zstd_held, zstd_note)) = (held(&lz4), held(&zstd));
    let (out, out_note) = speed(lz4.out_mb_s, kernel.out_mb_s);
    let (back, back_note) = speed(lz4.in_mb_s, kernel.in_mb_s);
    let (zstd_out, zstd_out_note) = speed(zstd.out_mb_s, kernel.out_mb_s);
    let (zstd_back, zstd_back_note) = speed(zstd.in_mb_s, kernel.in_mb_s);
    let zstd_4k = whole(corpus, "zstd", 0, 1)?;
    let floor = |ours: u64, theirs: u64| {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        (ours as f64 / theirs as f64, format!("{:.1} of {:.1} MiB", mib(ours), mib(theirs)))
    };
    let (lz4_floor, lz4_floor_note) = floor(lz4.stored, kernel.held);
    let (zstd_floor, zstd_floor_note) = floor(zstd.stored, zstd_4k.stored);
    Ok(vec![
        StoreRow::plain("lz4's own output in 16K blocks, of zram's bytes held", lz4_floor, lz4_floor_note),
        StoreRow::plain("zstd's own output, 16K of 4K blocks", zstd_floor, zstd_floor_note),
        StoreRow::at_most(labels[0], lz4_held, LZ4_MAX, lz4_note),
        StoreRow::at_least("lz4 16K of zram lz4: speed out", out, 1.0, out_note),
        StoreRow::at_least("lz4 16K of zram lz4: speed in", back, 1.0, back_note),
        StoreRow::at_most(labels[1], zstd_held, ZSTD_MAX, zstd_note),
        StoreRow::plain("zstd 16K of zram lz4: speed out", zstd_out, zstd_out_note),
        StoreRow::plain("zstd 16K of zram lz4: speed in", zstd_back, zstd_back_note),
    ])
}
