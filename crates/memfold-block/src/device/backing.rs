//! The memory behind devices: a store, one limit for it and the devices' tables, and perhaps a file
//! for what doesn't fit.
use super::age::Ages;
use super::error::DeviceError;
use super::holder::Holder;
use super::spill::{Spill, SpillSettings, SpillStats};
use super::units::LIMIT_BYTES_MIN;
use memfold_store::{CodecSpec, Handle, Store, StoreConfig, StoreStats};
use memfold_sys::units::{Order, PAGE_SIZE};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, RwLock, Weak};

/// What a backing is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Memory for all that the devices hold, their tables included, in bytes: at least
    /// [`LIMIT_BYTES_MIN`], or 0 for no limit.
    pub limit_bytes: u64,
    /// Compression.
    pub codec: CodecSpec,
    /// The unit of compression, for writes that are as large; smaller ones are kept in 4 KiB pages.
    pub block_order: Order,
    /// Compressed pools, 1..=64.
    pub pools: usize,
    /// Blocks that are kept decompressed for reads of their parts, 0..=4096.
    pub recent_blocks: usize,
    /// Decompress and compare everything that is written.
    pub verify: bool,
    /// A file for what does not fit in memory.
    pub spill: Option<SpillSettings>,
}

impl Default for Settings {
    /// No limit, lz4, 16 KiB blocks, one pool for each CPU, 16 recent blocks.
    fn default() -> Settings {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let pools = StoreConfig::pools_for(cores);
        let StoreConfig { codec, block_order, recent_blocks, .. } = StoreConfig::default();
        Settings {
            limit_bytes: 0,
            codec,
            block_order,
            pools,
            recent_blocks,
            verify: false,
            spill: None,
        }
    }
}

/// The memory of devices. Held bytes = what the store holds + the devices' tables; buffers of
/// [`super::Io`]s do not count.
pub struct Backing {
    pub(crate) store: Store,
    limit_bytes: AtomicU64,
    /// Bytes of the devices' tables. Changed under the lock, so that the store's limit is always
    /// what they leave.
    tables: Mutex<u64>,
    /// Keys given to devices: pages.
    keys: AtomicU64,
    devices: RwLock<Vec<Weak<dyn Holder>>>,
    spill: Option<Spill>,
    pub(crate) ages: Ages,
    /// Work for [`Backing::tend`] is there, and who does it was told.
    pub(super) is_called: AtomicBool,
    pub(super) call: Mutex<bool>,
    pub(super) called: Condvar,
}

/// With a file behind it, memory is kept so much below its limit, in the background: one part in so
/// many.
const HEADROOM: u64 = 16;
/// Figures of a backing at one moment, as zram's `mm_stat` has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingStats {
    /// The store's own figures.
    pub store: StoreStats,
    /// Memory held: the store's, and the devices' tables. Bytes.
    pub held_bytes: u64,
    /// The part of it that is tables.
    pub table_bytes: u64,
    /// The limit, 0 for none.
    pub limit_bytes: u64,
    /// The file behind it.
    pub spill: Option<SpillStats>,
}

impl Backing {
    /// A backing for devices. Reserves address space, takes next to no memory.
    ///
    /// # Errors
    /// A setting out of range, or no address space.
    pub fn new(settings: &Settings) -> Result<Arc<Backing>, DeviceError> {
        let limit_bytes = settings.limit_bytes;
        if limit_bytes != 0 && limit_bytes < LIMIT_BYTES_MIN {
            return Err(DeviceError::Limit(limit_bytes));
        }
        let store = Store::new(&StoreConfig {
            codec: settings.codec,
            block_order: settings.block_order,
            pools: settings.pools,
            pool_bytes_max: limit_bytes,
            // A full device takes writes again as soon as there is room for them.
            accept_percent: 100,
            verify: settings.verify,
            refuse_incompressible: false,
            recent_blocks: settings.recent_blocks,
        })
        .map_err(DeviceError::Store)?;
        let spill = settings
            .spill
            .as_ref()
            .map(|spill| Spill::new(spill, limit_bytes, settings.block_order));
        Ok(Arc::new(Backing {
            store,
            limit_bytes: AtomicU64::new(limit_bytes),
            tables: Mutex::new(0),
            keys: AtomicU64::new(0),
            devices: RwLock::new(Vec::new()),
            spill: spill.transpose().map_err(DeviceError::Spill)?,
            ages: Ages::default(),
            is_called: AtomicBool::new(false),
            call: Mutex::new(false),
            called: Condvar::new(),
        }))
    }

    /// Bytes of memory held now.
    pub fn held_bytes(&self) -> u64 {
        self.store.pool_bytes()
            + self.table_bytes()
            + self.spill.as_ref().map_or(0, Spill::memory_bytes)
    }

    /// Figures.
    pub fn stats(&self) -> BackingStats {
        BackingStats {
            store: self.store.stats(),
            held_bytes: self.held_bytes(),
            table_bytes: self.table_bytes(),
            limit_bytes: self.limit_bytes(),
            spill: self.spill.as_ref().map(Spill::stats),
        }
    }

    /// Packs all that is sparse, and gives all that is empty back. Returns the bytes.
    pub fn compact(&self) -> u64 {
        self.store.compact(u64::MAX)
    }

    /// Ends [`Backing::tend`].
    pub fn stop(&self) {
        *self.call.lock().expect("nobody panics with the lock") = true;
        self.called.notify_all();
    }

    /// Tells who tends if memory comes near its limit and there is a file for it.
    pub(crate) fn call_if_full(&self) {
        if self.spill.is_some() && self.is_nearly_full() && !self.is_called.swap(true, Relaxed) {
            // The lock makes sure that nobody is between his look and his sleep.
            drop(self.call.lock().expect("nobody panics with the lock"));
            self.called.notify_all();
        }
    }

    pub(super) fn is_nearly_full(&self) -> bool {
        let most = self.store.pool_bytes_max();
        most != 0 && self.store.pool_bytes() > most - most / HEADROOM
    }

    /// The file behind it.
    pub(crate) fn spill(&self) -> Option<&Spill> {
        self.spill.as_ref()
    }

    /// Changes how many bytes may still be written back; `None` for any number. `false`: there is
    /// no file.
    pub fn set_writeback_limit(&self, bytes: Option<u64>) -> bool {
        self.spill.as_ref().inspect(|spill| spill.set_limit(bytes)).is_some()
    }

    /// Makes a device's objects known to those who move them.
    pub(crate) fn enter(&self, device: Weak<dyn Holder>) {
        let mut devices = self.devices.write().expect("nobody panics with the lock");
        devices.retain(|device| device.strong_count() > 0);
        devices.push(device);
    }

    /// The device whose pages have this key.
    pub(crate) fn device_of(&self, key: u64) -> Option<Arc<dyn Holder>> {
        let devices = self.devices.read().expect("nobody panics with the lock");
        devices.iter().filter_map(Weak::upgrade).find(|device| device.has_key(key))
    }

    /// Frees an object, in memory or in the file, of a block or page of `order`. `NONE` and `ZERO`
    /// are none.
    pub(crate) fn free(&self, handle: Handle, order: Order) {
        self.store.free(handle);
        if let Some(spill) = &self.spill {
            spill.free(handle, order);
        }
    }

    /// The limit in bytes, 0 for none.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes.load(Relaxed)
    }

    /// Changes the limit, 0 for none. What is held above it stays, and leaves for the file if there
    /// is one.
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

    /// Charges memory for a table; `false` if there is none left.
    pub(crate) fn charge(&self, bytes: u64) -> bool {
        let mut tables = self.lock();
        let all = *tables + bytes;
        // The store's limit must not come to 0, which would be none, so a page stays.
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

    /// Keys for a device's pages, so that each device's are its own.
    pub(crate) fn take_keys(&self, pages: u64) -> u64 {
        self.keys.fetch_add(pages, Relaxed)
    }

    pub(super) fn set_limit(&self, tables: u64) {
        let limit = self.limit_bytes();
        if limit == 0 {
            return self.store.set_pool_bytes_max(0);
        }
        let others = tables + self.spill.as_ref().map_or(0, Spill::memory_bytes);
        // 0 would be no limit.
        self.store.set_pool_bytes_max(limit.saturating_sub(others).max(PAGE_SIZE as u64));
    }

    pub(super) fn table_bytes(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.tables.lock().expect("nobody panics with the lock")
    }
}
