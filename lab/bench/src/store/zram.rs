//! The kernel's zram as the store's peer: the whole corpus written to a device and read back.

use crate::common::row::StoreRow;
use crate::common::summary::show;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::host::guard;
use crate::host::journal::JOURNAL_PATH;
use crate::host::zram::Zram;
use crate::store::pool::{Buffer, Whole, whole};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

const CHUNK: usize = 1 << 20;
/// The most memory, relative to zram lz4.
const LZ4_MAX: f64 = 0.85;
const ZSTD_MAX: f64 = 0.65;

/// Writes the corpus to zram lz4 and reads it back, with direct transfers of 1 MiB. The device is
/// removed afterwards.
fn zram(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Whole> {
    guard::open_journal(Path::new(JOURNAL_PATH))?;
    let outcome = on_device(corpus, rounds);
    guard::close_journal();
    outcome
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
    Ok(Whole {
        stored: bytes.compressed,
        held: bytes.held,
        out_mb_s: mb / out_s,
        in_mb_s: mb / in_s,
    })
}

/// Compares the whole corpus in the store and in zram lz4: memory held, and speed.
///
/// With lz4 the target is for the best block size that is no slower than zram: blocks of 256 KiB.
/// The default of 16 KiB is shown beside it.
pub fn rows(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let settings =
        [("lz4", 2, "16K", LZ4_MAX), ("lz4", 6, "256K", LZ4_MAX), ("zstd", 2, "16K", ZSTD_MAX)];
    let label =
        |codec: &str, block: &str, what: &str| format!("{codec} {block} of zram lz4: {what}");
    if let Err(why) = Zram::check("lz4") {
        let row = |(codec, _, block, most): (&str, u8, &str, f64)| {
            StoreRow::not_run(
                &label(codec, block, "bytes held"),
                &format!("<= {most}"),
                &why.to_string(),
            )
        };
        return Ok(settings.into_iter().map(row).collect());
    }
    let ours = settings.map(|(codec, order, ..)| whole(corpus, codec, order, rounds));
    let kernel = zram(corpus, rounds)?;
    let mut rows = Vec::new();
    for (ours, (codec, _, block, most)) in ours.into_iter().zip(settings) {
        let ours = ours?;
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        let (held_ratio, floor) =
            (ours.held as f64 / kernel.held as f64, ours.stored as f64 / kernel.held as f64);
        let note = format!("{:.1} of {:.1} MiB", mib(ours.held), mib(kernel.held));
        rows.push(StoreRow::at_most_of(
            &label(codec, block, "bytes held"),
            held_ratio,
            most,
            floor,
            note,
        ));
        for (what, ours, kernel) in [
            ("speed out", ours.out_mb_s, kernel.out_mb_s),
            ("speed in", ours.in_mb_s, kernel.in_mb_s),
        ] {
            let (label, note) =
                (label(codec, block, what), format!("{} of {} MB/s", show(ours), show(kernel)));
            rows.push(match codec {
                "lz4" => StoreRow::at_least(&label, ours / kernel, 1.0, note),
                _ => StoreRow::plain(&label, ours / kernel, note),
            });
        }
    }
    Ok(rows)
}
