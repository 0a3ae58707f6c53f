//! Policies of textbooks. They evict one page at a time.

use crate::policy::memory::{Arrival, Candidate, PolicyMemory};
use crate::policy::trace::{PageNumber, Trace};
use memfold_engine::policy::eviction::LruList;

fn oldest(memory: &PolicyMemory<'_>) -> PageNumber {
    let (id, _) = memory.lists.isolate(LruList::Inactive).expect("a page is mapped");
    memory.lists.detach(id);
    id - 1
}

/// First in, first out.
pub struct Fifo;

impl Candidate for Fifo {
    fn arrived(&mut self, page: PageNumber, _how: Arrival, memory: &mut PolicyMemory<'_>) {
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
        oldest(memory)
    }
}

/// Least recently used.
pub struct LeastRecent;

impl Candidate for LeastRecent {
    fn arrived(&mut self, page: PageNumber, _how: Arrival, memory: &mut PolicyMemory<'_>) {
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
        oldest(memory)
    }

    fn touched(&mut self, page: PageNumber, _write: bool, memory: &mut PolicyMemory<'_>) {
        memory.list(page, LruList::Inactive);
    }
}

/// First in, first out, with a second chance by accessed bits, as kernels do.
pub struct Clock {
    accessed: Vec<bool>,
    /// The page that was mapped last. The touch that it was mapped for is not counted.
    fresh: Option<PageNumber>,
}

impl Clock {
    /// Makes it for a trace.
    pub fn new(trace: &Trace) -> Clock {
        Clock { accessed: vec![false; trace.pages()], fresh: None }
    }
}

impl Candidate for Clock {
    fn arrived(&mut self, page: PageNumber, _how: Arrival, memory: &mut PolicyMemory<'_>) {
        self.fresh = Some(page);
        memory.list(page, LruList::Inactive);
    }

    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
        loop {
            let page = oldest(memory);
            if !std::mem::take(&mut self.accessed[page as usize]) {
                return page;
            }
            memory.count_spared();
            memory.list(page, LruList::Inactive);
        }
    }

    fn touched(&mut self, page: PageNumber, _write: bool, _memory: &mut PolicyMemory<'_>) {
        self.accessed[page as usize] |= self.fresh.take() != Some(page);
    }
}
