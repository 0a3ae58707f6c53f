//! A device: its table, its locks, and the division of requests into blocks.
use super::backing::DeviceMemory;
use super::counters::{DeviceCounters, DeviceStats};
use super::error::{DeviceError, IoError};
use super::holder::SlotHolder;
use super::io::DeviceIo;
use super::table::{IN_BLOCK, SlotTable, TableChunk};
use super::units::{SECTOR_BYTES, SIZE_BYTES_MAX};
use memfold_os::sync::RwLock;
use memfold_os::units::{Order, PAGE_SIZE};
use std::ops::Range;
use std::sync::{Arc, Weak};

/// Locks of a device. A block uses the lock with its number modulo this.
const LOCKS: usize = 1024;

/// A compressed block device. Any number of threads may call all methods at once, each with its own
/// [`DeviceIo`].
///
/// Every byte reads as it was last written, or as zero. Each byte belongs to one page, whose slot
/// is described at `Chunk`.
pub struct Device {
    pub(super) backing: Arc<DeviceMemory>,
    pub(super) size: u64,
    pub(super) order: Order,
    pub(super) table: SlotTable,
    locks: Box<[RwLock<()>]>,
    /// Key of the first page.
    pub(super) key: u64,
    pub(super) counters: DeviceCounters,
}

/// A part of one block.
pub(super) struct BlockPart {
    pub block: u64,
    /// Bytes within the block.
    pub bytes: Range<usize>,
    /// Their position in the request.
    pub at: u64,
}

impl Device {
    /// Makes a device of `size` zero bytes.
    ///
    /// # Errors
    /// A size of 0, not a multiple of [`SECTOR_BYTES`], or above [`SIZE_BYTES_MAX`]; its table
    /// alone would take half of the limit, or there is no memory for it.
    pub fn new(backing: &Arc<DeviceMemory>, size: u64) -> Result<Arc<Device>, DeviceError> {
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || size > SIZE_BYTES_MAX {
            return Err(DeviceError::Size(size));
        }
        let pages = size.div_ceil(PAGE_SIZE as u64);
        let (bytes, limit) = (SlotTable::bytes(pages), backing.limit_bytes());
        if limit != 0 && bytes > limit / 2 || !backing.charge(bytes) {
            return Err(DeviceError::Table { size, limit });
        }
        let order = backing.store.block_order(Order::MAX);
        let Some(table) = SlotTable::new(pages, order) else {
            backing.give(bytes);
            return Err(DeviceError::NoMemory(size));
        };
        let device = Arc::new(Device {
            size,
            order,
            table,
            locks: (0..LOCKS).map(|_| RwLock::new(())).collect(),
            key: backing.take_keys(pages.next_multiple_of(order.pages() as u64)),
            counters: DeviceCounters::default(),
            backing: backing.clone(),
        });
        backing.enter(Arc::downgrade(&device) as Weak<dyn SlotHolder>);
        Ok(device)
    }

    /// Allocates its tables now: 2 bytes in 1000. Otherwise they are allocated with the first write
    /// of each part.
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

    /// Returns the memory behind it.
    pub fn backing(&self) -> &Arc<DeviceMemory> {
        &self.backing
    }

    /// Returns its size, bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the size of a block, the unit of compression, bytes.
    pub fn block_bytes(&self) -> usize {
        self.order.bytes()
    }

    /// Makes the state that a thread needs to use devices of this backing. It allocates everything
    /// that it will ever need.
    pub fn io(&self) -> DeviceIo {
        DeviceIo::new(&self.backing, self.order)
    }

    /// Returns the counters.
    pub fn stats(&self) -> DeviceStats {
        self.counters.stats()
    }

    pub(super) fn check_request(
        &self,
        io: &DeviceIo,
        offset: u64,
        len: u64,
    ) -> Result<(), IoError> {
        assert!(Arc::ptr_eq(&io.backing, &self.backing), "an Io of another backing");
        self.check_range(offset, len)
    }

    /// Checks that a request lies within the device, and counts one that does not.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`]
    pub fn check_range(&self, offset: u64, len: u64) -> Result<(), IoError> {
        if offset.checked_add(len).is_none_or(|end| end > self.size) {
            DeviceCounters::add(&self.counters.invalid, 1);
            return Err(IoError::OutOfRange);
        }
        Ok(())
    }

    /// Divides a request into parts of blocks.
    pub(super) fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = BlockPart> + use<> {
        let bytes = self.order.bytes() as u64;
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == len {
                return None;
            }
            let (block, first) = ((offset + at) / bytes, (offset + at) % bytes);
            let count = (bytes - first).min(len - at);
            let part = BlockPart { block, bytes: first as usize..(first + count) as usize, at };
            at += count;
            Some(part)
        })
    }

    pub(super) fn chunk_or_new(&self, block: u64) -> Result<&TableChunk, IoError> {
        self.table.chunk_or_new(block, &self.backing).ok_or(IoError::NoSpace)
    }

    pub(super) fn lock_of(&self, block: u64) -> &RwLock<()> {
        &self.locks[block as usize % LOCKS]
    }

    /// Returns whether these bytes are a whole page: the last page of a device may be shorter.
    pub(super) fn is_whole(&self, block: u64, page: usize, bytes: &Range<usize>) -> bool {
        let page_start = block * self.order.bytes() as u64 + (page * PAGE_SIZE) as u64;
        bytes.start == 0 && bytes.end as u64 == (self.size - page_start).min(PAGE_SIZE as u64)
    }

    pub(super) fn page_key(&self, block: u64, page: usize) -> u64 {
        self.key + block * self.order.pages() as u64 + page as u64
    }

    /// Returns the pages of a part, each with its bytes in the part.
    pub(super) fn each_page(
        bytes: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let Range { start, end } = *bytes;
        (start / PAGE_SIZE..end.div_ceil(PAGE_SIZE)).map(move |page| {
            let first = page * PAGE_SIZE;
            (page, start.max(first) - first..end.min(first + PAGE_SIZE) - first)
        })
    }

    /// Verifies the table against its promises, and counts its objects: blocks and pages, and those
    /// in the file. For tests, while nothing else uses the device.
    ///
    /// # Errors
    /// Says what does not hold.
    pub fn check(&self) -> Result<(u64, u64), String> {
        let (mut objects, mut spilled_objects) = (0, 0);
        for block in 0..self.size.div_ceil(self.order.bytes() as u64) {
            let Some(chunk) = self.table.chunk(block) else { continue };
            let slots = self.table.slots(chunk, block);
            let (whole, handles) = (slots.block(), slots.in_block());
            if whole.is_none() != (handles == 0) || whole.is_zero() {
                return Err(format!("block {block}: {whole:?} with {handles} pages in it"));
            }
            let single = (0..self.order.pages()).map(|page| slots.page(page)).chain([whole]);
            for handle in single
                .filter(|handle| !handle.is_none() && !handle.is_zero() && *handle != IN_BLOCK)
            {
                *(if handle.as_foreign().is_some() {
                    &mut spilled_objects
                } else {
                    &mut objects
                }) += 1;
            }
        }
        Ok((objects, spilled_objects))
    }
}

impl Drop for Device {
    /// Frees all of its memory.
    fn drop(&mut self) {
        let pages = self.size.div_ceil(PAGE_SIZE as u64);
        let mut bytes = SlotTable::bytes(pages);
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
