//! The optimum of Belady: the page that is used again last leaves first. It knows the future, so no
//! policy that loads pages only when they are touched has fewer misses.

use crate::policy::memory::{Arrival, Candidate, Place, PolicyMemory};
use crate::policy::trace::{PageNumber, Trace};
use std::collections::BinaryHeap;

const NEVER: u32 = u32::MAX;

pub struct Belady {
    /// For each reference, the position of the next one to the same page.
    next: Vec<u32>,
    /// For each page, the position of its next reference.
    due: Vec<u32>,
    /// Pages by their next reference. Older entries of a page are skipped.
    heap: BinaryHeap<(u32, PageNumber)>,
    at: usize,
}

impl Belady {
    pub fn new(trace: &Trace) -> Belady {
        let mut next_use = vec![NEVER; trace.pages()];
        let mut next = vec![NEVER; trace.references.len()];
        for (position, reference) in trace.references.iter().enumerate().rev() {
            next[position] = next_use[reference.page as usize];
            next_use[reference.page as usize] = position as u32;
        }
        Belady { next, due: next_use, heap: BinaryHeap::new(), at: 0 }
    }
}

impl Candidate for Belady {
    fn arrived(&mut self, _page: PageNumber, _how: Arrival, _memory: &mut PolicyMemory<'_>) {}

    fn victim(&mut self, memory: &mut PolicyMemory<'_>) -> PageNumber {
        loop {
            let (next_use, page) = self.heap.pop().expect("each mapped page has an entry");
            if self.due[page as usize] == next_use && memory.place(page) == Place::Mapped {
                return page;
            }
        }
    }

    fn touched(&mut self, page: PageNumber, _write: bool, _memory: &mut PolicyMemory<'_>) {
        self.due[page as usize] = self.next[self.at];
        self.heap.push((self.next[self.at], page));
        self.at += 1;
    }
}
