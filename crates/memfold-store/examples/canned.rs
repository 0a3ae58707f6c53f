//! Canned mode on each kind of data in a corpus, off and on: `canned FILE CODEC...`, for example
//! `cargo run --release -p memfold-store --example canned ~/.cache/memfold/corpus.bin lz4 zstd:1`.
//!
//! The kinds (libraries, pickles, JSON, floats) alternate in pieces of 1 MiB, as `memfold bench corpus` writes them. In the
//! fifth row one store takes all of them, mixed; its last column is the share of stored bytes on / off for each kind.
use memfold_store::{BlockSet, CannedStep, CodecSpec, Handle, Store, StoreConfig};
use memfold_sys::units::{Order, PAGE_SIZE};
use std::time::Instant;

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

/// Pages of one kind in a row.
const PIECE: usize = 256;

struct Figures {
    stored: u64,
    /// Payload bytes of the second save, by kind if the data is mixed.
    kinds: [u64; 4],
    held: u64,
    in_mb_s: f64,
    out_mb_s: f64,
    steps: Vec<CannedStep>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().expect("usage: canned FILE CODEC...");
    let bytes = std::fs::read(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
    let page = |chunk: &[u8]| Page(chunk.try_into().expect("a whole page"));
    let data: Vec<Page> = bytes.chunks_exact(PAGE_SIZE).map(page).collect();
    println!("stored: payload bytes on / off; held: pool bytes with dictionaries on / off");
    println!("codec    block part   stored    held  MB/s in off/on  MB/s out off/on");
    for spec in args {
        let spec = CodecSpec::parse(&spec).unwrap_or_else(|e| panic!("{e}"));
        for order in [0, 2, 4].map(|n| Order::new(n).expect("valid")) {
            let kind = |n: usize| data.chunks(PIECE).skip(n).step_by(4).flatten().copied().collect::<Vec<Page>>();
            for nth in 0..5 {
                let part = if nth < 4 { kind(nth) } else { data.clone() };
                let (off, on) = (run(&part, spec, order, false), run(&part, spec, order, true));
                let kinds: Vec<f64> =
                    (0..4).map(|k| (on.kinds[k] as f64 / off.kinds[k] as f64 * 1e4).round() / 1e4).collect();
                println!(
                    "{:<8} {:>4}K {:>4} {:>8.4} {:>7.4} {:>9.0}/{:<5.0} {:>9.0}/{:<5.0} {:?} {:?}",
                    spec.to_string(),
                    order.bytes() >> 10,
                    nth + 1,
                    on.stored as f64 / off.stored as f64,
                    on.held as f64 / off.held as f64,
                    off.in_mb_s,
                    on.in_mb_s,
                    off.out_mb_s,
                    on.out_mb_s,
                    on.steps,
                    if nth < 4 { &[][..] } else { &kinds }
                );
                assert!(on.stored <= off.stored, "larger with canned mode");
            }
        }
    }
}

/// Saves everything twice, as a program that goes on would, and loads it once. Times are of the second save.
fn run(data: &[Page], spec: CodecSpec, block: Order, canned: bool) -> Figures {
    let config = StoreConfig { codec: spec, block_order: block, ..StoreConfig::default() };
    let store = Store::new(&config).expect("address space");
    store.set_canned(canned);
    let mut worker = store.worker();
    let mut handles = vec![Handle::NONE; data.len() / block.pages()];
    let mut steps = Vec::new();
    let (mut saving, mut kinds) = (0.0, [0; 4]);
    for round in 0..2 {
        let folio = Order::new(4).expect("valid");
        let per_folio = folio.pages() / block.pages();
        (saving, kinds) = (0.0, [0; 4]);
        for (nth, (pages, out)) in data.chunks_exact(folio.pages()).zip(handles.chunks_mut(per_folio)).enumerate() {
            store.free_many(out);
            let start = Instant::now();
            // SAFETY: the pages are a whole folio that nobody writes.
            let report = unsafe {
                let from = pages.as_ptr().cast();
                store.save(&mut worker, from, folio, 0, &BlockSet::first(per_folio), || false, out).expect("saves")
            };
            kinds[nth * folio.pages() / PIECE % 4] += report.stored_bytes;
            saving += start.elapsed().as_secs_f64();
            if nth % 16 == 0 && round == 0 {
                let step = store.canned_step();
                steps.extend((step != CannedStep::Nothing).then_some(step));
            }
        }
    }
    let mut back = [Page([0; PAGE_SIZE]); 16];
    let start = Instant::now();
    for (nth, handle) in handles.iter().enumerate() {
        // SAFETY: the buffer has room for a block.
        unsafe { store.load(&mut worker, *handle, block, back.as_mut_ptr().cast()).expect("loads") };
        let expected = &data[nth * block.pages()..][..block.pages()];
        assert!(expected.iter().zip(&back).all(|(a, b)| a.0 == b.0), "wrong bytes");
    }
    let loading = start.elapsed().as_secs_f64();
    store.reap_dictionaries();
    store.compact(u64::MAX);
    let (stats, bytes) = (store.stats(), (data.len() * PAGE_SIZE) as f64 / 1e6);
    Figures {
        stored: stats.stored_bytes,
        kinds,
        held: stats.held_bytes - stats.warm_bytes,
        in_mb_s: bytes / saving,
        out_mb_s: bytes / loading,
        steps,
    }
}
