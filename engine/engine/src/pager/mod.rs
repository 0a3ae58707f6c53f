//! The pager: one engine, and the doors to it.
mod start;

pub use crate::memory::quota::SharedLimit;
pub use start::{StartError, codec_threads, open_remote};

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
pub use crate::stats_place::StatsPlace;
use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::uffd::space::Space;
use memfold_stats::Stats;
use memfold_store::{CompressorPool, Store};
use memfold_swap::disk::Disk;
use memfold_swap::remote::Remote;

/// One engine.
pub struct Pager(pub(crate) EngineParts);

/// The parts that an engine is made of, besides its settings.
pub struct PagerParts {
    /// The address space.
    pub space: Box<dyn Space>,
    /// Whether it can move pages.
    pub has_move: bool,
    /// The owner reports that the bounds can't be kept, or ends the program ([`Gauges::take_past`]).
    pub reports_limit: bool,
    /// Place of the counters.
    pub stats: StatsPlace,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// The swap device, if the settings ask for one. By default it is a file where they say.
    pub disk: Option<Box<dyn Disk>>,
    /// The remote store behind it, if the settings ask for one. By default it is the service at the
    /// socket that they name.
    pub remote: Option<Box<dyn Remote>>,
    /// The queue by which engine threads use disk and store, where threads of the program can't. A
    /// given disk or store uses it itself ([`memfold_os::thread::delegate_queue::Delegated`]).
    pub delegate_queue: Option<Arc<DelegateQueue>>,
    /// The limit that is charged before the engine takes memory; `None` if its bounds are its own.
    pub shared_limit: Option<&'static dyn SharedLimit>,
    /// A device that compresses batches ([`codec_threads`]); `None` without batches.
    pub compressors: Option<Box<dyn CompressorPool>>,
}

/// The doors: each returns a walk over the engine's parts.
impl Pager {
    /// Returns the walk that serves faults.
    pub fn faults(&self) -> Faults<'_> {
        Faults::new(&self.0)
    }

    /// Returns how much may be held.
    pub fn limits(&self) -> Limits<'_> {
        Limits::new(&self.0)
    }

    /// Returns how much is held, and the bounds.
    pub fn gauges(&self) -> Gauges<'_> {
        Gauges::new(&self.0)
    }

    /// Returns the walk for managed memory and the program's calls on it.
    pub fn mappings(&self) -> Mappings<'_> {
        Mappings::new(&self.0)
    }

    /// Returns the walk for a fork.
    pub fn fork(&self) -> Fork<'_> {
        Fork::new(&self.0)
    }

    /// Returns the walk of background threads.
    pub fn background(&self) -> Background<'_> {
        Background::new(&self.0)
    }

    /// Returns the walk that writes to the swap file.
    pub fn writeback(&self) -> Writeback<'_> {
        Writeback::new(&self.0)
    }

    /// Returns the walk that compresses cold blocks again.
    pub fn recompress(&self) -> Recompress<'_> {
        Recompress::new(&self.0)
    }

    /// Verifies the conditions that hold while no thread works: store, frames, and every folio of
    /// every area.
    ///
    /// # Errors
    /// The first condition that does not hold.
    pub fn check(&self) -> Result<(), String> {
        Invariants::new(&self.0).check()
    }
}

impl Pager {
    /// Makes the parts that the engine needs once it manages memory.
    pub fn prepare(&self) {
        self.0.backing.prepare();
    }

    /// Returns the CPUs that the process might use at its start.
    pub fn cpus(&self) -> usize {
        self.0.cpus
    }

    /// Returns whether there is a swap device.
    pub fn has_swap(&self) -> bool {
        self.0.backing.swap().is_some()
    }

    /// Returns whether areas are to be registered for write protection too.
    pub fn protects(&self) -> bool {
        self.0.mapper.protects()
    }

    /// Returns the first address and the length of the frames. They are registered with the same
    /// userfaultfd as the areas.
    pub fn frames_zone(&self) -> (usize, usize) {
        self.0.mapper.frames_zone()
    }

    /// Returns 2 MiB of zeros that no thread writes to.
    pub fn zeros(&self) -> *const u8 {
        self.0.mapper.frames().zeros()
    }

    /// Returns the counters.
    pub fn stats(&self) -> &Stats {
        &self.0.stats
    }

    /// Returns the settings.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Returns the holds of the program's system calls.
    pub fn holds(&self) -> &'static Holds {
        self.0.holds
    }

    /// Returns the compressed store, for its figures and, in tests, its faults on purpose.
    pub fn store(&self) -> &Store {
        self.0.backing.store()
    }

    /// Ends the background threads.
    pub fn stop(&self) {
        self.0.requests.stop();
        self.0.reads.stop();
        self.0.delegate_queue.iter().for_each(|queue| queue.stop());
        if let Some(swap) = self.0.backing.swap() {
            swap.stop();
        }
    }

    /// Ends the background threads that may wait for the others. Where all are to be started again,
    /// it is called first, and the caller waits for their end.
    pub fn stop_workers(&self) {
        self.0.requests.stop();
    }

    /// Serves the queued delegated calls, in a thread that may. It is called after [`Pager::stop`]:
    /// threads that are to end may need a call served, when the threads that served them are gone.
    pub fn serve_waiting(&self) {
        while self.0.delegate_queue.as_ref().is_some_and(|queue| queue.serve()) {}
    }

    /// Prepares background threads to be started again. It is called after [`Pager::stop`], in gate
    /// delivery, when they have ended.
    pub fn resume(&self) {
        self.0.requests.resume();
        self.0.delegate_queue.iter().for_each(|queue| queue.resume());
        if let Some(swap) = self.0.backing.swap() {
            swap.resume();
        }
    }
}
