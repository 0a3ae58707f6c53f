//! The keys of the run in the store: which ones to refresh, and to delete at its end.
use crate::process::EngineProcess;
use memfold_os::memory::descendant_watch::DescendantWatch;
use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

/// One engine's keys.
#[derive(Default)]
struct EngineKeys {
    /// Its process; `None` if it is invisible from here.
    process: Option<EngineProcess>,
    /// Its open connections.
    lines: usize,
    /// Watches of copies of its process, which read its objects.
    copies: Vec<DescendantWatch>,
    numbers: BTreeSet<u64>,
}

/// All keys of a run.
pub struct RunKeys {
    run: String,
    engines: Mutex<HashMap<u64, EngineKeys>>,
}

impl RunKeys {
    /// Makes an empty set. No other run may have the name `run`.
    pub fn new(run: String) -> RunKeys {
        RunKeys { run, engines: Mutex::default() }
    }

    /// Returns the key of an object. It has no braces, so that the keys of a run spread over the
    /// servers of a cluster.
    pub fn name(&self, engine: u64, number: u64) -> String {
        format!("memfold:{}:{engine:016x}:{number:x}", self.run)
    }

    fn engines(&self) -> std::sync::MutexGuard<'_, HashMap<u64, EngineKeys>> {
        self.engines.lock().expect("nobody panics with the lock")
    }

    /// Returns whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.engines().values().all(|engine| engine.numbers.is_empty())
    }

    /// Notes that an engine has connected.
    pub fn enter(&self, engine: u64, process: Option<EngineProcess>) {
        let mut engines = self.engines();
        let engine = engines.entry(engine).or_default();
        engine.process = process;
        engine.lines += 1;
    }

    /// Notes that one of its connections has ended.
    pub fn leave(&self, engine: u64) {
        if let Some(engine) = self.engines().get_mut(&engine) {
            engine.lines -= 1;
        }
    }

    /// Keeps an engine's objects until this watch is over, too.
    pub fn lend(&self, engine: u64, copies: DescendantWatch) {
        let mut engines = self.engines();
        let engine = engines.entry(engine).or_default();
        engine.copies.retain(|copies| !copies.is_over());
        engine.copies.push(copies);
    }

    /// Adds objects that may be in the store from now on.
    pub fn add(&self, engine: u64, numbers: impl Iterator<Item = u64>) {
        self.engines().entry(engine).or_default().numbers.extend(numbers);
    }

    /// Removes objects that are no longer there.
    pub fn remove(&self, engine: u64, numbers: impl Iterator<Item = u64>) {
        if let Some(engine) = self.engines().get_mut(&engine) {
            numbers.for_each(|number| {
                engine.numbers.remove(&number);
            });
        }
    }

    /// Returns up to `count` objects after one, in order. `None` is before the first.
    pub fn after(&self, last: Option<(u64, u64)>, count: usize) -> Vec<(u64, u64)> {
        let engines = self.engines();
        let mut ids: Vec<u64> =
            engines.keys().copied().filter(|id| last.is_none_or(|last| *id >= last.0)).collect();
        ids.sort_unstable();
        let of = |id: u64| {
            let from = last.filter(|last| last.0 == id).map_or(0, |last| last.1 + 1);
            engines[&id].numbers.range(from..).map(move |number| (id, *number))
        };
        ids.into_iter().flat_map(of).take(count).collect()
    }

    /// Returns up to `count` objects of engines whose process and all its reading copies have
    /// ended, as `has_ended` says. Forgets engines without objects.
    pub fn orphans(
        &self,
        count: usize,
        has_ended: impl Fn(&EngineProcess) -> bool,
    ) -> Vec<(u64, u64)> {
        let mut engines = self.engines();
        let is_over = |engine: &EngineKeys| {
            engine.lines == 0
                && engine.process.as_ref().is_some_and(&has_ended)
                && engine.copies.iter().all(DescendantWatch::is_over)
        };
        engines.retain(|_, engine| !(engine.numbers.is_empty() && is_over(engine)));
        let over = engines.iter().filter(|(_, engine)| is_over(engine));
        over.flat_map(|(id, engine)| engine.numbers.iter().map(|n| (*id, *n))).take(count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_walked_in_steps_and_ended_processes_orphan() {
        let keys = RunKeys::new("r".to_string());
        let process = |pid| EngineProcess { pid, begun: 5 };
        keys.enter(7, Some(process(100)));
        keys.enter(8, Some(process(200)));
        keys.enter(9, None);
        for engine in [7, 8, 9] {
            keys.add(engine, 1..4);
        }
        keys.remove(8, std::iter::once(2));
        let mut all = Vec::new();
        let mut last = None;
        loop {
            let some = keys.after(last, 3);
            let Some(end) = some.last() else { break };
            last = Some(*end);
            all.extend(some);
        }
        assert_eq!(all, [(7, 1), (7, 2), (7, 3), (8, 1), (8, 3), (9, 1), (9, 2), (9, 3)]);
        assert!(keys.orphans(10, |_| true).is_empty(), "all are connected");
        [7, 8, 9].iter().for_each(|engine| keys.leave(*engine));
        assert_eq!(keys.orphans(10, |p| *p == process(100)), [(7, 1), (7, 2), (7, 3)]);
        assert_eq!(keys.orphans(2, |_| true).len(), 2);
        keys.remove(7, 1..4);
        assert!(keys.orphans(10, |p| *p == process(100)).is_empty());
        assert_eq!(keys.name(0xab, 31), "memfold:r:00000000000000ab:1f");
    }
}
