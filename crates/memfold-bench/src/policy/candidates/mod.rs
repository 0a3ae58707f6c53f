//! Policies that the lab compares. A new one implements [`Candidate`] and gets a line in [`ALL`].

mod belady;
mod classic;
mod engine;

use crate::policy::memory::{Batches, Memory};
use crate::policy::trace::{Page, Trace};
use std::ops::Range;

/// Why a page is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Its first touch.
    First,
    /// A touch while it was in the swap cache.
    Rescue,
    /// A miss.
    Load,
    /// Loaded with another page, as the next page of a stream.
    Stream,
    /// Loaded with another page, as its neighbour.
    Beside,
}

/// Which pages are mapped write-protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protection {
    /// All.
    All,
    /// None.
    None,
    /// Those that were not dirty when they were last evicted.
    LeftClean,
}

/// How a miss is served.
#[derive(Debug, Clone)]
pub struct LoadPlan {
    /// The page is mapped write-protected.
    pub protected: bool,
    /// Pages to load too, if they are stored.
    pub ahead: Range<Page>,
    /// Which of them are mapped write-protected.
    pub protects_ahead: Protection,
    /// How they arrive.
    pub arrival_ahead: Arrival,
}

impl LoadPlan {
    /// Loads the page alone. A page that is read is write-protected.
    pub fn alone(page: Page, write: bool) -> LoadPlan {
        LoadPlan {
            protected: !write,
            ahead: page..page,
            protects_ahead: Protection::All,
            arrival_ahead: Arrival::Beside,
        }
    }
}

/// A policy: which page leaves next, and what a miss loads.
pub trait Candidate {
    /// A page is about to be mapped. It is on no list.
    fn arrived(&mut self, page: Page, how: Arrival, memory: &mut Memory<'_>);

    /// Takes the page that is evicted next off its list. At least one page is mapped.
    fn victim(&mut self, memory: &mut Memory<'_>) -> Page;

    /// A mapped page was touched. An engine in user space does not see this.
    fn touched(&mut self, _page: Page, _write: bool, _memory: &mut Memory<'_>) {}

    /// Returns how to serve a miss.
    fn plan(&mut self, page: Page, write: bool, _memory: &Memory<'_>) -> LoadPlan {
        LoadPlan::alone(page, write)
    }

    /// Returns how many pages leave together where `capacity` pages may be in memory.
    fn batches(&self, _capacity: u64) -> Batches {
        Batches { dropped: 1, dirty: 1 }
    }
}

/// A policy by name.
pub struct Named {
    /// Its name on the command line.
    pub name: &'static str,
    /// Makes it for a trace.
    pub make: fn(&Trace) -> Box<dyn Candidate>,
}

/// The engine's own policy, with which the others are compared.
pub const OWN: &str = "memfold";

/// All policies.
pub const ALL: [Named; 15] = [
    Named { name: "optimum", make: |trace| Box::new(belady::Belady::new(trace)) },
    Named { name: "lru", make: |_| Box::new(classic::LeastRecent) },
    Named { name: "clock", make: |trace| Box::new(classic::Clock::new(trace)) },
    Named { name: "fifo", make: |_| Box::new(classic::Fifo) },
    Named { name: OWN, make: |trace| engine::Engine::boxed(trace, engine::Changes::NONE) },
    Named { name: "written", make: |trace| engine::Engine::boxed(trace, engine::WRITTEN) },
    Named { name: "history", make: |trace| engine::Engine::boxed(trace, engine::HISTORY) },
    Named { name: "nostreams", make: |trace| engine::Engine::boxed(trace, engine::NO_STREAMS) },
    Named { name: "writebits", make: |trace| engine::Engine::boxed(trace, engine::WRITE_BITS) },
    Named { name: "around4", make: |trace| engine::Engine::boxed(trace, engine::AROUND_4) },
    Named { name: "around16", make: |trace| engine::Engine::boxed(trace, engine::AROUND_16) },
    Named { name: "learned16", make: |trace| engine::Engine::boxed(trace, engine::LEARNED_16) },
    Named {
        name: "history+bits",
        make: |trace| engine::Engine::boxed(trace, engine::HISTORY_BITS),
    },
    Named { name: "combined", make: |trace| engine::Engine::boxed(trace, engine::COMBINED) },
    Named { name: "learned", make: |trace| engine::Engine::boxed(trace, engine::COMBINED_LEARNED) },
];
