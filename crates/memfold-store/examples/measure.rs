//! Ratio and speed of codecs through a store, one thread: `measure FILE CODEC...`, for example
//! `cargo run --release -p memfold-store --example measure ~/.cache/memfold/corpus.bin lz4 zstd:1`.
//! `random` as FILE takes 64 MiB of random bytes.
use memfold_store::{BlockSet, CodecSpec, Handle, Store, StoreConfig};
use memfold_sys::units::{Order, PAGE_SIZE};
use std::time::Instant;

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

fn main() {
    let mut args = std::env::args().skip(1);
    let file = args.next().expect("usage: measure FILE CODEC...");
    let data = read(&file);
    println!(
        "{:<12} {:>5} {:>7} {:>7} {:>9} {:>9} {:>6}",
        "codec", "block", "ratio", "held", "MB/s in", "MB/s out", "raw"
    );
    for spec in args {
        for order in [0, 2, 4] {
            measure(
                &data,
                CodecSpec::parse(&spec).unwrap_or_else(|e| panic!("{e}")),
                Order::new(order).expect("valid"),
            );
        }
    }
}

fn read(file: &str) -> Vec<Page> {
    let bytes = if file == "random" {
        let mut state = 1u64;
        let word = |_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state ^ state >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd) >> 7 ^ state).to_ne_bytes()
        };
        (0..8 << 20).flat_map(word).collect()
    } else {
        std::fs::read(file).unwrap_or_else(|e| panic!("{file}: {e}"))
    };
    let page = |chunk: &[u8]| Page(chunk.try_into().expect("a whole page"));
    bytes.chunks_exact(PAGE_SIZE).map(page).collect()
}

fn measure(data: &[Page], spec: CodecSpec, block: Order) {
    let config = StoreConfig { codec: spec, block_order: block, ..StoreConfig::default() };
    let store = Store::new(&config).expect("address space");
    let mut worker = store.worker();
    let folio = Order::new(4).expect("valid");
    let mut out = vec![Handle::NONE; data.len() / block.pages()];
    let per_folio = folio.pages() / block.pages();
    let start = Instant::now();
    for (pages, out) in data.chunks_exact(folio.pages()).zip(out.chunks_mut(per_folio)) {
        // SAFETY: the pages are a whole folio that nobody writes.
        unsafe {
            let from = pages.as_ptr().cast();
            store.save(&mut worker, from, folio, 0, &BlockSet::first(per_folio), || false, out).expect("saves");
        }
    }
    let saved = start.elapsed().as_secs_f64();
    let mut back = [Page([0; PAGE_SIZE]); 16];
    let start = Instant::now();
    for handle in &out {
        // SAFETY: the buffer has room for a block.
        unsafe { store.load(&mut worker, *handle, block, back.as_mut_ptr().cast()).expect("loads") };
    }
    let loaded = start.elapsed().as_secs_f64();
    let bytes = (out.len() * block.bytes()) as f64;
    let stats = store.stats();
    println!(
        "{:<12} {:>4}K {:>7.3} {:>7.3} {:>9.0} {:>9.0} {:>6}",
        spec.to_string(),
        block.bytes() >> 10,
        bytes / stats.events.bytes_stored as f64,
        bytes / stats.held_bytes as f64,
        bytes / saved / 1e6,
        bytes / loaded / 1e6,
        stats.events.huge_blocks
    );
}
