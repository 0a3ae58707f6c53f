//! Tests of the whole store. Each is named for the promise that it checks.
mod canned;
mod cold;
mod damage;
mod faults;
mod fuzz;
mod offload;
mod oracle;
mod partial;
mod promises;
mod threads;

use crate::*;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_testkit::fill::libraries;
pub(crate) use memfold_testkit::random::Random;
use std::sync::OnceLock;

/// A page-aligned buffer of whole pages.
#[derive(Clone)]
pub(crate) struct Pages(Vec<Page>);

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

impl Pages {
    pub fn new(pages: usize) -> Pages {
        Pages(vec![Page([0xc3; PAGE_SIZE]); pages])
    }
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: pages are arrays of bytes, one after another.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * PAGE_SIZE) }
    }
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: pages are arrays of bytes, one after another, and are borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * PAGE_SIZE)
        }
    }
    pub fn page_mut(&mut self, page: usize) -> &mut [u8] {
        &mut self.0[page].0
    }
}

/// The content of a page.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fill {
    Zero,
    Pattern(u64),
    Random(u64),
    /// Real bytes from this offset of the corpus.
    Real(usize),
}

impl Fill {
    /// Returns any content: mostly real bytes.
    pub fn any(random: &mut Random) -> Fill {
        match random.below(8) {
            0 => Fill::Zero,
            1 => Fill::Pattern(if random.below(2) == 0 {
                0x0101_0101_0101_0101
            } else {
                random.word()
            }),
            2 => Fill::Random(random.word()),
            _ => Fill::Real(random.word() as usize),
        }
    }

    pub fn write(self, page: &mut [u8]) {
        match self {
            Fill::Zero => page.fill(0),
            Fill::Pattern(p) => {
                page.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&p.to_ne_bytes()))
            }
            Fill::Random(seed) => {
                let mut random = Random::new(seed);
                page.chunks_exact_mut(8)
                    .for_each(|c| c.copy_from_slice(&random.word().to_ne_bytes()));
            }
            Fill::Real(at) => {
                let corpus = corpus();
                let at = at % (corpus.len() - PAGE_SIZE);
                page.copy_from_slice(&corpus[at..at + PAGE_SIZE]);
            }
        }
    }
}

pub(crate) fn corpus() -> &'static [u8] {
    static CORPUS: OnceLock<Vec<u8>> = OnceLock::new();
    CORPUS.get_or_init(|| libraries(1 << 20, 8 << 20))
}

pub(crate) fn order(n: u8) -> Order {
    Order::new(n).unwrap()
}

pub(crate) fn store_with(change: impl FnOnce(&mut StoreConfig)) -> Store {
    let mut config = StoreConfig::default();
    change(&mut config);
    Store::new(&config).unwrap()
}

/// Saves all blocks of a folio.
pub(crate) fn save(
    store: &Store,
    w: &mut CodecWorker,
    folio: &Pages,
    o: Order,
    key: u64,
) -> Result<Vec<Handle>, SaveError> {
    let mut out = vec![Handle::NONE; store.blocks(o)];
    save_some(store, w, folio, o, key, &BlockSet::first(store.blocks(o)), &mut out).map(|_| out)
}

pub(crate) fn save_some(
    store: &Store,
    w: &mut CodecWorker,
    folio: &Pages,
    o: Order,
    key: u64,
    which: &BlockSet,
    out: &mut [Handle],
) -> Result<SaveReport, SaveError> {
    assert!(folio.bytes().len() >= o.bytes());
    // SAFETY: the folio has `o` bytes, page-aligned, and is borrowed.
    unsafe { store.save(w, folio.bytes().as_ptr(), o, key, which, || false, out) }
}

/// Loads a block of a folio of order `o`.
pub(crate) fn load(
    store: &Store,
    w: &mut CodecWorker,
    handle: Handle,
    block: Order,
) -> Result<Vec<u8>, LoadError> {
    let mut pages = Pages::new(block.pages());
    // SAFETY: the buffer has room for the block, page-aligned, and belongs to this function.
    unsafe { store.load(w, handle, block, pages.bytes_mut().as_mut_ptr())? };
    Ok(pages.bytes().to_vec())
}

/// Checks that the blocks of a folio load as the folio.
pub(crate) fn assert_same(
    store: &Store,
    w: &mut CodecWorker,
    handles: &[Handle],
    folio: &Pages,
    o: Order,
) {
    let block = store.block_order(o);
    for (i, handle) in handles.iter().enumerate() {
        let expected = &folio.bytes()[i * block.bytes()..][..block.bytes()];
        assert!(
            load(store, w, *handle, block).unwrap() == expected,
            "block {i} of order {}",
            o.get()
        );
    }
}
