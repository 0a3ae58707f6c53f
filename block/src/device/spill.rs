//! The file for data that does not fit in memory: its space, counters and writer (`writeback.rs`
//! describes the writes).
use super::holder::SlotHolder;
use memfold_os::sync::Mutex;
use memfold_os::units::Order;
use memfold_store::{ColdObject, Handle};
use memfold_swap::disk::file_disk::{FileDisk, FileDiskOptions};
use memfold_swap::{ObjectLocation, Swap, SwapBounds};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Most objects of one run.
pub(super) const ITEMS_MAX: usize = 1024;
/// Objects that are searched at a time.
pub(super) const LOOK: usize = 64;
/// No limit on writes.
const UNLIMITED: u64 = u64::MAX;

/// Where and how much is written back.
#[derive(Clone, Debug)]
pub struct SpillSettings {
    /// A directory, or a path in one. The file never has that name, and disappears with the
    /// process.
    pub path: String,
    /// Largest size of the file, bytes.
    pub size_bytes: u64,
    /// Space that stays free on the file system, bytes.
    pub keep_free_bytes: u64,
    /// Whether the file is encrypted with a key that is only in memory; else it has only checksums.
    pub encrypt: bool,
    /// Bytes that may be written in total; `None` for any number.
    pub limit_bytes: Option<u64>,
}

/// A file behind the memory of devices.
pub(crate) struct SpillFile {
    pub(super) swap: Swap,
    name: String,
    /// Bytes that may still be written.
    left: AtomicU64,
    pub(super) writer: Mutex<SpillWriter>,
    pub counters: SpillCounters,
    /// The last error.
    error: std::sync::Mutex<Option<String>>,
}

/// Counts as in zram's `bd_stat`, in bytes.
#[derive(Default)]
pub(crate) struct SpillCounters {
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
    /// Blocks that are in the file now, before compression.
    pub original_bytes: AtomicU64,
    pub failed_reads: AtomicU64,
    pub failed_writes: AtomicU64,
}

/// Counters of the file, as in zram's `bd_stat`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpillStats {
    /// Blocks in the file, before compression, bytes.
    pub original_bytes: u64,
    /// Objects in the file.
    pub objects: u64,
    /// Bytes of the file that are used.
    pub used_bytes: u64,
    /// Bytes of blocks that were read from the file, before compression.
    pub read_bytes: u64,
    /// Bytes of blocks that were written to the file, before compression.
    pub written_bytes: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Writes that failed; their data stayed in memory.
    pub failed_writes: u64,
    /// Bytes that may still be written; `None` for any number.
    pub limit_left_bytes: Option<u64>,
    /// The last error.
    pub error: Option<String>,
}

/// The writer; one thread at a time.
pub(super) struct SpillWriter {
    pub items: Vec<SpillItem>,
    pub found: [ColdObject; LOOK],
    pub used: usize,
    pub count: usize,
}

pub(super) struct SpillItem {
    pub device: Arc<dyn SlotHolder>,
    pub cold: ColdObject,
    pub place: ObjectLocation,
}

impl SpillFile {
    /// Makes an empty file.
    ///
    /// # Errors
    /// One line that says why there can be none.
    pub fn new(
        settings: &SpillSettings,
        limit_bytes: u64,
        block: Order,
    ) -> Result<SpillFile, String> {
        let disk = FileDisk::open(&settings.path, FileDiskOptions::default())?;
        let bounds = SwapBounds {
            size_bytes: settings.size_bytes,
            keep_free_bytes: settings.keep_free_bytes,
            remote_bytes: 0,
            remote_expiry: std::time::Duration::MAX,
            mark_percent: 100,
            limit_bytes: if limit_bytes == 0 { u64::MAX } else { limit_bytes },
            run_order_max: block,
        };
        let swap = Swap::new(Box::new(disk), None, settings.encrypt, bounds);
        let writer = SpillWriter {
            items: Vec::with_capacity(ITEMS_MAX),
            found: [ColdObject::NONE; LOOK],
            used: 0,
            count: 0,
        };
        Ok(SpillFile {
            swap: swap.map_err(|e| format!("{}: {e}", settings.path))?,
            name: settings.path.clone(),
            left: AtomicU64::new(settings.limit_bytes.unwrap_or(UNLIMITED)),
            writer: Mutex::new(writer),
            counters: SpillCounters::default(),
            error: std::sync::Mutex::new(None),
        })
    }

    /// Returns the bytes of memory that it takes. Its buffers count before they are allocated,
    /// because memory is full when they are needed.
    pub fn memory_bytes(&self) -> u64 {
        self.swap.buffer_bytes_max() + self.swap.table_bytes()
    }

    /// Returns the bytes that may still be written; `None` for any number.
    pub fn limit_left(&self) -> Option<u64> {
        Some(self.left.load(Relaxed)).filter(|bytes| *bytes != UNLIMITED)
    }

    /// Sets the result of [`SpillFile::limit_left`].
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.left.store(bytes.unwrap_or(UNLIMITED), Relaxed);
    }

    pub fn stats(&self) -> SpillStats {
        SpillStats {
            original_bytes: self.counters.original_bytes.load(Relaxed),
            objects: self.swap.objects(),
            used_bytes: self.swap.used_bytes(),
            read_bytes: self.counters.read_bytes.load(Relaxed),
            written_bytes: self.counters.written_bytes.load(Relaxed),
            failed_reads: self.counters.failed_reads.load(Relaxed),
            failed_writes: self.counters.failed_writes.load(Relaxed),
            limit_left_bytes: self.limit_left(),
            error: self.error.lock().expect("nobody panics with the lock").clone(),
        }
    }

    /// Frees an object in the file; `handle` may be any other.
    pub fn free(&self, handle: Handle, order: Order) {
        if ObjectLocation::from_handle(handle).is_some() {
            self.counters.original_bytes.fetch_sub(order.bytes() as u64, Relaxed);
            self.swap.free(handle);
        }
    }

    pub(super) fn note(&self, error: impl ToString) {
        *self.error.lock().expect("nobody panics with the lock") =
            Some(format!("{}: {}", self.name, error.to_string()));
    }

    /// Charges a block to the writeback limit. Returns `false` if the limit is used up.
    pub(super) fn spend(&self, order: Order) -> bool {
        let bytes = order.bytes() as u64;
        let spend =
            |left: u64| if left == UNLIMITED { Some(left) } else { left.checked_sub(bytes) };
        let is_within_limit = self.left.fetch_update(Relaxed, Relaxed, spend).is_ok();
        if !is_within_limit {
            self.note("the writeback limit is reached");
        }
        is_within_limit
    }
}
