//! Pages of programs' heaps, page by page: what a codec makes of them, and in what time.

use crate::common::row::StoreRow;
use crate::corpus::file::PAGE;
use crate::store::pool::Buffer;
use anyhow::Context;
use memfold_store::{BareCodec, CodecSpec, huge_threshold};
use serde_json::{Value, json};
use std::time::Instant;

/// 48 pages of each of eight programs, made by `sample/collect.py`: 12 blocks of 16 KiB.
static SAMPLE: &[u8] = include_bytes!("../../sample/program_pages.zst");
const SAMPLE_BYTES: usize = 8 * 48 * PAGE;
const CODECS: [&str; 4] = ["delta", "lz4", "zstd", "deflate"];
const BLOCKS: [usize; 2] = [PAGE, 16 << 10];

/// One codec's blocks.
struct Pass {
    stored_bytes: usize,
    in_us: f64,
    out_us: f64,
}

/// Returns a row for each codec and block size: the ratio, and the time of a page. The fastest of
/// several rounds counts, each over all pages, which are in the caches.
pub fn rows(rounds: usize) -> anyhow::Result<(Vec<StoreRow>, Vec<Value>)> {
    let mut pages = Buffer::new(SAMPLE_BYTES);
    let size = zstd_safe::decompress(pages.bytes(), SAMPLE)
        .map_err(|code| anyhow::anyhow!("the sample: {}", zstd_safe::get_error_name(code)))?;
    anyhow::ensure!(size == SAMPLE_BYTES, "the sample has {size} bytes");
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for block in BLOCKS {
        for name in CODECS {
            let passes = (0..rounds).map(|_| pass(name, block, pages.bytes()));
            let passes = passes.collect::<anyhow::Result<Vec<_>>>()?;
            let ratio = SAMPLE_BYTES as f64 / passes[0].stored_bytes as f64;
            let least = |time: fn(&Pass) -> f64| passes.iter().map(time).fold(f64::MAX, f64::min);
            let (in_us, out_us) = (least(|pass| pass.in_us), least(|pass| pass.out_us));
            let label = format!("{name}, pages of programs in blocks of {}K: ratio", block / 1024);
            let note = format!("{in_us:.2} us a page to compress, {out_us:.2} to decompress");
            rows.push(StoreRow::plain(&label, ratio, note));
            raw.push(json!({
                "codec": name, "block_kib": block / 1024, "pages": "programs", "ratio": ratio,
                "in_us": in_us, "out_us": out_us,
            }));
        }
    }
    Ok((rows, raw))
}

/// Compresses and decompresses all blocks once, and compares.
fn pass(name: &str, block: usize, pages: &[u8]) -> anyhow::Result<Pass> {
    let spec = CodecSpec::parse(name).map_err(|e| anyhow::anyhow!("{e}"))?;
    let mut codec = BareCodec::new(spec, block);
    let room = block + block / 128 + 1024;
    let mut packed = vec![0u8; pages.len() / block * room];
    let mut sizes = Vec::new();
    let start = Instant::now();
    for (from, to) in pages.chunks_exact(block).zip(packed.chunks_exact_mut(room)) {
        // SAFETY: both are borrowed and as long as said.
        let size = unsafe { codec.compress(from.as_ptr(), block, to.as_mut_ptr(), room) };
        let size = size.ok().flatten().filter(|size| *size <= huge_threshold(block));
        sizes.push(size);
    }
    let in_us = us_a_page(start, pages);
    let mut back = Buffer::new(pages.len());
    let start = Instant::now();
    let places = packed.chunks_exact(room).zip(back.bytes().chunks_exact_mut(block));
    for ((from, to), (size, raw)) in places.zip(sizes.iter().zip(pages.chunks_exact(block))) {
        match size {
            // SAFETY: both are borrowed and as long as said.
            Some(size) => unsafe { codec.decompress(from.as_ptr(), *size, to.as_mut_ptr(), block) }
                .ok()
                .context("a block does not come back")?,
            None => to.copy_from_slice(raw),
        }
    }
    let out_us = us_a_page(start, pages);
    anyhow::ensure!(back.bytes() == pages, "{name}: other pages come back");
    let stored_bytes = sizes.iter().map(|size| size.unwrap_or(block)).sum();
    Ok(Pass { stored_bytes, in_us, out_us })
}

fn us_a_page(start: Instant, pages: &[u8]) -> f64 {
    start.elapsed().as_secs_f64() * 1e6 / (pages.len() / PAGE) as f64
}
