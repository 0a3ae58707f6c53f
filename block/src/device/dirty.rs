//! Changes since the last look, and the content of a block as pieces that can be replayed.
use super::error::IoError;
use super::state::Device;
use super::table::{IN_BLOCK, TableChunk};
use super::units::ZeroPolicy;
use super::writeback;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::Handle;
use std::sync::atomic::Ordering::Acquire;

/// Which blocks to visit.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlockChoice {
    /// Blocks that have changed.
    Changed,
    /// Blocks to which anything was ever written.
    All,
}

/// A part of a device. Replaying the pieces of a block in order restores it.
#[derive(Debug)]
pub(crate) enum DirtyPiece<'a> {
    /// Bytes as stored: a block of the given order, which may reach beyond the end of the device.
    Object { offset: u64, order: Order, fields: u32, payload: &'a [u8] },
    /// Zeros of either kind, within the device.
    Zeros { offset: u64, len: u64, zeros: ZeroPolicy },
}

impl Device {
    /// Returns the longest payload of an object, which is the room that [`Device::describe`] needs.
    pub(crate) fn payload_max(&self) -> usize {
        // Besides the bytes there is a list of same-filled pages, with 8 bytes and a bit for each.
        self.order.bytes() + 1 + 9 * self.order.pages()
    }

    /// Calls `each` with every block that has changed, or with `Which::All` to which anything was
    /// ever written. Stops at an error. The changes are then in progress until
    /// [`Device::end_changed`] is called. Only one caller at a time.
    pub(crate) fn each_changed<E>(
        &self,
        which: BlockChoice,
        each: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let bits = |chunk: &TableChunk, word| {
            let changes = chunk.take_changed(word);
            if which == BlockChoice::All { u64::MAX } else { changes }
        };
        self.each_of(bits, each)
    }

    /// Calls `each` with every block to which anything was ever written. Stops at an error.
    pub(crate) fn each_written<E>(&self, each: impl FnMut(u64) -> Result<(), E>) -> Result<(), E> {
        self.each_of(|_, _| u64::MAX, each)
    }

    fn each_of<E>(
        &self,
        bits: impl Fn(&TableChunk, usize) -> u64,
        mut each: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let blocks = self.size.div_ceil(self.order.bytes() as u64);
        for (first, chunk) in self.table.all_from() {
            let end = self.table.next_chunk(first).min(blocks);
            for word in 0..chunk.changed.len() {
                let mut bits = bits(chunk, word);
                while bits != 0 {
                    let block = first + word as u64 * 64 + u64::from(bits.trailing_zeros());
                    bits &= bits - 1;
                    if block >= end {
                        break;
                    }
                    each(block)?;
                }
            }
        }
        Ok(())
    }

    /// Returns whether anything has changed.
    pub(crate) fn has_changed(&self) -> bool {
        self.table.all().any(|chunk| chunk.changed.iter().any(|word| word.load(Acquire) != 0))
    }

    /// Ends what [`Device::each_changed`] began. On success the changes are done, else they count
    /// as changes again.
    pub(crate) fn end_changed(&self, done: bool) {
        self.table.all().for_each(|chunk| chunk.end_changed(done));
    }

    /// Calls `each` with the pieces of a block at one moment. `room` has [`Device::payload_max`]
    /// bytes.
    ///
    /// # Errors
    /// What is stored can't be read.
    pub(crate) fn describe<E: From<IoError>>(
        &self,
        block: u64,
        room: &mut [u8],
        mut each: impl FnMut(DirtyPiece) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(chunk) = self.table.chunk(block) else { return Ok(()) };
        let slots = self.table.slots(chunk, block);
        let start = block * self.order.bytes() as u64;
        let _lock = self.lock_of(block).read();
        let mut object =
            |offset, order, handle, each: &mut dyn FnMut(DirtyPiece) -> Result<(), E>| {
                let (fields, len) = self.payload(handle, room)?;
                each(DirtyPiece::Object { offset, order, fields, payload: &room[..len] })
            };
        if !slots.block().is_none() {
            object(start, self.order, slots.block(), &mut each)?;
        }
        let pages =
            (self.size - start).div_ceil(PAGE_SIZE as u64).min(self.order.pages() as u64) as usize;
        let mut page = 0;
        while page < pages {
            let (handle, first) = (slots.page(page), page);
            page += 1;
            let offset = start + (first * PAGE_SIZE) as u64;
            if handle == IN_BLOCK {
                continue;
            }
            if !handle.is_none() && !handle.is_zero() {
                object(offset, Order::PAGE, handle, &mut each)?;
                continue;
            }
            while page < pages && slots.page(page) == handle {
                page += 1;
            }
            let len = ((page - first) * PAGE_SIZE) as u64;
            let zeros = if handle.is_none() { ZeroPolicy::Hole } else { ZeroPolicy::Written };
            each(DirtyPiece::Zeros { offset, len: len.min(self.size - offset), zeros })?;
        }
        Ok(())
    }

    /// Returns the payload of an object, wherever it is: its fields, and its length.
    fn payload(&self, handle: Handle, room: &mut [u8]) -> Result<(u32, usize), IoError> {
        if handle.as_foreign().is_some() {
            return writeback::export(&self.backing, handle, room);
        }
        let object = self.backing.store.export(handle, room).map_err(|_| IoError::Unread)?;
        Ok((object.fields, object.len))
    }
}
