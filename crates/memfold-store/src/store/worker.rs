//! Workers: what one thread needs to save and load.
use crate::block::Scratch;
use crate::block::dictionaries::{Cans, Decoders};
use crate::codec::{CodecSpec, Encoder};
use crate::handle::Handle;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use memfold_sys::page::PageBuffer;
use memfold_sys::units::{MAX_PAGES, Order};

/// Codec contexts and buffers of one thread. Everything is allocated when it is made, nothing
/// afterwards.
///
/// It belongs to the store that made it. It saves with the codec it was made for and loads every
/// codec's objects.
pub struct Worker {
    pub(crate) spec: CodecSpec,
    pub(crate) encoder: Box<dyn Encoder>,
    pub(crate) decoders: Decoders,
    pub(crate) scratch: Scratch,
    pub(crate) spare: PageBuffer,
    /// Handles of a save that is not finished.
    pub(crate) saved: Box<[Handle]>,
    /// Which group of counters it adds to.
    pub(crate) counters: usize,
}

impl Worker {
    pub(crate) fn new(
        spec: CodecSpec,
        block_order: Order,
        counters: usize,
        cans: Arc<Cans>,
    ) -> Worker {
        let bytes = block_order.bytes();
        Worker {
            spec,
            encoder: spec.encoder(bytes),
            decoders: Decoders::new(cans, bytes),
            scratch: Scratch::new(block_order),
            spare: PageBuffer::new(block_order),
            saved: vec![Handle::NONE; MAX_PAGES].into_boxed_slice(),
            counters,
        }
    }

    /// The codec that saves use.
    pub fn codec(&self) -> CodecSpec {
        self.spec
    }

    /// Changes the codec that saves use. Allocates what the new codec needs and frees what the old
    /// one had, unless they are the same.
    pub fn set_codec(&mut self, spec: CodecSpec) {
        if spec != self.spec {
            (self.spec, self.encoder) = (spec, spec.encoder(self.spare.len()));
        }
    }
}
