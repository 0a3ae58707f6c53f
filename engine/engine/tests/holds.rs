//! Holds under a model checker that chooses every switch between threads: a system call, evictions,
//! faults, a discard and the adoption. In each model a step can be left out, and then the checker
//! must find what that breaks: so these tests can fail.
//!
//! Run by `scripts/check models`. The kernel is played: a page is there or not, and a call that meets one that
//! isn't, where somebody else would have to serve it, has lost something.

use memfold_engine::holds::Holds;
use memfold_os::units::PAGE_SIZE;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use shuttle::thread;
use std::iter::once;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

const RUNS: usize = 2000;
const PAGES: usize = 2;
const BASE: usize = 1 << 30;
/// Ranges of a call beside those that count.
const FILLING: usize = 7;
/// What a page holds before it is discarded.
const DATA: u8 = 7;

/// What is left out.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Without {
    Nothing,
    /// The holder doesn't wait for who is at work.
    Look,
    /// It touches before it publishes.
    Order,
    /// It publishes nothing.
    Publish,
    /// The evictor looks at the slots before it has marked the pages.
    Mark,
    /// The discard drops what is held.
    Zeros,
    /// The adoption brings nothing in.
    Bring,
    /// A child of fork goes on with its parent's holds and marks.
    Reset,
}

fn explore(model: fn(Without), without: Without) {
    let times = std::env::var("MEMFOLD_MODEL_RUNS").ok().and_then(|t| t.parse().ok()).unwrap_or(1);
    let config = || {
        let mut config = shuttle::Config::new();
        config.max_steps = shuttle::MaxSteps::FailAfter(100_000);
        config
    };
    shuttle::Runner::new(RandomScheduler::new(RUNS * times), config()).run(move || model(without));
    shuttle::Runner::new(PctScheduler::new(3, RUNS * times), config()).run(move || model(without));
}

/// The model holds, and with any of these steps left out it doesn't.
fn assert_needs_all(model: fn(Without), steps: &[Without]) {
    explore(model, Without::Nothing);
    for step in steps {
        let outcome = catch_unwind(AssertUnwindSafe(|| explore(model, *step)));
        assert!(outcome.is_err(), "the model holds without this step");
    }
}

/// Pages of a program, its kernel, and who serves its faults.
struct World {
    holds: Holds,
    there: [AtomicBool; PAGES],
    bytes: [AtomicU8; PAGES],
    /// Who isn't there must be served.
    registered: AtomicBool,
    managing: AtomicBool,
    /// As the engine's: a fault, an eviction or a discard at a time.
    shard: Mutex<()>,
}

fn page(number: usize) -> Range<usize> {
    BASE + number * PAGE_SIZE..BASE + (number + 1) * PAGE_SIZE
}

fn all() -> Range<usize> {
    page(0).start..page(PAGES - 1).end
}

impl World {
    fn new(managed: bool) -> Arc<World> {
        Arc::new(World {
            holds: Holds::new(true),
            there: [const { AtomicBool::new(true) }; PAGES].map(|_| AtomicBool::new(true)),
            bytes: std::array::from_fn(|_| AtomicU8::new(DATA)),
            registered: AtomicBool::new(managed),
            managing: AtomicBool::new(managed),
            shard: Mutex::new(()),
        })
    }

    /// The program's own access: served like any fault.
    fn touch(&self, number: usize) {
        if !self.there[number].load(SeqCst) {
            let _shard = self.shard.lock().unwrap();
            self.there[number].store(true, SeqCst);
        }
    }

    /// The kernel's, which looks at the mapping and the page at once.
    fn kernel_access(&self, number: usize) {
        let _shard = self.shard.lock().unwrap();
        if !self.there[number].load(SeqCst) {
            assert!(!self.registered.load(SeqCst), "EFAULT");
            self.there[number].store(true, SeqCst);
        }
    }

    /// A system call that names both pages.
    fn call(&self, without: Without) {
        let touch = || (0..PAGES).for_each(|number| self.touch(number));
        if without == Without::Order {
            touch();
        }
        // Its ranges don't fit into one slot.
        let mut holding = self.holds.begin(1);
        (0..FILLING).for_each(|n| holding.push(page(PAGES + n), false));
        if without != Without::Publish {
            holding.push(all(), true);
        }
        let hold = holding.publish().expect("there is room").expect("something is held");
        if without != Without::Look {
            self.holds.wait(hold);
        }
        if self.managing.load(SeqCst) && without != Without::Order {
            touch();
        }
        (0..PAGES).for_each(|number| self.kernel_access(number));
        (0..PAGES).rev().for_each(|number| self.kernel_access(number));
        self.holds.release(hold);
    }

    fn evict(&self, numbers: Range<usize>, without: Without) {
        let _shard = self.shard.lock().unwrap();
        let range = page(numbers.start).start..page(numbers.end - 1).end;
        let marks = if without == Without::Mark { 0..0 } else { range.clone() };
        let departure = self.holds.mark_leaving(once(marks));
        for number in numbers {
            if departure.may_evict(page(number)) {
                self.there[number].store(false, SeqCst);
            }
        }
    }

    /// The program gives both pages up.
    fn discard(&self, without: Without) {
        let departure = self.holds.mark_leaving(once(all()));
        let mut is_held = [false; PAGES];
        for (number, is_held_one) in is_held.iter_mut().enumerate() {
            *is_held_one = departure.is_held(page(number)) && without != Without::Zeros;
        }
        for number in 0..PAGES {
            if is_held[number] {
                self.touch(number);
            } else {
                let _shard = self.shard.lock().unwrap();
                self.there[number].store(false, SeqCst);
            }
            self.bytes[number].store(0, SeqCst);
        }
    }

    fn adopt(&self, without: Without) {
        self.managing.store(true, SeqCst);
        let departure = self.holds.mark_leaving(once(all()));
        for number in 0..PAGES {
            if without != Without::Bring {
                departure.each_held(page(number), |_| self.there[number].store(true, SeqCst));
            }
        }
        let _shard = self.shard.lock().unwrap();
        self.registered.store(true, SeqCst);
    }

    /// The process is copied: this is the child's world, in which the copier is the only thread.
    fn copied(&self, without: Without) -> World {
        let holds = self.holds.copied();
        if without != Without::Reset {
            // SAFETY: nobody else has it.
            unsafe { holds.reset_in_child() };
        }
        let presence = |number: usize| AtomicBool::new(self.there[number].load(SeqCst));
        World {
            holds,
            there: std::array::from_fn(presence),
            bytes: std::array::from_fn(|_| AtomicU8::new(DATA)),
            registered: AtomicBool::new(true),
            managing: AtomicBool::new(true),
            shard: Mutex::new(()),
        }
    }
}

fn spawn(world: &Arc<World>, act: impl FnOnce(&World) + Send + 'static) -> thread::JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || act(&world))
}

fn join(threads: Vec<thread::JoinHandle<()>>) {
    threads.into_iter().for_each(|t| t.join().unwrap());
}

#[test]
fn a_call_meets_no_page_that_an_evictor_takes() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| w.evict(0..2, without)),
            spawn(&world, move |w| w.evict(1..2, without)),
        ]);
    }
    let steps = [Without::Look, Without::Order, Without::Publish, Without::Mark];
    assert_needs_all(model, &steps);
}

#[test]
fn two_calls_an_eviction_and_a_fault_all_end() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| w.evict(0..2, without)),
            spawn(&world, |w| w.touch(1)),
        ]);
        // What nobody holds any more leaves.
        world.evict(0..2, Without::Nothing);
        assert!(world.there.iter().all(|is_present| !is_present.load(SeqCst)));
    }
    assert_needs_all(model, &[Without::Look, Without::Publish]);
}

#[test]
fn a_call_goes_on_while_what_it_names_is_discarded() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| w.discard(without)),
            spawn(&world, move |w| w.evict(0..1, without)),
        ]);
        assert!(world.bytes.iter().all(|byte| byte.load(SeqCst) == 0));
    }
    assert_needs_all(model, &[Without::Look, Without::Zeros]);
}

/// Some calls are under way at the adoption, and some begin during it.
#[test]
fn an_adoption_breaks_no_call_under_way() {
    fn model(without: Without) {
        let world = World::new(false);
        world.there[1].store(false, SeqCst);
        join(vec![
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| {
                w.adopt(without);
                w.evict(0..2, without);
            }),
        ]);
    }
    assert_needs_all(model, &[Without::Look, Without::Publish, Without::Bring]);
}

/// Of a call that is under way, and of an evictor at work, the child of a third thread has nothing:
/// all that its parent held can leave, and a call of its own waits for nobody.
#[test]
fn a_child_of_fork_has_neither_holds_nor_marks_of_its_parents() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| w.call(without)),
            spawn(&world, move |w| w.evict(0..2, without)),
            spawn(&world, move |w| {
                let child = w.copied(without);
                child.evict(0..2, Without::Nothing);
                assert!(
                    child.there.iter().all(|is_present| !is_present.load(SeqCst)),
                    "still held"
                );
                child.call(Without::Nothing);
                child.evict(0..2, Without::Nothing);
                assert!(
                    child.there.iter().all(|is_present| !is_present.load(SeqCst)),
                    "held for good"
                );
            }),
        ]);
    }
    assert_needs_all(model, &[Without::Reset]);
}

/// The same of the marks alone.
#[test]
fn call_in_a_child_waits_for_no_evictor_of_its_parent() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| w.evict(0..2, without)),
            spawn(&world, move |w| w.copied(without).call(Without::Nothing)),
        ]);
    }
    assert_needs_all(model, &[Without::Reset]);
}

/// The process is about to end: nothing leaves from then on, whoever is at work.
#[test]
fn pages_that_are_touched_while_eviction_is_stopped_stay() {
    fn model(without: Without) {
        let world = World::new(true);
        join(vec![
            spawn(&world, move |w| {
                if without != Without::Publish {
                    w.holds.stop_eviction();
                }
                (0..PAGES).for_each(|number| w.touch(number));
                (0..PAGES).for_each(|number| w.kernel_access(number));
            }),
            spawn(&world, move |w| w.evict(0..2, without)),
            spawn(&world, move |w| w.evict(1..2, without)),
        ]);
    }
    assert_needs_all(model, &[Without::Publish, Without::Mark]);
}
