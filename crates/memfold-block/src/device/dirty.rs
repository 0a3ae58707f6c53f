//! What has changed since it was last looked at, and what a block holds as pieces that can be
//! replayed.
use super::error::IoError;
use super::state::Device;
use super::table::IN_BLOCK;
use super::units::Zeros;
use super::writeback;
use memfold_store::Handle;
use memfold_sys::units::{Order, PAGE_SIZE};

/// A part of a device: replayed in order, the pieces of a block make it what it was.
#[derive(Debug)]
pub(crate) enum Piece<'a> {
    /// Bytes, as they are stored: a block of the given order, which may reach beyond the end of the
    /// device.
    Object { offset: u64, order: Order, fields: u32, payload: &'a [u8] },
    /// Zeros of either kind, within the device.
    Zeros { offset: u64, len: u64, zeros: Zeros },
}

impl Device {
    /// The longest payload of an object: what [`Device::describe`] needs room for.
    pub(crate) fn payload_max(&self) -> usize {
        // Beside the bytes themselves a list of same-filled pages, of 8 bytes and a bit each.
        self.order.bytes() + 1 + 9 * self.order.pages()
    }

    /// Calls `each` with every block that has changed since the last call, which are no longer
    /// changed then; with `all`, with every block of which anything was ever written. Stops at an
    /// error, after which the block counts as changed.
    pub(crate) fn each_changed<E>(
        &self,
        all: bool,
        mut each: impl FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        for (first, chunk) in self.table.all_from() {
            for word in 0..chunk.changed.len() {
                let mut bits = chunk.take_changed(word);
                if all {
                    bits = u64::MAX;
                }
                while bits != 0 {
                    let bit = bits.trailing_zeros() as u64;
                    bits &= bits - 1;
                    let block = first + word as u64 * 64 + bit;
                    if block >= self.table.next_chunk(first)
                        || block * self.order.bytes() as u64 >= self.size
                    {
                        break;
                    }
                    if let Err(error) = each(block) {
                        chunk.give_changed(word, bits | 1 << bit);
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks everything as changed.
    pub(crate) fn set_all_changed(&self) {
        for (_, chunk) in self.table.all_from() {
            (0..chunk.changed.len()).for_each(|word| chunk.give_changed(word, u64::MAX));
        }
    }

    /// Calls `each` with the pieces of a block, as they are at one moment. `room` is as long as
    /// [`Device::payload_max`].
    ///
    /// # Errors
    /// What is stored can't be read.
    pub(crate) fn describe<E: From<IoError>>(
        &self,
        block: u64,
        room: &mut [u8],
        mut each: impl FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(chunk) = self.table.chunk(block) else { return Ok(()) };
        let slots = self.table.slots(chunk, block);
        let start = block * self.order.bytes() as u64;
        let _lock = self.lock_of(block).read();
        let mut object = |offset, order, handle, each: &mut dyn FnMut(Piece) -> Result<(), E>| {
            let (fields, len) = self.payload(handle, room)?;
            each(Piece::Object { offset, order, fields, payload: &room[..len] })
        };
        if !slots.block().is_none() {
            object(start, self.order, slots.block(), &mut each)?;
        }
        let pages =
            (self.size - start).div_ceil(PAGE_SIZE as u64).min(self.order.pages() as u64) as usize;
        let mut page = 0;
        while page < pages {
            let (held, first) = (slots.page(page), page);
            page += 1;
            let offset = start + (first * PAGE_SIZE) as u64;
            if held == IN_BLOCK {
                continue;
            }
            if !held.is_none() && !held.is_zero() {
                object(offset, Order::PAGE, held, &mut each)?;
                continue;
            }
            while page < pages && slots.page(page) == held {
                page += 1;
            }
            let len = ((page - first) * PAGE_SIZE) as u64;
            let zeros = if held.is_none() { Zeros::Hole } else { Zeros::Written };
            each(Piece::Zeros { offset, len: len.min(self.size - offset), zeros })?;
        }
        Ok(())
    }

    /// The payload of an object, wherever it is: its fields, and its length.
    fn payload(&self, handle: Handle, room: &mut [u8]) -> Result<(u32, usize), IoError> {
        if handle.as_foreign().is_some() {
            return writeback::export(&self.backing, handle, room);
        }
        let exported = self.backing.store.export(handle, room).map_err(|_| IoError::Unread)?;
        Ok((exported.fields, exported.len))
    }
}
