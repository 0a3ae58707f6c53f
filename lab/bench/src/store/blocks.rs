//! `memfold bench blocks`: the compression of the corpus, and of pages of programs, by codec and block
//! size.

use crate::common::row::StoreRow;
use crate::corpus::file::{CorpusFile, PAGE};
use crate::harness::brief::{BriefArgs, BriefFindings, brief};
use crate::store::pool::{Whole, whole};
use crate::store::program_pages;
use serde_json::json;

/// The seed's ratios are for blocks of these orders. Stored bytes relative to 4 KiB blocks: 36.21,
/// 32.42, 31.76, 31.07%.
const ORDERS: [u8; 6] = [0, 2, 3, 4, 6, 9];
const CODECS: [&str; 4] = ["delta", "lz4", "zstd", "deflate"];

/// Measures, prints and returns the exit status.
pub fn blocks(args: BriefArgs) -> anyhow::Result<i32> {
    brief("blocks", &args, |corpus, _, quick| {
        let mut findings = measure(corpus, if quick { 1 } else { 3 })?;
        let (rows, raw) = program_pages::rows(if quick { 3 } else { 15 })?;
        findings.rows.extend(rows);
        findings.raw.extend(raw);
        Ok(findings)
    })
}

fn measure(corpus: &CorpusFile, rounds: usize) -> anyhow::Result<BriefFindings> {
    let mut findings = BriefFindings { rows: Vec::new(), name: "blocks", raw: Vec::new() };
    for codec in CODECS {
        let mut small: Option<Whole> = None;
        for order in ORDERS {
            let kib = (PAGE << order) / 1024;
            let whole = whole(corpus, codec, order, rounds)?;
            let bytes = corpus.pages() * PAGE;
            let ratio = bytes as f64 / whole.stored as f64;
            let note = format!(
                "ratio {ratio:.2}, held {:.1}%, {:.0} MB/s out, {:.0} in, one core",
                whole.held as f64 * 100.0 / bytes as f64,
                whole.out_mb_s,
                whole.in_mb_s
            );
            let of = small.as_ref().map_or(1.0, |small| whole.stored as f64 / small.stored as f64);
            let label = format!("{codec}, blocks of {kib}K: bytes stored, of those of 4K blocks");
            findings.rows.push(StoreRow::plain(&label, of, note));
            findings.raw.push(json!({
                "codec": codec, "block_kib": kib, "ratio": ratio, "held_bytes": whole.held,
                "out_mb_s": whole.out_mb_s, "in_mb_s": whole.in_mb_s,
            }));
            small.get_or_insert(whole);
        }
    }
    Ok(findings)
}
