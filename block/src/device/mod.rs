//! Blocks over the store: unaligned reads and writes, and discard and zeroing exact to the byte
//! (M3-M5, M10).
//!
//! A device consists of blocks, the unit of compression. A block consists of pages of 4 KiB. A
//! write of a whole block becomes one object, without a read. Any other write is stored page by
//! page: whole pages without a read, parts of pages by read, change and write. The slot of a page
//! says where its content is (`table.rs`). A page that is discarded or rewritten leaves its block's
//! object. The object is freed with its last page. When at most half of the pages are left, they
//! are stored as pages.
//!
//! ```text
//! write(block, bytes):  all of the block -> save as one object; lock; set its slots; free what they held
//!                       a whole page     -> save the page; lock; set its slot; free what it held
//!                       a part of a page -> lock; load the page; change it; save it; set its slot; free what it held
//! read(block, bytes):   lock for reading; load runs of pages that lie in the block's object, and single pages
//! ```
//! A lock covers one block (several blocks share one, by number), and a request holds one lock at a
//! time. So overlapping requests leave each block as if they had run one after the other; page by
//! page where they don't cover it.
//!
//! Devices share `backing.rs`, the store and the limit; `spill.rs`, the file for data that does not
//! fit; `writeback.rs`, which moves objects there; `age.rs`, idle marks; `holder.rs`, a device as
//! the movers of objects see it. A device is `state.rs` with its `table.rs`; `blocks.rs`, requests
//! on one block; `cold.rs`, picked objects; `dirty.rs`, changes as pieces that can be replayed; and
//! its requests here, each with an `Io` (`io.rs`). `counters.rs` is the table of counters.

mod units;
mod counters;
mod error;
mod age;
mod holder;
mod spill;
mod backing;
mod io;
mod table;
mod writeback;
mod state;
mod blocks;
mod cold;
mod dirty;
#[cfg(test)]
pub(crate) mod tests;

pub use backing::{BackingStats, DeviceMemory, MemorySettings};
pub use cold::{ObjectPick, ObjectState};
pub use counters::DeviceStats;
pub(crate) use dirty::{BlockChoice, DirtyPiece};
pub use error::{DeviceError, IoError};
pub use holder::RecompressResult;
pub use io::DeviceIo;
pub use spill::{SpillSettings, SpillStats};
pub use state::Device;
pub use units::{LIMIT_BYTES_MIN, RangeStatus, SECTOR_BYTES, SIZE_BYTES_MAX, ZeroPolicy};

use counters::DeviceCounters;
use memfold_os::units::PAGE_SIZE;
use memfold_store::Handle;

impl Device {
    /// Reads bytes from `offset` on. Reads of whole pages into page-aligned memory are the fastest.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`], or [`IoError::Damaged`]: `to` holds any bytes then.
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn read(&self, io: &mut DeviceIo, offset: u64, to: &mut [u8]) -> Result<(), IoError> {
        self.check_request(io, offset, to.len() as u64)?;
        DeviceCounters::add(&self.counters.reads, 1);
        DeviceCounters::add(&self.counters.bytes_read, to.len() as u64);
        for part in self.parts(offset, to.len() as u64) {
            let to = &mut to[part.at as usize..][..part.bytes.len()];
            let outcome = self.read_part(io, &part, to);
            outcome.inspect_err(|_| DeviceCounters::add(&self.counters.failed_reads, 1))?;
        }
        Ok(())
    }

    /// Writes bytes from `offset` on. After the return every later read sees them.
    ///
    /// # Errors
    /// See [`IoError`].
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn write(&self, io: &mut DeviceIo, offset: u64, from: &[u8]) -> Result<(), IoError> {
        self.check_request(io, offset, from.len() as u64)?;
        DeviceCounters::add(&self.counters.writes, 1);
        DeviceCounters::add(&self.counters.bytes_written, from.len() as u64);
        for part in self.parts(offset, from.len() as u64) {
            let from = &from[part.at as usize..][..part.bytes.len()];
            let outcome = self.with_room(|| self.write_part(io, &part, from));
            outcome.inspect_err(|_| DeviceCounters::add(&self.counters.failed_writes, 1))?;
        }
        self.backing.call_if_full();
        Ok(())
    }

    /// Runs a request that may find no room again, as long as room can be made. The caller holds no
    /// lock of a block.
    fn with_room<T>(&self, mut write: impl FnMut() -> Result<T, IoError>) -> Result<T, IoError> {
        for _ in 0..writeback::ROOM_TRIES {
            match write() {
                Err(IoError::NoSpace) if self.backing.make_room() => {}
                other => return other,
            }
        }
        write()
    }

    /// Makes bytes zero. Whole pages free their memory and take none.
    ///
    /// # Errors
    /// See [`IoError`]; never [`IoError::NoSpace`] with [`ZeroPolicy::Hole`].
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn zero(
        &self,
        io: &mut DeviceIo,
        offset: u64,
        len: u64,
        zeros: ZeroPolicy,
    ) -> Result<(), IoError> {
        self.check_request(io, offset, len)?;
        DeviceCounters::add(&self.counters.zeroings, 1);
        DeviceCounters::add(&self.counters.bytes_zeroed, len);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let block = at / self.order.bytes() as u64;
            let next = (self.table.next_chunk(block) * self.order.bytes() as u64).min(end);
            let chunk = match zeros {
                ZeroPolicy::Hole => self.table.chunk(block),
                ZeroPolicy::Written => Some(self.with_room(|| self.chunk_or_new(block))?),
            };
            // Without a chunk all of it is a hole already.
            if let Some(chunk) = chunk {
                for part in self.parts(at, next - at) {
                    let outcome =
                        self.zero_part(io, &self.table.slots(chunk, part.block), &part, zeros);
                    outcome
                        .inspect_err(|_| DeviceCounters::add(&self.counters.failed_writes, 1))?;
                }
            }
            at = next;
        }
        Ok(())
    }

    /// Calls `each` with runs of one status, in order, until it returns `false`. The runs cover
    /// `len` bytes from `offset` on. Adjacent runs may have one status. Other threads may change
    /// the device meanwhile.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`].
    pub fn status(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(u64, RangeStatus) -> bool,
    ) -> Result<(), IoError> {
        self.check_range(offset, len)?;
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let (first, mut next) = self.status_at(at);
            while next < end {
                let (status, after) = self.status_at(next);
                if status != first {
                    break;
                }
                next = after;
            }
            let next = next.min(end);
            if !each(next - at, first) {
                break;
            }
            at = next;
        }
        Ok(())
    }

    /// Returns the status of the byte at `at`, and the end of its page or unwritten chunk.
    fn status_at(&self, at: u64) -> (RangeStatus, u64) {
        let block = at / self.order.bytes() as u64;
        let Some(chunk) = self.table.chunk(block) else {
            return (RangeStatus::Hole, self.table.next_chunk(block) * self.order.bytes() as u64);
        };
        let page = at as usize % self.order.bytes() / PAGE_SIZE;
        let status = match self.table.slots(chunk, block).page(page) {
            Handle::NONE => RangeStatus::Hole,
            Handle::ZERO => RangeStatus::Zeros,
            _ => RangeStatus::Data,
        };
        (status, (at / PAGE_SIZE as u64 + 1) * PAGE_SIZE as u64)
    }
}
