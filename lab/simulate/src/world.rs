//! Worlds: the settings of a run, and the engine that has them, over a fake kernel, disk and remote
//! store.
use crate::step::Habits;
use memfold_engine::config::WORKABLE_MIN_BYTES;
use memfold_engine::delivery::background;
use memfold_engine::pager::{Pager, PagerParts, StatsPlace};
use memfold_engine::{Config, Delivery};
use memfold_os::sync::Mutex;
use memfold_os::thread::delegate_queue::{DelegateQueue, Delegated};
use memfold_stats::Stats;
use memfold_testkit::disk::MemoryDisk;
use memfold_testkit::fake::FakeSpace;
use memfold_testkit::program::Program;
use memfold_testkit::random::Random;
use memfold_testkit::remote::MemoryRemote;
use memfold_testkit::trouble::Troubled;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where folded data may go besides the pool.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Tiers {
    /// Nowhere.
    Pool,
    /// To a swap file of so many KiB.
    File(u64),
    /// To a swap file of so many KiB, and a remote store.
    Remote(u64),
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct World {
    /// How faults are delivered.
    pub delivery: Delivery,
    /// Pages of the area.
    pub pages: usize,
    /// Tasks of the program.
    pub tasks: usize,
    /// Folded memory is hidden, as without a userfaultfd.
    pub hides: bool,
    /// What its steps are like.
    pub habits: Habits,
    tiers: Tiers,
    settings: Vec<(&'static str, &'static str)>,
}

impl World {
    /// Draws a world.
    pub fn random(random: &mut Random) -> World {
        let delivery =
            random.pick(&[Delivery::Thread, Delivery::Signal, Delivery::Gate, Delivery::Gate]);
        let hides = delivery == Delivery::Gate && random.below(3) == 0;
        let paging = if hides { "protection" } else { "userfaultfd" };
        let sizes = [
            ("4K", "4K"),
            ("4K", "64K"),
            ("16K", "16K"),
            ("16K", "64K"),
            ("16K", "64K"),
            ("16K", "2M"),
            ("64K", "2M"),
        ];
        let (block, folio) = match hides {
            true => random.pick(&[("64K", "64K"), ("64K", "2M")]),
            false => random.pick(&sizes),
        };
        let settings = vec![
            ("paging", paging),
            ("block", block),
            ("folio", folio),
            ("codec", random.pick(&["lz4", "lz4", "lz4", "delta", "none", "zstd"])),
            ("verify", random.pick(&["off", "off", "on"])),
            ("readahead", random.pick(&["on", "on", "off"])),
            ("workingset", random.pick(&["on", "on", "off"])),
            ("clean", random.pick(&["100", "100", "10", "0"])),
            ("fallback", random.pick(&["0", "0", "30"])),
            ("move", random.pick(&["on", "on", "off"])),
            ("pools", random.pick(&["1", "2"])),
            ("workers", random.pick(&["1", "1", "2"])),
            ("max-pool", random.pick(&["none", "none", "256K", "1M"])),
            ("recompress", random.pick(&["off", "off", "zstd:3"])),
            ("recompress-after", "1"),
            ("recompress-cpu", "5"),
            ("swap-encrypt", "on"),
            ("remote-at", random.pick(&["10", "50", "90"])),
            ("swap-keep-free", "0"),
        ];
        let file = random.pick(&[256, 1024, 8192]);
        let tiers = random.pick(&[
            Tiers::Pool,
            Tiers::Pool,
            Tiers::File(file),
            Tiers::File(file),
            Tiers::Remote(file),
        ]);
        let (pages, tasks) = (random.pick(&[192, 600, 1100]), 2 + random.below(3));
        let habits = Habits::random(random, pages, delivery == Delivery::Gate);
        World { delivery, pages, tasks, hides, habits, tiers, settings }
    }

    fn config(&self) -> Config {
        let mut config = Config::new(1 << 30);
        for (name, value) in &self.settings {
            config.set(name, value).expect("a valid setting");
        }
        config.delivery = self.delivery;
        config.resident_bytes = Some(WORKABLE_MIN_BYTES);
        if let Tiers::File(kib) | Tiers::Remote(kib) = self.tiers {
            config.swap = Some("memory".into());
            config.swap_bytes = kib << 10;
        }
        if self.tiers != Tiers::Pool {
            config.remote_bytes = 16 << 20;
        }
        config
    }
}

/// Engine tasks, a bit each. They make calls to disk and remote store themselves.
static ENGINE_TASKS: AtomicU64 = AtomicU64::new(0);

fn own_bit() -> u64 {
    let task: usize = shuttle::current::me().into();
    1 << (task % 64)
}

fn is_engine_task() -> bool {
    ENGINE_TASKS.load(Relaxed) & own_bit() != 0
}

/// Makes the calling task one that has the engine's descriptors.
pub fn become_engine_task() {
    ENGINE_TASKS.fetch_or(own_bit(), Relaxed);
}

/// An engine thread that is a task.
pub type EngineTask = shuttle::thread::JoinHandle<()>;

/// An engine, and the fakes around it.
pub struct Machine {
    /// The pages.
    pub space: FakeSpace,
    /// Faults of the fake kernel.
    pub troubles: Troubled,
    /// The swap file.
    pub disk: MemoryDisk,
    /// The remote store.
    pub remote: MemoryRemote,
    /// The engine.
    pub pager: Arc<Pager>,
    /// The program.
    pub program: Program,
    /// Held by the task that changes mappings or copies the process.
    pub changes: Mutex<()>,
}

impl Machine {
    /// Makes the engine of a world, which manages the whole area.
    ///
    /// # Panics
    /// The settings are wrong.
    pub fn new(world: &World) -> Machine {
        let config = world.config();
        let space = match world.hides {
            true => FakeSpace::hiding(world.pages),
            false => FakeSpace::new(world.pages),
        };
        let troubles = Troubled::new(&space);
        let (disk, remote) = (MemoryDisk::default(), MemoryRemote::default());
        let is_gate = world.delivery == Delivery::Gate;
        let queue = is_gate.then(|| Arc::new(DelegateQueue::new(is_engine_task)));
        let parts = PagerParts {
            space: Box::new(troubles.clone()),
            has_move: !world.hides,
            reports_limit: false,
            stats: StatsPlace::Own(Box::new(Stats::new())),
            cpus: 2,
            disk: (world.tiers != Tiers::Pool).then(|| match &queue {
                Some(queue) => Box::new(Delegated::new(Arc::new(disk.clone()), queue.clone())) as _,
                None => Box::new(disk.clone()) as _,
            }),
            remote: matches!(world.tiers, Tiers::Remote(_)).then(|| match &queue {
                Some(queue) => {
                    Box::new(Delegated::new(Arc::new(remote.clone()), queue.clone())) as _
                }
                None => Box::new(remote.clone()) as _,
            }),
            delegate_queue: queue.clone(),
            shared_limit: None,
            compressors: None,
        };
        let pager = Arc::new(Pager::new(config, parts).expect("an engine"));
        pager.prepare();
        pager.mappings().manage_empty(space.area().start, space.area().end);
        let program = Program::new(&pager, &space);
        Machine { space, troubles, disk, remote, pager, program, changes: Mutex::new(()) }
    }

    /// Starts the engine's threads as tasks. Returns those that may wait for the others, and the
    /// others.
    pub fn start(&self) -> [Vec<EngineTask>; 2] {
        let count = self.pager.config().worker_count(self.pager.cpus());
        let threads = background::threads(&self.pager, count);
        let begin = |thread: background::EngineThread| {
            shuttle::thread::spawn(move || {
                become_engine_task();
                (thread.main)(thread.arg);
            })
        };
        let (workers, others): (Vec<_>, Vec<_>) =
            threads.into_iter().partition(|thread| background::is_worker(thread.name));
        [workers, others].map(|threads| threads.into_iter().map(begin).collect())
    }

    /// Ends the engine's threads.
    ///
    /// # Panics
    /// One of them has failed.
    pub fn stop(&self, tasks: [Vec<EngineTask>; 2]) {
        let stops: [fn(&Pager); 2] = [Pager::stop_workers, Pager::stop];
        for (stop, tasks) in stops.into_iter().zip(tasks) {
            stop(&self.pager);
            tasks.into_iter().for_each(|task| task.join().expect("an engine task ends"));
        }
    }
}
