//! A device as those see it who move its objects.
use memfold_store::{Cold, Exported, Handle, Worker};

/// Who has objects in slots. An object that isn't where it was when it was found is left alone.
pub(crate) trait Holder: Send + Sync {
    /// Whether a key is one of its pages.
    fn has_key(&self, key: u64) -> bool;
    /// Copies the payload of an object, if it still is where it was.
    fn export(&self, cold: &Cold, out: &mut [u8]) -> Option<Exported>;
    /// Puts `new` in the place of an object, which is freed; `false` if it no longer is where it
    /// was.
    fn replace(&self, cold: &Cold, new: Handle) -> bool;
    /// Compresses an object again with the worker's codec, and keeps the result where it is
    /// smaller.
    fn recompress(&self, worker: &mut Worker, cold: &Cold, done: &mut Recompressed);
}

/// What a recompression came to.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Recompressed {
    /// Objects that the codec was tried on.
    pub tried: u64,
    /// Objects that became smaller.
    pub smaller: u64,
    /// Payload bytes gained.
    pub gained_bytes: u64,
}
