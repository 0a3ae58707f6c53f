//! Contexts: what a thread needs to compress, decompress and compare, kept and lent out. No
//! thread-local storage.
use crate::backing::fingerprint::Fingerprint;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ops::{Deref, DerefMut};
use memfold_store::{Handle, Offload, SoftwarePool, Store, Worker};
use memfold_sys::page::PageBuffer;
use memfold_sys::sync::{Mutex, MutexGuard};
use memfold_sys::units::{MAX_PAGES, Order};

/// No block takes this long on a software thread that runs at all.
const OFFLOAD_TIMEOUT_NS: u64 = 1_000_000_000;

/// One thread's working set.
pub struct CodecContext {
    /// Codec state.
    pub worker: Worker,
    /// Other cores that compress blocks of a folio, if batches are on.
    pub offload: Option<Offload>,
    /// New handles of the folio being saved.
    pub handles: [Handle; MAX_PAGES],
    /// New fingerprints of the folio being saved.
    pub fingerprints: [Fingerprint; MAX_PAGES],
    /// One decompressed block.
    pub buffer: PageBuffer,
}

/// All contexts of an engine, each made when it is first borrowed, the first also by
/// [`ContextPool::prepare`]: most processes of a run are small, and short.
pub struct ContextPool {
    all: Vec<Mutex<Option<Box<CodecContext>>>>,
    /// Dropped after those that use it.
    codecs: Option<SoftwarePool>,
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
    /// Up to `count` contexts (at least 1) for blocks of up to `block`, with batches of `batch`
    /// blocks if there are `codecs`: threads that compress for them.
    pub fn new(
        count: usize,
        block: Order,
        codecs: Option<SoftwarePool>,
        batch: usize,
    ) -> ContextPool {
        let all = (0..count.max(1)).map(|_| Mutex::new(None)).collect();
        ContextPool { all, codecs, batch, block }
    }

    /// Makes the one that [`ContextPool::at_rest`] gives, if there is none.
    pub fn prepare(&self, store: &Store) {
        self.all[0].lock().get_or_insert_with(|| self.make(store));
    }

    fn make(&self, store: &Store) -> Box<CodecContext> {
        let offload = |codecs: &SoftwarePool| {
            Offload::new(Box::new(codecs.queue()), self.batch, self.block, OFFLOAD_TIMEOUT_NS)
        };
        Box::new(CodecContext {
            worker: store.worker(),
            offload: self.codecs.as_ref().map(offload),
            handles: [Handle::NONE; MAX_PAGES],
            fingerprints: [Fingerprint::NONE; MAX_PAGES],
            buffer: PageBuffer::new(self.block),
        })
    }

    /// A context for who serves while the engine is at rest.
    ///
    /// # Safety
    /// - Nobody borrows a context, or calls this, while the reference lives.
    ///
    /// # Panics
    /// If nobody has called [`ContextPool::prepare`].
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn at_rest(&self) -> &mut CodecContext {
        // SAFETY: by the caller's promise.
        unsafe { self.all[0].peek_mut() }.as_mut().expect("made before the rest")
    }

    /// A free context, the one last used on this CPU if it is; waits for one if all are taken.
    /// `store` is that of [`ContextPool::new`].
    pub fn borrow(&self, store: &Store) -> BorrowedContext<'_> {
        let first = memfold_sys::thread::current_cpu();
        let n = self.all.len();
        let free = (0..n).find_map(|i| self.all[(first + i) % n].try_lock());
        let mut context = free.unwrap_or_else(|| self.all[first % n].lock());
        context.get_or_insert_with(|| self.make(store));
        BorrowedContext(context)
    }
}
