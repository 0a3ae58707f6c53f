//! The store under the engine: a region is folded and touched again, by block size and with the
//! small-page fallback.

use crate::common::row::StoreRow;
use crate::common::summary::Spread;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::store::pool::whole;
use memfold_engine::{Memory, Region};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// The ratio of 16 KiB to 4 KiB blocks, as in the source's own figures, with zstd.
const OUT_MAX: f64 = 0.73;
const IN_MAX: f64 = 0.68;
const STORED_MAX: f64 = 0.83;
/// The most time of loads with all of them forced onto small pages, relative to normal loads. The
/// source lost 3.2x.
const FALLBACK_MAX: f64 = 1.10;

/// The results of folding a region and touching it again.
struct Folded {
    out_ms: f64,
    in_ms: f64,
    /// Pool bytes per folded byte.
    held: f64,
}

/// A region that is folded and touched in turn with others.
struct Bench {
    // The region first, because it must be dropped before its `Memory`.
    region: Region,
    memory: Memory,
    rounds: Vec<Folded>,
}

impl Bench {
    fn new(corpus: &CorpusFile, len: usize, settings: &[(&str, &str)]) -> anyhow::Result<Bench> {
        let builder =
            Memory::builder().resident_bytes(2 * len as u64 + (64 << 20)).set("clean", "0");
        let builder = settings.iter().fold(builder, |b, (name, value)| b.set(name, value));
        let memory = builder.build().map_err(|e| anyhow::anyhow!("memfold: {e}"))?;
        let mut region = memory.region(len).map_err(|e| anyhow::anyhow!("memfold: {e}"))?;
        corpus.fill(&mut region);
        Ok(Bench { region, memory, rounds: Vec::new() })
    }

    /// Folds and touches all pages once, and checks every byte.
    fn round(&mut self, corpus: &CorpusFile) -> anyhow::Result<()> {
        let len = self.region.len();
        let start = Instant::now();
        self.region.pageout(0..len);
        // Workers may still be saving the last folios.
        while self.memory.stats().folded_bytes.load(Relaxed) < len as u64 {
            self.region.pageout(0..len);
        }
        let out_ms = start.elapsed().as_secs_f64() * 1e3;
        let held_ratio = self.memory.stats().pool_bytes.load(Relaxed) as f64 / len as f64;
        let start = Instant::now();
        let bytes = self.region.as_slice();
        let sum = (0..len / PAGE).fold(0u8, |sum, page| sum ^ bytes[page * PAGE]);
        std::hint::black_box(sum);
        let in_ms = start.elapsed().as_secs_f64() * 1e3;
        let sum = (1..=self.rounds.len()).fold(0u8, |sum, round| sum.wrapping_add(round as u8));
        let right =
            |page: usize| is_right(&bytes[page * PAGE..][..PAGE], corpus_page(corpus, page), sum);
        let wrong_pages = (0..len / PAGE).filter(|page| !right(*page)).count();
        anyhow::ensure!(wrong_pages == 0, "{wrong_pages} PAGES came back WRONG");
        self.rounds.push(Folded { out_ms, in_ms, held: held_ratio });
        // A small change in every block makes the next round compress it again.
        let round = self.rounds.len() as u8;
        let bytes = self.region.as_mut_slice();
        (0..len / PAGE).for_each(|page| {
            bytes[page * PAGE + CHANGED] = bytes[page * PAGE + CHANGED].wrapping_add(round)
        });
        Ok(())
    }

    fn median(&self, of: impl Fn(&Folded) -> f64) -> f64 {
        Spread::of(self.rounds.iter().map(of).collect()).map_or(f64::NAN, |spread| spread.median)
    }
}

/// The offset of the byte in each page that every round changes.
const CHANGED: usize = 8;

fn corpus_page(corpus: &CorpusFile, page: usize) -> &[u8] {
    // SAFETY: a whole page of the corpus, which is mapped as long as `corpus` lives and never
    // written.
    unsafe { std::slice::from_raw_parts(corpus.page(page as u64), PAGE) }
}

/// Returns whether a page equals that of the corpus, except for the changed byte, to which
/// `changed` was added.
fn is_right(page: &[u8], original: &[u8], changed: u8) -> bool {
    page[..CHANGED] == original[..CHANGED]
        && page[CHANGED] == original[CHANGED].wrapping_add(changed)
        && page[CHANGED + 1..] == original[CHANGED + 1..]
}

/// Measures 4 KiB blocks, 16 KiB blocks, and 16 KiB blocks with every load on small pages, in turn.
pub fn rows(corpus: &CorpusFile, len: usize, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let mut all = [("4K", "0"), ("16K", "0"), ("16K", "100")]
        .into_iter()
        .map(|(block, fallback)| {
            // Folios of one block without read-ahead, as in the source: each touch of a folio is a
            // fault.
            let settings =
                [("folio", block), ("block", block), ("readahead", "off"), ("fallback", fallback)];
            Bench::new(corpus, len, &[&settings[..], &[("codec", "zstd")]].concat())
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    for _ in 0..rounds {
        all.iter_mut().try_for_each(|bench| bench.round(corpus))?;
    }
    let [small, block, fallback] = &all[..] else { unreachable!("three were made") };
    let ms = |of: fn(&Folded) -> f64| {
        let note = format!(
            "{:.0} ms of {:.0} ms for {} MiB",
            block.median(of),
            small.median(of),
            len >> 20
        );
        (block.median(of) / small.median(of), note)
    };
    let (out_ratio, out_note) = ms(|f| f.out_ms);
    let (in_ratio, in_note) = ms(|f| f.in_ms);
    let (output, output_small) =
        (whole(corpus, "zstd", 2, 1)?.stored, whole(corpus, "zstd", 0, 1)?.stored);
    let (held_ratio, held_small) = (block.median(|f| f.held), small.median(|f| f.held));
    let stats = fallback.memory.stats();
    let (in_ms, plain_ms) = (fallback.median(|f| f.in_ms), block.median(|f| f.in_ms));
    Ok(vec![
        StoreRow::at_most("zstd, 16K of 4K blocks: time out", out_ratio, OUT_MAX, out_note),
        StoreRow::at_most("zstd, 16K of 4K blocks: time in", in_ratio, IN_MAX, in_note),
        StoreRow::at_most_of(
            "zstd, 16K of 4K blocks: bytes held",
            held_ratio / held_small,
            STORED_MAX,
            output as f64 / output_small as f64,
            format!("{:.1}% of {:.1}% of the data", held_ratio * 100.0, held_small * 100.0),
        ),
        StoreRow::at_most(
            "all loads on small pages: time in",
            in_ms / plain_ms,
            FALLBACK_MAX,
            format!(
                "{in_ms:.0} ms of {plain_ms:.0} ms, {} loads fell back",
                stats.load_fallback.load(Relaxed)
            ),
        ),
    ])
}

/// Measures the gain of batches on several cores in the engine, whose threads already work on
/// several folios at once.
pub fn batches(corpus: &CorpusFile, len: usize, rounds: usize) -> anyhow::Result<Vec<StoreRow>> {
    let mut all = ["1", "16"]
        .into_iter()
        .map(|batch| Bench::new(corpus, len, &[("batch", batch), ("codec", "lz4")]))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for _ in 0..rounds {
        all.iter_mut().try_for_each(|bench| bench.round(corpus))?;
    }
    let [one, many] = &all[..] else { unreachable!("two were made") };
    let (one, many) = (one.median(|f| f.out_ms), many.median(|f| f.out_ms));
    let note = format!("{many:.0} ms of {one:.0} ms for {} MiB, folios of 2M", len >> 20);
    Ok(vec![StoreRow::plain("engine, --batch 16 of --batch 1: time out", many / one, note)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_anywhere_in_a_page_is_seen() {
        let original = [7u8; PAGE];
        let mut page = original;
        page[CHANGED] = 10;
        assert!(is_right(&page, &original, 3));
        for at in [0, CHANGED, CHANGED + 1, PAGE - 1] {
            let mut page_changed = page;
            page_changed[at] ^= 1;
            assert!(!is_right(&page_changed, &original, 3), "byte {at}");
        }
    }
}
