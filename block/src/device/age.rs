//! The age of objects: which ones were not used since some moment.
use memfold_store::{ColdObject, Store};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Seconds between advances of the store's clock.
const TICK_S: u64 = 30;
/// Ticks whose time is known: those of 34 hours.
const KNOWN: usize = 4096;

/// The times of the ticks of the store's clock.
#[derive(Default)]
pub(crate) struct ObjectAges(Mutex<TickTimes>);

#[derive(Default)]
struct TickTimes {
    /// A tick of the clock, and when it began.
    known: VecDeque<(u16, Instant)>,
    /// Objects that were not used since this tick are marked idle.
    idle: Option<u16>,
}

impl ObjectAges {
    /// Advances the store's clock if that is due.
    pub fn advance(&self, store: &Store) {
        let mut times = self.0.lock().expect("nobody panics with the lock");
        let is_due =
            times.known.back().is_none_or(|last| last.1.elapsed() >= Duration::from_secs(TICK_S));
        if is_due {
            times.tick(store);
        }
    }

    /// Marks objects that were not used for `age` as idle. An object is idle until it is used
    /// again.
    pub fn mark_idle(&self, store: &Store, age: Duration) {
        let mut times = self.0.lock().expect("nobody panics with the lock");
        let mut since = times.tick(store);
        if !age.is_zero() {
            // The clock knows no age beyond its oldest tick, so older objects count as older than
            // any age.
            let old = times
                .known
                .iter()
                .rev()
                .find(|tick| tick.1.elapsed() >= age)
                .or(times.known.front());
            since = old.map_or(since, |tick| tick.0);
        }
        times.idle = Some(since);
    }

    /// Returns whether an object is marked idle.
    pub fn is_idle(&self, store: &Store, cold: &ColdObject) -> bool {
        let idle = self.0.lock().expect("nobody panics with the lock").idle;
        idle.is_some_and(|since| cold.idle_ticks > store.now().wrapping_sub(since))
    }
}

impl TickTimes {
    fn tick(&mut self, store: &Store) -> u16 {
        let now = store.tick();
        if self.known.len() == KNOWN {
            self.known.pop_front();
        }
        self.known.push_back((now, Instant::now()));
        now
    }
}
