//! The table of a device: a slot for each page and one for each block, with the object that holds
//! it.
use super::backing::DeviceMemory;
use memfold_os::units::Order;
use memfold_store::Handle;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Relaxed};

/// Pages of a chunk of the table: 16 MiB of the device.
pub(crate) const CHUNK_PAGES: usize = 4096;

/// In a page's slot: the page is in its block's object.
pub(crate) const IN_BLOCK: Handle = Handle::foreign(0);

/// The memory of the table. It comes chunk by chunk, with the first write to each part of the
/// device, and stays.
pub(crate) struct SlotTable {
    chunks: Box<[OnceLock<TableChunk>]>,
    order: Order,
}

/// A page's slot is `NONE` (never written, or discarded), `ZERO` (zeros were written), `IN_BLOCK`,
/// or an object of one page. A block's slot is an object of the whole block while a page of it is
/// `IN_BLOCK`, else `NONE`. Slots change under the block's lock. A page's slot may be read without
/// it.
pub(crate) struct TableChunk {
    /// Slots of the pages, then slots of the blocks.
    slots: Box<[AtomicU64]>,
    /// A bit for each block that has changed. It is set after the change, before the request
    /// returns, with the block's lock held.
    pub changed: Box<[AtomicU64]>,
    /// Blocks whose change is being written to an image. They count as changed again if that fails.
    under_way: Box<[AtomicU64]>,
}

impl SlotTable {
    /// Makes a table. Returns `None` if there is no memory for it.
    pub fn new(pages: u64, order: Order) -> Option<SlotTable> {
        let count = pages.div_ceil(CHUNK_PAGES as u64) as usize;
        Some(SlotTable { chunks: filled(count, OnceLock::new)?, order })
    }

    /// Returns the bytes of a table for so many pages before anything is written.
    pub fn bytes(pages: u64) -> u64 {
        pages.div_ceil(CHUNK_PAGES as u64) * size_of::<OnceLock<TableChunk>>() as u64
    }

    /// Returns the chunk of a block; `None` while nothing of it was written.
    pub fn chunk(&self, block: u64) -> Option<&TableChunk> {
        self.chunks[self.chunk_of(block)].get()
    }

    /// Returns the chunk of a block and makes it if needed. Returns `None` if its memory would
    /// exceed the limit, or if there is none.
    pub fn chunk_or_new(&self, block: u64, backing: &DeviceMemory) -> Option<&TableChunk> {
        let cell = &self.chunks[self.chunk_of(block)];
        if cell.get().is_none() {
            let bytes = self.chunk_bytes();
            if !backing.charge(bytes) {
                return None;
            }
            let slots = filled(self.chunk_slots(), || AtomicU64::new(Handle::NONE.to_bits()));
            let changes = filled(self.chunk_words(), AtomicU64::default);
            let under_way = filled(self.chunk_words(), AtomicU64::default);
            let chunk = slots.zip(changes).zip(under_way);
            let chunk = chunk.map(|((slots, changes), under_way)| TableChunk {
                slots,
                changed: changes,
                under_way,
            });
            // There is no memory, or another thread has made it meanwhile.
            if chunk.is_none_or(|chunk| cell.set(chunk).is_err()) {
                backing.give(bytes);
            }
        }
        cell.get()
    }

    /// Returns the slots of a block within its chunk.
    pub fn slots<'a>(&self, chunk: &'a TableChunk, block: u64) -> BlockSlots<'a> {
        let pages = self.order.pages();
        let first = block as usize * pages % CHUNK_PAGES;
        let number = first / pages;
        let (block, changes) = (&chunk.slots[CHUNK_PAGES + number], &chunk.changed[number / 64]);
        BlockSlots {
            pages: &chunk.slots[first..first + pages],
            block,
            changed: changes,
            bit: 1 << (number % 64),
        }
    }

    /// Returns the first block after `block` that lies in another chunk.
    pub fn next_chunk(&self, block: u64) -> u64 {
        let blocks = (CHUNK_PAGES >> self.order.get()) as u64;
        (block / blocks + 1) * blocks
    }

    /// Returns the chunks that were made.
    pub fn all(&self) -> impl Iterator<Item = &TableChunk> {
        self.chunks.iter().filter_map(OnceLock::get)
    }

    /// Returns the chunks that were made, each with its first block.
    pub fn all_from(&self) -> impl Iterator<Item = (u64, &TableChunk)> {
        let blocks = (CHUNK_PAGES >> self.order.get()) as u64;
        (0..)
            .step_by(blocks as usize)
            .zip(&self.chunks)
            .filter_map(|(first, cell)| Some((first, cell.get()?)))
    }

    /// Returns the bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        ((self.chunk_slots() + 2 * self.chunk_words()) * size_of::<AtomicU64>()) as u64
    }

    fn chunk_words(&self) -> usize {
        (CHUNK_PAGES >> self.order.get()).div_ceil(64)
    }

    fn chunk_slots(&self) -> usize {
        CHUNK_PAGES + (CHUNK_PAGES >> self.order.get())
    }

    fn chunk_of(&self, block: u64) -> usize {
        (block / (CHUNK_PAGES >> self.order.get()) as u64) as usize
    }
}

impl TableChunk {
    /// Takes a word of changes, which are then in progress.
    pub fn take_changed(&self, word: usize) -> u64 {
        let bits = self.changed[word].swap(0, AcqRel);
        if bits != 0 {
            self.under_way[word].fetch_or(bits, AcqRel);
        }
        bits
    }

    /// Ends progress: the changes are done, or count as changes again.
    pub fn end_changed(&self, done: bool) {
        for (changes, under_way) in self.changed.iter().zip(&self.under_way) {
            let bits = under_way.swap(0, AcqRel);
            if !done && bits != 0 {
                changes.fetch_or(bits, AcqRel);
            }
        }
    }

    /// Returns the contents of its pages' slots.
    pub fn pages(&self) -> impl Iterator<Item = Handle> {
        self.slots[..CHUNK_PAGES].iter().map(|slot| Handle::from_bits(slot.load(Relaxed)))
    }

    /// Returns the contents of its blocks' slots.
    pub fn blocks(&self) -> impl Iterator<Item = Handle> {
        self.slots[CHUNK_PAGES..].iter().map(|slot| Handle::from_bits(slot.load(Relaxed)))
    }
}

/// The slots of one block.
#[derive(Copy, Clone)]
pub(crate) struct BlockSlots<'a> {
    pages: &'a [AtomicU64],
    block: &'a AtomicU64,
    changed: &'a AtomicU64,
    bit: u64,
}

impl BlockSlots<'_> {
    pub fn page(&self, page: usize) -> Handle {
        Handle::from_bits(self.pages[page].load(Relaxed))
    }

    pub fn replace_page(&self, page: usize, with: Handle) -> Handle {
        Handle::from_bits(self.pages[page].swap(with.to_bits(), Relaxed))
    }

    pub fn block(&self) -> Handle {
        Handle::from_bits(self.block.load(Relaxed))
    }

    pub fn replace_block(&self, with: Handle) -> Handle {
        Handle::from_bits(self.block.swap(with.to_bits(), Relaxed))
    }

    /// Notes that the block has changed.
    pub fn set_changed(&self) {
        if self.changed.load(Relaxed) & self.bit == 0 {
            self.changed.fetch_or(self.bit, AcqRel);
        }
    }

    /// Returns the pages that are in the block's object.
    pub fn in_block(&self) -> usize {
        (0..self.pages.len()).filter(|page| self.page(*page) == IN_BLOCK).count()
    }
}

/// Makes a chunk. Returns `None` if there is no memory for it.
fn filled<T>(count: usize, each: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut all = Vec::new();
    all.try_reserve_exact(count).ok()?;
    all.resize_with(count, each);
    Some(all.into_boxed_slice())
}
