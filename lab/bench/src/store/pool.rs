//! The store alone: its overhead over the bare codec, its memory for the corpus, and its
//! fragmentation.

use crate::common::row::StoreRow;
use crate::common::summary::Spread;
use crate::corpus::file::{CorpusFile, PAGE};
use memfold_os::units::Order;
use memfold_store::{
    BareCodec, BlockSet, CodecSpec, CodecWorker, Handle, Store, StoreConfig, huge_threshold,
};
use memfold_testkit::random::Sequence as Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Pages of a 64 KiB folio.
pub const FOLIO_PAGES: u64 = 16;
const FOLIO_BYTES: usize = FOLIO_PAGES as usize * PAGE;
const BLOCK_BYTES: usize = 16 << 10;
/// The most overhead of the pool, relative to the time of the bare codec.
const OVERHEAD_MAX: f64 = 0.10;
const EFFICIENCY_MIN: f64 = 0.85;
const EFFICIENCY_COMPACT_MIN: f64 = 0.95;

/// Makes an order from its number.
pub fn order(number: u8) -> Order {
    Order::new(number).expect("0 to 9 are orders")
}

/// Makes a store with blocks of 2^`block` pages.
pub fn store(codec: &str, block: u8, pools: usize) -> anyhow::Result<Store> {
    let codec = CodecSpec::parse(codec).map_err(|e| anyhow::anyhow!("{e}"))?;
    let block_order = order(block);
    let config =
        StoreConfig { codec, block_order, pools, cached_blocks: 0, ..StoreConfig::default() };
    Store::new(&config).map_err(|e| anyhow::anyhow!("store: {e}"))
}

/// Saves the folio of `order` that starts at corpus page `page`. It must not wrap around.
pub fn save(
    store: &Store,
    w: &mut CodecWorker,
    corpus: &CorpusFile,
    page: u64,
    order: Order,
) -> Vec<Handle> {
    let blocks = store.blocks(order);
    let mut handles = vec![Handle::NONE; blocks];
    assert!(page as usize + order.pages() <= corpus.pages());
    // SAFETY: the pages lie in the corpus one after another, page-aligned, and are never written.
    let outcome = unsafe {
        store.save(
            w,
            corpus.page(page),
            order,
            page,
            &BlockSet::first(blocks),
            || false,
            &mut handles,
        )
    };
    outcome.expect("a store without a limit takes everything");
    handles
}

/// Loads a folio to `to`, which is page-aligned.
pub fn load(store: &Store, w: &mut CodecWorker, handles: &[Handle], order: Order, to: &mut [u8]) {
    let block = store.block_order(order);
    assert!(to.len() >= order.bytes());
    for (index, handle) in handles.iter().enumerate() {
        // SAFETY: block `index` lies in the folio, for which `to` has room; nothing frees the
        // handle meanwhile.
        let outcome =
            unsafe { store.load(w, *handle, block, to[index * block.bytes()..].as_mut_ptr()) };
        outcome.expect("what was saved loads");
    }
}

/// A page-aligned buffer for one folio of any order.
pub struct Buffer(Vec<AlignedPage>);

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct AlignedPage([u8; PAGE]);

impl Buffer {
    /// Makes a buffer of zeros.
    pub fn new(bytes: usize) -> Buffer {
        Buffer(vec![AlignedPage([0; PAGE]); bytes.div_ceil(PAGE)])
    }

    /// Returns the bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: pages are arrays of bytes, one after another, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE) }
    }
}

/// Returns the bytes of a corpus folio of 64 KiB.
pub fn folio(corpus: &CorpusFile, page: u64) -> &[u8] {
    assert!(page as usize + FOLIO_PAGES as usize <= corpus.pages());
    // SAFETY: the pages lie in the corpus one after another, which is mapped and never written.
    unsafe { std::slice::from_raw_parts(corpus.page(page), FOLIO_BYTES) }
}

/// The results of storing the whole corpus.
pub struct Whole {
    /// Bytes of the codec's output.
    pub stored: u64,
    /// Bytes of memory held, metadata included.
    pub held: u64,
    /// Throughput of saves in the fastest round, MB/s.
    pub out_mb_s: f64,
    /// Throughput of loads in the fastest round, MB/s.
    pub in_mb_s: f64,
}

/// Saves the whole corpus as folios of 64 KiB, loads and compares it, `rounds` times.
pub fn whole(corpus: &CorpusFile, codec: &str, block: u8, rounds: usize) -> anyhow::Result<Whole> {
    let folio_order = order(block.max(4));
    let folios = corpus.pages() / folio_order.pages();
    let bytes = folios * folio_order.bytes();
    let (mut out_s, mut in_s, mut held_bytes, mut stored_bytes) = (f64::MAX, f64::MAX, 0, 0);
    let mut to = Buffer::new(folio_order.bytes());
    for _ in 0..rounds {
        let store = store(codec, block, 1)?;
        let mut w = store.worker();
        let start = Instant::now();
        let pages = (0..folios).map(|folio| (folio * folio_order.pages()) as u64);
        let saves: Vec<_> =
            pages.map(|page| (page, save(&store, &mut w, corpus, page, folio_order))).collect();
        out_s = start.elapsed().as_secs_f64().min(out_s);
        (held_bytes, stored_bytes) = (store.pool_bytes(), store.stats().stored_bytes);
        let start = Instant::now();
        for (_, handles) in &saves {
            load(&store, &mut w, handles, folio_order, to.bytes());
        }
        in_s = start.elapsed().as_secs_f64().min(in_s);
        for (page, handles) in saves.iter().step_by(7) {
            load(&store, &mut w, handles, folio_order, to.bytes());
            anyhow::ensure!(
                folio(corpus, *page) == &to.bytes()[..FOLIO_BYTES],
                "page {page} came back wrong"
            );
        }
    }
    let mb = bytes as f64 / 1e6;
    Ok(Whole { stored: stored_bytes, held: held_bytes, out_mb_s: mb / out_s, in_mb_s: mb / in_s })
}

/// Folios kept at a time while the overhead is measured: more than fits into the CPU caches.
const RING: usize = 512;

/// Measures save and load of 64 KiB folios against the codec alone, which uses a ring of as many
/// folios. Folios with a same-filled page are left out: the store skips those, which would improve
/// its figures.
pub fn overhead(corpus: &CorpusFile, codec: &str, rounds: usize) -> anyhow::Result<StoreRow> {
    let is_filled = |page: &[u8]| page.chunks_exact(8).all(|word| word == &page[..8]);
    let starts = (0..corpus.pages() as u64 / FOLIO_PAGES).map(|folio| folio * FOLIO_PAGES);
    let pages: Vec<u64> =
        starts.filter(|&start| !folio(corpus, start).chunks(PAGE).any(is_filled)).collect();
    anyhow::ensure!(pages.len() > RING, "the corpus has too few folios without same-filled pages");
    let store = store(codec, 2, 1)?;
    let mut ours = Ours {
        w: store.worker(),
        store,
        ring: vec![Vec::new(); RING],
        to: Buffer::new(FOLIO_BYTES),
    };
    let spec = ours.w.codec();
    let bare_codec = BareCodec::new(spec, BLOCK_BYTES);
    let mut run = Bare {
        codec: bare_codec,
        ring: Buffer::new(RING * FOLIO_BYTES),
        to: Buffer::new(FOLIO_BYTES),
    };
    // Both run once through their rings first, so that neither touches new memory.
    (0..2 * RING).for_each(|at| {
        ours.step(corpus, pages[at % pages.len()], at % RING);
        run.step(corpus, pages[at % pages.len()], at % RING);
    });
    let mut ratios = Vec::new();
    let mut sums = (Duration::ZERO, Duration::ZERO);
    for round in 0..rounds {
        let (mut ours_time, mut bare_time) = (Duration::ZERO, Duration::ZERO);
        for (at, page) in pages.iter().enumerate() {
            // The second of the two finds the folio in the CPU caches, so they take turns.
            if (at + round) % 2 == 0 {
                ours_time += ours.step(corpus, *page, at % RING);
                bare_time += run.step(corpus, *page, at % RING);
            } else {
                bare_time += run.step(corpus, *page, at % RING);
                ours_time += ours.step(corpus, *page, at % RING);
            }
        }
        ratios.push(ours_time.as_secs_f64() / bare_time.as_secs_f64() - 1.0);
        sums = (sums.0 + ours_time, sums.1 + bare_time);
    }
    let count = (rounds * pages.len()) as f64;
    let us = |time: Duration| time.as_secs_f64() * 1e6 / count;
    let median = Spread::of(ratios).map_or(f64::NAN, |spread| spread.median);
    let note = format!("{:.1} us of {:.1} us of the bare codec", us(sums.0), us(sums.1));
    let label = format!("{codec}: save and load of 64K, pool over bare codec");
    Ok(StoreRow::at_most(&label, median, OVERHEAD_MAX, note))
}

struct Ours {
    store: Store,
    w: CodecWorker,
    ring: Vec<Vec<Handle>>,
    to: Buffer,
}

impl Ours {
    fn step(&mut self, corpus: &CorpusFile, page: u64, at: usize) -> Duration {
        self.store.free_many(&self.ring[at]);
        let start = Instant::now();
        let handles = save(&self.store, &mut self.w, corpus, page, order(4));
        load(&self.store, &mut self.w, &handles, order(4), self.to.bytes());
        let time = start.elapsed();
        self.ring[at] = handles;
        time
    }
}

struct Bare {
    codec: BareCodec,
    ring: Buffer,
    to: Buffer,
}

impl Bare {
    fn step(&mut self, corpus: &CorpusFile, page: u64, at: usize) -> Duration {
        let folio = folio(corpus, page);
        let start = Instant::now();
        let output = &mut self.ring.bytes()[at * FOLIO_BYTES..][..FOLIO_BYTES];
        for (block, to) in folio.chunks(BLOCK_BYTES).zip(self.to.bytes().chunks_mut(BLOCK_BYTES)) {
            let room = huge_threshold(BLOCK_BYTES);
            // SAFETY: the block is readable; `output` has room for it; they lie apart.
            let size = unsafe {
                self.codec.compress(block.as_ptr(), BLOCK_BYTES, output.as_mut_ptr(), room)
            };
            match size.expect("the codec works") {
                // SAFETY: the `size` bytes were just written; `to` has room for the block.
                Some(size) => unsafe {
                    self.codec.decompress(output.as_ptr(), size, to.as_mut_ptr(), BLOCK_BYTES)
                }
                .expect("what was compressed decompresses"),
                None => {
                    output[..BLOCK_BYTES].copy_from_slice(block);
                    to.copy_from_slice(&output[..BLOCK_BYTES]);
                }
            }
        }
        start.elapsed()
    }
}

/// Stores objects of mixed size with short, medium and long lives. Then returns the stored bytes
/// relative to the memory held, before and after compaction.
pub fn churn(corpus: &CorpusFile, objects: u64) -> anyhow::Result<Vec<StoreRow>> {
    let store = store("lz4", 2, 1)?;
    let mut w = store.worker();
    let mut random = Random::new(7);
    let mut deaths = BinaryHeap::new();
    for now in 0..objects {
        while let Some(Reverse((death, handle))) = deaths.peek().copied()
            && death <= now
        {
            store.free(Handle::from_bits(handle));
            deaths.pop();
        }
        let number = [0, 0, 0, 1, 1, 2, 2, 2][random.below(8)];
        let order = order(number);
        let page = (random.below(corpus.pages() / order.pages()) * order.pages()) as u64;
        let life = match random.below(100) {
            0..70 => objects / 1000,
            70..95 => objects / 20,
            _ => objects,
        };
        let death = now + 1 + random.below(2 * life as usize) as u64;
        deaths.extend(
            save(&store, &mut w, corpus, page, order)
                .into_iter()
                .map(|h| Reverse((death, h.to_bits()))),
        );
    }
    let before = store.stats();
    let start = Instant::now();
    store.compact(u64::MAX);
    let (ms, after) = (start.elapsed().as_secs_f64() * 1e3, store.stats());
    store.check().map_err(|e| anyhow::anyhow!("after compaction: {e}"))?;
    let note = |s: &memfold_store::StoreStats| {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        format!(
            "{} objects live, {:.1} of {:.1} MiB, {:.1} metadata, {:.1} warm",
            s.objects,
            mib(s.stored_bytes),
            mib(s.held_bytes),
            mib(s.metadata_bytes),
            mib(s.warm_bytes)
        )
    };
    let label = |what: &str| format!("stored of held after {objects} objects, {what}");
    let note_after =
        format!("{}; {} moved in {ms:.0} ms", note(&after), after.moved - before.moved);
    Ok(vec![
        StoreRow::at_least(
            &label("not compacted"),
            before.efficiency(),
            EFFICIENCY_MIN,
            note(&before),
        ),
        StoreRow::at_least(
            &label("compacted"),
            after.efficiency(),
            EFFICIENCY_COMPACT_MIN,
            note_after,
        ),
    ])
}
