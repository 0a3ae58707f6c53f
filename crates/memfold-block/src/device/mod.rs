//! Blocks over the store: reads and writes of any alignment, discard and zeroing exact to the byte (M3-M5, M10).
//!
//! A device is cut into blocks, the unit of compression, and those into pages of 4 KiB. A write that covers a block becomes
//! one object, without a read. Any other is kept page by page: whole pages without a read, parts of a page by reading it,
//! changing it and writing it. What a page holds is said by its slot (`table.rs`); pages that are given up or written
//! anew only leave their block, whose object goes with its last page, or when no more than half of them are left: then
//! these are kept as pages.
//!
//! ```text
//! write(block, bytes):  all of the block -> save as one object; lock; set its slots; free what they held
//!                       a whole page     -> save the page; lock; set its slot; free what it held
//!                       a part of a page -> lock; load the page; change it; save it; set its slot; free what it held
//! read(block, bytes):   lock for reading; load runs of pages that lie in the block's object, and single pages
//! ```
//! A lock is that of a block (of several, by its number), and is held for one block at a time: what overlapping requests
//! leave in a block is what one of them after the other would have, page by page if they don't cover it.

mod counters;
mod error;
mod age;
mod table;
mod spill;
mod backing;
mod blocks;
mod cold;
mod dirty;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_cold;

pub use backing::{Backing, BackingStats, DeviceError, LIMIT_BYTES_MIN, Settings};
pub use cold::{Object, Pick, Recompressed};
pub use counters::DeviceStats;
pub(crate) use dirty::Piece;
pub use error::IoError;
pub use spill::{SpillSettings, SpillStats};

use counters::Counters;
use memfold_store::{Handle, Worker};
use memfold_sys::page::PageBuffer;
use memfold_sys::sync::RwLock;
use memfold_sys::units::{Order, PAGE_SIZE};
use std::ops::Range;
use std::sync::Arc;
use table::{Chunk, IN_BLOCK, Table};

/// Sizes are multiples of so many bytes. Requests need not be.
pub const SECTOR_BYTES: u64 = 512;
/// The largest device: 64 TiB.
pub const SIZE_BYTES_MAX: u64 = 64 << 40;
/// Locks of a device; a block has the one of its number modulo this.
const LOCKS: usize = 1024;

/// What a part of a device is. All but `Data` reads as zeros.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Bytes were written.
    Data,
    /// Zeros were written.
    Zeros,
    /// Nothing was ever written, or it was discarded.
    Hole,
}

/// What zeroed bytes are to be afterwards. Neither holds memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// [`Status::Hole`] where whole pages are zeroed: a discard.
    Hole,
    /// [`Status::Zeros`].
    Written,
}

impl Zeros {
    fn slot(self) -> Handle {
        if self == Zeros::Hole { Handle::NONE } else { Handle::ZERO }
    }
}

/// Codec state and buffers of one thread, for devices of one backing.
pub struct Io {
    decoder: Decoder,
    block: PageBuffer,
    page: PageBuffer,
    backing: Arc<Backing>,
}

/// What loading takes of it.
struct Decoder {
    worker: Worker,
    /// A block out of the file, of which a part is wanted.
    whole: PageBuffer,
}

impl Io {
    /// Decodes a payload that was exported, perhaps by another process, to a block.
    ///
    /// # Errors
    /// [`IoError::Unread`]: it makes no sense.
    pub(crate) fn decode(&mut self, fields: u32, payload: &[u8], order: Order, to: &mut [u8]) -> Result<(), IoError> {
        assert!(to.len() == order.bytes());
        let store = &self.backing.store;
        // SAFETY: `to` is a block of `order`, ours alone. Any payload is an error or a block: the fuzzers of the store say so.
        let decoded = unsafe { store.import(&mut self.decoder.worker, fields, payload, order, to.as_mut_ptr()) };
        decoded.map_err(|_| IoError::Unread)
    }
}

/// A compressed block device. All methods may be called from any number of threads at once, each with an [`Io`] of its own.
///
/// Every byte reads as it was last written, zero if never. It belongs to one page; see `Chunk` for what a page's slot says.
pub struct Device {
    backing: Arc<Backing>,
    size: u64,
    order: Order,
    table: Table,
    locks: Box<[RwLock<()>]>,
    /// Key of the first page.
    key: u64,
    counters: Counters,
}

/// A part of one block.
struct Part {
    block: u64,
    /// Bytes within the block.
    bytes: Range<usize>,
    /// Where they are in the request.
    at: u64,
}

impl Device {
    /// A device of `size` zero bytes.
    ///
    /// # Errors
    /// A size of 0, not a multiple of [`SECTOR_BYTES`], or above [`SIZE_BYTES_MAX`]; its table alone would take half of
    /// the limit, or there is no memory for it.
    pub fn new(backing: &Arc<Backing>, size: u64) -> Result<Arc<Device>, DeviceError> {
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || size > SIZE_BYTES_MAX {
            return Err(DeviceError::Size(size));
        }
        let pages = size.div_ceil(PAGE_SIZE as u64);
        let (bytes, limit) = (Table::bytes(pages), backing.limit_bytes());
        if limit != 0 && bytes > limit / 2 || !backing.take(bytes) {
            return Err(DeviceError::Table { size, limit });
        }
        let order = backing.store.block_order(Order::MAX);
        let Some(table) = Table::new(pages, order) else {
            backing.give(bytes);
            return Err(DeviceError::NoMemory(size));
        };
        let device = Arc::new(Device {
            size,
            order,
            table,
            locks: (0..LOCKS).map(|_| RwLock::new(())).collect(),
            key: backing.take_keys(pages.next_multiple_of(order.pages() as u64)),
            counters: Counters::default(),
            backing: backing.clone(),
        });
        backing.enter(&device);
        Ok(device)
    }

    /// Takes the memory of its tables now, which otherwise comes as parts are first written: 2 bytes in 1000.
    ///
    /// # Errors
    /// [`IoError::NoSpace`]
    pub fn preallocate(&self) -> Result<(), IoError> {
        let blocks = self.size.div_ceil(self.order.bytes() as u64);
        let mut block = 0;
        while block < blocks {
            self.chunk_or_new(block)?;
            block = self.table.next_chunk(block);
        }
        Ok(())
    }

    /// The memory behind it.
    pub fn backing(&self) -> &Arc<Backing> {
        &self.backing
    }

    /// Its bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a block, the unit of compression.
    pub fn block_bytes(&self) -> usize {
        self.order.bytes()
    }

    /// What a thread needs to use devices of this backing. Allocates all that it will ever need.
    pub fn io(&self) -> Io {
        Io {
            decoder: Decoder { worker: self.backing.store.worker(), whole: PageBuffer::new(self.order) },
            block: PageBuffer::new(self.order),
            page: PageBuffer::new(Order::PAGE),
            backing: self.backing.clone(),
        }
    }

    /// Counters.
    pub fn stats(&self) -> DeviceStats {
        self.counters.stats()
    }

    /// Reads the bytes from `offset` on. Fastest into page-aligned memory, from whole pages.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`], or [`IoError::Damaged`]: `to` holds any bytes then.
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn read(&self, io: &mut Io, offset: u64, to: &mut [u8]) -> Result<(), IoError> {
        self.check_request(io, offset, to.len() as u64)?;
        Counters::add(&self.counters.reads, 1);
        Counters::add(&self.counters.bytes_read, to.len() as u64);
        for part in self.parts(offset, to.len() as u64) {
            let to = &mut to[part.at as usize..][..part.bytes.len()];
            let done = self.read_part(io, &part, to);
            done.inspect_err(|_| Counters::add(&self.counters.failed_reads, 1))?;
        }
        Ok(())
    }

    /// Writes bytes from `offset` on. When it returns, every later read sees them.
    ///
    /// # Errors
    /// See [`IoError`].
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn write(&self, io: &mut Io, offset: u64, from: &[u8]) -> Result<(), IoError> {
        self.check_request(io, offset, from.len() as u64)?;
        Counters::add(&self.counters.writes, 1);
        Counters::add(&self.counters.bytes_written, from.len() as u64);
        for part in self.parts(offset, from.len() as u64) {
            let from = &from[part.at as usize..][..part.bytes.len()];
            let done = self.with_room(|| self.write_part(io, &part, from));
            done.inspect_err(|_| Counters::add(&self.counters.failed_writes, 1))?;
        }
        self.backing.call_if_full();
        Ok(())
    }

    /// Does what may find no room again, as long as some can be made. No lock of a block is held.
    fn with_room<T>(&self, mut write: impl FnMut() -> Result<T, IoError>) -> Result<T, IoError> {
        for _ in 0..backing::ROOM_TRIES {
            match write() {
                Err(IoError::NoSpace) if self.backing.make_room() => {}
                other => return other,
            }
        }
        write()
    }

    /// Makes bytes zero. Whole pages give up their memory, and take none.
    ///
    /// # Errors
    /// See [`IoError`]; never [`IoError::NoSpace`] with [`Zeros::Hole`].
    ///
    /// # Panics
    /// If `io` is of another backing.
    pub fn zero(&self, io: &mut Io, offset: u64, len: u64, zeros: Zeros) -> Result<(), IoError> {
        self.check_request(io, offset, len)?;
        Counters::add(&self.counters.zeroings, 1);
        Counters::add(&self.counters.bytes_zeroed, len);
        let (mut at, end) = (offset, offset + len);
        while at < end {
            let block = at / self.order.bytes() as u64;
            let next = (self.table.next_chunk(block) * self.order.bytes() as u64).min(end);
            let chunk = match zeros {
                Zeros::Hole => self.table.chunk(block),
                Zeros::Written => Some(self.with_room(|| self.chunk_or_new(block))?),
            };
            // Without one all of it is a hole already.
            if let Some(chunk) = chunk {
                for part in self.parts(at, next - at) {
                    let done = self.zero_part(io, &self.table.slots(chunk, part.block), &part, zeros);
                    done.inspect_err(|_| Counters::add(&self.counters.failed_writes, 1))?;
                }
            }
            at = next;
        }
        Ok(())
    }

    /// Calls `each` with runs of the same status, in order, until it says `false`: `len` bytes from `offset` on in all. A run
    /// may be followed by one of the same status. Other threads may change it meanwhile.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`].
    pub fn status(&self, offset: u64, len: u64, mut each: impl FnMut(u64, Status) -> bool) -> Result<(), IoError> {
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

    /// The status of the byte at `at`, and where the page or the unwritten chunk that it lies in ends.
    fn status_at(&self, at: u64) -> (Status, u64) {
        let block = at / self.order.bytes() as u64;
        let Some(chunk) = self.table.chunk(block) else {
            return (Status::Hole, self.table.next_chunk(block) * self.order.bytes() as u64);
        };
        let page = at as usize % self.order.bytes() / PAGE_SIZE;
        let status = match self.table.slots(chunk, block).page(page) {
            Handle::NONE => Status::Hole,
            Handle::ZERO => Status::Zeros,
            _ => Status::Data,
        };
        (status, (at / PAGE_SIZE as u64 + 1) * PAGE_SIZE as u64)
    }

    /// A hint that these bytes will be read soon.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`].
    pub fn cache(&self, _io: &mut Io, offset: u64, len: u64) -> Result<(), IoError> {
        self.check_range(offset, len)
    }

    /// Counts a request beyond the end that whoever serves the device has refused itself.
    pub fn count_invalid(&self) {
        Counters::add(&self.counters.invalid, 1);
    }

    fn check_request(&self, io: &Io, offset: u64, len: u64) -> Result<(), IoError> {
        assert!(Arc::ptr_eq(&io.backing, &self.backing), "an Io of another backing");
        self.check_range(offset, len)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), IoError> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            Counters::add(&self.counters.invalid, 1);
            return Err(IoError::OutOfRange);
        }
        Ok(())
    }

    /// A request, block by block.
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> + use<> {
        let bytes = self.order.bytes() as u64;
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == len {
                return None;
            }
            let (block, first) = ((offset + at) / bytes, (offset + at) % bytes);
            let count = (bytes - first).min(len - at);
            let part = Part { block, bytes: first as usize..(first + count) as usize, at };
            at += count;
            Some(part)
        })
    }

    fn chunk_or_new(&self, block: u64) -> Result<&Chunk, IoError> {
        self.table.chunk_or_new(block, &self.backing).ok_or(IoError::NoSpace)
    }

    fn lock_of(&self, block: u64) -> &RwLock<()> {
        &self.locks[block as usize % LOCKS]
    }

    /// Whether these bytes are all that there is of a page: a device may end within one.
    fn is_whole(&self, block: u64, page: usize, bytes: &Range<usize>) -> bool {
        let page_start = block * self.order.bytes() as u64 + (page * PAGE_SIZE) as u64;
        bytes.start == 0 && bytes.end as u64 == (self.size - page_start).min(PAGE_SIZE as u64)
    }

    fn page_key(&self, block: u64, page: usize) -> u64 {
        self.key + block * self.order.pages() as u64 + page as u64
    }

    /// Pages of a part, each with the bytes of it that are meant.
    fn each_page(bytes: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let Range { start, end } = *bytes;
        (start / PAGE_SIZE..end.div_ceil(PAGE_SIZE)).map(move |page| {
            let first = page * PAGE_SIZE;
            (page, start.max(first) - first..end.min(first + PAGE_SIZE) - first)
        })
    }

    /// Verifies the table against its promises, and counts its objects: blocks and pages, those in the file apart. For tests,
    /// while nothing else uses the device.
    ///
    /// # Errors
    /// Says what does not hold.
    pub fn check(&self) -> Result<(u64, u64), String> {
        let (mut objects, mut spilled) = (0, 0);
        for block in 0..self.size.div_ceil(self.order.bytes() as u64) {
            let Some(chunk) = self.table.chunk(block) else { continue };
            let slots = self.table.slots(chunk, block);
            let (whole, left) = (slots.block(), slots.in_block());
            if whole.is_none() != (left == 0) || whole.is_zero() {
                return Err(format!("block {block}: {whole:?} with {left} pages in it"));
            }
            let single = (0..self.order.pages()).map(|page| slots.page(page)).chain([whole]);
            for held in single.filter(|held| !held.is_none() && !held.is_zero() && *held != IN_BLOCK) {
                *(if held.as_foreign().is_some() { &mut spilled } else { &mut objects }) += 1;
            }
        }
        Ok((objects, spilled))
    }
}

impl Drop for Device {
    /// Gives all of its memory back to the backing.
    fn drop(&mut self) {
        let pages = self.size.div_ceil(PAGE_SIZE as u64);
        let mut bytes = Table::bytes(pages);
        for chunk in self.table.all() {
            for handle in chunk.pages().filter(|handle| *handle != IN_BLOCK) {
                self.backing.free(handle, Order::PAGE);
            }
            chunk.blocks().for_each(|handle| self.backing.free(handle, self.order));
            bytes += self.table.chunk_bytes();
        }
        self.backing.give(bytes);
    }
}
