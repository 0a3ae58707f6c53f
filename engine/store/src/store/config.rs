//! Settings of a store, and errors of its creation.
use crate::codec::CodecSpec;
use crate::handle::POOLS_MAX;
use core::fmt;
use memfold_os::Errno;
use memfold_os::units::Order;

/// Most blocks that can be kept decompressed.
pub const CACHED_BLOCKS_MAX: usize = 4096;

/// Settings of a store, fixed for its life except where a method of [`crate::Store`] changes one.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Codec of workers made from now on. Objects of other codecs stay readable.
    pub codec: CodecSpec,
    /// Order of the unit of compression. A smaller folio is one block of its own order.
    pub block_order: Order,
    /// Number of pools, 1..=64; [`StoreConfig::pools_for`] has a default.
    pub pools: usize,
    /// Limit for the memory of all pools together, in bytes; 0 for none. Metadata counts but never
    /// fails.
    pub pool_bytes_max: u64,
    /// After a save was refused because the pools were full, the share of the limit in percent,
    /// 0..=100, below which saves are accepted again. 100: as soon as there is room.
    pub accept_percent: u8,
    /// Whether every block is decompressed and compared byte for byte before the save returns.
    pub verify: bool,
    /// Whether folios whose blocks mostly don't compress are refused instead of stored raw.
    pub refuse_incompressible: bool,
    /// Decompressed blocks that are kept for loads of their parts, 0..=4096. Each takes its memory when
    /// it is first used.
    pub cached_blocks: usize,
}

/// Why a store could not be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreError {
    /// The number of pools is not within 1..=64; holds it.
    Pools(usize),
    /// More cached blocks than 4096; holds the number.
    CachedBlocks(usize),
    /// A share of the limit above 100 percent; holds it.
    AcceptPercent(u8),
    /// No address space for the pools.
    Memory(Errno),
}

impl StoreConfig {
    /// Returns the default number of pools on a machine with `cores` cores: one for each, at most
    /// 64.
    pub fn pools_for(cores: usize) -> usize {
        cores.clamp(1, POOLS_MAX)
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        if self.pools == 0 || self.pools > POOLS_MAX {
            return Err(StoreError::Pools(self.pools));
        }
        if self.accept_percent > 100 {
            return Err(StoreError::AcceptPercent(self.accept_percent));
        }
        if self.cached_blocks > CACHED_BLOCKS_MAX {
            return Err(StoreError::CachedBlocks(self.cached_blocks));
        }
        Ok(())
    }
}

impl Default for StoreConfig {
    /// Returns settings: lz4, 16 KiB blocks, one pool without limit, 16 cached blocks.
    fn default() -> StoreConfig {
        StoreConfig {
            codec: CodecSpec::default(),
            block_order: Order::new(2).expect("2 is an order"),
            pools: 1,
            pool_bytes_max: 0,
            accept_percent: 90,
            verify: false,
            refuse_incompressible: false,
            cached_blocks: 16,
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoreError::Pools(n) => write!(f, "{n} pools: must be 1 to {POOLS_MAX}"),
            StoreError::CachedBlocks(n) => {
                write!(f, "{n} cached blocks: must be at most {CACHED_BLOCKS_MAX}")
            }
            StoreError::AcceptPercent(n) => {
                write!(f, "{n} percent of the limit: must be at most 100")
            }
            StoreError::Memory(e) => write!(f, "no address space for the pools: {e}"),
        }
    }
}

impl core::error::Error for StoreError {}
