//! Canned mode on each kind of data in the corpus and on all of it mixed: stored bytes with
//! dictionaries, relative to those without.

use crate::common::row::StoreRow;
use crate::corpus::PIECE;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::store::pool::{Buffer, FOLIO_PAGES, folio, load, order, save, store};
use anyhow::ensure;
use memfold_os::units::Order;
use memfold_store::{
    CodecSpec, Dictionary, DictionaryTrial, Handle, raw_dictionaries, trained_dictionaries,
};
use std::time::Instant;

/// The kinds that alternate in a corpus of `memfold bench corpus`.
const KINDS: [&str; 4] = ["libraries", "pickles", "JSON", "floats"];
/// Size of the sample of blocks that the dictionaries of the `raw` and `trained` figures are made
/// from and judged by.
const SAMPLE_BYTES: usize = 2 << 20;
/// One sampled block in this many is used to judge a dictionary, not to make it.
const HELD_OUT: usize = 4;
/// Folios saved between two evaluations of canned mode.
const STEP: usize = 16;

/// The source of a store's dictionary.
enum With<'a> {
    Nothing,
    /// The store makes and judges dictionaries itself, from saved blocks.
    Own,
    /// This dictionary, unjudged.
    This(&'a Dictionary),
}

/// The memory that a part needs in a store.
struct Taken {
    stored: u64,
    /// Bytes of pool pages and dictionaries.
    held: u64,
    save_s: f64,
}

/// Returns one row for each codec, block size and part. A quick run measures only the last part.
pub fn rows(corpus: &CorpusFile, quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let mut rows = Vec::new();
    for codec in ["lz4", "zstd"] {
        for block in [order(0), order(2)] {
            for (name, folios) in
                parts(corpus).into_iter().filter(|(name, _)| !quick || *name == "all, mixed")
            {
                rows.push(row(corpus, codec, block, name, &folios)?);
            }
        }
    }
    Ok(rows)
}

/// Returns the parts, and the first pages of their folios.
fn parts(corpus: &CorpusFile) -> Vec<(&'static str, Vec<u64>)> {
    let all: Vec<u64> =
        (0..corpus.pages() as u64 / FOLIO_PAGES).map(|folio| folio * FOLIO_PAGES).collect();
    let kind = |page: u64| page as usize * PAGE / PIECE % KINDS.len();
    let of_kind = |nth| all.iter().copied().filter(|page| kind(*page) == nth).collect::<Vec<_>>();
    let kinds = KINDS.iter().enumerate().map(|(nth, name)| (*name, of_kind(nth)));
    let parts = kinds.chain([("all, mixed", all.clone())]);
    parts.filter(|(_, folios)| folios.len() > STEP).collect()
}

fn row(
    corpus: &CorpusFile,
    codec: &str,
    block: Order,
    name: &str,
    folios: &[u64],
) -> anyhow::Result<StoreRow> {
    let off = measure(corpus, codec, block, folios, &With::Nothing)?;
    let own = measure(corpus, codec, block, folios, &With::Own)?;
    let spec = CodecSpec::parse(codec).map_err(|e| anyhow::anyhow!("{e}"))?;
    let (teach, judge) = samples(corpus, block, folios);
    let mut trial = DictionaryTrial::new(spec, block);
    let mut best = |dictionaries: &mut dyn Iterator<Item = Dictionary>| {
        let best = trial.best(judge.chunks_exact(block.bytes()), dictionaries);
        let result = best
            .map(|(_, dictionary)| measure(corpus, codec, block, folios, &With::This(&dictionary)));
        result.transpose()
    };
    let raw = best(&mut raw_dictionaries(&teach, block.bytes()))?;
    let dictionary =
        if codec == "zstd" { best(&mut trained_dictionaries(&teach, block))? } else { None };
    let show = |result: Option<Taken>| {
        result
            .map_or("-".into(), |result| format!("{:.3}", result.stored as f64 / off.stored as f64))
    };
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let note = format!(
        "held {:.2} of {:.2} MiB; unjudged: raw content {}, trained {}; saves take {:.1}x",
        mib(own.held),
        mib(off.held),
        show(raw),
        show(dictionary),
        own.save_s / off.save_s,
    );
    let label = format!("canned {codec} {}K, {name}: bytes stored, on of off", block.bytes() >> 10);
    Ok(StoreRow::at_most(&label, own.stored as f64 / off.stored as f64, 1.0, note))
}

/// Saves everything twice, as a program that runs on would. Times and bytes are of the second save.
fn measure(
    corpus: &CorpusFile,
    codec: &str,
    block: Order,
    folios: &[u64],
    with: &With,
) -> anyhow::Result<Taken> {
    let store = store(codec, block.get(), 1)?;
    match with {
        With::Nothing => {}
        With::Own => store.set_canned(true),
        With::This(dictionary) => store.install_dictionary(dictionary)?,
    }
    let (mut w, folio_order) = (store.worker(), order(4));
    let mut handles: Vec<Vec<Handle>> = vec![Vec::new(); folios.len()];
    let mut save_s = 0.0;
    for round in 0..2 {
        save_s = 0.0;
        for (nth, (page, saves)) in folios.iter().zip(&mut handles).enumerate() {
            store.free_many(saves);
            let start = Instant::now();
            *saves = save(&store, &mut w, corpus, *page, folio_order);
            save_s += start.elapsed().as_secs_f64();
            if round == 0 && nth % STEP == 0 {
                store.canned_step();
            }
        }
    }
    let mut to = Buffer::new(folio_order.bytes());
    for (page, saves) in folios.iter().zip(&handles).step_by(7) {
        load(&store, &mut w, saves, folio_order, to.bytes());
        ensure!(folio(corpus, *page) == to.bytes(), "page {page} came back wrong");
    }
    store.reap_dictionaries();
    store.compact(u64::MAX);
    let stats = store.stats();
    Ok(Taken { stored: stats.stored_bytes, held: stats.held_bytes - stats.warm_bytes, save_s })
}

/// Returns blocks from all over a part: those to make dictionaries from, and those to judge them
/// by.
fn samples(corpus: &CorpusFile, block: Order, folios: &[u64]) -> (Vec<u8>, Vec<u8>) {
    let folio_bytes = FOLIO_PAGES as usize * PAGE;
    let step = (folios.len() * folio_bytes / SAMPLE_BYTES).max(1);
    let blocks = folios.iter().flat_map(|page| folio(corpus, *page).chunks_exact(block.bytes()));
    let (mut teach, mut judge) = (Vec::new(), Vec::new());
    for (nth, bytes) in blocks.step_by(step).enumerate() {
        if nth % HELD_OUT == HELD_OUT - 1 { &mut judge } else { &mut teach }
            .extend_from_slice(bytes);
    }
    (teach, judge)
}
