//! Faults at random: whatever the kernel or the store refuses, no byte is lost, no thread stays
//! asleep, and at rest all sums hold. Rows Z3, Z4, Z5, Z7, C1, C2.
use memfold_engine::{Config, Delivery};
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::InjectedFault;
use memfold_testkit::fill::fill;
use memfold_testkit::program::{Program, Setup};
use memfold_testkit::random::{Random, seed};
use std::time::{Duration, Instant};

fn config(change: impl FnOnce(&mut Config)) -> Config {
    let mut config = Config::new(1 << 30);
    config.workers = 1;
    change(&mut config);
    config
}

fn order(n: u8) -> Order {
    Order::new(n).expect("an order")
}

/// What the pages of a program must hold: its own pages are those whose number is `me` modulo `of`.
struct Shadow {
    bytes: Vec<u8>,
    pages: usize,
    me: usize,
    of: usize,
}

impl Shadow {
    fn new(pages: usize, me: usize, of: usize) -> Shadow {
        Shadow { bytes: vec![0; pages * PAGE_SIZE], pages, me, of }
    }
    fn own(&self, random: &mut Random) -> usize {
        random.below(self.pages / self.of) * self.of + self.me
    }
    fn page(&mut self, number: usize) -> &mut [u8] {
        &mut self.bytes[number * PAGE_SIZE..][..PAGE_SIZE]
    }
    fn write(&mut self, program: &Program, number: usize, random: &mut Random) {
        let at = if random.below(3) == 0 { random.below(PAGE_SIZE - 64) } else { 0 };
        let to = if at == 0 { PAGE_SIZE } else { at + 64 };
        let page = self.page(number);
        fill(random, &mut page[at..to]);
        program.write(number, |bytes| bytes[at..to].copy_from_slice(&page[at..to]));
    }
    fn read(&mut self, program: &Program, number: usize) {
        let page = self.page(number);
        program.read(number, |bytes| assert!(*bytes == *page, "page {number} has wrong bytes"));
    }
    fn read_all(&mut self, program: &Program) {
        (self.me..self.pages).step_by(self.of).for_each(|number| self.read(program, number));
    }
}

/// Random steps of one program among `of`.
fn steps(setup: &Setup, mut random: Random, shadow: &mut Shadow, count: usize) {
    let program = setup.program.clone();
    for _ in 0..count {
        let number = shadow.own(&mut random);
        let span = number..(number + 1 + random.below(600)).min(shadow.pages);
        match random.below(100) {
            0..38 => shadow.write(&program, number, &mut random),
            38..74 => shadow.read(&program, number),
            // A stream through its own pages.
            74..84 => span.step_by(shadow.of).for_each(|n| shadow.read(&program, n)),
            84..89 => drop(setup.pager.mappings().page_out_at(setup.addrs(span))),
            89..92 => setup.pager.mappings().cool_at(setup.addrs(span)),
            92..95 => setup
                .pager
                .mappings()
                .need_at(setup.addrs(span.start..span.end.min(span.start + 64))),
            95..97 => drop(setup.pager.background().reclaim_in_background()),
            97..99 => {
                // SAFETY: the page is this program's own, and it isn't using it.
                unsafe { setup.pager.mappings().discard_at(setup.addrs(number..number + 1)) };
                shadow.page(number).fill(0);
            }
            // Without moves the engine reads a page at its home, where the fake has poison for a
            // hole; in regions with signal delivery pages are discarded by the engine only.
            _ => {
                let config = setup.pager.config();
                if config.use_move
                    && config.delivery == Delivery::Thread
                    && setup.space.punch(program.page(number))
                {
                    shadow.page(number).fill(0);
                }
            }
        }
    }
}

/// Several programs at random steps, with a background thread, under troubles of every kind.
fn heavy(seed: u64, count: usize, change: impl FnOnce(&mut Config)) {
    const PAGES: usize = 6 * 1024;
    let mut random = Random::new(seed);
    let setup = &Setup::new(config(change), PAGES);
    setup.troubles.strike_at_random(60, random.word());
    let faults = setup.pager.store().faults();
    faults.strike_every(InjectedFault::Codec, 97);
    faults.strike_every(InjectedFault::PoolFull, 131);
    if setup.pager.config().verify {
        faults.strike_every(InjectedFault::Compressed, 89);
    }
    let mut shadows: Vec<_> = (0..2).map(|me| Shadow::new(PAGES, me, 2)).collect();
    std::thread::scope(|scope| {
        let background = scope.spawn(|| while setup.pager.work() {});
        let programs: Vec<_> = shadows
            .iter_mut()
            .map(|shadow| {
                let random = random.fork();
                scope.spawn(move || steps(setup, random, shadow, count))
            })
            .collect();
        let results: Vec<_> = programs.into_iter().map(|p| p.join()).collect();
        setup.pager.stop();
        background.join().expect("the background thread works on");
        results.into_iter().for_each(|r| r.expect("every program goes on"));
    });
    setup.assert_sound();
    setup.troubles.clear();
    faults.clear();
    shadows.iter_mut().for_each(|s| s.read_all(&setup.program));
    setup.pager.mappings().page_out_at(setup.addrs(0..PAGES));
    setup.assert_sound();
    shadows.iter_mut().for_each(|s| s.read_all(&setup.program));
    setup.assert_sound();
    assert!(setup.troubles.struck(|_| true) > 10, "the troubles were met");
}

#[test]
fn z3_c1_thread_delivery_loses_nothing_under_faults() {
    heavy(seed(1), 1000, |_| ());
}

#[test]
fn z3_c1_signal_delivery_loses_nothing_under_faults() {
    heavy(seed(2), 1000, |c| c.delivery = Delivery::Signal);
}

#[test]
fn z3_c1_copying_loses_nothing_under_faults() {
    heavy(seed(3), 1000, |c| c.use_move = false);
}

#[test]
fn z7_verify_mode_loses_nothing_under_faults() {
    heavy(seed(4), 1000, |c| c.verify = true);
}

/// New seeds and settings for `MEMFOLD_SECONDS` (600).
#[test]
#[ignore = "runs for minutes"]
fn hunt() {
    let seconds = std::env::var("MEMFOLD_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(600);
    let start = Instant::now();
    let mut random = Random::new(seed(std::process::id() as u64));
    while start.elapsed() < Duration::from_secs(seconds) {
        let (seed, mut choice) = (random.word(), random.fork());
        eprintln!("seed {seed}");
        heavy(seed, 3000, |c| {
            let (block, folio) = choice.pick(&[(0, 0), (0, 4), (0, 9), (2, 4), (2, 9), (4, 9)]);
            (c.block_order, c.folio_order) = (order(block), order(folio));
            c.delivery = choice.pick(&[Delivery::Thread, Delivery::Signal]);
            c.use_move = choice.below(3) > 0;
            c.verify = choice.below(2) == 0;
            c.clean_percent = choice.pick(&[0, 10, 100]);
            c.codec = choice.pick(&["lz4", "lz4", "zstd"]).to_string();
            eprintln!("{c:?}");
        });
    }
}
