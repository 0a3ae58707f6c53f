//! Contexts: what a thread needs to compress, decompress and hash, made at set-up and lent out. No thread-local storage.
use alloc::boxed::Box;
use alloc::vec::Vec;
use memfold_store::{Handle, Offload, SoftwarePool, Store, Worker};
use memfold_sys::sync::{Mutex, MutexGuard};
use memfold_sys::units::{MAX_PAGES, Order};

/// No block takes this long on a software thread that runs at all.
const OFFLOAD_TIMEOUT_NS: u64 = 1_000_000_000;

/// One thread's working set.
pub struct Context {
    /// Codec state.
    pub worker: Worker,
    /// Other cores that compress blocks of a folio, if batches are on.
    pub offload: Option<Offload>,
    /// New handles of the folio being saved.
    pub handles: [Handle; MAX_PAGES],
    /// New hashes of the folio being saved.
    pub hashes: [[u64; 2]; MAX_PAGES],
    /// One decompressed block.
    pub buffer: Vec<u8>,
}

/// All contexts of an engine.
pub struct Contexts {
    all: Vec<Mutex<Box<Context>>>,
}

impl Contexts {
    /// `count` contexts (at least 1) for blocks of up to `block`, with batches of `batch` blocks if there is a pool.
    pub fn new(store: &Store, count: usize, block: Order, pool: Option<&SoftwarePool>, batch: usize) -> Contexts {
        let make = || {
            let worker = store.worker();
            let buffer = alloc::vec![0; block.bytes()];
            let offload = pool.map(|pool| Offload::new(Box::new(pool.queue()), batch, block, OFFLOAD_TIMEOUT_NS));
            Mutex::new(Box::new(Context {
                worker,
                offload,
                handles: [Handle::NONE; MAX_PAGES],
                hashes: [[0; 2]; MAX_PAGES],
                buffer,
            }))
        };
        Contexts { all: (0..count.max(1)).map(|_| make()).collect() }
    }

    /// A context for who serves while the engine is at rest.
    ///
    /// # Safety
    /// - Nobody borrows a context, or calls this, while the reference lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn at_rest(&self) -> &mut Context {
        // SAFETY: by the caller's promise.
        unsafe { self.all[0].peek_mut() }
    }

    /// A free context, the one last used on this CPU if it is; waits for one if all are taken.
    pub fn borrow(&self) -> MutexGuard<'_, Box<Context>> {
        let first = memfold_sys::thread::current_cpu();
        let n = self.all.len();
        (0..n).find_map(|i| self.all[(first + i) % n].try_lock()).unwrap_or_else(|| self.all[first % n].lock())
    }
}
