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
mod backing;
mod table;
#[cfg(test)]
mod tests;

pub use backing::{Backing, BackingStats, DeviceError, LIMIT_BYTES_MIN, Settings};
pub use counters::DeviceStats;

use counters::Counters;
use memfold_store::{BlockSet, Handle, LoadError, SaveError, Worker};
use memfold_sys::page::{Page, PageBuffer};
use memfold_sys::sync::RwLock;
use memfold_sys::units::{MAX_PAGES, Order, PAGE_SIZE};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use table::{Chunk, IN_BLOCK, Slots, Table};

/// Sizes are multiples of so many bytes. Requests need not be.
pub const SECTOR_BYTES: u64 = 512;
/// The largest device: 64 TiB.
pub const SIZE_BYTES_MAX: u64 = 64 << 40;
/// Locks of a device; a block has the one of its number modulo this.
const LOCKS: usize = 1024;

/// Why a request was not done. Of a write that failed, any part may have been done, block by block; no other byte has
/// changed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum IoError {
    /// It goes beyond the end of the device.
    OutOfRange,
    /// The backing holds as much as it may, or there is no memory for more.
    NoSpace,
    /// What is stored can't be read back: memory was damaged.
    Damaged(LoadError),
    /// What was to be stored could not be: the codec failed, or verification read other bytes back.
    Refused(SaveError),
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IoError::OutOfRange => write!(f, "beyond the end of the device"),
            IoError::NoSpace => write!(f, "the memory limit is reached, or there is no more memory"),
            IoError::Damaged(e) => write!(f, "{e}"),
            IoError::Refused(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for IoError {}

impl From<SaveError> for IoError {
    fn from(error: SaveError) -> IoError {
        if error == SaveError::PoolFull { IoError::NoSpace } else { IoError::Refused(error) }
    }
}

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
    worker: Worker,
    block: PageBuffer,
    page: PageBuffer,
    backing: Arc<Backing>,
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
    pub fn new(backing: &Arc<Backing>, size: u64) -> Result<Device, DeviceError> {
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
        Ok(Device {
            size,
            order,
            table,
            locks: (0..LOCKS).map(|_| RwLock::new(())).collect(),
            key: backing.take_keys(pages.next_multiple_of(order.pages() as u64)),
            counters: Counters::default(),
            backing: backing.clone(),
        })
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
            worker: self.backing.store.worker(),
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
            let done = self.write_part(io, &part, from);
            done.inspect_err(|_| Counters::add(&self.counters.failed_writes, 1))?;
        }
        Ok(())
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
                Zeros::Written => Some(self.chunk_or_new(block)?),
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

    fn read_part(&self, io: &mut Io, part: &Part, to: &mut [u8]) -> Result<(), IoError> {
        let Some(chunk) = self.table.chunk(part.block) else {
            to.fill(0);
            return Ok(());
        };
        let slots = self.table.slots(chunk, part.block);
        let _lock = self.lock_of(part.block).read();
        let (start, last) = (part.bytes.start, (part.bytes.end - 1) / PAGE_SIZE);
        let mut page = start / PAGE_SIZE;
        while page <= last {
            let held = slots.page(page);
            let mut after = page + 1;
            while held == IN_BLOCK && after <= last && slots.page(after) == IN_BLOCK {
                after += 1;
            }
            let bytes = start.max(page * PAGE_SIZE)..part.bytes.end.min(after * PAGE_SIZE);
            let to = &mut to[bytes.start - start..bytes.end - start];
            if held.is_none() || held.is_zero() {
                to.fill(0);
            } else {
                self.read_run(io, &slots, page..after, &bytes, to)?;
            }
            page = after;
        }
        Ok(())
    }

    /// Reads `bytes` of a block, which lie in `pages`: pages of the block's object, or one page that is an object.
    fn read_run(
        &self,
        io: &mut Io,
        slots: &Slots,
        pages: Range<usize>,
        bytes: &Range<usize>,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        let all = pages.start * PAGE_SIZE..pages.end * PAGE_SIZE;
        if Page::begins_at(to.as_ptr()) && *bytes == all {
            return self.load(&mut io.worker, slots, pages, to);
        }
        let buffer = &mut io.block.bytes_mut()[..all.len()];
        self.load(&mut io.worker, slots, pages, buffer)?;
        to.copy_from_slice(&buffer[bytes.start - all.start..][..bytes.len()]);
        Ok(())
    }

    /// Loads `pages`, as for [`Device::read_run`], to page-aligned memory. The caller holds the block's lock.
    fn load(&self, worker: &mut Worker, slots: &Slots, pages: Range<usize>, to: &mut [u8]) -> Result<(), IoError> {
        assert!(Page::begins_at(to.as_ptr()) && to.len() == pages.len() * PAGE_SIZE);
        let (store, held) = (&self.backing.store, slots.page(pages.start));
        let loaded = if held == IN_BLOCK {
            let whole = pages.len() == self.order.pages();
            Counters::add(if whole { &self.counters.block_reads } else { &self.counters.partial_reads }, 1);
            // SAFETY: `to` is as many whole pages, page-aligned and ours alone; handles of this block are freed only by
            // who holds its lock for writing, which nobody does now but perhaps this thread.
            unsafe { store.load_pages(worker, slots.block(), self.order, pages.start, pages.len(), to.as_mut_ptr()) }
                .map(drop)
        } else {
            assert!(pages.len() == 1);
            Counters::add(&self.counters.page_reads, 1);
            // SAFETY: likewise, for one page.
            unsafe { store.load(worker, held, Order::PAGE, to.as_mut_ptr()) }
        };
        loaded.map_err(IoError::Damaged)
    }

    /// Stores a block or page. Whoever gets the handle puts it in a slot, or frees it.
    fn save(&self, worker: &mut Worker, from: &[u8], order: Order, key: u64) -> Result<Handle, IoError> {
        assert!(Page::begins_at(from.as_ptr()) && from.len() == order.bytes());
        let mut handle = [Handle::NONE];
        // SAFETY: `from` is `order.bytes()` bytes, page-aligned, borrowed so that nobody writes them.
        unsafe {
            self.backing.store.save(worker, from.as_ptr(), order, key, &BlockSet::first(1), || false, &mut handle)?;
        }
        Ok(handle[0])
    }

    fn write_part(&self, io: &mut Io, part: &Part, from: &[u8]) -> Result<(), IoError> {
        let chunk = self.chunk_or_new(part.block)?;
        if self.order > Order::PAGE && part.bytes.len() == self.order.bytes() {
            return self.write_block(io, chunk, part.block, from);
        }
        let slots = self.table.slots(chunk, part.block);
        for (page, bytes) in Self::each_page(&part.bytes) {
            let at = page * PAGE_SIZE + bytes.start - part.bytes.start;
            let from = &from[at..][..bytes.len()];
            if self.is_whole(part.block, page, &bytes) {
                self.write_page(io, &slots, part.block, page, from)?;
            } else {
                self.change_page(io, &slots, part.block, page, bytes, Some(from))?;
            }
        }
        Ok(())
    }

    fn write_block(&self, io: &mut Io, chunk: &Chunk, block: u64, from: &[u8]) -> Result<(), IoError> {
        let from = if Page::begins_at(from.as_ptr()) {
            from
        } else {
            io.block.bytes_mut().copy_from_slice(from);
            io.block.bytes_mut()
        };
        let new = self.save(&mut io.worker, from, self.order, self.page_key(block, 0))?;
        Counters::add(&self.counters.block_writes, 1);
        let _lock = self.lock_of(block).write();
        let in_slots = if new.is_zero() { Handle::ZERO } else { IN_BLOCK };
        let of_block = if new.is_zero() { Handle::NONE } else { new };
        self.set_block(&self.table.slots(chunk, block), in_slots, of_block);
        Ok(())
    }

    fn write_page(&self, io: &mut Io, slots: &Slots, block: u64, page: usize, from: &[u8]) -> Result<(), IoError> {
        let from = if Page::begins_at(from.as_ptr()) && from.len() == PAGE_SIZE {
            from
        } else {
            let to = io.page.bytes_mut();
            to[..from.len()].copy_from_slice(from);
            to[from.len()..].fill(0);
            to
        };
        let new = self.save(&mut io.worker, from, Order::PAGE, self.page_key(block, page))?;
        Counters::add(&self.counters.page_writes, 1);
        let _lock = self.lock_of(block).write();
        self.set_page(slots, page, new);
        self.cut(io, slots, block);
        Ok(())
    }

    /// Reads a page, puts `from` at `bytes` of it (zeros for `None`), and stores it again.
    fn change_page(
        &self,
        io: &mut Io,
        slots: &Slots,
        block: u64,
        page: usize,
        bytes: Range<usize>,
        from: Option<&[u8]>,
    ) -> Result<(), IoError> {
        let _lock = self.lock_of(block).write();
        let held = slots.page(page);
        if held.is_none() || held.is_zero() {
            io.page.bytes_mut().fill(0);
        } else {
            self.load(&mut io.worker, slots, page..page + 1, io.page.bytes_mut())?;
        }
        match from {
            Some(from) => io.page.bytes_mut()[bytes].copy_from_slice(from),
            None => io.page.bytes_mut()[bytes].fill(0),
        }
        // Zeros are never refused, as they make room; what other threads save in this moment isn't either.
        let _room = from.is_none().then(|| self.backing.store.past_limit());
        let new = self.save(&mut io.worker, io.page.bytes_mut(), Order::PAGE, self.page_key(block, page))?;
        Counters::add(&self.counters.partial_writes, 1);
        self.set_page(slots, page, new);
        self.cut(io, slots, block);
        Ok(())
    }

    fn zero_part(&self, io: &mut Io, slots: &Slots, part: &Part, zeros: Zeros) -> Result<(), IoError> {
        if part.bytes.len() == self.order.bytes() {
            let _lock = self.lock_of(part.block).write();
            self.set_block(slots, zeros.slot(), Handle::NONE);
            return Ok(());
        }
        for (page, bytes) in Self::each_page(&part.bytes) {
            if self.is_whole(part.block, page, &bytes) {
                let _lock = self.lock_of(part.block).write();
                self.set_page(slots, page, zeros.slot());
            } else if self.is_data(slots, part.block, page) {
                self.change_page(io, slots, part.block, page, bytes, None)?;
            } else if zeros == Zeros::Written {
                let _lock = self.lock_of(part.block).write();
                if slots.page(page).is_none() {
                    self.set_page(slots, page, Handle::ZERO);
                }
            }
        }
        Ok(())
    }

    fn is_data(&self, slots: &Slots, block: u64, page: usize) -> bool {
        let _lock = self.lock_of(block).read();
        let held = slots.page(page);
        !held.is_none() && !held.is_zero()
    }

    /// Sets all slots of a block, and frees what they held. The caller holds the lock.
    fn set_block(&self, slots: &Slots, in_slots: Handle, of_block: Handle) {
        for page in 0..self.order.pages() {
            // Neither `IN_BLOCK` nor `NONE` nor `ZERO` is an object: nothing is freed for them.
            self.backing.store.free(slots.replace_page(page, in_slots));
        }
        self.backing.store.free(slots.replace_block(of_block));
    }

    /// Puts an object of one page, `NONE` or `ZERO` in a page's slot. The block's object goes with its last page; until then
    /// its memory stays, which is counted (M4, M5). The caller holds the lock.
    fn set_page(&self, slots: &Slots, page: usize, new: Handle) {
        let old = slots.replace_page(page, new);
        if old != IN_BLOCK {
            self.backing.store.free(old);
        } else if slots.in_block() == 0 {
            self.backing.store.free(slots.replace_block(Handle::NONE));
        } else {
            Counters::add(&self.counters.deferred_frees, 1);
        }
    }

    /// Keeps what is left of a block's object as pages when no more than half of its pages are: they may cost twice the
    /// memory otherwise. If that can't be, all stays as it is. The caller holds the lock.
    fn cut(&self, io: &mut Io, slots: &Slots, block: u64) {
        let left = slots.in_block();
        if left == 0 || left > self.order.pages() / 2 {
            return;
        }
        let mut pages = [Handle::NONE; MAX_PAGES];
        let left = || (0..self.order.pages()).filter(|page| slots.page(*page) == IN_BLOCK);
        for page in left() {
            // SAFETY: the buffer is a page, aligned and ours; the block's handle can't be freed, as we hold the lock.
            let loaded = unsafe {
                let to = io.page.bytes_mut().as_mut_ptr();
                self.backing.store.load_pages(&mut io.worker, slots.block(), self.order, page, 1, to)
            };
            let saved = loaded
                .is_ok()
                .then(|| self.save(&mut io.worker, io.page.bytes_mut(), Order::PAGE, self.page_key(block, page)).ok());
            match saved.flatten() {
                Some(handle) => pages[page] = handle,
                None => return self.backing.store.free_many(&pages[..page]),
            }
        }
        for page in (0..self.order.pages()).filter(|page| !pages[*page].is_none()) {
            slots.replace_page(page, pages[page]);
        }
        self.backing.store.free(slots.replace_block(Handle::NONE));
        Counters::add(&self.counters.blocks_cut, 1);
    }

    /// Verifies the table against its promises, and counts its objects: blocks and pages. For tests, while nothing else
    /// uses the device.
    ///
    /// # Errors
    /// Says what does not hold.
    pub fn check(&self) -> Result<u64, String> {
        let mut objects = 0;
        for block in 0..self.size.div_ceil(self.order.bytes() as u64) {
            let Some(chunk) = self.table.chunk(block) else { continue };
            let slots = self.table.slots(chunk, block);
            let (whole, left) = (slots.block(), slots.in_block());
            if whole.is_none() != (left == 0) || whole.is_zero() {
                return Err(format!("block {block}: {whole:?} with {left} pages in it"));
            }
            let single = (0..self.order.pages()).map(|page| slots.page(page));
            let single = single.filter(|held| !held.is_none() && !held.is_zero() && *held != IN_BLOCK).count();
            objects += single as u64 + u64::from(!whole.is_none());
        }
        Ok(objects)
    }
}

impl Drop for Device {
    /// Gives all of its memory back to the backing.
    fn drop(&mut self) {
        let pages = self.size.div_ceil(PAGE_SIZE as u64);
        let mut bytes = Table::bytes(pages);
        for chunk in self.table.all() {
            chunk.each(|handle| self.backing.store.free(handle));
            bytes += self.table.chunk_bytes();
        }
        self.backing.give(bytes);
    }
}
