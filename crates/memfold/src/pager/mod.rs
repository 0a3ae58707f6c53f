//! The pager: one engine, and the doors to it.
mod start;

pub use crate::memory::quota::SharedLimit;
pub use start::{StartError, open_remote};

use crate::config::Config;
use crate::fault::Faults;
use crate::fork::Fork;
use crate::holds::Holds;
use crate::invariants::Invariants;
use crate::limits::Limits;
use crate::limits::gauges::Gauges;
use crate::mappings::Mappings;
use crate::parts::EngineParts;
use crate::reclaim::background::Background;
use crate::reclaim::recompress::Recompress;
use crate::reclaim::writeback::Writeback;
use crate::stats::Stats;
pub use crate::stats_place::StatsPlace;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use memfold_store::Store;
use memfold_swap::disk::Disk;
use memfold_swap::remote::Remote;
use memfold_sys::thread::errands::DelegateQueue;
use memfold_sys::uffd::space::Space;

/// One engine.
pub struct Pager(pub(crate) EngineParts);

/// What an engine is made of, besides its settings.
pub struct PagerParts {
    /// The address space.
    pub space: Box<dyn Space>,
    /// It can move pages.
    pub has_move: bool,
    /// The owner reports that the bounds can't be kept, or ends the program ([`Gauges::take_past`]).
    pub reports_limit: bool,
    /// Where to count.
    pub stats: StatsPlace,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// The swap device where the settings ask for one; by default a file where they say.
    pub disk: Option<Box<dyn Disk>>,
    /// The remote store behind it where the settings ask for one; by default the service whose
    /// socket they name.
    pub remote: Option<Box<dyn Remote>>,
    /// By whom disk and store are used, where threads of the program can't use them: the given ones
    /// do so themselves ([`memfold_sys::thread::errands::Delegated`]).
    pub errands: Option<Arc<DelegateQueue>>,
    /// What the engine takes is charged there, before it is taken; `None` if its bounds are its own.
    pub shared_limit: Option<&'static dyn SharedLimit>,
}

/// The doors: each returns a walk over the engine's parts.
impl Pager {
    /// Faults are served.
    pub fn faults(&self) -> Faults<'_> {
        Faults(&self.0)
    }

    /// How much may be held.
    pub fn limits(&self) -> Limits<'_> {
        Limits(&self.0)
    }

    /// What is held, and the bounds.
    pub fn gauges(&self) -> Gauges<'_> {
        Gauges(&self.0)
    }

    /// What is managed, and what the program's calls mean for it.
    pub fn mappings(&self) -> Mappings<'_> {
        Mappings(&self.0)
    }

    /// The engine across a fork.
    pub fn fork(&self) -> Fork<'_> {
        Fork(&self.0)
    }

    /// Reclaim by background threads.
    pub fn background(&self) -> Background<'_> {
        Background(&self.0)
    }

    /// Writes to the swap file.
    pub fn writeback(&self) -> Writeback<'_> {
        Writeback(&self.0)
    }

    /// Cold blocks compressed again.
    pub fn recompress(&self) -> Recompress<'_> {
        Recompress(&self.0)
    }

    /// Verifies what must hold while no thread works: store, frames, and every folio of every area.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        Invariants(&self.0).check()
    }
}

impl Pager {
    /// Makes what the engine needs once it manages something.
    pub fn prepare(&self) {
        self.0.backing.prepare();
    }

    /// CPUs that the process might use at the start.
    pub fn cpus(&self) -> usize {
        self.0.cpus
    }

    /// Whether there is a swap device.
    pub fn has_swap(&self) -> bool {
        self.0.backing.swap().is_some()
    }

    /// Whether areas are to be registered for write protection too.
    pub fn protects(&self) -> bool {
        self.0.mapper.protects()
    }

    /// First address and length of the frames, to be registered with the same userfaultfd as the
    /// areas.
    pub fn frames_zone(&self) -> (usize, usize) {
        let zone = self.0.mapper.frames().zone();
        (zone.start(), zone.len())
    }

    /// 2 MiB of zeros that no thread writes to.
    pub fn zeros(&self) -> *const u8 {
        self.0.mapper.frames().zeros()
    }

    /// Figures.
    pub fn stats(&self) -> &Stats {
        &self.0.stats
    }

    /// Settings.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// What system calls of the program hold.
    pub fn holds(&self) -> &'static Holds {
        self.0.holds
    }

    /// The compressed store, for its figures and, in tests, its faults on purpose.
    pub fn store(&self) -> &Store {
        self.0.backing.store()
    }

    /// Ends the background threads.
    pub fn stop(&self) {
        self.0.requests.stop();
        self.0.reads.stop();
        self.0.errands.iter().for_each(|errands| errands.stop());
        if let Some(swap) = self.0.backing.swap() {
            swap.stop();
        }
    }

    /// Ends those of them that may wait for the others: to be called first, and their end awaited,
    /// where all are to be started again.
    pub fn stop_workers(&self) {
        self.0.requests.stop();
    }

    /// After [`Pager::stop`]: does the errands that wait, by a thread that may. Threads that are to end
    /// may need what those who wait for them have, when the threads that served them are gone.
    pub fn serve_waiting(&self) {
        while self.0.errands.as_ref().is_some_and(|errands| errands.serve()) {}
    }

    /// After [`Pager::stop`], in gate delivery: the background threads have ended, and are about to be
    /// started again.
    pub fn resume(&self) {
        self.0.requests.resume();
        self.0.errands.iter().for_each(|errands| errands.resume());
        if let Some(swap) = self.0.backing.swap() {
            swap.resume();
        }
    }
}
