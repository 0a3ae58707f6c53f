//! The memory behind devices: a store, and one limit for it and the devices' tables.
use memfold_store::{CodecSpec, Store, StoreConfig, StoreError, StoreStats};
use memfold_sys::units::{Order, PAGE_SIZE};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// The least limit, in bytes.
pub const LIMIT_BYTES_MIN: u64 = 8 << 20;

/// What a backing is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Memory for all that the devices hold, their tables included, in bytes: at least [`LIMIT_BYTES_MIN`], or 0 for no
    /// limit.
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
}

impl Default for Settings {
    /// No limit, lz4, 16 KiB blocks, one pool for each CPU, 16 recent blocks.
    fn default() -> Settings {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let pools = StoreConfig::pools_for(cores);
        let StoreConfig { codec, block_order, recent_blocks, .. } = StoreConfig::default();
        Settings { limit_bytes: 0, codec, block_order, pools, recent_blocks, verify: false }
    }
}

/// Why a backing or a device could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceError {
    /// A limit below [`LIMIT_BYTES_MIN`]; holds it.
    Limit(u64),
    /// A size of 0, not of whole sectors, or above the most; holds it.
    Size(u64),
    /// The table of a device of this size does not fit the limit.
    Table {
        /// Bytes of the device.
        size: u64,
        /// Bytes of the limit.
        limit: u64,
    },
    /// There is no memory for the table of a device of this size; holds it.
    NoMemory(u64),
    /// The store could not be made.
    Store(StoreError),
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceError::Limit(n) => write!(f, "a limit of {n} bytes is too small: at least {LIMIT_BYTES_MIN}"),
            DeviceError::Size(0) => write!(f, "a device of 0 bytes: give it a size"),
            DeviceError::Size(n) if !n.is_multiple_of(super::SECTOR_BYTES) => {
                write!(f, "{n} bytes are no whole sectors: the size must be a multiple of {}", super::SECTOR_BYTES)
            }
            DeviceError::Size(n) => write!(f, "{n} bytes are too many: at most {}", super::SIZE_BYTES_MAX),
            DeviceError::Table { size, limit } => {
                write!(f, "a device of {size} bytes leaves nothing of a limit of {limit} bytes: raise the limit")
            }
            DeviceError::NoMemory(n) => write!(f, "no memory for the table of a device of {n} bytes"),
            DeviceError::Store(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for DeviceError {}

/// The memory of devices. Held bytes = what the store holds + the devices' tables; buffers of [`super::Io`]s do not count.
pub struct Backing {
    pub(crate) store: Store,
    limit_bytes: u64,
    /// Bytes of the devices' tables. Changed under the lock, so that the store's limit is always what they leave.
    tables: Mutex<u64>,
    /// Keys given to devices: pages.
    keys: AtomicU64,
}

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
        Ok(Arc::new(Backing { store, limit_bytes, tables: Mutex::new(0), keys: AtomicU64::new(0) }))
    }

    /// Bytes of memory held now.
    pub fn held_bytes(&self) -> u64 {
        self.store.pool_bytes() + self.table_bytes()
    }

    /// Figures.
    pub fn stats(&self) -> BackingStats {
        BackingStats {
            store: self.store.stats(),
            held_bytes: self.held_bytes(),
            table_bytes: self.table_bytes(),
            limit_bytes: self.limit_bytes,
        }
    }

    /// Packs sparse memory and gives emptied memory back to the kernel, for a background thread now and then. Returns the
    /// bytes emptied or given back.
    pub fn tidy(&self) -> u64 {
        let packed: u64 = std::iter::from_fn(|| Some(self.store.tidy()).filter(|bytes| *bytes > 0)).take(64).sum();
        packed + self.store.trim()
    }

    /// The limit in bytes, 0 for none.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Takes memory for a table; `false` if there is none left.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let mut tables = self.lock();
        let all = *tables + bytes;
        // The store's limit must not come to 0, which would be none, so a page stays.
        let fits = || all + self.store.pool_bytes() + PAGE_SIZE as u64 <= self.limit_bytes;
        if self.limit_bytes != 0 && !fits() {
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

    fn set_limit(&self, tables: u64) {
        if self.limit_bytes != 0 {
            self.store.set_pool_bytes_max(self.limit_bytes - tables);
        }
    }

    fn table_bytes(&self) -> u64 {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, u64> {
        self.tables.lock().expect("nobody panics with the lock")
    }
}
