//! The state that a thread needs to use devices.
use super::backing::DeviceMemory;
use super::error::IoError;
use memfold_os::page::PageBuffer;
use memfold_os::units::Order;
use memfold_store::CodecWorker;
use std::sync::Arc;

/// Codec state and buffers of one thread, for devices of one backing.
pub struct DeviceIo {
    pub(super) decoder: BlockDecoder,
    pub(super) block: PageBuffer,
    pub(super) page: PageBuffer,
    pub(super) backing: Arc<DeviceMemory>,
}

/// The part of it that a load needs.
pub(super) struct BlockDecoder {
    pub worker: CodecWorker,
    /// A block from the file, of which a part is wanted.
    pub whole: PageBuffer,
}

impl DeviceIo {
    /// Makes the state for devices of this backing, whose largest block is of `order`.
    pub(super) fn new(backing: &Arc<DeviceMemory>, order: Order) -> DeviceIo {
        DeviceIo {
            decoder: BlockDecoder { worker: backing.store.worker(), whole: PageBuffer::new(order) },
            block: PageBuffer::new(order),
            page: PageBuffer::new(Order::PAGE),
            backing: backing.clone(),
        }
    }

    /// Decodes an exported payload, perhaps of another process, to a block.
    ///
    /// # Errors
    /// [`IoError::Unread`]: it makes no sense.
    pub(crate) fn decode(
        &mut self,
        fields: u32,
        payload: &[u8],
        order: Order,
        to: &mut [u8],
    ) -> Result<(), IoError> {
        assert!(to.len() == order.bytes());
        let store = &self.backing.store;
        // SAFETY: `to` is a block of `order` that only this thread uses. Any payload gives an error
        // or a block, as the fuzzers of the store check.
        let outcome = unsafe {
            store.import(&mut self.decoder.worker, fields, payload, order, to.as_mut_ptr())
        };
        outcome.map_err(|_| IoError::Unread)
    }
}
