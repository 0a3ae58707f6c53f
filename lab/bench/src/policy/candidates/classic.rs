//! Policies of textbooks. They evict one page at a time.

use crate::policy::memory::{Arrival, Candidate, Memory};
use crate::policy::trace::{Page, Trace};
use memfold_engine::policy::eviction::LruList;

fn oldest(memory: &Memory<'_>) -> Page {
    let (id, _) = memory.lists.isolate(LruList::Inactive).expect("a page is mapped");
    memory.lists.detach(id);
    id - 1
}

/// First in, first out.
pub struct Fifo;

impl Candidate for Fifo {
    fn arrived(&mut self, page: Page, _how: Arrival, memory: &mut Memory<'_>) {
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut Memory<'_>) -> Page {
        oldest(memory)
    }
}

/// Least recently used.
pub struct LeastRecent;

impl Candidate for LeastRecent {
    fn arrived(&mut self, page: Page, _how: Arrival, memory: &mut Memory<'_>) {
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut Memory<'_>) -> Page {
        oldest(memory)
    }

    fn touched(&mut self, page: Page, _write: bool, memory: &mut Memory<'_>) {
        memory.list(page, LruList::Inactive);
    }
}

/// First in, first out, with a second chance by accessed bits, as kernels do.
pub struct Clock {
    accessed: Vec<bool>,
    /// The page that was mapped last. The touch that it was mapped for is not counted.
    fresh: Option<Page>,
}

impl Clock {
    /// Makes it for a trace.
    pub fn new(trace: &Trace) -> Clock {
        Clock { accessed: vec![false; trace.pages()], fresh: None }
    }
}

impl Candidate for Clock {
    fn arrived(&mut self, page: Page, _how: Arrival, memory: &mut Memory<'_>) {
        self.fresh = Some(page);
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut Memory<'_>) -> Page {
        loop {
            let page = oldest(memory);
            if !std::mem::take(&mut self.accessed[page as usize]) {
                return page;
            }
            memory.count_spared();
            memory.list(page, LruList::Inactive);
        }
    }

    fn touched(&mut self, page: Page, _write: bool, _memory: &mut Memory<'_>) {
        self.accessed[page as usize] |= self.fresh.take() != Some(page);
    }
}
