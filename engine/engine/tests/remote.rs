//! The remote tier behind the swap file, over a fake address space, a device and a store in memory.
//! Row B3.
use memfold_engine::Config;
use memfold_os::transfer::Direction;
use memfold_stats::Stats;
use memfold_testkit::disk::{DiskTrouble, MemoryDisk};
use memfold_testkit::fill::partly_random;
use memfold_testkit::program::{Setup, fatal, small_config};
use memfold_testkit::random::{Random, seed};
use memfold_testkit::remote::{Ask, MemoryRemote, RemoteTrouble};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Pages of 16 MiB: more than limit and file together.
const PAGES: usize = 4096;

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}

/// A limit of 8 MiB, and a file of 4 MiB.
fn config() -> Config {
    let mut config = small_config();
    config.swap_bytes = 4 << 20;
    config.remote_bytes = 64 << 20;
    config
}

fn content(number: usize, version: u64, share: usize) -> Vec<u8> {
    partly_random((number as u64) << 32 | version, share)
}

struct World {
    setup: Setup,
    disk: MemoryDisk,
    remote: MemoryRemote,
}

impl World {
    fn new(config: Config) -> World {
        let (disk, remote) = (MemoryDisk::default(), MemoryRemote::default());
        let setup = Setup::with_tiers(config, PAGES, Some(&disk), Some(&remote));
        World { setup, disk, remote }
    }

    /// Pages `0..count`, incompressible, moving on as they fill the file.
    fn filled(config: Config, count: usize) -> World {
        let world = World::new(config);
        for n in 0..count {
            world.write(n, 1, 0);
            if n % 64 == 63 {
                world.move_all();
            }
        }
        world
    }

    fn move_all(&self) {
        while self.setup.pager.writeback().move_out(false) {}
    }

    fn stats(&self) -> &Stats {
        self.setup.pager.gauges().publish();
        self.setup.pager.stats()
    }

    fn write(&self, number: usize, version: u64, share: usize) {
        self.setup
            .program
            .write(number, |page| page.copy_from_slice(&content(number, version, share)));
    }

    fn assert_holds(&self, number: usize, version: u64, share: usize) {
        let want = content(number, version, share);
        self.setup
            .program
            .read(number, |page| assert!(*page == *want, "page {number} isn't version {version}"));
    }

    /// What reading one of the first pages, which are away, ends the program with.
    fn fatal(&self) -> String {
        fatal(|| self.assert_holds(0, 1, 0))
    }
}

#[test]
fn b3_the_cold_end_moves_to_the_store_and_every_byte_comes_back() {
    let world = World::filled(config(), PAGES);
    let stats = world.stats();
    assert!(get(&stats.remote_out) > 500, "{} pages moved", get(&stats.remote_out));
    assert!(get(&stats.remote_bytes) > 2 << 20 && get(&stats.swap_bytes) <= 4 << 20);
    assert_eq!(get(&stats.over_limit), 0);
    let page = content(5, 1, 0);
    assert!(!world.remote.holds(&page[256..320]), "the store must see no plain bytes");
    world.setup.assert_sound();
    for n in 0..PAGES {
        world.assert_holds(n, 1, 0);
        if n % 64 == 63 {
            world.move_all();
        }
    }
    assert!(get(&world.stats().remote_in) > 500);
    assert_eq!(get(&world.stats().remote_failed), 0);
    world.setup.assert_sound();
}

/// Each is a journal entry of the file system: the mover was bound by them, at 29 MB/s.
#[test]
fn groups_that_move_together_are_punched_together() {
    let world = World::filled(config(), PAGES);
    let (moves, punches) = (get(&world.stats().remote_out) / 16, world.disk.punches());
    // Two to a batch, with so little memory.
    assert!(moves > 50 && punches * 3 < moves * 2, "{punches} calls for {moves} groups");
}

#[test]
fn cold_data_moves_and_data_that_is_read_stays() {
    let world = World::filled(config(), 2500);
    let before = world.remote.asked();
    let hot = 1500..1600;
    for n in 2500..4000 {
        world.write(n, 1, 0);
        hot.clone().step_by(4).for_each(|n| world.assert_holds(n, 1, 0));
        if n % 64 == 63 {
            world.move_all();
        }
    }
    assert!(world.remote.asked() > before);
    let reads = get(&world.stats().remote_in);
    hot.for_each(|n| world.assert_holds(n, 1, 0));
    assert_eq!(get(&world.stats().remote_in), reads, "the hot pages are near");
}

#[test]
fn discarded_data_leaves_the_store() {
    let world = World::filled(config(), PAGES);
    assert!(world.remote.objects() > 20);
    // SAFETY: nobody uses the pages.
    unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(0..PAGES)) };
    world.setup.pager.writeback().write_pending(false);
    world.move_all();
    assert_eq!(world.remote.objects(), 0);
    assert_eq!((get(&world.stats().remote_bytes), get(&world.stats().swap_bytes)), (0, 0));
    world.setup.assert_sound();
}

#[test]
fn a_put_that_fails_in_any_way_leaves_the_data_where_it_was() {
    const COUNT: usize = PAGES / 8 * 7;
    for trouble in [RemoteTrouble::Away, RemoteTrouble::Silent, RemoteTrouble::Half] {
        let world = World::new(config());
        (1..4).for_each(|nth| world.remote.strike(Ask::Put, nth, trouble));
        for n in 0..COUNT {
            world.write(n, 1, 0);
            if n % 64 == 63 {
                world.move_all();
            }
        }
        let failures = get(&world.stats().remote_failed);
        assert_eq!(failures, 3, "{trouble:?}");
        assert!(get(&world.stats().remote_out) > 0, "later ones work: {trouble:?}");
        world.setup.assert_sound();
        (0..COUNT).for_each(|n| world.assert_holds(n, 1, 0));
        // SAFETY: nobody uses the pages.
        unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(0..PAGES)) };
        world.setup.pager.writeback().write_pending(false);
        world.move_all();
        assert_eq!(
            world.remote.objects(),
            0,
            "nor is anything left of those that failed: {trouble:?}"
        );
    }
}

#[test]
fn unreachable_store_costs_memory_but_no_data() {
    let world = World::new(config());
    world.remote.set_away(true);
    for n in 0..PAGES {
        world.write(n, 1, 0);
        if n % 64 == 63 {
            world.move_all();
        }
    }
    assert!(get(&world.stats().remote_failed) > 0 && get(&world.stats().remote_out) == 0);
    assert!(get(&world.stats().swap_bytes) <= 4 << 20, "the file keeps its size");
    assert!(get(&world.stats().over_limit) > 0);
    (0..PAGES).for_each(|n| world.assert_holds(n, 1, 0));
    world.setup.assert_sound();
    world.remote.set_away(false);
    world.move_all();
    assert!(get(&world.stats().remote_out) > 0);
    (0..PAGES).for_each(|n| world.assert_holds(n, 1, 0));
    world.setup.assert_sound();
}

#[test]
fn a_delete_that_fails_is_done_later() {
    let world = World::filled(config(), PAGES);
    world.remote.strike(Ask::Delete, 1, RemoteTrouble::Away);
    // SAFETY: nobody uses the pages.
    unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(0..PAGES)) };
    world.setup.pager.writeback().write_pending(false);
    world.move_all();
    world.move_all();
    assert_eq!(world.remote.objects(), 0);
}

#[test]
fn a_read_that_fails_ends_the_program_and_names_the_store() {
    let world = World::filled(config(), PAGES);
    world.remote.set_away(true);
    let why = world.fatal();
    assert!(
        why.contains("remote store memory-remote, object ") && why.contains("on purpose"),
        "{why}"
    );
}

#[test]
fn data_that_the_store_lost_or_changed_is_never_believed() {
    type Harm = (fn(&MemoryRemote), &'static str);
    let harms: [Harm; 3] = [
        (MemoryRemote::lose, "is not there"),
        (MemoryRemote::damage, "not what was written"),
        (MemoryRemote::exchange, "not what was written"),
    ];
    for (harm, word) in harms {
        let world = World::filled(config(), PAGES);
        harm(&world.remote);
        let why = world.fatal();
        assert!(why.contains("remote store memory-remote, object ") && why.contains(word), "{why}");
    }
}

#[test]
fn a_file_that_cant_be_read_moves_nothing_wrong() {
    let world = World::filled(config(), PAGES / 4);
    // The reads of the mover: each group has one or more.
    (1..40).for_each(|nth| world.disk.strike(Direction::Read, nth, DiskTrouble::Short));
    for n in PAGES / 4..PAGES {
        world.write(n, 1, 0);
        if n % 64 == 63 {
            world.move_all();
        }
    }
    (0..PAGES).for_each(|n| world.assert_holds(n, 1, 0));
    world.setup.assert_sound();
}

#[test]
fn the_mover_works_while_the_program_does() {
    let seed = seed(23);
    let mut random = Random::new(seed);
    let world = World::new(config());
    let pager = world.setup.pager.clone();
    let mut shadow = vec![(0, 0); PAGES];
    std::thread::scope(|scope| {
        scope.spawn(|| while pager.writeback().move_out(true) {});
        let is_moved = || get(&world.stats().remote_out) > 0 && get(&world.stats().remote_in) > 0;
        // On a busy machine the mover comes late.
        for step in (0..500_000u64).take_while(|step| *step < 5_000 || !is_moved()) {
            let n = random.below(PAGES);
            if step == 2_500 {
                world.remote.strike(Ask::Put, 3, RemoteTrouble::Silent);
            }
            if random.per_mille(500) || shadow[n].0 == 0 {
                shadow[n] = (step + 1, random.below(3));
                world.write(n, shadow[n].0, shadow[n].1);
            } else if random.per_mille(50) {
                shadow[n].0 = 0;
                // SAFETY: nobody uses the page.
                unsafe { world.setup.pager.mappings().discard_at(world.setup.addrs(n..n + 1)) };
            } else {
                world.assert_holds(n, shadow[n].0, shadow[n].1);
            }
        }
        world.setup.pager.stop();
    });
    let rest = shadow.iter().enumerate().filter(|(_, entry)| entry.0 > 0);
    rest.for_each(|(n, (version, share))| world.assert_holds(n, *version, *share));
    assert!(get(&world.stats().remote_out) > 0 && get(&world.stats().remote_in) > 0);
    world.setup.assert_sound();
}
