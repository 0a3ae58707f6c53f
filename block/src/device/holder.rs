//! A device as the threads that move its objects see it.
use memfold_store::{CodecWorker, ColdObject, ExportedObject, Handle};

/// An owner of slots with objects. An object that has moved since it was found is left alone.
pub(crate) trait SlotHolder: Send + Sync {
    /// Returns whether a key is one of its pages.
    fn has_key(&self, key: u64) -> bool;
    /// Copies the payload of an object, if it has not moved.
    fn export(&self, cold: &ColdObject, out: &mut [u8]) -> Option<ExportedObject>;
    /// Puts `new` in the place of an object, which is freed. Returns `false` if the object has
    /// moved.
    fn replace(&self, cold: &ColdObject, new: Handle) -> bool;
    /// Compresses an object again with the worker's codec, and keeps the result if it is smaller.
    fn recompress(&self, worker: &mut CodecWorker, cold: &ColdObject, done: &mut RecompressResult);
}

/// The result of a recompression.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct RecompressResult {
    /// Objects that the codec was tried on.
    pub tried: u64,
    /// Objects that became smaller.
    pub smaller: u64,
    /// Payload bytes gained.
    pub gained_bytes: u64,
}
