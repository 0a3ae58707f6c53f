//! Memory of the index: 16 GiB of large folios against single pages, and a sparse terabyte.

use crate::common::row::StoreRow;
use crate::common::size::show_size;
use crate::common::summary::show;
use crate::corpus::file::PAGE;
use crate::harness::region::folded;
use crate::host::machine::kib_field;
use memfold_engine::{Delivery, Memory, Region};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

/// The least saving of 2 MiB folios in the index, relative to 4 KiB entries.
const SAVED_MIN: f64 = 0.94;
/// The most memory of index and pool for a terabyte touched once in 2 MiB steps. For smaller areas
/// it is proportional.
const SPARSE_MAX_MIB: u64 = 256;
const HUGE: usize = 2 << 20;

/// Memory of an engine when all is folded, in bytes.
struct HeldBytes {
    index: u64,
    pool: u64,
}

/// Fills every page of a region of `len` bytes with a different pattern, and folds it.
fn held(len: usize, settings: &[String]) -> anyhow::Result<HeldBytes> {
    let (memory, region) = folded(len, Delivery::Signal, settings)?;
    for page in 0..len / PAGE {
        // SAFETY: the page lies in the region, which nothing else uses.
        let words = unsafe {
            std::slice::from_raw_parts_mut(region.as_ptr().add(page * PAGE).cast::<u64>(), PAGE / 8)
        };
        words.fill(pattern(page));
    }
    fold(&memory, &region, len);
    let stats = memory.stats();
    let sizes =
        HeldBytes { index: stats.index_bytes.load(Relaxed), pool: stats.pool_bytes.load(Relaxed) };
    for page in (0..len / PAGE).step_by(997) {
        // SAFETY: the page lies in the region, which nothing else uses.
        let word = unsafe {
            region.as_ptr().add(page * PAGE + 8 * (page % 512)).cast::<u64>().read_volatile()
        };
        anyhow::ensure!(word == pattern(page), "page {page} is WRONG");
    }
    Ok(sizes)
}

fn pattern(page: usize) -> u64 {
    0x0101_0101_0101_0101 * (page as u64 % 250 + 1)
}

/// Folds all of it, and waits until workers have saved the last folios.
fn fold(memory: &Memory, region: &Region, len: usize) {
    let start = Instant::now();
    while memory.stats().folded_bytes.load(Relaxed) < len as u64 && start.elapsed().as_secs() < 20 {
        region.pageout(0..len);
    }
}

/// Measures index memory by folio size, and the sparse terabyte.
pub fn rows(quick: bool) -> anyhow::Result<Vec<StoreRow>> {
    let len: usize = if quick { 2 << 30 } else { 16 << 30 };
    let of = |folio: &str, block: &str| {
        held(len, &["resident=256M".into(), format!("folio={folio}"), format!("block={block}")])
    };
    let small = of("4K", "4K")?;
    let mut rows = Vec::new();
    for (block, is_judged) in [("16K", false), ("2M", true)] {
        let large = of("2M", block)?;
        let note = format!(
            "{} of {}, for {}; pool {} of {}",
            show_size(large.index),
            show_size(small.index),
            show_size(len as u64),
            show_size(large.pool),
            show_size(small.pool),
        );
        let label = format!("index memory saved by 2M folios, blocks of {block}");
        let saving = 1.0 - large.index as f64 / small.index as f64;
        rows.push(match is_judged {
            true => StoreRow::at_least(&label, saving, SAVED_MIN, note),
            false => StoreRow::plain(&label, saving, note),
        });
    }
    rows.extend(sparse(if quick { 1 << 36 } else { 1 << 40 })?);
    Ok(rows)
}

/// Writes one word in each 2 MiB of `len` bytes, and reads it again.
fn sparse(len: usize) -> anyhow::Result<Vec<StoreRow>> {
    let tables = || {
        kib_field(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "VmPTE:")
            .unwrap_or(0)
    };
    let tables_before = tables();
    let (memory, region) = folded(len, Delivery::Signal, &["resident=256M".into()])?;
    // SAFETY: `at` lies in the region, which nothing else uses.
    let word = |at: usize| unsafe { region.as_ptr().add(at).cast::<u64>() };
    let start = Instant::now();
    for at in (0..len).step_by(HUGE) {
        // SAFETY: `at` lies in the region, which nothing else uses.
        unsafe { word(at).write_volatile(!(at as u64)) };
    }
    let seconds = start.elapsed().as_secs_f64();
    let stats = memory.stats();
    let (index, pool) = (stats.index_bytes.load(Relaxed), stats.pool_bytes.load(Relaxed));
    let peak = stats.peak_resident_bytes.load(Relaxed);
    let table_bytes = tables().saturating_sub(tables_before);
    for at in (0..len).step_by(HUGE * 61) {
        // SAFETY: `at` lies in the region, which nothing else uses.
        let word_at = unsafe { word(at).read_volatile() };
        anyhow::ensure!(word_at == !(at as u64), "byte {at:#x} is WRONG");
    }
    let steps = (len / HUGE) as f64;
    let note = format!(
        "{} touches in {seconds:.1} s; index {}, pool {}; most resident {}",
        show(steps),
        show_size(index),
        show_size(pool),
        show_size(peak)
    );
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let tables = "the kernel's, 4 KiB for each 2 MiB touched; it keeps them while the area lives"
        .to_string();
    let label = |what: &str| format!("{} touched every 2 MiB: {what}, MiB", show_size(len as u64));
    let most = ((SPARSE_MAX_MIB * (len as u64 >> 20)) >> 20) as f64;
    Ok(vec![
        StoreRow::at_most(&label("index and pool"), mib(index + pool), most, note),
        StoreRow::plain(&label("page tables"), mib(table_bytes), tables),
    ])
}
