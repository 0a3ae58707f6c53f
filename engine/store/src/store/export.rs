//! Objects as they are stored, out of the store and back to a block: for a device below, which
//! stores them compressed.
use crate::block::{self, DecodeError};
use crate::handle::Handle;
use crate::pool::entry::ObjectHeader;
use crate::store::Store;
use crate::store::error::LoadProblem;
use crate::store::worker::CodecWorker;
use memfold_os::page::Page;
use memfold_os::units::Order;

/// A stored object's payload, and what decoding needs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ExportedObject {
    /// Payload bytes.
    pub len: usize,
    /// Length, order and format in one word; goes back to [`Store::import`].
    pub fields: u32,
}

impl Store {
    /// Returns what [`Store::export`] would return, without the bytes; `None` for handles that are
    /// not objects of the store.
    pub fn payload(&self, handle: Handle) -> Option<ExportedObject> {
        let name = handle.object()?;
        let pin = self.pools.get(name.pool as usize)?.pin(name).ok()?;
        Some(ExportedObject { len: pin.header.len as usize, fields: pin.header.fields() })
    }

    /// Copies the stored payload of an object to the start of `out`, and verifies its checksum. The
    /// object stays.
    ///
    /// # Errors
    /// The object is unknown or damaged, or longer than `out` (`Layout`).
    pub fn export(&self, handle: Handle, out: &mut [u8]) -> Result<ExportedObject, LoadProblem> {
        let name = handle.object().ok_or(LoadProblem::Unknown)?;
        let pool = self.pools.get(name.pool as usize).ok_or(LoadProblem::Unknown)?;
        let pin = pool.pin(name)?;
        let len = pin.header.len as usize;
        let out = out.get_mut(..len).ok_or(LoadProblem::Layout)?;
        // SAFETY: the pinned payload is `len` readable bytes that no thread writes; `out` is
        // another buffer.
        unsafe { core::ptr::copy_nonoverlapping(pin.payload, out.as_mut_ptr(), len) };
        pin.verify()?;
        Ok(ExportedObject { len, fields: pin.header.fields() })
    }

    /// Decodes an exported payload to `dst`. The caller has verified that payload and fields are
    /// those of [`Store::export`].
    ///
    /// # Errors
    /// It is no block of `order`, or makes no sense. `dst` holds any bytes then.
    ///
    /// # Panics
    /// If no page begins at `dst`.
    ///
    /// # Safety
    /// - `dst` points to `order.bytes()` writable bytes that no other thread accesses during the
    ///   call.
    pub unsafe fn import(
        &self,
        w: &mut CodecWorker,
        fields: u32,
        payload: &[u8],
        order: Order,
        dst: *mut u8,
    ) -> Result<(), LoadProblem> {
        assert!(Page::begins_at(dst));
        let header = ObjectHeader::of_fields(fields);
        if header.order != order.get() {
            return Err(LoadProblem::Order { expected: order.get(), found: header.order });
        }
        if header.len as usize != payload.len() {
            return Err(LoadProblem::Layout);
        }
        // SAFETY: the payload is readable for `header.len` bytes; the caller vouches for `dst`.
        let outcome = unsafe {
            block::decode(&mut w.decoders, header, payload.as_ptr(), dst, order, 0..order.pages())
        };
        outcome.map_err(|error| match error {
            DecodeError::Layout => LoadProblem::Layout,
            DecodeError::Format => LoadProblem::Format(header.format),
            DecodeError::Codec(code) => LoadProblem::Codec(code),
        })
    }
}
