//! Policies that the lab compares. A new one implements [`Candidate`] and gets a line in [`ALL`].

mod belady;
mod classic;
mod engine;

use crate::policy::memory::Candidate;
use crate::policy::trace::Trace;

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
pub const ALL: [Named; 13] = [
    Named { name: "optimum", make: |trace| Box::new(belady::Belady::new(trace)) },
    Named { name: "lru", make: |_| Box::new(classic::LeastRecent) },
    Named { name: "clock", make: |trace| Box::new(classic::Clock::new(trace)) },
    Named { name: "fifo", make: |_| Box::new(classic::Fifo) },
    Named { name: OWN, make: |trace| engine::EngineCandidate::boxed(trace, engine::Changes::NONE) },
    Named { name: "forgets", make: |trace| engine::EngineCandidate::boxed(trace, engine::FORGETS) },
    Named {
        name: "nostreams",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::NO_STREAMS),
    },
    Named {
        name: "writebits",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::WRITE_BITS),
    },
    Named {
        name: "around4",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::AROUND_4),
    },
    Named {
        name: "around16",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::AROUND_16),
    },
    Named {
        name: "learned16",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::LEARNED_16),
    },
    Named {
        name: "combined",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::COMBINED),
    },
    Named {
        name: "learned",
        make: |trace| engine::EngineCandidate::boxed(trace, engine::COMBINED_LEARNED),
    },
];
