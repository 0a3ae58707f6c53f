//! The memory behind devices: a store, one limit for the store and the devices' tables, and
//! optionally a file for data that does not fit.
use super::age::ObjectAges;
use super::error::DeviceError;
use super::holder::SlotHolder;
use super::spill::{SpillFile, SpillSettings, SpillStats};
use super::units::LIMIT_BYTES_MIN;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::{CodecSpec, Handle, Store, StoreConfig, StoreStats};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, RwLock, Weak};

/// Settings of a backing.
#[derive(Clone, Debug)]
pub struct MemorySettings {
    /// Memory for all that the devices hold, with their tables, in bytes: at least
    /// [`LIMIT_BYTES_MIN`], or 0 for no limit.
    pub limit_bytes: u64,
    /// The codec.
    pub codec: CodecSpec,
    /// The unit of compression. Smaller writes are stored as 4 KiB pages.
    pub block_order: Order,
    /// Compressed pools, 1..=64.
    pub pools: usize,
    /// Decompressed blocks that are kept for reads of their parts, 0..=4096.
    pub cached_blocks: usize,
    /// Whether everything that is written is decompressed and compared.
    pub verify: bool,
    /// A file for data that does not fit in memory.
    pub spill: Option<SpillSettings>,
}

impl Default for MemorySettings {
    /// Returns settings without a limit: lz4, 16 KiB blocks, one pool for each CPU, 16 cached
    /// blocks.
    fn default() -> MemorySettings {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let pools = StoreConfig::pools_for(cores);
        let StoreConfig { codec, block_order, cached_blocks, .. } = StoreConfig::default();
        MemorySettings {
            limit_bytes: 0,
            codec,
            block_order,
            pools,
            cached_blocks,
            verify: false,
            spill: None,
        }
    }
}

/// The memory of devices. Held bytes = bytes of the store + bytes of the devices' tables. Buffers
/// of [`super::DeviceIo`]s do not count.
pub struct DeviceMemory {
    pub(crate) store: Store,
    limit_bytes: AtomicU64,
    /// Bytes of the devices' tables. They change under the lock, so that the store's limit is
    /// always the rest.
    tables: Mutex<u64>,
    /// Keys given to devices, in pages.
    keys: AtomicU64,
    devices: RwLock<Vec<Weak<dyn SlotHolder>>>,
    spill: Option<SpillFile>,
    pub(crate) ages: ObjectAges,
    /// Work for [`DeviceMemory::tend`] exists, and its thread was woken.
    pub(super) is_called: AtomicBool,
    pub(super) call: Mutex<bool>,
    pub(super) called: Condvar,
}

/// Divisor of the limit: cached blocks take at most this part of it, unless one takes more.
const CACHE_SHARE: u64 = 16;
/// Divisor of the limit: with a file, a background thread keeps memory this part of the limit below
/// it.
const HEADROOM: u64 = 16;
/// Counters of a backing at one moment, as in zram's `mm_stat`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingStats {
    /// Counters of the store.
    pub store: StoreStats,
    /// Memory of the store and of the devices' tables, bytes.
    pub held_bytes: u64,
    /// The part of it in tables, bytes.
    pub table_bytes: u64,
    /// The limit in bytes, 0 for none.
    pub limit_bytes: u64,
    /// Counters of the file, if there is one.
    pub spill: Option<SpillStats>,
}

/// Returns how many decompressed blocks a backing may keep.
fn cached_blocks(settings: &MemorySettings) -> usize {
    let most = settings.limit_bytes / CACHE_SHARE / settings.block_order.bytes() as u64;
    match settings.limit_bytes {
        0 => settings.cached_blocks,
        _ => settings.cached_blocks.min(most.max(1) as usize),
    }
}

impl DeviceMemory {
    /// Makes a backing. It reserves address space and takes next to no memory.
    ///
    /// # Errors
    /// A setting out of range, or no address space.
    pub fn new(settings: &MemorySettings) -> Result<Arc<DeviceMemory>, DeviceError> {
        let limit_bytes = settings.limit_bytes;
        if limit_bytes != 0 && limit_bytes < LIMIT_BYTES_MIN {
            return Err(DeviceError::Limit(limit_bytes));
        }
        let store = Store::new(&StoreConfig {
            codec: settings.codec,
            block_order: settings.block_order,
            pools: settings.pools,
            pool_bytes_max: limit_bytes,
            // A full device accepts writes again as soon as there is room for them.
            accept_percent: 100,
            verify: settings.verify,
            refuse_incompressible: false,
            cached_blocks: cached_blocks(settings),
        })
        .map_err(DeviceError::Store)?;
        let spill = settings
            .spill
            .as_ref()
            .map(|spill| SpillFile::new(spill, limit_bytes, settings.block_order));
        Ok(Arc::new(DeviceMemory {
            store,
            limit_bytes: AtomicU64::new(limit_bytes),
            tables: Mutex::new(0),
            keys: AtomicU64::new(0),
            devices: RwLock::new(Vec::new()),
            spill: spill.transpose().map_err(DeviceError::Spill)?,
            ages: ObjectAges::default(),
            is_called: AtomicBool::new(false),
            call: Mutex::new(false),
            called: Condvar::new(),
        }))
    }

    /// Returns the bytes of memory that are held now.
    pub fn held_bytes(&self) -> u64 {
        self.store.pool_bytes()
            + self.table_bytes()
            + self.spill.as_ref().map_or(0, SpillFile::memory_bytes)
    }

    /// Returns the counters.
    pub fn stats(&self) -> BackingStats {
        BackingStats {
            store: self.store.stats(),
            held_bytes: self.held_bytes(),
            table_bytes: self.table_bytes(),
            limit_bytes: self.limit_bytes(),
            spill: self.spill.as_ref().map(SpillFile::stats),
        }
    }

    /// Packs sparse memory and returns empty memory to the kernel. Returns the bytes.
    pub fn compact(&self) -> u64 {
        self.store.compact(u64::MAX)
    }

    /// Ends [`DeviceMemory::tend`].
    pub fn stop(&self) {
        *self.call.lock().expect("nobody panics with the lock") = true;
        self.called.notify_all();
    }

    /// Wakes the thread in [`DeviceMemory::tend`] if memory comes near its limit and there is a file.
    pub(crate) fn call_if_full(&self) {
        if self.spill.is_some() && self.is_nearly_full() && !self.is_called.swap(true, Relaxed) {
            // The lock ensures that the thread is not between its look and its sleep.
            drop(self.call.lock().expect("nobody panics with the lock"));
            self.called.notify_all();
        }
    }

    pub(super) fn is_nearly_full(&self) -> bool {
        let most = self.store.pool_bytes_max();
        most != 0 && self.store.pool_bytes() > most - most / HEADROOM
    }

    /// Returns the file, if there is one.
    pub(crate) fn spill(&self) -> Option<&SpillFile> {
        self.spill.as_ref()
    }

    /// Sets how many bytes may still be written back; `None` for any number. Returns `false` if
    /// there is no file.
    pub fn set_writeback_limit(&self, bytes: Option<u64>) -> bool {
        self.spill.as_ref().inspect(|spill| spill.set_limit(bytes)).is_some()
    }

    /// Registers a device, so that its objects can be moved.
    pub(crate) fn enter(&self, device: Weak<dyn SlotHolder>) {
        let mut devices = self.devices.write().expect("nobody panics with the lock");
        devices.retain(|device| device.strong_count() > 0);
        devices.push(device);
    }

    /// Returns the device whose pages have this key.
    pub(crate) fn device_of(&self, key: u64) -> Option<Arc<dyn SlotHolder>> {
        let devices = self.devices.read().expect("nobody panics with the lock");
        devices.iter().filter_map(Weak::upgrade).find(|device| device.has_key(key))
    }

    /// Frees an object of a block or page of `order`, in memory or in the file. `NONE` and `ZERO`
    /// are not objects.
    pub(crate) fn free(&self, handle: Handle, order: Order) {
        self.store.free(handle);
        if let Some(spill) = &self.spill {
            spill.free(handle, order);
        }
    }

    /// Returns the limit in bytes, 0 for none.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    /// Sets the limit, 0 for none. Memory above it is kept, or moved to the file if there is one.
    ///
    /// # Errors
    /// Below [`LIMIT_BYTES_MIN`], or below what the devices' tables take.
    pub fn set_limit_bytes(&self, bytes: u64) -> Result<(), DeviceError> {
        if bytes != 0 && bytes < LIMIT_BYTES_MIN {
            return Err(DeviceError::Limit(bytes));
        }
        let tables = self.lock();
        if bytes != 0 && *tables + PAGE_SIZE as u64 > bytes {
            return Err(DeviceError::Tables { tables: *tables, limit: bytes });
        }
        self.limit_bytes.store(bytes, Relaxed);
        self.set_limit(*tables);
        drop(tables);
        self.call_if_full();
        Ok(())
    }

    /// Charges memory for a table. Returns `false` if none is left.
    pub(crate) fn charge(&self, bytes: u64) -> bool {
        let mut tables = self.lock();
        let all = *tables + bytes;
        // A store limit of 0 would mean none, so one page must stay.
        let limit = self.limit_bytes();
        let fits = || all + self.store.pool_bytes() + PAGE_SIZE as u64 <= limit;
        if limit != 0 && !fits() {
            self.store.compact(bytes);
            if !fits() {
                return false;
            }
        }
        *tables = all;
        self.set_limit(all);
        true
    }

    pub(crate) fn give(&self, bytes: u64) {
        let mut tables = self.lock();
        *tables -= bytes;
        self.set_limit(*tables);
    }

    /// Returns keys for a device's pages. No two devices share keys.
    pub(crate) fn take_keys(&self, pages: u64) -> u64 {
        self.keys.fetch_add(pages, Relaxed)
    }

    pub(super) fn set_limit(&self, tables: u64) {
        let limit = self.limit_bytes();
        if limit == 0 {
            return self.store.set_pool_bytes_max(0);
        }
        let others = tables + self.spill.as_ref().map_or(0, SpillFile::memory_bytes);
        // 0 would mean no limit.
        self.store.set_pool_bytes_max(limit.saturating_sub(others).max(PAGE_SIZE as u64));
    }

    pub(super) fn table_bytes(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.tables.lock().expect("nobody panics with the lock")
    }
}
