//! An engine and its heap, as the package's `Memory` uses them.
use crate::error::exception;
use memfold_engine::delivery::gate;
use memfold_engine::{Delivery, Error, Heap, Hint, Memory, OpenError};
use memfold_run::request::{RunRequest, VARIABLE};
use memfold_stats::FIGURES;
use pyo3::exceptions::{PyOSError, PyPermissionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

/// A heap that Python's objects and numpy's arrays share. In a child of fork it is never dropped,
/// because its threads are not there.
pub struct Shared {
    pub heap: Heap,
    /// Memory that the next child of fork is to copy.
    pub lent: Mutex<Vec<Range<usize>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.heap.is_at_home() {
            std::mem::forget(self.heap.clone());
        }
    }
}

/// All heaps of the process. Locked only by threads that are attached to Python, so no other thread
/// holds the lock while one forks.
static HEAPS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Returns the heaps that are alive.
pub fn heaps() -> Vec<Arc<Shared>> {
    let mut heaps = HEAPS.lock().unwrap_or_else(|e| e.into_inner());
    heaps.retain(|heap| heap.strong_count() > 0);
    heaps.iter().filter_map(Weak::upgrade).collect()
}

/// Returns the order that `memfold run` gave this process; None outside of a run.
#[pyfunction]
pub fn run_order() -> Option<String> {
    let environment = std::fs::read("/proc/self/environ").unwrap_or_default();
    let own = std::env::var(VARIABLE).ok().filter(|order| !order.is_empty());
    own.or_else(|| RunRequest::find(&environment).map(|request| request.text().to_string()))
}

/// Arms the process. The caller is attached to Python, so no other thread forks through Python
/// meanwhile.
fn arm() -> Result<(), String> {
    let is = |name: &str, value: &str| std::env::var(name).is_ok_and(|is| is == value);
    if !gate::is_armed() && run_order().is_some() {
        // There is an engine of another kind, with its own threads and signals.
        if !is("MEMFOLD_DISABLE", "1") {
            return Err("this process is under memfold run".into());
        }
    }
    // SAFETY: in this shared library only the engine makes system calls with its own instructions;
    // other code in it calls libc.
    unsafe { gate::arm() }
}

/// Folded memory: an engine with its threads. numpy's arrays keep it alive.
#[pyclass(frozen, module = "memfold._memfold")]
pub struct Engine {
    pub shared: Arc<Shared>,
}

#[pymethods]
impl Engine {
    /// Starts an engine with settings by name, as text. Without the setting `delivery` it uses the
    /// gate where that is available, else threads, and signals where this user may use neither.
    #[new]
    fn new(py: Python<'_>, settings: Vec<(String, String)>) -> PyResult<Engine> {
        let build = |delivery: Option<Delivery>| {
            let mut builder = Memory::builder();
            if let Some(delivery) = delivery {
                builder = builder.delivery(delivery);
            }
            for (name, value) in &settings {
                builder = builder.set(name, value);
            }
            py.detach(|| builder.build())
        };
        // The engine's threads load data from files and the remote store.
        let stores_elsewhere = settings.iter().any(|(name, _)| name == "swap" || name == "remote");
        let delivery = settings.iter().find(|(name, _)| name == "delivery");
        let best = match delivery.map(|(_, value)| value.as_str()) {
            None if !stores_elsewhere && arm().is_ok() => Some(Delivery::Gate),
            Some("gate") => {
                arm().map_err(|why| {
                    PyOSError::new_err(format!(
                        "delivery=\"gate\" does not work in this process: {why}. Leave delivery out, or give \"thread\" or \"signal\""
                    ))
                })?;
                None
            }
            _ => None,
        };
        let memory = match build(best) {
            Err(refusal @ Error::Userfaultfd(OpenError::Forbidden)) if delivery.is_none() => {
                // This needs no permission. Where it fails too, the first refusal says what to do.
                build(Some(Delivery::Signal))
                    .map_err(|_| PyPermissionError::new_err(refusal.to_string()))?
            }
            outcome => outcome.map_err(exception)?,
        };
        let core = Arc::new(Shared { heap: Heap::new(&memory), lent: Mutex::default() });
        HEAPS.lock().unwrap_or_else(|e| e.into_inner()).push(Arc::downgrade(&core));
        Ok(Engine { shared: core })
    }

    /// Returns how page faults are handled: "gate", "thread" or "signal".
    fn delivery(&self) -> &'static str {
        match self.shared.heap.memory().delivery() {
            Delivery::Gate => "gate",
            Delivery::Thread => "thread",
            Delivery::Signal => "signal",
        }
    }

    /// Returns whether this is the process that started it.
    fn is_at_home(&self) -> bool {
        self.shared.heap.is_at_home()
    }

    /// Returns whether an address lies in its memory.
    fn owns(&self, address: usize) -> bool {
        self.shared.heap.owns(address)
    }

    /// Folds the pages wholly inside a range of bytes now. Returns the pages that were evicted.
    fn fold(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<u64> {
        self.hint(py, address, nbytes, Hint::Fold)
    }

    /// Makes a range of bytes the first to be folded when memory is needed.
    fn cold(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<u64> {
        self.hint(py, address, nbytes, Hint::Cold)
    }

    /// Loads the folded pages of a range of bytes.
    fn prefetch(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<u64> {
        self.hint(py, address, nbytes, Hint::Prefetch)
    }

    /// Loads a range of bytes and keeps it resident until `unpin`.
    fn pin(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<()> {
        py.detach(|| self.shared.heap.pin(address..address + nbytes)).map_err(exception)
    }

    /// Ends one pin of exactly this range.
    fn unpin(&self, py: Python<'_>, address: usize, nbytes: usize) -> PyResult<()> {
        py.detach(|| self.shared.heap.unpin(address..address + nbytes)).map_err(exception)
    }

    /// Returns every counter of the engine, and the address space of arrays in bytes.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let heap = &self.shared.heap;
        if heap.is_at_home() {
            let (stats, allocated) = py.detach(|| (heap.memory().stats(), heap.allocated_bytes()));
            stats.iter().try_for_each(|(name, value)| dict.set_item(name, value))?;
            dict.set_item("allocated_bytes", allocated)?;
        }
        Ok(dict)
    }

    /// Loads all folded memory, past the limit if need be, so that the next child of fork gets
    /// copies.
    fn lend(&self, py: Python<'_>) -> PyResult<()> {
        let gain = py.detach(|| self.shared.heap.lend()).map_err(exception)?;
        self.shared.lent.lock().unwrap_or_else(|e| e.into_inner()).extend(gain);
        Ok(())
    }

    /// Lets the parent fold that memory again, after the fork.
    fn take_back(&self) {
        let ranges =
            std::mem::take(&mut *self.shared.lent.lock().unwrap_or_else(|e| e.into_inner()));
        self.shared.heap.take_back(ranges);
    }

    /// Verifies the engine's structures; for tests, while nothing uses its arrays.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.shared.heap.memory().check()).map_err(PyValueError::new_err)
    }
}

impl Engine {
    fn hint(&self, py: Python<'_>, address: usize, nbytes: usize, hint: Hint) -> PyResult<u64> {
        py.detach(|| self.shared.heap.hint(address..address + nbytes, hint)).map_err(exception)
    }
}

/// Returns whether an address lies in folded memory of this process.
#[pyfunction]
pub fn is_folded(address: usize) -> bool {
    heaps().iter().any(|core| core.heap.owns(address))
}

/// Returns the names of the counters of `Engine.stats`, with a sentence about each.
#[pyfunction]
pub fn figures() -> Vec<(&'static str, &'static str)> {
    FIGURES.iter().map(|figure| (figure.name, figure.help)).collect()
}

/// Returns the bytes of a size as people write it: "2GiB", "512M", or "25%" of the machine's
/// memory.
#[pyfunction]
pub fn parse_size(text: &str) -> PyResult<u64> {
    let of_memory = memfold_engine::memory_bytes();
    memfold_engine::config::parse_size(text, of_memory).map_err(PyValueError::new_err)
}
