//! Random use of folded memory by several threads against a shadow buffer, with real page faults:
//! both deliveries, moving and copying, small and large blocks and folios, tiny limits. Rows C1,
//! C2, C3, S5, Z1, Z2, Z5, Z7, M1, M8, B2.
//!
//! A failure prints its seed; `MEMFOLD_SEED=N cargo test -p memfold --test property` runs it again.
//! `hunt` (ignored) goes on with new seeds for `MEMFOLD_SECONDS`.
use memfold_engine::{Delivery, Memory, PinnedRange, Region};
use memfold_os::units::PAGE_SIZE;
use memfold_testkit::fill::fill;
use memfold_testkit::random::{Random, seed};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const THREADS: usize = 3;
const RESIDENT: u64 = 8 << 20;

/// Settings that change what the engine does with a page.
#[derive(Copy, Clone, Debug)]
struct Case {
    delivery: Delivery,
    moves: &'static str,
    block: &'static str,
    folio: &'static str,
    codec: &'static str,
    verify: &'static str,
    readahead: &'static str,
    clean: &'static str,
    fallback: &'static str,
    mib: usize,
}

const USUAL: Case = Case {
    delivery: Delivery::Thread,
    moves: "on",
    block: "16K",
    folio: "2M",
    codec: "lz4",
    verify: "off",
    readahead: "on",
    clean: "100",
    fallback: "0",
    mib: 32,
};

impl Case {
    fn random(random: &mut Random) -> Case {
        let (block, folio) = random.pick(&[
            ("4K", "4K"),
            ("4K", "64K"),
            ("4K", "2M"),
            ("16K", "16K"),
            ("16K", "64K"),
            ("16K", "2M"),
            ("64K", "64K"),
            ("64K", "2M"),
        ]);
        Case {
            delivery: random.pick(&[Delivery::Thread, Delivery::Signal]),
            moves: random.pick(&["on", "on", "off"]),
            block,
            folio,
            codec: random.pick(&["lz4", "lz4", "delta", "zstd", "none"]),
            verify: random.pick(&["off", "on"]),
            readahead: random.pick(&["on", "on", "off"]),
            clean: random.pick(&["100", "100", "10", "0"]),
            fallback: random.pick(&["0", "0", "50", "100"]),
            mib: random.pick(&[16, 32, 64]),
        }
    }

    fn memory(&self) -> Memory {
        let builder =
            Memory::builder().resident_bytes(RESIDENT).delivery(self.delivery).codec(self.codec);
        let builder =
            builder.set("move", self.moves).set("block", self.block).set("folio", self.folio);
        let builder = builder
            .set("verify", self.verify)
            .set("readahead", self.readahead)
            .set("clean", self.clean);
        builder.set("fallback", self.fallback).build().expect("folded memory")
    }
}

/// One thread and the pages that are its own: those whose number is `me` modulo [`THREADS`]. Folios
/// are shared with the other threads, pages are not.
struct Owner<'a> {
    region: &'a Region,
    me: usize,
    random: Random,
    shadow: Vec<u8>,
    pins: Vec<PinnedRange<'a>>,
}

impl<'a> Owner<'a> {
    fn new(region: &'a Region, me: usize, random: Random) -> Owner<'a> {
        let pages = region.len() / PAGE_SIZE / THREADS;
        Owner { region, me, random, shadow: vec![0; pages * PAGE_SIZE], pins: Vec::new() }
    }

    fn pages(&self) -> usize {
        self.shadow.len() / PAGE_SIZE
    }

    /// Offset in the region of the thread's `own`th page.
    fn offset(&self, own: usize) -> usize {
        (own * THREADS + self.me) * PAGE_SIZE
    }

    fn at(&self, own: usize) -> *mut u8 {
        self.region.as_ptr().wrapping_add(self.offset(own))
    }

    fn write(&mut self, own: usize) {
        let (at, len) = match self.random.below(3) {
            0 => (self.random.below(PAGE_SIZE - 64), 64),
            _ => (0, PAGE_SIZE),
        };
        let to = self.at(own).wrapping_add(at);
        let shadow = &mut self.shadow[own * PAGE_SIZE + at..][..len];
        fill(&mut self.random, shadow);
        // SAFETY: the page lies in the region and is this thread's own; the region outlives the
        // borrow.
        unsafe { std::ptr::copy_nonoverlapping(shadow.as_ptr(), to, len) };
    }

    fn read(&self, own: usize) {
        // SAFETY: as in `write`; nobody writes the page while the slice lives.
        let bytes = unsafe { std::slice::from_raw_parts(self.at(own), PAGE_SIZE) };
        let want = &self.shadow[own * PAGE_SIZE..][..PAGE_SIZE];
        if bytes != want {
            let at = (0..PAGE_SIZE).find(|i| bytes[*i] != want[*i]).unwrap_or(0);
            let (byte, expected) = (bytes[at], want[at]);
            panic!(
                "page {} of thread {}, byte {at}: {byte:#x}, not {expected:#x}",
                self.offset(own) / PAGE_SIZE,
                self.me
            );
        }
    }

    fn discard(&mut self, own: usize) {
        let at = self.offset(own);
        // SAFETY: the page is this thread's own, and no reference into it is alive.
        unsafe { self.region.discard(at..at + PAGE_SIZE) };
        self.shadow[own * PAGE_SIZE..][..PAGE_SIZE].fill(0);
    }

    /// Pins a page and lets the kernel write to it, which in signal delivery works for pinned pages
    /// only.
    fn pin(&mut self, own: usize) {
        let at = self.offset(own);
        let pin = self.region.pin(at + 1..at + 2);
        let mut zeros = std::fs::File::open("/dev/zero").expect("/dev/zero");
        // SAFETY: the page is this thread's own; it is not borrowed otherwise.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.at(own), PAGE_SIZE) };
        std::io::Read::read_exact(&mut zeros, bytes)
            .expect("a pinned page can be written to by the kernel");
        self.shadow[own * PAGE_SIZE..][..PAGE_SIZE].fill(0);
        if self.pins.len() > 4 {
            self.pins.clear();
        }
        self.pins.push(pin);
    }

    fn span(&mut self) -> std::ops::Range<usize> {
        let from = self.random.below(self.region.len());
        from..(from + 1 + self.random.below(3 << 20)).min(self.region.len())
    }

    fn step(&mut self) {
        let own = self.random.below(self.pages());
        match self.random.below(100) {
            0..35 => self.write(own),
            35..70 => self.read(own),
            70..76 => {
                // A stream, up or down.
                let end = (own + 400).min(self.pages());
                let up = self.random.below(2) == 0;
                (own..end).for_each(|n| self.read(if up { n } else { end - 1 - (n - own) }));
            }
            76..80 => (own..(own + 200).min(self.pages())).for_each(|n| self.write(n)),
            80..86 => {
                let span = self.span();
                self.region.pageout(span);
            }
            86..89 => {
                let span = self.span();
                self.region.cold(span);
            }
            89..92 => {
                let span = self.span();
                self.region.willneed(span.start..span.end.min(span.start + (512 << 10)));
            }
            92..97 => self.discard(own),
            _ => self.pin(own),
        }
    }
}

fn run(case: Case, seed: u64, steps: usize) {
    eprintln!("{case:?}, seed {seed}");
    let mut random = Random::new(seed);
    let memory = case.memory();
    let region = memory.region(case.mib << 20).expect("a region");
    let region = &region;
    let outcome = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|me| {
                let mut owner = Owner::new(region, me, random.fork());
                scope.spawn(move || {
                    (0..steps).for_each(|_| owner.step());
                    owner.pins.clear();
                    (0..owner.pages()).for_each(|own| owner.read(own));
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join()).collect::<Vec<_>>()
    });
    assert!(outcome.iter().all(|r| r.is_ok()), "seed {seed}, {case:?}: a thread saw wrong bytes");
    check(&memory, &case, seed);
}

fn check(memory: &Memory, case: &Case, seed: u64) {
    memory.check().unwrap_or_else(|why| panic!("seed {seed}, {case:?}: {why}"));
    let get = |counter: &AtomicU64| counter.load(Relaxed);
    let stats = memory.stats();
    assert_eq!(stats.check_sums(), Ok(()), "seed {seed}, {case:?}");
    assert!(
        get(&stats.pgmajfault) > 0 && get(&stats.zswpout) > 0,
        "seed {seed}, {case:?}: nothing was folded"
    );
    if case.moves == "on" {
        assert_eq!(get(&stats.over_limit), 0, "seed {seed}, {case:?}: the limit was not kept");
    }
}

fn cases(of: &[Case], steps: usize) {
    let seed = seed(20_261_121);
    of.iter().enumerate().for_each(|(n, case)| run(*case, seed.wrapping_add(n as u64), steps));
}

#[test]
fn c1_c2_thread_delivery_agrees_with_a_shadow() {
    cases(
        &[
            USUAL,
            Case { block: "4K", folio: "4K", codec: "zstd", ..USUAL },
            Case { block: "64K", verify: "on", clean: "10", mib: 64, ..USUAL },
            Case { block: "4K", folio: "64K", readahead: "off", ..USUAL },
            Case { codec: "delta", verify: "on", ..USUAL },
        ],
        250,
    );
}

#[test]
fn c1_c2_signal_delivery_agrees_with_a_shadow() {
    let usual = Case { delivery: Delivery::Signal, ..USUAL };
    cases(
        &[
            usual,
            Case { block: "4K", codec: "zstd", verify: "on", ..usual },
            Case { block: "64K", folio: "64K", clean: "0", ..usual },
            Case { block: "64K", codec: "delta", fallback: "50", ..usual },
            Case { folio: "64K", mib: 64, fallback: "50", ..usual },
        ],
        250,
    );
}

#[test]
fn c1_copying_agrees_with_a_shadow() {
    let usual = Case { moves: "off", ..USUAL };
    cases(
        &[
            usual,
            Case { delivery: Delivery::Signal, verify: "on", codec: "zstd", ..usual },
            Case { block: "4K", folio: "64K", delivery: Delivery::Signal, ..usual },
        ],
        200,
    );
}

/// New cases and seeds for `MEMFOLD_SECONDS` (600).
#[test]
#[ignore = "runs for minutes"]
fn hunt() {
    let seconds = std::env::var("MEMFOLD_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600);
    let start = Instant::now();
    let mut random =
        Random::new(seed(start.elapsed().as_nanos() as u64 ^ std::process::id() as u64));
    let mut runs = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        run(Case::random(&mut random), random.word(), 1500);
        runs += 1;
    }
    println!("{runs} runs");
}
