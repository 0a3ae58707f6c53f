//! Contexts: the state that a thread needs to compress, decompress and compare. They are kept and
//! lent out, without thread-local storage.
use crate::backing::fingerprint::Fingerprint;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use memfold_os::page::PageBuffer;
use memfold_os::sync::{Mutex, MutexGuard};
use memfold_os::units::{MAX_PAGES, Order};
use memfold_store::{CodecWorker, CompressorPool, Handle, Offload, Store};

/// A block takes less than this on any software thread that runs at all.
const OFFLOAD_TIMEOUT_NS: u64 = 1_000_000_000;

/// One thread's working set.
pub struct CodecContext {
    /// Codec state.
    pub worker: CodecWorker,
    /// Other cores that compress blocks of a folio, if batches are on.
    pub offload: Option<Offload>,
    /// New handles of the folio being saved.
    pub handles: [Handle; MAX_PAGES],
    /// New fingerprints of the folio being saved.
    pub fingerprints: [Fingerprint; MAX_PAGES],
    /// One decompressed block.
    pub buffer: PageBuffer,
}

/// All contexts of an engine. Each is made when it is first borrowed, because most processes of a
/// run are small and short. [`ContextPool::prepare`] makes the first one.
pub struct ContextPool {
    all: Vec<Mutex<Option<Box<CodecContext>>>>,
    /// Dropped after the contexts that use it.
    codecs: Option<Box<dyn CompressorPool>>,
    batch: usize,
    block: Order,
}

/// A context that is borrowed.
pub struct BorrowedContext<'a>(MutexGuard<'a, Option<Box<CodecContext>>>);

impl Deref for BorrowedContext<'_> {
    type Target = CodecContext;
    fn deref(&self) -> &CodecContext {
        self.0.as_ref().expect("made before it was lent")
    }
}

impl DerefMut for BorrowedContext<'_> {
    fn deref_mut(&mut self) -> &mut CodecContext {
        self.0.as_mut().expect("made before it was lent")
    }
}

impl ContextPool {
    /// Makes room for up to `count` contexts (at least 1) for blocks of up to `block`. With
    /// `codecs`, which compress beside the caller, they have batches of `batch` blocks.
    pub fn new(
        count: usize,
        block: Order,
        codecs: Option<Box<dyn CompressorPool>>,
        batch: usize,
    ) -> ContextPool {
        let all = (0..count.max(1)).map(|_| Mutex::new(None)).collect();
        ContextPool { all, codecs, batch, block }
    }

    /// Makes the context that [`ContextPool::at_rest`] returns, if there is none.
    pub fn prepare(&self, store: &Store) {
        self.all[0].lock().get_or_insert_with(|| self.make(store));
    }

    fn make(&self, store: &Store) -> Box<CodecContext> {
        let offload = |codecs: &dyn CompressorPool| {
            Offload::new(codecs.queue(), self.batch, self.block, OFFLOAD_TIMEOUT_NS)
        };
        Box::new(CodecContext {
            worker: store.worker(),
            offload: self.codecs.as_deref().map(offload),
            handles: [Handle::NONE; MAX_PAGES],
            fingerprints: [Fingerprint::NONE; MAX_PAGES],
            buffer: PageBuffer::new(self.block),
        })
    }

    /// Returns a context for the thread that serves faults while the engine is quiesced.
    ///
    /// # Safety
    /// - No thread borrows a context, or calls this, while the reference lives.
    ///
    /// # Panics
    /// If [`ContextPool::prepare`] was not called.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn at_rest(&self) -> &mut CodecContext {
        // SAFETY: by the caller's promise no other thread uses a context meanwhile.
        unsafe { self.all[0].peek_mut() }.as_mut().expect("made before the rest")
    }

    /// Borrows a free context: the one last used on this CPU if it is free. Waits if all are lent.
    /// `store` is that of [`ContextPool::new`].
    pub fn borrow(&self, store: &Store) -> BorrowedContext<'_> {
        let first = memfold_os::thread::current_cpu();
        let n = self.all.len();
        let free = (0..n).find_map(|i| self.all[(first + i) % n].try_lock());
        let mut context = free.unwrap_or_else(|| self.all[first % n].lock());
        context.get_or_insert_with(|| self.make(store));
        BorrowedContext(context)
    }
}
