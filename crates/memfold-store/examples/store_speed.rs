//! Prints how fast the store saves and loads against the bare codec, on this machine's largest shared libraries.
//!
//! `cargo run --release -p memfold-store --example store_speed [MiB [codec,...]]`
//!
//! "bare" compresses from and to memory with nothing around it: what the store adds is pages tested for same-filled,
//! a checksum, a slot, and a copy into it. Saves are measured twice: into a new pool, whose memory the kernel must
//! first hand out page by page, and then into gaps: each block is freed and saved again.
use memfold_store::{BlockSet, CodecSpec, Handle, Store, StoreConfig, Worker};
use memfold_sys::units::{Order, PAGE_SIZE};
use std::hint::black_box;
use std::path::PathBuf;

/// The best of this many runs counts: noise only ever adds time.
const RUNS: usize = 7;
/// Decompressed blocks go round in a buffer of this size, as in a pager's frames.
const FRAMES_BYTES: usize = 2 << 20;

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

fn main() {
    let mib = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(64);
    let corpus = corpus(mib << 20);
    println!(
        "{} MiB of shared libraries; MB/s of processor time, best of {RUNS}; overhead against bare in %",
        (corpus.len() * PAGE_SIZE) >> 20
    );
    println!(
        "{:9}{:>5} | {:>8}{:>9}{:>7}{:>9}{:>7} | {:>8}{:>9}{:>7}{:>9}{:>9}{:>7}",
        "codec",
        "block",
        "bare in",
        "new pool",
        "+%",
        "replace",
        "+%",
        "bare out",
        "load",
        "+%",
        "bare rnd",
        "load rnd",
        "+%"
    );
    let codecs = std::env::args().nth(2).unwrap_or("lz4,zstd:-1,zstd".into());
    for codec in codecs.split(',') {
        for order in [0, 2, 4].map(|o| Order::new(o).expect("an order")) {
            row(codec, order, &corpus);
        }
    }
}

fn row(codec: &str, order: Order, corpus: &[Page]) {
    let blocks = corpus.len() / order.pages();
    let mut bare = Bare::new(codec, order, corpus);
    let shuffled = shuffled(blocks);
    let in_order: Vec<usize> = (0..blocks).collect();
    let mut figures: Vec<Vec<f64>> = vec![Vec::new(); 7];
    for _ in 0..RUNS {
        let mut folded = Folded::new(codec, order, corpus);
        let seconds = [
            time(|| bare.compress()),
            time(|| folded.save()),
            time(|| folded.replace()),
            time(|| bare.decompress(&in_order)),
            time(|| folded.load(&in_order)),
            time(|| bare.decompress(&shuffled)),
            time(|| folded.load(&shuffled)),
        ];
        figures.iter_mut().zip(seconds).for_each(|(f, s)| f.push(s));
        folded.store.check().expect("the store is sound");
    }
    let bytes = (blocks * order.bytes()) as f64;
    let speed = figures.into_iter().map(|mut f| {
        f.sort_by(f64::total_cmp);
        bytes / f[0] / 1e6
    });
    let s: Vec<f64> = speed.collect();
    let over = |bare: f64, ours: f64| (bare / ours - 1.0) * 100.0;
    println!(
        "{:9}{:>4}K | {:>8.0}{:>9.0}{:>7.1}{:>9.0}{:>7.1} | {:>8.0}{:>9.0}{:>7.1}{:>9.0}{:>9.0}{:>7.1}",
        codec,
        order.bytes() >> 10,
        s[0],
        s[1],
        over(s[0], s[1]),
        s[2],
        over(s[0], s[2]),
        s[3],
        s[4],
        over(s[3], s[4]),
        s[5],
        s[6],
        over(s[5], s[6])
    );
}

fn time(run: impl FnOnce()) -> f64 {
    let start = cpu_seconds();
    run();
    cpu_seconds() - start
}

/// Processor time of this thread, so that other work on the machine disturbs less.
fn cpu_seconds() -> f64 {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `at` is a valid place for the result.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut at) };
    at.tv_sec as f64 + at.tv_nsec as f64 / 1e9
}

fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 1u64;
    for i in (1..count).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        order.swap(i, (state >> 33) as usize % (i + 1));
    }
    order
}

fn corpus(bytes: usize) -> Vec<Page> {
    let mut files: Vec<(u64, PathBuf)> =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/bin"]
            .iter()
            .filter_map(|d| std::fs::read_dir(d).ok())
            .flatten()
            .flatten()
            .map(|e| e.path())
            .filter(|p| p.is_file() && !p.is_symlink())
            .map(|p| (p.metadata().map_or(0, |m| m.len()), p))
            .collect();
    files.sort();
    let mut pages = Vec::new();
    for (_, file) in files.iter().rev() {
        for chunk in std::fs::read(file).unwrap_or_default().chunks_exact(PAGE_SIZE) {
            pages.push(Page(chunk.try_into().expect("a page")));
        }
        if pages.len() * PAGE_SIZE >= bytes {
            break;
        }
    }
    pages.truncate(bytes / PAGE_SIZE);
    pages
}

/// The store under test.
struct Folded<'a> {
    store: Store,
    worker: Worker,
    order: Order,
    corpus: &'a [Page],
    handles: Vec<Handle>,
    frames: Vec<Page>,
}

impl<'a> Folded<'a> {
    fn new(codec: &str, order: Order, corpus: &'a [Page]) -> Self {
        let config = StoreConfig {
            codec: CodecSpec::parse(codec).expect("a codec"),
            block_order: order,
            ..StoreConfig::default()
        };
        let store = Store::new(&config).expect("a store");
        let worker = store.worker();
        let handles = vec![Handle::NONE; corpus.len() / order.pages()];
        Folded { store, worker, order, corpus, handles, frames: frames() }
    }

    fn save(&mut self) {
        (0..self.handles.len()).for_each(|i| self.save_one(i));
    }

    fn save_one(&mut self, i: usize) {
        let folio = self.corpus[i * self.order.pages()].0.as_ptr();
        let out = std::slice::from_mut(&mut self.handles[i]);
        // SAFETY: block `i` lies in the corpus, which nobody writes.
        let saved = unsafe {
            self.store.save(&mut self.worker, folio, self.order, i as u64, &BlockSet::first(1), || false, out)
        };
        saved.expect("no limit is set");
    }

    /// Frees each block and saves it again: a pool in its steady state.
    fn replace(&mut self) {
        for i in 0..self.handles.len() {
            self.store.free(self.handles[i]);
            self.save_one(i);
        }
    }

    fn load(&mut self, which: &[usize]) {
        for (nth, i) in which.iter().enumerate() {
            let at = nth * self.order.pages() % self.frames.len();
            // SAFETY: the frames have room for a block at `at`, as their size is a multiple of every block's.
            let loaded = unsafe {
                let dst = self.frames.as_mut_ptr().add(at).cast();
                self.store.load(&mut self.worker, self.handles[*i], self.order, dst)
            };
            loaded.expect("the object is sound");
            black_box(&self.frames[at]);
        }
    }
}

fn frames() -> Vec<Page> {
    vec![Page([0; PAGE_SIZE]); FRAMES_BYTES / PAGE_SIZE]
}

/// The codec alone: all outputs one after another in one buffer.
struct Bare<'a> {
    level: Option<i32>,
    state: Vec<u64>,
    cctx: zstd_safe::CCtx<'static>,
    dctx: zstd_safe::DCtx<'static>,
    order: Order,
    corpus: &'a [Page],
    packed: Vec<u8>,
    ends: Vec<usize>,
    frames: Vec<Page>,
}

unsafe extern "C" {
    fn LZ4_sizeofState() -> i32;
    fn LZ4_compress_fast_extState(
        state: *mut u64,
        src: *const u8,
        dst: *mut u8,
        len: i32,
        room: i32,
        level: i32,
    ) -> i32;
}

impl<'a> Bare<'a> {
    fn new(codec: &str, order: Order, corpus: &'a [Page]) -> Self {
        let spec = CodecSpec::parse(codec).expect("a codec");
        // SAFETY: only returns a number.
        let state = vec![0; unsafe { LZ4_sizeofState() } as usize / 8 + 1];
        let mut cctx = zstd_safe::CCtx::create();
        cctx.set_parameter(zstd_safe::CParameter::CompressionLevel(spec.level())).expect("a level");
        Bare {
            level: (spec.name() == "lz4").then_some(spec.level()),
            state,
            cctx,
            dctx: zstd_safe::DCtx::create(),
            order,
            corpus,
            packed: vec![0; corpus.len() * PAGE_SIZE * 5 / 4],
            ends: Vec::with_capacity(corpus.len()),
            frames: frames(),
        }
    }

    fn compress(&mut self) {
        let len = self.order.bytes();
        self.ends.clear();
        let mut at = 0;
        for pages in self.corpus.chunks_exact(self.order.pages()) {
            let src = pages.as_ptr().cast::<u8>();
            let to = &mut self.packed[at..];
            // SAFETY: `pages` are `len` readable bytes, `to` is writable for its length, and the state is large enough.
            at += unsafe {
                match self.level {
                    Some(level) => LZ4_compress_fast_extState(
                        self.state.as_mut_ptr(),
                        src,
                        to.as_mut_ptr(),
                        len as i32,
                        to.len().min(1 << 30) as i32,
                        level,
                    ) as usize,
                    None => self.cctx.compress2(to, std::slice::from_raw_parts(src, len)).expect("it fits"),
                }
            };
            self.ends.push(at);
        }
    }

    fn decompress(&mut self, which: &[usize]) {
        let len = self.order.bytes();
        for (nth, i) in which.iter().enumerate() {
            let start = if *i == 0 { 0 } else { self.ends[*i - 1] };
            let from = &self.packed[start..self.ends[*i]];
            let at = nth * self.order.pages() % self.frames.len();
            // SAFETY: the frames have room for a block at `at`; `from` is readable for its length.
            let size = unsafe {
                let dst = self.frames.as_mut_ptr().add(at).cast::<u8>();
                match self.level {
                    Some(_) => {
                        lz4_sys::LZ4_decompress_safe(from.as_ptr().cast(), dst.cast(), from.len() as i32, len as i32)
                            as usize
                    }
                    None => {
                        let to = std::slice::from_raw_parts_mut(dst, len);
                        self.dctx.decompress(to, from).expect("it is sound")
                    }
                }
            };
            assert_eq!(size, len);
            black_box(&self.frames[at]);
        }
    }
}
