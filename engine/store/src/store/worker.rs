//! Workers: the state that one thread needs to save and load.
use crate::block::EncodeScratch;
use crate::block::dictionaries::{DecoderSet, DictionarySet};
use crate::codec::{CodecSpec, Encoder};
use crate::handle::Handle;
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use memfold_os::page::PageBuffer;
use memfold_os::units::{MAX_PAGES, Order};

/// Codec contexts and buffers of one thread. Everything is allocated at its creation, nothing
/// afterwards.
///
/// It belongs to the store that made it. It saves with its codec and loads objects of every codec.
pub struct CodecWorker {
    pub(crate) spec: CodecSpec,
    pub(crate) encoder: Box<dyn Encoder>,
    pub(crate) decoders: DecoderSet,
    pub(crate) scratch: EncodeScratch,
    pub(crate) spare: PageBuffer,
    /// Handles of a save that is not finished.
    pub(crate) saved: Box<[Handle]>,
    /// The group of counters that it adds to.
    pub(crate) counters: usize,
}

impl CodecWorker {
    pub(crate) fn new(
        spec: CodecSpec,
        block_order: Order,
        counters: usize,
        cans: Arc<DictionarySet>,
    ) -> CodecWorker {
        let bytes = block_order.bytes();
        CodecWorker {
            spec,
            encoder: spec.encoder(bytes),
            decoders: DecoderSet::new(cans, bytes),
            scratch: EncodeScratch::new(block_order),
            spare: PageBuffer::new(block_order),
            saved: vec![Handle::NONE; MAX_PAGES].into_boxed_slice(),
            counters,
        }
    }

    /// Returns the codec that saves use.
    pub fn codec(&self) -> CodecSpec {
        self.spec
    }

    /// Sets the codec that saves use. Allocates what the new codec needs and frees what the old one
    /// had, unless they are equal.
    pub fn set_codec(&mut self, spec: CodecSpec) {
        if spec != self.spec {
            (self.spec, self.encoder) = (spec, spec.encoder(self.spare.len()));
        }
    }
}
